"""Defines the training settings that the options give to every worker, and parses their texts.

Pure. A field of `TrainingSettings` has the name that a row of `training.py` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from elasticzero.errors import UserError
from elasticzero.options.diloco import DiLoCo
from elasticzero.options.wire import EXACT, Wire
from elasticzero.serialization import OMIT_DEFAULT

OnNonFinite = Literal["stop", "skip", "rollback"]
"""Says what happens to a global batch whose loss or gradient is not finite: the job stops before
its step, the batch is skipped, or training goes back to a held state and leaves the batch out."""

DataChange = Literal["batch", "dataset"]
"""Names what a loop may have otherwise than before, where training goes on in it: the size of
global batches; the dataset or the order of its samples."""

OnStraggler = Literal["report", "balance"]
"""Says what happens where a rank is slower than the others: it is shown, or its part of the global
batches becomes smaller too."""

BucketBytes = int | Literal["auto"] | None
"""Size in bytes beyond which a bucket of gradients takes no further parameter; auto: one that rank
0 finds by measuring; None: the strategy's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeLimit:
    """Says which losses are too high, and what becomes of their global batches."""

    action: OnNonFinite
    deviations: float
    """Number of standard deviations above the mean loss."""
    steps: int
    """Number of steps of which the mean is taken."""

    def __str__(self) -> str:
        return f"{self.action}:{self.deviations:g}:{self.steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Holds what the options say to every worker, whatever its rank."""

    deterministic: bool = False
    """True: gradients are summed slice by slice in one fixed order, by deterministic kernels, so
    that the bits of the result do not depend on the world."""
    bucket_bytes: BucketBytes = None
    """Limit of the size of a bucket of gradients."""
    wire: Wire = EXACT
    """Format of gradients between ranks."""
    diloco: DiLoCo | None = field(default=None, metadata=OMIT_DEFAULT)
    """Settings of the islands; None: the nodes of the job are no islands."""
    checkpoint_dir: str | None = None
    checkpoint_every: int = 0
    """Number of steps from one checkpoint to the next; 0: one is saved at the end only."""
    snapshot_every: int | None = None
    """Number of steps from one snapshot to the next; 0: none are taken; None: rank 0 chooses."""
    verify_every: int | None = None
    """Number of steps from one comparison of replicated state to the next; 0: none; None: rank 0
    chooses."""
    on_nonfinite: OnNonFinite = "stop"
    """Says what happens to a global batch whose loss or gradient is not finite."""
    on_spike: SpikeLimit | None = None
    """Which losses are too high; None: none is."""
    allow_data_change: tuple[DataChange, ...] = ()
    """Says what may change in the loop in which training goes on."""

    on_straggler: OnStraggler = "report"
    """Says what happens where a rank is slower than the others."""
    straggler_factor: float = 1.3
    """Multiple of the median own time from which on a rank is slow, for `balance`."""
    straggler_steps: int = 20
    """Number of steps from one comparison of the ranks' speeds to the next, for `balance`."""

    @property
    def rolls_back(self) -> bool:
        """Returns whether a bad global batch can take training back to a held state."""
        spike = self.on_spike is not None and self.on_spike.action == "rollback"
        return spike or self.on_nonfinite == "rollback"


def data_changes(flag: str, text: str | None) -> tuple[DataChange, ...]:
    """Parses changes, separated by commas; there are none without a text. Raises `UserError` that
    names the option `flag`."""
    possible: tuple[DataChange, ...] = get_args(DataChange)
    names = text.split(",") if text is not None else []
    if not set(names) <= set(possible):
        raise UserError(f"{flag} {text}: batch, dataset or batch,dataset is expected")
    return tuple(name for name in possible if name in names)


def spike_limit(flag: str, text: str) -> SpikeLimit | None:
    """Parses ACTION:K:N; returns None for off. Raises `UserError` that names the option `flag`."""
    if text == "off":
        return None
    action, _, rest = text.partition(":")
    deviations, _, steps = rest.partition(":")
    try:
        limit, count = float(deviations), int(steps)
    except ValueError:
        limit, count = math.nan, 0
    actions: tuple[OnNonFinite, ...] = get_args(OnNonFinite)
    chosen = next((name for name in actions if name == action), None)
    if chosen is None or not 0 < limit < math.inf or count < 2:
        raise UserError(
            f"{flag} {text}: off, stop:K:N, skip:K:N or rollback:K:N is expected, such as "
            "skip:6:100 for losses more than 6 standard deviations above the mean of the last 100 "
            "steps"
        )
    return SpikeLimit(action=chosen, deviations=limit, steps=count)
