"""A loop of accelerate on one process: the results of accelerate's own, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from elasticzero.errors import UserError
from elasticzero.integrations.accelerate import Accelerator
from elasticzero.integrations.accelerate.prepared import LoopSize
from tests.integration.scripts import regression


@pytest.fixture
def accelerators() -> Iterator[Callable[..., Any]]:
    """Makes accelerators, one after the other."""
    made: list[Any] = []

    def make(kind: type = Accelerator, **options: Any) -> Any:
        for accelerator in made:
            accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        made.append(kind(cpu=True, **options))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


def parts(samples: int = 328) -> tuple[nn.Module, Any, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    net = regression.network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    data = Subset(regression.dataset(), range(samples))
    return net, optimizer, schedule, DataLoader(data, batch_size=4)


def train(accelerator: Any, epochs: int = 2) -> tuple[Any, list[float], list[float]]:
    """Returns the model, and the rate and the gradient's norm after each step."""
    net, optimizer, schedule, loader = accelerator.prepare(*parts())
    rates, norms = [], []
    assert len(loader) == 82
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(regression.loss_of(net(x), y))
                ended = accelerator.sync_gradients
                if ended:
                    norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if ended:
                    norms.append(norm.item())
                    rates.append(schedule.get_last_lr()[0])
    return accelerator.unwrap_model(net), rates, norms


def test_the_steps_are_those_of_accelerate(accelerators: Callable[..., Any]) -> None:
    (ours, rates, norms), (theirs, last_loss, others) = (
        train(accelerators(kind, gradient_accumulation_steps=2))
        for kind in (Accelerator, accelerate.Accelerator)
    )
    assert len(rates) == 82 and rates == pytest.approx(last_loss)
    assert norms == pytest.approx(others, rel=1e-6)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-10, name


def test_registered_objects_are_kept_and_loaders_of_other_calls_evaluate(
    accelerators: Callable[..., Any],
) -> None:
    accelerator = accelerators()
    average = torch.optim.swa_utils.AveragedModel(regression.network())
    accelerator.register_for_checkpointing(average)
    held_out = accelerator.prepare(DataLoader(regression.dataset(), batch_size=7))
    net, *_ = accelerator.prepare(*parts())
    assert "registered 0" in accelerator.session._generation.training.auxiliary.tracked
    sizes = [accelerator.gather_for_metrics(y).shape[0] for _, y in held_out]
    assert sum(sizes) == regression.SAMPLES
    state = accelerator.get_state_dict(net)
    assert state.keys() == net.state_dict().keys()


class Counter:
    """Counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def trained(
    accelerator: Any, before: list[Counter], after: list[Counter], steps: int
) -> list[tuple[int, ...]]:
    """Counts steps by objects that are registered before and after `prepare`; returns what they
    were before each."""
    accelerator.register_for_checkpointing(*before)
    net, optimizer, _, loader = accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(*after)
    counted = []
    for x, y in loader:
        counted.append(tuple(counter.steps for counter in before + after))
        accelerator.backward(regression.loss_of(net(x), y))
        optimizer.step()
        for counter in before + after:
            counter.steps += 1
        if len(counted) == steps:
            break
    return counted


def test_an_object_is_registered_before_or_after_prepare(
    accelerators: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order after `prepare`, that of accelerate's documentation, was refused."""
    monkeypatch.setenv("ELASTICZERO_CHECKPOINT_DIR", str(tmp_path / "c"))
    one, two = [Counter(), Counter()]
    assert trained(accelerators(), [one], [two], 3) == [(0, 0), (1, 1), (2, 2)]
    one, two = Counter(), Counter()
    assert trained(accelerators(), [], [one, two], 2) == [(3, 3), (4, 4)]
    one, two = Counter(), Counter()
    assert trained(accelerators(), [one, two], [], 1) == [(5, 5)]
    with pytest.raises(UserError, match="has not registered that of place 1"):
        trained(accelerators(), [], [Counter()], 1)
    with pytest.raises(UserError, match="the state of step 6 has no object of place 2"):
        trained(accelerators(), [], [Counter(), Counter(), Counter()], 1)


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = regression.dataset()
        return (data[index] for index in range(len(data)))


def test_a_stream_is_trained_on(accelerators: Callable[..., Any]) -> None:
    accelerator = accelerators(global_batch=8)
    net, optimizer, _, _ = parts()
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Rows(), batch_size=8))
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    seen = 0
    for x, y in loader:
        accelerator.backward(regression.loss_of(net(x), y))
        optimizer.step()
        seen += len(x)
    assert seen == regression.SAMPLES and accelerator.session.step_count == 42


def twice(accelerator: Any) -> None:
    accelerator.prepare(*parts())
    accelerator.prepare(*parts())


def other_model(accelerator: Any) -> None:
    net, _, _, loader = parts()
    accelerator.prepare(net, parts()[1], loader)


def no_state(accelerator: Any) -> None:
    accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(object())


def early_norm(accelerator: Any) -> None:
    net, *_ = accelerator.prepare(*parts())
    accelerator.clip_grad_norm_(net.parameters(), 1.0).item()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (twice, "in a second call"),
        (other_model, "not the model's"),
        (no_state, "which has no state_dict and load_state_dict"),
        (early_norm, "is known once optimizer.step"),
        (lambda a: a.prepare(*parts()[:2]), "needs a DataLoader with a batch_size"),
        (lambda a: a.prepare(parts()[0]), "1 models and 0 optimizers"),
        (lambda a: a.load_state("folder"), "goes on by itself"),
        (lambda a: a.skip_first_batches([], 3), "goes on by itself"),
        (lambda a: a.clip_grad_value_([], 1.0), "on_gradients"),
        (lambda a: a.backward(torch.zeros(1), retain_graph=True), "takes no retain_graph"),
        (lambda a: a.save_state(), "needs output_dir"),
        (lambda _: Accelerator(cpu=True, deepspeed_plugin=object()), "takes no deepspeed_plugin"),
    ],
)
def test_what_cannot_be_done_is_refused(
    act: Callable[[Any], Any], message: str, accelerators: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match=message):
        act(accelerators())


MISTAKE = """
from elasticzero.integrations.accelerate import Accelerator
from elasticzero.integrations.accelerate.prepared import LoopSize
Accelerator(cpu=True).load_state("here")
"""


@pytest.mark.parametrize("launcher", [[], ["-m", "elasticzero.cli", "run"]])
def test_a_mistake_ends_a_script_in_one_line(launcher: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISTAKE)
    options = ["--http-port=0", "--preemption=none", f"--log-dir={tmp_path / 'logs'}"]
    command = [sys.executable, *launcher, *(options if launcher else [])]
    command += [str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 64
    output = done.stdout + done.stderr
    assert "accelerator.load_state: training goes on by itself" in output
    assert "Traceback" not in output


def test_an_error_of_the_script_is_shown_as_python_does(tmp_path: Path) -> None:
    script = MISTAKE.replace('.load_state("here")', "\n1/0")
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_the_stored_size_of_a_step_has_its_key() -> None:
    """Checkpoints of other releases hold it."""
    assert LoopSize(None, 8).state_dict() == {"global_batch": 8}
    size = LoopSize(None, 4)
    size.load_state_dict({"global_batch": 8})
    assert size.global_batch == 8
