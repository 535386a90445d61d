"""What carries out the script's calls keeps nothing of a loop that has ended."""

from __future__ import annotations

import gc
import weakref

from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.training.batch_work import BatchWork
from elasticzero.training.step_machine import StepState
from elasticzero.training.step_tracker import StepTracker


class Order(SampleOrder):
    """Can be referred to weakly."""


def test_a_loop_that_has_ended_leaves_its_plan() -> None:
    """A sampler's indices of two epochs would stay in memory until the next loop begins."""
    tracker = StepTracker()
    work = BatchWork(AgentClient(None, STANDALONE), None, tracker, on_gpu=False)
    order = Order(samples=4, seed=0, shuffle=False)
    reference = weakref.ref(order)
    loop = tracker.move(StepState.next_loop).loop
    work.open_loop(BatchPlan(order=order, global_batch=2, epochs=1), None, whole=True)
    del order
    gc.collect()
    assert reference() is not None
    work.end_loop(loop)
    gc.collect()
    assert reference() is None
