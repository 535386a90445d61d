"""The size of micro-batches (given, whole, automatic), and the order of calls for each."""

from __future__ import annotations

from typing import Any

import pytest

from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import GlobalBatch
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.step_progress import StepProgress
from elasticzero.errors import UserError

PLAN = BatchPlan(order=SampleOrder(samples=100), global_batch=20, steps=1)
BATCH = GlobalBatch(epoch=0, start=0, stop=20)


def schedule(**given: Any) -> RankSchedule:
    return RankSchedule(plan=PLAN, rank=0, world_size=2, **given)


def sizes(rank: RankSchedule) -> list[int]:
    return [len(part.positions) for part in rank.parts(BATCH)]


def test_an_automatic_size_is_the_whole_part_until_memory_is_short() -> None:
    assert sizes(schedule(micro_batch="auto")) == [10]
    assert sizes(schedule(micro_batch="auto", micro_batch_limit=4)) == [4, 4, 2]
    assert sizes(schedule(micro_batch_limit=4)) == [10]


def test_only_an_automatic_size_can_be_halved() -> None:
    [part] = schedule(micro_batch="auto").parts(BATCH)
    assert schedule(micro_batch="auto").halved(part) == 5
    assert schedule(micro_batch=10).halved(part) is None
    [one, *_] = schedule(micro_batch="auto", micro_batch_limit=1).parts(BATCH)
    assert schedule(micro_batch="auto").halved(one) is None


@pytest.mark.parametrize("size", [0, -1, "half"])
def test_another_size_is_refused(size: Any) -> None:
    with pytest.raises(UserError, match="at least 1, or auto"):
        schedule(micro_batch=size)


def at_first(**given: Any) -> StepProgress:
    progress = StepProgress()
    progress.begin(BATCH)
    progress.present(schedule(**given).parts(BATCH)[0], 0.0)
    return progress


def do(progress: StepProgress, only: tuple[str, ...] | None) -> None:
    """What `session.backward` and `session.step` do."""
    progress.begin_backward(only)
    progress.add_weight(2.0)
    progress.backward = True
    progress.check_step(only)
    progress.stepped = True


def test_optimizers_take_turns_in_a_global_batch_of_one_micro_batch() -> None:
    progress = at_first()
    for only in [("a",), ("a",), ("b",)]:
        do(progress, only)
        assert progress.weights == {0: 2.0}, "of this turn alone"
    with pytest.raises(UserError, match="called once for each micro-batch"):
        progress.begin_backward(None)
    assert not progress.partial


@pytest.mark.parametrize("given", [{"micro_batch": 5}, {"virtual_batch": 20}, {"virtual_batch": 5}])
def test_optimizers_take_no_turns_within_several_micro_batches(given: Any) -> None:
    """A slice is one micro-batch in some worlds only."""
    progress = at_first(**given)
    do(progress, ("a",))
    with pytest.raises(UserError, match="in the middle of a global batch"):
        progress.begin_backward(("b",))


def test_all_micro_batches_are_for_the_same_optimizers() -> None:
    progress = at_first(micro_batch=5)
    do(progress, ("a",))
    progress.present(schedule(micro_batch=5).parts(BATCH)[1], 0.0)
    with pytest.raises(UserError, match="was given only='b' for a micro-batch, and only='a' for"):
        progress.begin_backward(("b",))
    do(progress, ("a",))


def test_a_step_is_of_the_optimizers_of_its_backward() -> None:
    progress = at_first()
    with pytest.raises(UserError, match=r"session.backward\(loss\) was not called before"):
        progress.check_step(None)
    progress.begin_backward(("a", "b"))
    progress.backward = True
    for only in (None, ("a",)):
        with pytest.raises(UserError, match=r"before it only=\['a', 'b'\]: give both the same"):
            progress.check_step(only)
    with pytest.raises(UserError, match="called twice for one micro-batch"):
        progress.begin_backward(("c",))
