"""torchao's 8-bit, 4-bit and float8 optimizers train as in one process, through faults and worlds.

`make integrations` runs these in an environment that has torchao. The optimizers compile their step
with a C++ compiler.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointMismatch
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.observability.lineage import Lineage
from elasticzero.parallel import Setting, create
from elasticzero.snapshots.restore import restore_state
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import NamedModel
from tests.integration.clusters import elasticzero, events_in
from tests.integration.training_harness import Pool

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parent / "training_torchao.py"
PATIENCE_S = 250.0
STEPS = 30
PACKED = ("first.weight", "second.weight")
"""Parameters of the script's model that have 4096 elements."""


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes share what they compile, for this module alone."""
    pytest.importorskip("torchao", reason="`make integrations` has it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="module")
def pool(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def plain(folder: Path, optimizer: str) -> dict[str, Tensor]:
    """The weights and the optimizer's state of a plain loop of STEPS steps."""
    told = {"optimizer": optimizer, "steps": STEPS, "out": str(folder / "plain")}
    completed = run([sys.executable, str(SCRIPT), json.dumps(told)], OMP_NUM_THREADS="1")
    assert completed.returncode == 0, completed.stderr
    return load_file(folder / "plain")


def state_in(folder: Path) -> dict[str, Tensor]:
    """The weights and the optimizer's state of a checkpoint."""
    whole = ez_checkpoint.load(folder)
    return {n: t for n, t in whole.items() if n.startswith(("model/", "optimizer/"))}


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        bits = [value.reshape(-1).view(torch.uint8) for value in (tensors[name], tensor)]
        assert torch.equal(*bits), name


def assert_close(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The sums of another world have another order, and so a few numbers get another code."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        differences = (tensors[name].double() - tensor.double()).abs()
        beyond = differences > (0.0 if name.endswith(".codes") else 1e-5)
        assert beyond.double().mean() < 0.03, (name, differences.max())
        assert name.endswith(".codes") or differences.max() < 1e-3, (name, differences.max())


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        *((strategy, "AdamW8bit") for strategy in ("ddp", "zero1", "zero2")),
        ("zero1", "Adam8bit"),
        ("zero2", "AdamW4bit"),
        ("ddp", "AdamWFp8"),
    ],
)
def test_two_ranks_train_as_one_process(
    pool: Pool, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """Bit by bit, since the sum of two halves has one order."""
    told = {"strategy": strategy, "optimizer": optimizer, "steps": STEPS}
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "c"), "verify_every": 4}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, generation=1, **options)
    assert running.finish(PATIENCE_S) == STEPS
    expected = plain(tmp_path, optimizer)
    packed = {name for name in expected if name.endswith(".codes")}
    keys = ("exp_avg.codes", "exp_avg_sq.codes")
    assert packed == {f"optimizer/{name}/{key}" for name in PACKED for key in keys}
    assert_equal(state_in(tmp_path / "c"), expected)


def test_training_goes_on_in_other_worlds_with_other_strategies(pool: Pool, tmp_path: Path) -> None:
    told = {"optimizer": "AdamW8bit"}
    worlds = ((3, "zero2", 9), (2, "ddp", 16), (1, "zero1", 23), (2, "zero1", STEPS))
    resume = Resume(tier="fresh")
    for generation, (world_size, strategy, steps) in enumerate(worlds, 1):
        running = pool.start(
            SCRIPT,
            [json.dumps(told | {"strategy": strategy, "steps": steps})],
            world_size,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(tmp_path / "c"),
        )
        assert running.finish(PATIENCE_S) == steps
        resume = Resume(tier="storage", step=steps)
    assert_close(state_in(tmp_path / "c"), plain(tmp_path, "AdamW8bit"))


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_state_of_two_ranks_of_zero2_is_the_same_in_ddp_on_one(
    pool: Pool, tmp_path: Path, optimizer: str
) -> None:
    """Bit by bit; and an optimizer that packs in another way does not take it."""
    from tests.integrations import training_torchao

    told = {"strategy": "zero2", "optimizer": optimizer, "steps": 5}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    assert running.finish(PATIENCE_S) == 5
    [step] = tmp_path.glob("step-*")
    stored = {n: t for n, t in state_in(step).items() if n.startswith("optimizer/")}

    def restored(kind: str) -> dict[str, Tensor]:
        model = training_torchao.Model()
        strategy = create(
            "ddp",
            Setting(
                model=model,
                named=NamedModel(model),
                factory=lambda parameters: training_torchao.optimizer_of(kind, parameters),
                device=torch.device("cpu"),
                rank=0,
                world_size=1,
            ),
        )
        small = AuxiliaryState(torch.device("cpu"), groups=strategy.optimizers.groups)
        scheduler = training_torchao.schedule_of(strategy.optimizers.as_made)
        small.track("scheduler", scheduler)
        restore_state(open_step(DiskStorage(step)), strategy, small, 0)
        made = strategy.optimizers.as_made
        kept = made.state[strategy.model.get_parameter("first.weight")]["exp_avg"]
        assert type(kept).__name__.startswith("OptimState") and kept.shape == (64, 64)
        assert made.param_groups[0]["lr"].item() == pytest.approx(0.01)
        return {name: held.tensor for name, held in strategy.rank_state().held.items()}

    state = restored(optimizer)
    assert_equal({name: t for name, t in state.items() if name.startswith("optimizer/")}, stored)
    other = "AdamW8bit" if optimizer == "AdamW4bit" else "AdamW4bit"
    with pytest.raises(CheckpointMismatch):
        restored(other)


def trained(folder: Path, told: dict[str, Any], *arguments: str) -> dict[str, Tensor]:
    """The weights and the optimizer's state after a job of `elasticzero local`."""
    job = f"torchao-{secrets.token_hex(4)}"
    options = ["--job", job, "--log-dir", str(folder / "logs"), "--checkpoint-every", "10"]
    options += ["--checkpoint-dir", str(folder / "c"), *arguments]
    completed = run(elasticzero("local", *options, str(SCRIPT), json.dumps(told)))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return state_in(folder / "c")


@pytest.mark.parametrize(
    ("strategy", "faults", "options"),
    [
        ("zero2", ("kill-worker@8", "kill-node@18"), ("--deterministic",)),
        ("ddp", ("kill-worker@8", "drain@18"), ("--deterministic",)),
        ("zero1", ("kill-node@12",), ("--redundancy", "mirror", "--snapshot-every", "1000")),
    ],
)
def test_a_killed_worker_and_a_change_of_world_change_nothing(
    tmp_path: Path, strategy: str, faults: Sequence[str], options: Sequence[str]
) -> None:
    """With sums in one fixed order, bit by bit; a mirror has the state of the lost node."""
    told: dict[str, Any] = {"optimizer": "AdamW8bit", "steps": STEPS, "pause": 0.1, "clip": 0.5}
    if "--deterministic" in options:
        told["virtual"] = 3
    arguments = ["--nodes", "3", "--strategy", strategy, "--verify-replicas", "3", *options]
    disturbed = [word for fault in faults for word in ("--fault", fault)]
    expected = trained(tmp_path / "a", told | {"pause": 0.0}, *arguments)
    state = trained(tmp_path / "b", told, *arguments, *disturbed)
    lineage = Lineage()
    [logs] = (tmp_path / "b" / "logs").iterdir()
    for event in events_in(logs):
        lineage.take(event)
    assert len(lineage.resume_steps) == len(faults) + 1
    if "mirror" in options:
        assert lineage.recomputed == 0
        assert_close(state, expected)
    else:
        assert_equal(state, expected)


def test_the_tools_take_packed_state_as_any_other(pool: Pool, tmp_path: Path) -> None:
    told = {"strategy": "zero2", "optimizer": "AdamW8bit", "steps": 6}
    options: dict[str, Any] = {"generation": 1, "checkpoint_dir": str(tmp_path / "c")}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, **options)
    assert running.finish(PATIENCE_S) == 6
    for arguments in (
        ("verify", str(tmp_path / "c")),
        ("reshard", str(tmp_path / "c"), str(tmp_path / "r"), "--world-size", "3"),
        ("verify", str(tmp_path / "r")),
        ("diff", str(tmp_path / "c"), str(tmp_path / "r")),
        ("export", str(tmp_path / "c"), str(tmp_path / "hf"), "--format", "hf"),
    ):
        completed = run(elasticzero("checkpoint", *arguments))
        assert completed.returncode == 0, (arguments, completed.stdout + completed.stderr)
    options |= {"generation": 2, "resume": Resume(tier="storage", step=6)}
    options["checkpoint_dir"] = str(tmp_path / "r")
    told |= {"steps": STEPS, "strategy": "ddp"}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, **options)
    assert running.finish(PATIENCE_S) == STEPS
    assert_equal(state_in(tmp_path / "r"), plain(tmp_path, "AdamW8bit"))


def test_zero3_refuses_packed_state_in_a_sentence() -> None:
    told = {"strategy": "zero3", "optimizer": "AdamW8bit", "steps": 2}
    completed = run([sys.executable, str(SCRIPT), json.dumps(told)])
    assert completed.returncode == 64
    last = completed.stderr.splitlines()[-1]
    assert last.startswith("error: AdamW8bit keeps packed state, with a scale for each block")
    assert "use zero1 or zero2, which give it whole parameters" in last
