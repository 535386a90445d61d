"""A global batch with a bad loss is left out on all ranks alike, also where a worker is killed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from elasticzero.options.settings import SpikeLimit
from elasticzero.spans import STRATEGIES
from tests.integration.test_precision import SCRIPT, collated
from tests.integration.training_harness import Pool, Running
from tests.integration.training_precision import (
    GLOBAL_BATCH,
    SAMPLES,
    Model,
    Samples,
    optimizer_of,
    several_of,
    squares,
)
from tests.support.cases import drawn, slow

PER_EPOCH = SAMPLES // GLOBAL_BATCH
STEPS = 14
BAD_BATCH = 7
"""Of the loop, from 0: the third of the second epoch."""
BAD_SAMPLE = (BAD_BATCH % PER_EPOCH) * GLOBAL_BATCH + GLOBAL_BATCH - 1
"""The last rank has it, in both epochs."""


def plain(
    left_out: set[int], steps: int = STEPS, *, several: bool = False
) -> dict[str, torch.Tensor]:
    """The parameters after a plain loop in one process without these batches."""
    torch.manual_seed(1)
    model = Model()
    optimizers = [optimizer_of(model.parameters())]
    if several:
        optimizers = list(several_of(model.parameters()).values())
    for number in range(steps):
        if number in left_out:
            continue
        first = number % PER_EPOCH * GLOBAL_BATCH
        model.zero_grad()
        squares(model, collated(Samples(), range(first, first + GLOBAL_BATCH))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(folder: Path, expected: dict[str, torch.Tensor], atol: float = 1e-4) -> None:
    state = ez_checkpoint.load(folder)
    assert all(tensor.isfinite().all() for tensor in state.values()), "running statistics too"
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=atol, rtol=0, msg=name)


def skipped_in(folder: Path, step: int) -> list[tuple[int, int]]:
    """The (epoch, first position) of the batches that a checkpoint records as skipped."""
    directory = open_directory(str(folder))
    state = open_step(directory.step(f"step-{step:012d}")).manifest.state
    return [(entry["epoch"], entry["start"]) for entry in state["position"]["skipped"]]


def start(pool: Pool, folder: Path, told: dict[str, Any], **options: Any) -> Running:
    line = {"steps": STEPS, "out": str(folder / "out"), "log": str(folder / "log")} | told
    return pool.start(
        SCRIPT,
        [json.dumps(line)],
        options.pop("world", 2),
        checkpoint_dir=str(folder / "checkpoints"),
        **{"on_nonfinite": "skip"} | options,
    )


def killed_state(pool: Pool, folder: Path, told: dict[str, Any], **options: Any) -> Resume:
    """Trains until a worker kills itself after a skipped batch; returns what is committed then."""
    first_skip = BAD_BATCH % PER_EPOCH
    told = told | {"saved": str(folder / "checkpoints"), "beyond": first_skip}
    running = start(pool, folder, told, world=3, generation=1, checkpoint_every=1, **options)
    running.until(running.ended)
    newest = newest_good(open_directory(str(folder / "checkpoints")))
    assert newest is not None and newest > first_skip, "the first skip is in it"
    return Resume(tier="storage", step=newest)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro", [None, 2])
def test_a_bad_batch_is_left_out_on_all_ranks(
    pool: Pool, tmp_path: Path, strategy: str, micro: int | None
) -> None:
    """The sample is bad in each of three epochs; the weights are those of training without it."""
    told = {"strategy": strategy, "bad": [BAD_SAMPLE], "micro": micro}
    assert start(pool, tmp_path, told).finish() == STEPS
    left_out = {number for number in range(STEPS) if number % PER_EPOCH == BAD_BATCH % PER_EPOCH}
    for rank in (0, 1):
        outcome = json.loads((tmp_path / f"out-{rank}").read_text())
        assert outcome["count"] == STEPS - len(left_out) and math.isfinite(outcome["loss"])
    assert_close(tmp_path / "checkpoints", plain(left_out))
    first = BAD_BATCH % PER_EPOCH * GLOBAL_BATCH
    assert skipped_in(tmp_path / "checkpoints", STEPS) == [(epoch, first) for epoch in range(3)]


@pytest.mark.parametrize("strategy", drawn("zero3"))
def test_a_worker_killed_right_after_a_skip_changes_nothing(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Each batch is applied or recorded as skipped, once; the world shrinks from three to two."""
    told = {"strategy": strategy, "bad": [BAD_SAMPLE], "steps": STEPS}
    killed = told | {"die": [1, BAD_BATCH], "pause": 0.1}
    resume = killed_state(pool, tmp_path, killed)
    running = start(pool, tmp_path, told, generation=2, resume=resume)
    assert running.finish() == STEPS
    left_out = {number for number in range(STEPS) if number % PER_EPOCH == BAD_BATCH % PER_EPOCH}
    assert_close(tmp_path / "checkpoints", plain(left_out))
    first = BAD_BATCH % PER_EPOCH * GLOBAL_BATCH
    assert skipped_in(tmp_path / "checkpoints", STEPS) == [(epoch, first) for epoch in range(3)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_spike_is_left_out(pool: Pool, tmp_path: Path, strategy: str) -> None:
    limit = SpikeLimit(action="skip", deviations=20.0, steps=4)
    told = {"strategy": strategy, "spike": [BAD_SAMPLE], "steps": 9}
    assert start(pool, tmp_path, told, on_spike=limit, on_nonfinite="stop").finish() == 9
    (skipped,) = skipped_in(tmp_path / "checkpoints", 9)
    assert skipped == (1, BAD_BATCH % PER_EPOCH * GLOBAL_BATCH), "the first one was too early"
    outcome = json.loads((tmp_path / "out-0").read_text())
    assert outcome["applied"] == [number != BAD_BATCH for number in range(9)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_spike_stops_the_job_with_the_state_before_it(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    limit = SpikeLimit(action="stop", deviations=20.0, steps=4)
    told = {"strategy": strategy, "spike": [BAD_SAMPLE], "steps": 9}
    running = start(pool, tmp_path, told, on_spike=limit)
    running.until(running.ended)
    failures = [
        failed for worker in running.workers for failed in worker.all(Failed) if failed.final
    ]
    assert len(failures) == 2, running.logs()
    for failed in failures:
        assert failed.message.startswith(f"step {BAD_BATCH + 1} was not applied: its loss"), failed
        assert "is more than 20 standard deviations of" in failed.message
    folder = tmp_path / "checkpoints"
    assert newest_good(open_directory(str(folder))) == BAD_BATCH
    assert skipped_in(folder, BAD_BATCH) == []


@pytest.mark.parametrize(
    ("strategy", "several"),
    [("ddp", False), ("zero1", True), *(slow(name, False) for name in ("zero1", "zero2", "zero3"))],
)
def test_fp16_goes_on_with_its_scale_after_a_kill(
    pool: Pool, tmp_path: Path, strategy: str, several: bool
) -> None:
    """An overflow halves the scale on all ranks, and the scale outlives a killed worker."""
    told = {"strategy": strategy, "precision": "fp16", "bad": [BAD_SAMPLE], "several": several}
    killed = told | {"die": [1, 9], "pause": 0.1}
    resume = killed_state(pool, tmp_path, killed, on_nonfinite="stop")
    running = start(pool, tmp_path, told, generation=2, resume=resume, on_nonfinite="stop")
    assert running.finish() == STEPS
    directory = open_directory(str(tmp_path / "checkpoints"))
    guard = open_step(directory.step(f"step-{STEPS:012d}")).manifest.state["guard"]
    skipped = skipped_in(tmp_path / "checkpoints", STEPS)
    left_out = {epoch * PER_EPOCH + first // GLOBAL_BATCH for epoch, first in skipped}
    assert {number for number in range(STEPS) if number % PER_EPOCH == 2} <= left_out
    assert len(left_out) == len(skipped) < STEPS / 2, "some overflow by themselves"
    assert guard["scale"] == 2.0 ** (16 - len(skipped))
    assert_close(tmp_path / "checkpoints", plain(left_out, several=several), atol=0.02)
    outcomes = [json.loads((tmp_path / f"out-{rank}").read_text()) for rank in range(2)]
    assert (
        outcomes[0]["dtypes"] == ["torch.float16"]
        and outcomes[0]["applied"] == outcomes[1]["applied"]
    )
    assert outcomes[0]["count"] == STEPS - len(skipped)


def test_ranks_must_agree_on_what_is_skipped(pool: Pool, tmp_path: Path) -> None:
    odd = {2: lambda assignment: replace(assignment, on_nonfinite="stop")}
    running = start(pool, tmp_path, {"strategy": "ddp"}, world=3, odd=odd)
    running.until(running.ended)
    messages = [failed.message for worker in running.workers for failed in worker.all(Failed)]
    assert any("has --on-nonfinite stop, the other ranks have skip" in text for text in messages), (
        messages
    )
