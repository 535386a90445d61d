"""Finds which tensors are not finite where the norm of a gradient is not.

It stands alone because it reads tensors and meets the other ranks; `consistency/nonfinite` has the
sentence, and `step_guard` the decision, and both are pure.
"""

from __future__ import annotations

import logging

import torch

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.nonfinite import Findings
from elasticzero.ipc.assignment import Assignment
from elasticzero.parallel import Strategy
from elasticzero.state.model import MODEL

log = logging.getLogger(__name__)


def own_findings(strategy: Strategy) -> str:
    """Describes what is not finite of this rank's losses and gradients; empty: nothing is.

    Raises `UserError` where another mistake is the reason.
    """
    suspects = strategy.suspects()
    findings = ["the loss"] if suspects.loss else []
    if suspects.gradients:
        others = len(suspects.gradients) - 1
        findings.append(
            f"the gradient of {suspects.gradients[0]!r}{f' and {others} more' if others else ''}"
        )
    return " and ".join(findings)


def print_skipped(rank: int, step: int, reason: str, finding: str = "") -> None:
    """Prints, on rank 0 and where `finding` is given, that a step was skipped.

    Args:
        rank: This rank.
        step: The number of the step.
        reason: Why it was skipped, the same on all ranks.
        finding: What is not finite on this rank; empty: nothing is.
    """
    where = f" (on this rank {finding})" if finding else ""
    if finding or rank == 0:
        log.warning("step %d was skipped: %s%s", step, reason, where)


def all_findings(
    strategy: Strategy, groups: ProcessGroups | None, assignment: Assignment, step: int
) -> Findings:
    """Returns what is not finite on any rank; all ranks call this together.

    Args:
        strategy: The model as it is laid over the ranks, after `finish`.
        groups: The process groups; None for one process alone.
        assignment: This rank's place.
        step: The number of the step that is not applied.
    """
    suspects, share = strategy.suspects(), strategy.rank_state()
    names = sorted(share.specs)
    broken = set(share.not_finite())
    bad = [suspects.loss]
    bad += [name.removeprefix(MODEL) in suspects.gradients for name in names]
    bad += [name in broken for name in names]
    table = torch.zeros(assignment.world_size, len(bad), dtype=torch.uint8)
    table[assignment.rank] = torch.tensor(bad)
    if groups is not None:
        table = groups.sum(table)
    first = dict(reversed([(what, rank) for rank, what in table.nonzero().tolist()]))
    named = [(name.removeprefix(MODEL), first.get(at)) for at, name in enumerate(names, 1)]
    kept = [(name, first.get(at)) for at, name in enumerate(names, 1 + len(names))]
    return Findings(
        step=step,
        losses=[rank for rank, row in enumerate(table.tolist()) if row[0]],
        gradients=[(name, rank) for name, rank in named if rank is not None],
        state=[(name, rank) for name, rank in kept if rank is not None],
    )
