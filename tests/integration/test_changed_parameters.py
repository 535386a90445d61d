"""What a script does to parameters and gradients beside the session counts, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Stepped
from tests.integration.training_changes import plain
from tests.integration.training_harness import Pool
from tests.support.cases import slow

SCRIPT = Path(__file__).parent / "training_changes.py"


def check(pool: Pool, folder: Path, told: dict[str, Any], worlds: dict[int, int]) -> None:
    """Trains under worlds of these sizes until the steps that are given, and compares."""
    every = ((ranks, told | {"steps": steps}) for ranks, steps in worlds.items())
    pool.train_through(SCRIPT, folder, every)
    tensors = ez_checkpoint.load(folder)
    expected = plain(told | {"steps": max(worlds.values())})
    close = 0.03 if told["dtype"] == "bfloat16" else 1e-9
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        slow("ddp", "float64"),
        ("zero1", "float64"),
        ("zero2", "bfloat16"),
        slow("zero1", "bfloat16"),
        slow("zero2", "float64"),
    ],
)
def test_changed_parameters_count_in_every_world(
    pool: Pool, tmp_path: Path, strategy: str, dtype: str
) -> None:
    """Values set and written, by aliases from before and after `prepare`, and by a vector."""
    told = {"strategy": strategy, "dtype": dtype}
    check(pool, tmp_path, told, {2: 5, 3: 7, 1: 10})


@pytest.mark.parametrize("strategy", [slow("ddp"), "zero1", slow("zero2"), "zero3"])
def test_a_micro_batch_without_weight_may_have_any_loss(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"strategy": strategy, "dtype": "float64", "empty": True}
    check(pool, tmp_path, told, {2: 3, 1: 6})


def test_a_late_backward_is_refused_in_one_process(pool: Pool, tmp_path: Path) -> None:
    """Its gradient would be averaged over nothing there, and be refused in a larger world."""
    told = {"strategy": "ddp", "dtype": "float64", "steps": 4, "own": "after"}
    running = pool.start(SCRIPT, [json.dumps(told)], 1, checkpoint_dir=str(tmp_path))
    running.until(running.ended)
    (worker,) = running.workers
    failed = worker.last(Failed)
    assert failed.final and "has got a gradient after session.backward" in failed.message
    assert not worker.all(Stepped)


@pytest.mark.parametrize(
    ("strategy", "wrong", "complaint"),
    [
        ("ddp", {"wrong": "assigned"}, "parameter '2.bias' is another object"),
        slow(
            "zero1", {"wrong": "parametrized"}, "'4.weight' is no parameter of the model any more"
        ),
        slow("zero2", {"wrong": "added"}, "parameter 'head.weight' was added after"),
        ("zero3", {"wrong": "added"}, "parameter 'head.weight' was added after"),
        ("zero1", {"own": "before"}, "has a gradient before session.backward"),
        slow("ddp", {"own": "before"}, "has a gradient before session.backward"),
        slow("zero2", {"own": "before"}, "has a gradient before session.backward"),
        slow("zero3", {"own": "before"}, "has a gradient before session.backward"),
        slow("zero1", {"own": "after"}, "a backward of the script's own adds to gradients"),
        ("zero2", {"own": "after"}, "a backward of the script's own adds to gradients"),
        slow("ddp", {"own": "after"}, "got a gradient after the gradients were summed"),
    ],
)
def test_what_would_be_lost_is_refused_before_a_second_step(
    pool: Pool, tmp_path: Path, strategy: str, wrong: dict[str, str], complaint: str
) -> None:
    told = {"strategy": strategy, "dtype": "float64", "steps": 4, **wrong}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    running.until(running.ended)
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    assert any(complaint in failed.message for failed in failures), running.logs()
    for worker in running.workers:
        assert max((stepped.step for stepped in worker.all(Stepped)), default=0) <= 1
