"""Has islands train on each kind of dataset: those with a length, and streams."""

from __future__ import annotations

from dataclasses import replace

from elasticzero.data.loader import BatchReader, ClaimedBatches, RankSchedule
from elasticzero.data.position import DataPosition, LoopPlan
from elasticzero.data.sampling import BatchPlan
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.islands.claimed_stream import ClaimedStream
from elasticzero.islands.plan import ClaimTable, IslandPlan, used_in_epoch
from elasticzero.islands.stream_plan import IslandStreamPlan
from elasticzero.serialization import field_values


def plan_of_islands(plan: LoopPlan, table: ClaimTable) -> IslandPlan | IslandStreamPlan:
    """Returns the plan of a loop whose samples the rounds give.

    Args:
        plan: The plan of all samples.
        table: Holds what the island is given.
    """
    if isinstance(plan, BatchPlan):
        return IslandPlan(**field_values(plan), table=table)
    assert isinstance(plan, StreamPlan)
    return IslandStreamPlan(
        order=plan.order,
        global_batch=plan.global_batch,
        epochs=plan.epochs,
        steps=plan.steps,
        drop_last=plan.drop_last,
        never_one=plan.never_one,
        table=table,
    )


def claimed(
    schedule: RankSchedule, reader: BatchReader | StreamReader
) -> tuple[IslandPlan | IslandStreamPlan, ClaimedBatches | ClaimedStream]:
    """Returns the plan of an island's loop, and its batches.

    Args:
        schedule: What a rank computes of the loop.
        reader: Reads the dataset.
    """
    plan = schedule.plan
    if isinstance(reader, StreamReader):
        assert isinstance(plan, IslandStreamPlan)
        return plan, ClaimedStream(reader, schedule, plan)
    assert isinstance(plan, IslandPlan)
    return plan, ClaimedBatches(reader, schedule)


def without_islands(position: DataPosition, plan: LoopPlan) -> tuple[DataPosition, str]:
    """Returns where a loop goes on whose state is that of an island.

    With a length, that is the first sample that is in no committed round; of a stream it is the
    beginning of the epoch that this sample is in, as its readers may be at any place there.

    Args:
        position: The position of that state.
        plan: The loop's plan.

    Returns:
        The position, and the end of a sentence that says so.
    """
    assert position.island is not None
    left, size = position.island.left, plan.global_batch
    if not isinstance(plan, BatchPlan):
        of_islands = plan_of_islands(plan, ClaimTable())
        epoch = left.first // of_islands.epoch_positions
        after = replace(
            position, epoch=epoch, offset=0, steps=left.committed // size, stream=None, island=None
        )
        return after, (
            f"from the beginning of epoch {epoch} of the stream on: its samples that were in "
            "rounds already are used again"
        )
    epoch, offset = divmod(left.first, used_in_epoch(plan))
    steps = epoch * plan.steps_in_epoch + -(-offset // size)
    after = replace(position, epoch=epoch, offset=offset, steps=steps, island=None)
    return after, (
        f"from sample {offset} of epoch {epoch} on: {left.committed - left.first} samples after it "
        "were in rounds already, and are used again"
    )
