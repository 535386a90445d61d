"""Compares the learning rates that a restored state has with those that the script's schedules give
at the same step.

A `LambdaLR` (transformers' schedules are such) stores its step and its rates, and not its function.
One whose function is built from a number of steps that follows from the number of ranks so changes
the rate, in silence, whenever the world changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

log = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""Relative difference up to which two rates count as equal."""


def warn_of_changed_rates(tracked: Mapping[str, Any]) -> None:
    """Says in one line which rate has changed, of schedules whose state was just restored.

    Args:
        tracked: Schedules and other objects by name.
    """
    for name, thing in tracked.items():
        for schedule in _functions_in(thing):
            if (change := _changed_rate(schedule)) is not None:
                restored, computed = change
                log.warning(
                    f"{name!r}: at its step {schedule.last_epoch} this script's schedule gives a "
                    f"learning rate of {computed:g}, and the state that training goes on from has "
                    f"{restored:g}; training goes on with the script's. A number of steps that "
                    "follows from the number of ranks changes with the world: take it from "
                    "session.steps_in(…)"
                )
                return


def _functions_in(thing: Any) -> Iterator[LambdaLR]:
    """Yields the schedules by function in a tracked object: itself, or the parts of one."""
    if isinstance(thing, LambdaLR):
        yield thing
    for part in getattr(thing, "_schedulers", ()):  # of SequentialLR and ChainedScheduler
        yield from _functions_in(part)


def _changed_rate(schedule: LambdaLR) -> tuple[float, float] | None:
    """Returns the first rate that has changed, as it was restored and as it is computed anew; None:
    all are equal, or the schedule has not begun."""
    step = schedule.last_epoch
    if step < 0:
        return None
    functions = zip(schedule.base_lrs, schedule.lr_lambdas, schedule.get_last_lr(), strict=False)
    for base, function, last in functions:
        restored, computed = float(last), float(base * function(step))
        if not math.isclose(restored, computed, rel_tol=TOLERANCE):
            return restored, computed
    return None
