"""Whatever a script does with its parameters counts as in one process, or is refused in the first
step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Captured, Stepped
from elasticzero.spans import STRATEGIES
from tests.integration.training_harness import Pool
from tests.integration.training_parameters import (
    GLOBAL_BATCH,
    KINDS,
    SAMPLES,
    Samples,
    clamp,
    hooked_later,
    loaded,
    loss_of,
    optimizer_of,
)
from tests.support.cases import slow

SCRIPT = Path(__file__).parent / "training_parameters.py"
WORLDS = {2: 4, 1: 6, 3: 11}
"""Number of ranks, and the step up to which they train; an epoch has five."""
DIVIDED = ("zero1", "zero2", "zero3")


def plain(kind: str, steps: int) -> dict[str, Tensor]:
    """The weights of one process that takes each global batch whole."""
    torch.manual_seed(1)
    model = KINDS[kind]().double()
    optimizer, samples = optimizer_of(model.parameters()), Samples()
    if kind == "hooked":
        hooked_later(model)
    if kind == "loaded":
        loaded(model)
    batches = [range(at, min(at + GLOBAL_BATCH, SAMPLES)) for at in range(0, SAMPLES, GLOBAL_BATCH)]
    for step in range(steps):
        chosen = [samples[i] for i in batches[step % len(batches)]]
        optimizer.zero_grad()
        loss_of(kind, model, {k: torch.stack([s[k] for s in chosen]) for k in chosen[0]}).backward()
        optimizer.step()
        if kind == "aliased":
            clamp(parameter.data for parameter in model.parameters())
    return {f"model/{name}": tensor for name, tensor in model.state_dict().items()}


def train(pool: Pool, folder: Path, kind: str, strategy: str, **options: Any) -> None:
    told = {"kind": kind, "strategy": strategy, **options}
    pool.train_through(SCRIPT, folder, [(n, told | {"steps": s}) for n, s in WORLDS.items()])


def assert_close(folder: Path, kind: str) -> None:
    stored = ez_checkpoint.load(folder)
    for name, tensor in plain(kind, max(WORLDS.values())).items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("clamped", "ddp"), ("hooked", "ddp"), ("one memory", "ddp")),
        *(("masked", "zero2"), ("momentum", "zero1"), ("penalty", "zero1")),
        *(("transposed", "zero3"), ("channels_last", "zero3"), ("plain hooks", "zero1")),
        *(("empty", "zero3"), ("loaded", "zero3"), ("aliased", "zero1")),
        *(
            pytest.param(kind, strategy, marks=pytest.mark.slow)
            for kind, strategies in {
                "masked": ("ddp", "zero1"),
                "momentum": ("ddp", "zero2"),
                "penalty": ("ddp", "zero2"),
                "transposed": ("ddp", "zero1", "zero2"),
                "channels_last": ("ddp", "zero1", "zero2"),
                "plain hooks": ("ddp", "zero2", "zero3"),
                "empty": ("ddp", "zero1", "zero2"),
                "loaded": ("ddp", "zero1", "zero2"),
                "aliased": ("ddp", "zero2"),
            }.items()
            for strategy in strategies
        ),
    ],
)
def test_it_trains_as_in_one_process(pool: Pool, tmp_path: Path, kind: str, strategy: str) -> None:
    train(pool, tmp_path, kind, strategy)
    assert_close(tmp_path, kind)


@pytest.mark.parametrize("kind", [slow("clamped"), "hooked"])
def test_a_hook_gets_the_gradient_of_all_micro_batches(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    train(pool, tmp_path, kind, "ddp", micro=1)
    assert_close(tmp_path, kind)


def test_random_numbers_in_a_hook_are_the_same_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """The end of training would refuse ranks that differ."""
    told = {"kind": "noisy", "strategy": "ddp", "steps": 3}
    pool.train_through(SCRIPT, tmp_path, [(2, told)])


HOOK = "has a hook on its gradient"
LOST = "the script has changed parameter 'first.weight' in or after a forward of the model"
REFUSED = [
    *(("clamped", strategy, f"'first.weight' {HOOK}") for strategy in DIVIDED),
    *(("hooked", strategy, f"'first.weight' {HOOK}") for strategy in DIVIDED),
    ("masked", "zero3", LOST),
    ("momentum", "zero3", "the script has changed parameter 'key.weight' in or after a forward"),
    ("touched", "zero3", "the script has changed parameter 'last.weight' in or after a forward"),
    ("viewed", "zero3", "buffer 'row' shares memory with parameter 'first.weight'"),
    ("differentiated", "zero3", "torch refuses what the script does with them"),
    ("penalty", "zero3", "the script differentiates gradients (create_graph=True"),
    *(("max_norm", strategy, "module 'words' is an embedding with") for strategy in STRATEGIES),
    *(
        ("one memory", strategy, "'back.weight' and 'first.weight' share memory")
        for strategy in DIVIDED
    ),
    *(
        ("max_norm of a function", strategy, "a forward has changed parameter 'rows', and not in")
        for strategy in ("ddp", "zero1", "zero2")
    ),
    ("max_norm of a function", "zero3", "the script has changed parameter 'rows' in or after"),
    *(("assigned", strategy, "is another object than session") for strategy in STRATEGIES),
    ("complex", "ddp", "parameter 'turn' is complex, of torch.complex128"),
    ("lazy", "zero3", "'last.weight' of the model has no shape yet"),
]
FAST = {
    "clamped": "zero1",
    "hooked": "zero2",
    "max_norm": "ddp",
    "max_norm of a function": "zero1",
    "one memory": "zero3",
    "assigned": "zero3",
}


@pytest.mark.parametrize(
    ("kind", "strategy", "complaint"),
    [
        pytest.param(*case, marks=[] if FAST.get(case[0], case[1]) == case[1] else pytest.mark.slow)
        for case in REFUSED
    ],
)
def test_it_is_refused_before_a_step(
    pool: Pool, tmp_path: Path, kind: str, strategy: str, complaint: str
) -> None:
    told = {"kind": kind, "strategy": strategy, "steps": 3}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    running.until(running.ended)
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    assert any(f.final and complaint in f.message for f in failures), running.logs()
    assert not any(worker.all(Stepped) for worker in running.workers)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("aliased", "was changed through a tensor from before session.prepare"),
        ("set", "torch refuses what the script does with them"),
    ],
)
def test_a_change_after_a_step_is_refused_before_the_next(
    pool: Pool, tmp_path: Path, kind: str, complaint: str
) -> None:
    told = {"kind": kind, "strategy": "zero3", "steps": 9}
    running = pool.start(
        SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path), checkpoint_every=1
    )
    running.until(running.ended)
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    assert any(f.final and complaint in f.message for f in failures), running.logs()
    assert max((s.step for w in running.workers for s in w.all(Stepped)), default=0) <= 1


def test_a_later_change_in_a_forward_is_refused_at_a_capture(pool: Pool, tmp_path: Path) -> None:
    """It comes in the seventh step, and a capture has forwards compared until the next one. Where a
    save is slow that may be many steps later."""
    told = {"kind": "masked later", "strategy": "zero3", "steps": 40}
    running = pool.start(
        SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path), checkpoint_every=5
    )
    running.until(running.ended)
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    assert any(f.final and LOST in f.message for f in failures), running.logs()
    captured = [c for worker in running.workers for c in worker.all(Captured)]
    assert len({c.step for c in captured if c.checkpoint and c.step > 6}) <= 2


@pytest.mark.parametrize("strategy", [slow("ddp"), "zero3"])
def test_no_rank_has_one_sample_of_a_batch_norm(pool: Pool, tmp_path: Path, strategy: str) -> None:
    """The last global batch of an epoch has four samples: three ranks have two, two and none."""
    train(pool, tmp_path, "BatchNorm", strategy)
    told = {"kind": "BatchNorm", "strategy": strategy, "micro": 2, "steps": 5}
    pool.train_through(SCRIPT, tmp_path / "parts", [(2, told)])
