"""What a script changes of parameters between a boundary and the step is of the step: the state
that is kept of a generation that ends within it has it not, and the step makes it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.ipc.messages import Stopping
from elasticzero.spans import STRATEGIES
from tests.integration.training_before_steps import plain
from tests.integration.training_harness import Pool, Running
from tests.support.cases import slow

SCRIPT = Path(__file__).parent / "training_before_steps.py"
STEPS = 8


def failed(pool: Pool, strategy: str, step: int) -> Running:
    """A generation of two ranks on one node, of which one fails in the step after this one."""
    told = {"strategy": strategy, "steps": STEPS, "fail": [1, step]}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, row=2, snapshot_every=0)
    running.until(running.ended)
    return running


@pytest.mark.parametrize("strategy", ["ddp", "zero1", slow("zero2"), "zero3"])
def test_changes_of_a_step_that_fails_count_once(pool: Pool, tmp_path: Path, strategy: str) -> None:
    first = failed(pool, strategy, 3)
    assert [w.last(Stopping).clean for w in first.workers] == [True, True], first.logs()
    resume = first.resume()
    assert resume.step == 3
    places = {"generation": resume.generation + 1, "checkpoint_dir": str(tmp_path)}
    told = json.dumps({"strategy": strategy, "steps": STEPS})
    second = pool.start(SCRIPT, [told], 2, row=2, resume=resume, **places)
    assert second.finish() == STEPS
    tensors = ez_checkpoint.load(tmp_path)
    for name, tensor in plain(strategy, STEPS).items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", [slow(name) for name in STRATEGIES[:-1]] + ["zero3"])
def test_the_first_change_leaves_no_state_of_the_boundary(pool: Pool, strategy: str) -> None:
    """Nothing has copied the values from before it."""
    running = failed(pool, strategy, 0)
    for worker in running.workers:
        assert not worker.last(Stopping).clean, running.logs()
