"""Creates a strategy by its name.

A strategy is imported where it is chosen: torch's FSDP2 takes a while to import, and `ddp` does
without it.
"""

from __future__ import annotations

from elasticzero.errors import UserError
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel.base import Setting, Strategy
from elasticzero.spans import STRATEGIES


def create(name: str, setting: Setting) -> Strategy:
    """Returns the strategy of this name; the model is on its device already."""
    mirrored = setting.mirrored_by is not None
    check_options(name, setting.options, mirrored=mirrored, by_node=setting.by_node)
    if name == "ddp":
        from elasticzero.parallel.ddp import Replicated

        return Replicated(setting)
    if setting.options.deterministic and name in ("zero1", "zero2"):
        from elasticzero.parallel.fixed_order.zero import WholeParameters

        return WholeParameters(setting)
    if name in ("zero1", "zero2"):
        from elasticzero.parallel.zero import FlatBuckets

        return FlatBuckets(setting, stage=int(name[-1]))
    if name == "zero3":
        from elasticzero.parallel.fsdp.strategy import FullyPartitioned

        return FullyPartitioned(setting)
    raise UserError(f"strategy {name!r} is not one of {', '.join(STRATEGIES)}")


def check_options(
    strategy: str, options: TrainingSettings, *, mirrored: bool, by_node: bool = False
) -> None:
    """Checks that the options can be had with a strategy.

    Args:
        strategy: The strategy's name.
        options: The training options.
        mirrored: Whether each rank's part has a live copy, though not every rank keeps one.
        by_node: Whether each node holds the whole state (`--shard node`).

    Raises:
        UserError: The strategy sums in an order that depends on the world, or keeps no live copies
            with `--deterministic`, or cannot round what it sends.
    """
    if options.wire.is_lossy:
        _check_wire(strategy, options, by_node=by_node)
    if not options.deterministic:
        return
    if strategy == "zero3":
        raise UserError(
            "--deterministic cannot be had with strategy zero3, for torch's FSDP2 sums gradients "
            "in an order that depends on the world: use ddp, zero1 or zero2"
        )
    if mirrored and strategy != "ddp":
        raise UserError(
            "--deterministic cannot be had with --redundancy mirror: its zero1 and zero2 keep "
            "no live copies of other ranks' parts; leave out one of the two"
        )


def _check_wire(strategy: str, options: TrainingSettings, *, by_node: bool) -> None:
    if why := options.wire.refusal(strategy, by_node=by_node):
        raise UserError(f"--wire {options.wire} cannot be had with {why}")
    if options.deterministic:
        raise UserError(
            f"--wire {options.wire} cannot be had with --deterministic: what a rank encodes "
            "depends on which slices it has; leave out one of the two"
        )
