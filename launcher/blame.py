"""Whose fault failures are: which of them count, whether they are the script's or a machine's, and
which nodes are set aside.

Pure. Rules:
 B1  A failure counts against --max-restarts if it is a worker's own, or of peers that are all
     there, and no progress was made: the state did not get past the step that its generation
     started from, nor past the furthest from which one did, where a failure that counts has thrown
     it back since. What is lost, or fails on a node that leaves or for want of one, never counts:
     of nodes that held the state to start from, too. Progress forgives everything.
 B2  The first error of each generation since the last progress is remembered, and all of them are
     told when the job is given up.
 B3  Errors of one kind, of the same rank or after the same step, one upon the other, are told as
     the script's or its data's: a lost machine leaves no error, and a bad one not always the same.
     On different nodes they are that for certain.
 B4  A node whose workers fail, where those of no other do, gets a strike. A failure of another
     takes the strikes back of those that trained with it, and so does a generation that lasted
     for FORGIVEN_S. From ASIDE_AFTER strikes on the node is set aside: it waits for ASIDE_S, twice
     that at the next strike, MOST_ASIDE_S at most.
 B5  Where the others are fewer than MIN, nodes that are set aside are needed: as many as are
     wanting, and no more. Those with the fewest strikes come first, for whom the time is shortest;
     of these the one that has the least of it left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elasticzero.launcher.world import Failure, Report, Setback, Strikes, World

KEPT_SETBACKS = 8
KEPT_STRIKES = 16
MAX_MESSAGE = 300
ASIDE_AFTER = 3
ASIDE_S = 30.0
MOST_ASIDE_S = 3600.0
FORGIVEN_S = 600.0
OWN_FAULTS = ("user", "killed", "environment", "hung")
"""What can be a node's own fault; not a lost peer, nor a checkpoint's damage."""
AGAIN = "its workers failed time and again, where no others did"

Cause = tuple[str, Failure]
"""A node, and the first error of its workers."""


def fruitless(
    world: World, resume_step: int, cause: Cause | None, reports: Mapping[str, Report]
) -> int:
    """B1: failures in a row without progress. reports: of the nodes that are not lost."""
    if _comes_on(world, resume_step):
        return 0
    if cause is None or _leaves(reports.get(cause[0])):
        return world.fruitless
    all_stay = not any(_leaves(reports.get(member.node)) for member in world.members)
    lost = any(member.node not in reports for member in world.members)
    counts = cause[1].blame != "peer" or (all_stay and not lost)
    counts &= not _in_want(world, cause[1], reports)
    return world.fruitless + 1 if counts else world.fruitless


def _comes_on(world: World, resume_step: int) -> bool:
    """Whether progress was made."""
    return resume_step > max(world.resume.step, world.furthest)


def furthest(world: World, resume_step: int, count: int) -> int:
    """B1: the step that the next generation must get past. count: its `fruitless`."""
    if count <= world.fruitless and resume_step < world.resume.step:
        return resume_step  # what machines took is done again, and that is progress
    return max(resume_step, world.resume.step, world.furthest)


def _in_want(world: World, failure: Failure, here: Collection[str]) -> bool:
    """Whether it failed because nobody is left who held a part of the state to start from."""
    sources = world.resume.sources if failure.blame == "environment" else ()
    there = {source.rank for source in sources if source.node in here}
    return any(source.rank not in there for source in sources)


def _leaves(report: Report | None) -> bool:
    return report is not None and report.leaving


def setbacks(world: World, resume_step: int, cause: Cause | None) -> tuple[Setback, ...]:
    """B2: the errors in a row that stand after this round."""
    before = () if _comes_on(world, resume_step) else world.setbacks
    if cause is None:
        return before
    node, failure = cause
    new = Setback(
        generation=world.generation,
        node=node,
        rank=failure.rank,
        blame=failure.blame,
        step=max(failure.step, world.resume.step),
        message=failure.message[:MAX_MESSAGE],
    )
    return (*before, new)[-KEPT_SETBACKS:]


def likeness(row: tuple[Setback, ...]) -> str:
    """B3: what is to be said of the last errors, if they are alike; else nothing."""
    if not row:
        return ""
    last = row[-1]
    alike = 1
    for earlier in reversed(row[:-1]):
        if last.blame != "user" or not _alike(earlier, last):
            break
        alike += 1
    if alike < 2:
        return ""
    nodes = {setback.node for setback in row[-alike:]}
    if len(nodes) > 1:
        where, whose = "on different nodes", "not a machine"
    else:
        where, whose = f"on {last.node}", "rather than a machine"
    return f"{alike} generations in a row failed alike, {where}: the script or its data, {whose}"


def _alike(one: Setback, other: Setback) -> bool:
    kinds = [(s.blame, s.message.partition(":")[0]) for s in (one, other)]
    return kinds[0] == kinds[1] and (one.rank == other.rank or one.step == other.step)


def strikes(world: World, reports: Mapping[str, Report], lasted_s: float) -> tuple[Strikes, ...]:
    """B4: the strikes after this round. lasted_s: how long this generation was seen."""
    present = {member.node for member in world.members}
    away = tuple(struck for struck in world.strikes if struck.node not in present)
    here = tuple(struck for struck in world.strikes if struck.node in present)
    own = {
        node
        for node, report in reports.items()
        if report.failure is not None and report.failure.blame in OWN_FAULTS and not report.leaving
        if not _in_want(world, report.failure, reports)
    }
    before = () if lasted_s >= FORGIVEN_S else here
    if not own:
        return (*away, *before)
    if len(own) > 1 or len(present) < 2:
        return away
    (node,) = own
    known = sum(struck.count for struck in before if struck.node == node)
    return (*away, Strikes(node=node, count=known + 1))[-KEPT_STRIKES:]


def set_aside(
    before: tuple[Strikes, ...],
    after: tuple[Strikes, ...],
    struck_s: Mapping[str, float],
    now_s: float,
) -> dict[str, float]:
    """B4: the nodes that wait, and for how much longer, in seconds.

    before: the strikes of the present world, `struck_s` by node since when they are so many.
    """
    left: dict[str, float] = {}
    for struck in after:
        if struck.count >= ASIDE_AFTER:
            since_s = struck_s.get(struck.node, now_s) if struck in before else now_s
            left_s = since_s + term_s(struck.count) - now_s
            if left_s > 0:
                left[struck.node] = left_s
    return left


def term_s(count: int) -> float:
    """How long a node with so many strikes waits."""
    doublings = min(count - ASIDE_AFTER, 20)
    return float(min(MOST_ASIDE_S, ASIDE_S * 2**doublings))


def kept_aside(
    aside: Mapping[str, float], row: tuple[Strikes, ...], here: Collection[str], least: int
) -> set[str]:
    """B5: of the nodes that are set aside those that a new world does without.

    aside: by node, how much longer it waits. row: the strikes. here: who could be in that world.
    """
    counts = {struck.node: struck.count for struck in row}
    struck = [node for node in here if node in aside]
    struck.sort(key=lambda node: (counts[node], aside[node], node))
    wanting = max(0, least - (len(here) - len(struck)))
    return set(aside) - set(struck[:wanting])
