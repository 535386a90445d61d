"""Decides whether a loop may go on with another batch size, or with other data. Pure.

- A loop goes on as it was. Another `global_batch` within a loop, and another order of samples
  (dataset, seed, shuffle, sampler) within an epoch, are refused unless that kind of change is
  allowed.
- The position is carried over. With another batch size the epoch goes on after the same sample, and
  what is left of it is cut anew, so each of its samples is still used once. With other data the
  epoch begins anew, for its samples are not those that were used; each of them is used once.
- What is done stays done: steps, epochs and loops. The position has the new size and order from
  here on, so that later generations go on with them and need no permission.
- At the end of an epoch other data need no permission: the next epoch begins with them. A loop that
  is over, or has used nothing, may have any batch size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from elasticzero.data.position import UNKNOWN, DataPosition, LoopPlan
from elasticzero.errors import UserError
from elasticzero.options.settings import DataChange


def epoch_is_over(order: Any, stream: Any, used: int, least: int = 1) -> bool:
    """Returns whether no batch is left of an epoch of which so many samples are used.

    Args:
        order: The inputs of the epoch's order.
        stream: Where its readers go on, of a stream; None: the dataset is none.
        used: Number of samples that are used.
        least: Number of samples of the smallest batch.
    """
    samples = None
    if stream is not None:
        totals = [row[0] for row in stream]
        samples = sum(totals) if UNKNOWN not in totals else None
    elif order and isinstance(order[0], int):
        samples = order[0]
    return samples is not None and used > samples - least


def needed_changes(plan: LoopPlan, position: DataPosition) -> tuple[DataChange, ...]:
    """Returns what must be allowed for the loop in which training stands to go on by this plan."""
    needed: list[DataChange] = []
    if position.global_batch not in (0, plan.global_batch) and _goes_on(plan, position):
        needed.append("batch")
    other = position.order not in (None, plan.order.inputs)
    if other and position.offset and not _has_ended_epoch(plan, position):
        needed.append("dataset")
    return tuple(needed)


def carried_over(
    plan: LoopPlan, position: DataPosition, allowed: Collection[DataChange]
) -> DataPosition:
    """Returns where the loop in which training stands goes on by this plan.

    Args:
        plan: The loop's plan, as the script has it now.
        position: Where training stopped.
        allowed: The changes that are allowed.

    Raises:
        UserError: The plan makes a change that is not allowed.
    """
    needed = needed_changes(plan, position)
    if not set(needed) <= set(allowed):
        raise _refused(plan, position, needed)
    if position.order in (None, plan.order.inputs):
        return position
    ended = position.offset > 0 and _has_ended_epoch(plan, position)
    return replace(position, epoch=position.epoch + ended, offset=0, stream=None)


def change_text(plan: LoopPlan, before: DataPosition, step: int) -> str:
    """Returns a sentence on what has changed in the loop in which training stands; empty: nothing.

    Args:
        plan: The loop's plan, as the script has it now.
        before: The position at which training stopped.
        step: Number of global batches until then.
    """
    needed, changed = needed_changes(plan, before), []
    if "batch" in needed:
        changed.append(f"global_batch {plan.global_batch} in place of {before.global_batch}")
    if before.order not in (None, plan.order.inputs) and (before.offset or before.steps):
        changed.append(_other_data(plan, before))
    if not changed:
        return ""
    allows = f", as --allow-data-change {','.join(needed)} allows" if needed else ""
    at = plan.wrapped(carried_over(plan, before, needed))
    how = "begins anew" if "dataset" in needed else "begins"
    how = f"goes on after its first {at.offset} samples" if at.offset else how
    listed = " and ".join(changed)
    return f"after step {step} the loop goes on with {listed}{allows}: epoch {at.epoch} {how}"


def _has_ended_epoch(plan: LoopPlan, position: DataPosition) -> bool:
    """Returns whether the position's epoch was over when training stopped."""
    least = position.global_batch or plan.global_batch
    least = least if plan.drop_last else 1
    return epoch_is_over(position.order, position.stream, position.offset, least)


def _goes_on(plan: LoopPlan, position: DataPosition) -> bool:
    """Returns whether the position's loop has used something and is not over."""
    ended = position.offset > 0 and _has_ended_epoch(plan, position)
    epochs = position.epoch + ended - position.first_epoch
    over = plan.epochs is not None and epochs >= plan.epochs
    over = over or (plan.steps is not None and position.steps >= plan.steps)
    return position.steps > 0 and not over


def _other_data(plan: LoopPlan, position: DataPosition) -> str:
    """Returns what the order of samples depends on now, and on what it did, where they differ."""
    names, before = plan.order.described, position.order
    if len(names) != len(before):
        listed = ", ".join(f"{name} {value}" for name, value in names.items())
        return f"{listed} in place of {', '.join(map(str, before))}"
    pairs = zip(names.items(), before, strict=True)
    differing = [f"{name} {now} in place of {old}" for (name, now), old in pairs if now != old]
    return " and ".join(differing)


def _refused(plan: LoopPlan, position: DataPosition, needed: Collection[DataChange]) -> UserError:
    """Returns the error for a loop that would go on with changes that are not allowed.

    Args:
        plan: The loop's plan, as the script has it now.
        position: Where training stopped.
        needed: The changes that the loop would make, at least one.
    """
    faults, then, instead = [], [], []
    if "batch" in needed:
        before = position.global_batch
        faults.append(
            f"training stopped in a loop with global_batch {before}, and the script now has "
            f"{plan.global_batch}"
        )
        then.append("the epoch goes on from the same sample")
        instead.append(f"give global_batch={before} again, the same for any number of ranks")
    if "dataset" in needed:
        faults.append(
            "training stopped in the middle of an epoch, and the script now has "
            f"{_other_data(plan, position)}: some samples would be used twice and others never"
        )
        then = ["the epoch begins anew"]
        instead.append("give the same dataset and seed, or another checkpoint directory")
    kinds = ",".join(needed)
    return UserError(
        f"{'; and '.join(faults)}. If that is meant, start all nodes with --allow-data-change "
        f"{kinds}, or a script without a launcher with ELASTICZERO_ALLOW_DATA_CHANGE={kinds}: "
        f"{then[0]}. Otherwise {'; '.join(instead)}"
    )
