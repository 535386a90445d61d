"""Compares what lives at a boundary with what lives in the generation that goes on from it. Pure.

Rules:
 RB1  What lives before the first step of a generation equals what lived at the boundary that it
      goes on from, by name and digest, in any world. A name that is missing or new differs too.
 RB2  That boundary is the one of the newest earlier generation that has made its step. A generation
      that made no step is compared by what it started with.
 RB3  Ranks after the first that has whole values may have what rank 0 had at the boundary, or what
      they had themselves; what they leave out is not looked at.
 RB4  The generators of rank 0 are compared. Those of another rank may begin anew, as a rank's do
      that a stored state does not have: then it is only known that they do (`reseeded`).
 RB5  A generation that begins at step 0 makes everything anew, and is not compared.
"""

from __future__ import annotations

from elasticzero.ops.rehearse.causes import Reason, value_verdict, verdict
from elasticzero.ops.rehearse.checks.changes import Change, changed, in_order, lost_text
from elasticzero.ops.rehearse.checks.series import (
    ByRank,
    Generation,
    Series,
    Values,
    first_whole,
    rank_values,
    whole_values,
)
from elasticzero.ops.rehearse.results import Verdict


def check(series: Series) -> Verdict | None:
    """Returns the verdict on the first generation that did not begin with what had lived; None: all
    did."""
    if len(series.generations) < 2:
        return verdict(Reason.NO_GENERATION)
    for index, generation in enumerate(series.generations[1:], 1):
        if generation.start_step > 0:
            problem = _check_start(generation, series.generations[:index])
            if problem is not None:
                return problem
    return None


def _check_start(generation: Generation, earlier: tuple[Generation, ...]) -> Verdict | None:
    step = generation.start_step
    boundary = _boundary(step, earlier)
    before, after = first_whole(boundary), first_whole(generation.starts)
    for values, moment in ((before, f"after step {step}"), (after, f"before step {step + 1}")):
        if not values:
            return verdict(Reason.NO_RECORD, generation=generation.number, moment=moment)
    changes = changed(before, after)
    wrong = {(change.kind, change.name) for change in changes}
    of_others = _of_other_ranks(before, boundary, generation.starts)
    changes += [change for change in of_others if (change.kind, change.name) not in wrong]
    if 0 in boundary and 0 in generation.starts:
        changes += changed(rank_values(boundary[0]), rank_values(generation.starts[0]), 0)
    if not changes:
        return None
    changes = in_order(changes)
    where = f"generation {generation.number}, before step {step + 1}"
    return value_verdict(changes[0].kind, f"{where}: {lost_text(changes)}", lost=True)


def reseeded(series: Series) -> int | None:
    """Returns a rank whose generators did not come back, or that is new, in any generation after
    the first; None: all came back."""
    for index, generation in enumerate(series.generations[1:], 1):
        boundary = _boundary(generation.start_step, series.generations[:index])
        for rank, record in generation.starts.items():
            before = rank_values(boundary[rank]) if rank in boundary else {}
            if changed(before, rank_values(record), rank):
                return rank
    return None


def _boundary(step: int, earlier: tuple[Generation, ...]) -> ByRank:
    """Returns the records of the boundary after a step (RB2)."""
    newest_first = earlier[::-1]
    for generation in newest_first:
        if step in generation.steps:
            return generation.steps[step]
    return next((g.starts for g in newest_first if g.starts and g.start_step == step), {})


def _of_other_ranks(before: Values, boundary: ByRank, starts: ByRank) -> list[Change]:
    """Returns the values that ranks after the first one have got wrong (RB3)."""
    changes = []
    _, *others = (rank for rank, record in starts.items() if whole_values(record))
    for rank in others:
        at_boundary = whole_values(boundary[rank]) if rank in boundary else {}
        for key, value in whole_values(starts[rank]).items():
            accepted = [values[key].digest for values in (before, at_boundary) if key in values]
            if accepted and value.digest not in accepted:
                changes.append(Change(*key, before.get(key), value, rank))
    return changes
