"""Every optimizer of torch's trains as in one plain process, or is refused in a sentence."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.ipc.assignment import Resume
from tests.integration import training_gan
from tests.integration.training_harness import Pool
from tests.integration.training_optimizer_table import CASES, OPTIMIZERS
from tests.integration.training_optimizers import (
    SAMPLES,
    Model,
    Samples,
    optimizers,
    schedulers,
    squares,
)

HERE = Path(__file__).parent
REFUSED = {
    "LBFGS": "LBFGS computes the loss anew inside its step",
    "SparseAdam": "SparseAdam cannot work on parts of a model",
}
REFUSED_BY_ROWS = {
    name: f"{name} works on whole parameters, and zero3 divides each of them by rows"
    for name in ("Adafactor", "Muon")
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


def test_each_optimizer_of_torch_equals_plain_torch_or_is_refused(
    pool: Pool, tmp_path: Path
) -> None:
    """100 steps of 2 ranks, which have whole matrices of Muon's and Adafactor's."""
    known = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert known - {"Optimizer"} == OPTIMIZERS.keys()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told: dict[str, Any] = {"world_size": 2, "port": port, "out": str(tmp_path / "table")}
    script = HERE / "training_optimizer_table.py"
    worlds = [pool.start(script, [json.dumps(told | {"rank": rank})], 1) for rank in range(2)]
    for running in worlds:
        running.until(running.ended, 100)
        assert running.workers[0].exit_code == 0, running.logs()
    for rank in range(2):
        found = json.loads((tmp_path / f"table-{rank}").read_text())
        assert {strategy: sorted(results) for strategy, results in found.items()} == CASES
        for strategy in CASES:
            for name, result in found[strategy].items():
                refused = REFUSED | (REFUSED_BY_ROWS if strategy == "zero3" else {})
                if name in refused:
                    assert result.startswith(refused[name]), (strategy, name, result)
                else:
                    assert isinstance(result, float), (strategy, name, result)
                    assert result < 1e-6, (strategy, name, result)


def plain(steps: int, clip: float) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Model().double()
    made = optimizers(list(model.parameters()))
    tracked = schedulers(made)
    samples = Samples()
    for step in range(steps):
        batch = [samples[i] for i in range(step * 6 % 42, min(step * 6 % 42 + 6, SAMPLES))]
        squares(model, {k: torch.stack([s[k] for s in batch]) for k in batch[0]}).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for name, optimizer in made.items():
            optimizer.step()
            optimizer.zero_grad()
            tracked[name].step()
    state = {f"model/{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for optimizer in made.values():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optimizer/{name}/{key}"] = value
    return state


@pytest.mark.parametrize(
    ("strategies", "bucket_bytes"),
    [
        (("zero1", "zero2", "ddp"), 1 << 20),
        (("zero2", "ddp", "zero1"), 300),
        (("ddp", "zero1", "zero2"), 300),
    ],
)
def test_muon_and_adamw_on_one_model_through_worlds_and_strategies(
    pool: Pool, tmp_path: Path, strategies: tuple[str, ...], bucket_bytes: int
) -> None:
    """Worlds of 3, 2 and 1, each with another strategy; schedulers on both optimizers."""
    resume = Resume(tier="fresh")
    told = {"micro": 1, "clip": 0.5, "bucket_bytes": bucket_bytes}
    worlds = zip(strategies, (3, 2, 1), (6, 13, 20), strict=True)
    for generation, (strategy, world_size, steps) in enumerate(worlds, 1):
        running = pool.start(
            HERE / "training_optimizers.py",
            [json.dumps(told | {"strategy": strategy, "steps": steps})],
            world_size,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(tmp_path),
        )
        assert running.finish() == steps
        resume = Resume(tier="storage", step=steps)
    found = ez_checkpoint.load(tmp_path)
    expected = plain(20, 0.5)
    named = {n for n in found if n.startswith(("model/", "optimizer/"))}
    assert named == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].double() - tensor.double()).abs().max().item() < 1e-9, name


def plain_gan(steps: int) -> dict[str, Tensor]:
    """Each network has the gradient of its own loss, and both are stepped then."""
    torch.manual_seed(1)
    gan = training_gan.Gan().double()
    made = training_gan.optimizers(gan)
    samples = training_gan.Samples()
    for step in range(steps):
        batch = [samples[i % training_gan.SAMPLES] for i in range(step * 6, step * 6 + 6)]
        noise, real = (torch.stack([s[key] for s in batch]) for key in ("noise", "real"))
        fake = gan.generator(noise)
        losses = {
            "generator": softplus(-gan.critic(fake)).mean(),
            "critic": (softplus(gan.critic(fake)) + softplus(-gan.critic(real))).mean(),
        }
        gradients = {}
        for name, loss in losses.items():
            own = list(gan.get_submodule(name).parameters())
            gradients[name] = torch.autograd.grad(loss, own, retain_graph=True)
        for name, optimizer in made.items():
            parameters = gan.get_submodule(name).parameters()
            for parameter, gradient in zip(parameters, gradients[name], strict=True):
                parameter.grad = gradient
            optimizer.step()
    return {f"model/{name}": parameter.detach() for name, parameter in gan.named_parameters()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_gan_with_two_optimizers_is_as_in_one_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"strategy": strategy, "steps": 12, "micro": 1}
    script = HERE / "training_gan.py"
    running = pool.start(script, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    assert running.finish() == 12
    found = ez_checkpoint.load(tmp_path)
    for name, tensor in plain_gan(12).items():
        assert (found[name] - tensor).abs().max().item() < 1e-9, name
