"""Whatever a step leaves unused, every gradient that is applied is summed over all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Stepped
from elasticzero.spans import STRATEGIES
from tests.integration.training_harness import Pool
from tests.integration.training_unused import (
    SAMPLES,
    Model,
    Samples,
    add_to_averages,
    clamp,
    optimizer_of,
    squares,
)
from tests.support.cases import drawn, slow

SCRIPT = Path(__file__).parent / "training_unused.py"


def plain(
    told: dict[str, Any],
    steps: int,
    after_step: Callable[[Model], None] = lambda model: None,
    norms: list[float] | None = None,
    sums: list[dict[str, float]] | None = None,
) -> dict[str, Tensor]:
    """The weights and optimizer state of one process that takes each global batch whole; `norms`
    receives the norm of each gradient that is clipped, and `sums` what `clamp` returns for each
    gradient, if they are given."""
    norms = [] if norms is None else norms
    torch.manual_seed(1)
    model = Model(told).double()
    optimizer = optimizer_of(model.parameters())
    samples, order = Samples(), SampleOrder(samples=SAMPLES, shuffle=False)
    plan, position = BatchPlan(order=order, global_batch=6, steps=steps), DataPosition()
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        chosen = [samples[i] for i in order.indices(batch.epoch, batch.start, batch.stop).tolist()]
        squares(model, {k: torch.stack([s[k] for s in chosen]) for k in chosen[0]}).backward()
        if sums is not None:
            used = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
            clamped_sums = {name: clamp(name, gradient.view(-1)) for name, gradient in used}
            sums.append({n: 0.0 if v is None else float(v) for n, v in clamped_sums.items()})
        if told.get("clip"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), told["clip"])
            norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
    state = {f"model/{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer/{name}/{key}"] = value
    return state


def run(pool: Pool, folder: Path, told: dict[str, Any], worlds: dict[int, int]) -> None:
    """Train under a world of each size until the step that is given for it."""
    every = ((ranks, told | {"steps": steps}) for ranks, steps in worlds.items())
    pool.train_through(SCRIPT, folder, every)


def assert_close(folder: Path, expected: dict[str, Tensor]) -> None:
    state = ez_checkpoint.load(folder)
    for name in state.keys() - expected.keys():
        if name.startswith(("model/", "optimizer/")):  # zeros: of a parameter never stepped
            assert not state[name].any(), name
    for name, tensor in expected.items():
        torch.testing.assert_close(
            state[name].double(), tensor.double(), rtol=0, atol=1e-9, msg=f"{name}: ".__add__
        )


MOST = ("ddp", "zero1", "zero3")
"""The strategies that take the way of zero2 through most cases."""


def in_each(name: str, told: dict[str, Any], rare: Collection[str] = ()) -> list[Any]:
    """A case for each strategy, of which `make slow` runs the rare ones."""
    return [
        pytest.param(
            strategy,
            told,
            id=f"{name}-{strategy}",
            marks=[pytest.mark.slow] if strategy in rare else [],
        )
        for strategy in STRATEGIES
    ]


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        *in_each("one micro-batch", {}, rare=("zero1", "zero2", "zero3")),
        *in_each("many and clipping", {"micro": 1, "clip": 0.3}, rare=("ddp", "zero1")),
        *in_each("checkpointed", {"reentrant": False}, rare=("ddp", "zero1", "zero2")),
        *in_each("a bucket for each", {"bucket_bytes": 1, "micro": 1}, rare=MOST),
        *in_each("compiled", {"bucket_bytes": 500, "compile": True}, rare=STRATEGIES),
    ],
)
def test_unused_parameters_train_as_in_one_process(
    pool: Pool, tmp_path: Path, strategy: str, told: dict[str, Any]
) -> None:
    """Each step uses other experts, on other ranks and in other micro-batches, and one is never
    used: torch's DistributedDataParallel applied gradients of one rank then, without a word."""
    told = told | {"strategy": strategy}
    run(pool, tmp_path, told, {3: 7, 2: 14, 1: 21})
    assert_close(tmp_path, plain(told, 21))
    weight = ez_checkpoint.load(tmp_path)["model/never.weight"]
    torch.manual_seed(1)
    assert torch.equal(weight, Model(told).double().never.weight)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1, "micro": 1}], ids=["one", "many"])
def test_a_layer_that_runs_twice_under_reentrant_checkpointing(
    pool: Pool, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    """Autograd gives its gradient in two parts; the sum over ranks waits for both."""
    told = {"strategy": strategy, "reentrant": True, "twice": True, "blocks": True} | options
    run(pool, tmp_path, told, {2: 6})
    assert_close(tmp_path, plain(told, 6))


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_parameter_read_right_after_a_step_is_up_to_date(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Its newest elements are still on their way from other ranks then: the read waits."""
    told = {"strategy": strategy, "bucket_bytes": 200, "averages": str(tmp_path / "averages")}
    run(pool, tmp_path / "checkpoints", told, {3: 9})
    torch.manual_seed(1)
    expected: dict[str, Tensor] = {}
    plain(told, 9, after_step=lambda model: add_to_averages(expected, model))
    for rank in range(3):
        averages = json.loads((tmp_path / f"averages-{rank}").read_text())
        assert averages.keys() == expected.keys()
        for name, tensor in expected.items():
            got = torch.tensor(averages[name], dtype=torch.float64)
            torch.testing.assert_close(got, tensor, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_of_each_whole_gradient(pool: Pool, tmp_path: Path, strategy: str) -> None:
    told = {"strategy": strategy, "micro": 1, "clip": 0.3, "norms": str(tmp_path / "norms")}
    run(pool, tmp_path / "checkpoints", told, {3: 6})
    expected: list[float] = []
    plain(told, 6, norms=expected)
    assert len(expected) == 6
    for rank in range(3):
        none_yet, *norms = json.loads((tmp_path / f"norms-{rank}").read_text())
        assert none_yet is None
        assert norms == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("strategy", drawn("ddp", "zero3"))
def test_a_hook_on_gradients_means_the_same_everywhere(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """It clips by value before the norm is taken, and sums what it returns over the ranks."""
    told = {"strategy": strategy, "micro": 1, "clip": 0.3, "hook": "clamp", "bucket_bytes": 200}
    told |= {"norms": str(tmp_path / "norms"), "sums": str(tmp_path / "sums")}
    run(pool, tmp_path / "checkpoints", told, {3: 7})
    norms: list[float] = []
    sums: list[dict[str, float]] = []
    assert_close(tmp_path / "checkpoints", plain(told, 7, norms=norms, sums=sums))
    for rank in range(3):
        assert json.loads((tmp_path / f"norms-{rank}").read_text())[1:] == pytest.approx(norms)
        reported = json.loads((tmp_path / f"sums-{rank}").read_text())
        assert [entry.keys() for entry in reported] == [entry.keys() for entry in sums]
        assert all(f == pytest.approx(s, rel=1e-9) for f, s in zip(reported, sums, strict=True))


def test_noise_on_gradients_is_the_same_on_all_ranks_of_ddp(pool: Pool, tmp_path: Path) -> None:
    """Each rank has random numbers of its own; with them the copies would differ, which the end of
    training refuses."""
    told = {"strategy": "ddp", "hook": "noise"}
    run(pool, tmp_path, told, {2: 3})
    without = plain(told, 3)["model/last.weight"]
    assert not torch.equal(ez_checkpoint.load(tmp_path)["model/last.weight"], without)


@pytest.mark.parametrize("strategy", ["ddp", slow("zero1"), "zero2"])
def test_sparse_gradients_are_summed_as_dense_ones(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"micro": 1, "clip": 0.3}
    run(pool, tmp_path, told | {"strategy": strategy, "words": "sparse"}, {3: 6, 2: 10, 1: 14})
    assert_close(tmp_path, plain(told | {"words": "dense"}, 14))


@pytest.mark.parametrize(
    ("strategy", "wrong", "complaint"),
    [
        ("ddp", "late", "got a gradient after the gradients were summed over the ranks"),
        ("ddp", "thaw", "parameter 'first.bias' has a gradient, but needed none when"),
        ("zero3", "thaw", "parameter 'first.bias' has a gradient, but needed none when"),
    ],
)
def test_a_gradient_that_cannot_be_summed_is_refused(
    pool: Pool, tmp_path: Path, strategy: str, wrong: str, complaint: str
) -> None:
    """A script that unfreezes, or runs a backward of its own, would step with one rank's part."""
    told = {"strategy": strategy, "wrong": wrong, "steps": 2}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    running.until(running.ended)
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    assert any(f.final and complaint in f.message for f in failures), running.logs()
    assert not any(worker.all(Stepped) for worker in running.workers)
