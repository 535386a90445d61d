"""Attributes failures: which of them count, whether the script or a machine is to blame, and which
nodes are quarantined.

Pure. Rules:
 B1  A failure counts against --max-restarts if it is a worker's own, or of peers although every
     member is still present, and the generation made no progress. It made progress if the state got
     past the step that it started from, and past the furthest step from which one did, if a failure
     that counts has thrown the state back since. Failures never count of a lost or leaving node, or
     of a node that could not read the state to start from because a holder of it is gone; nor if
     storage cannot be written (E5 in `termination` bounds that), nor if memory did not suffice and
     the next generation has smaller micro-batches, which at one sample ends; nor is a rollback a
     failure, which leaves a batch out (Q6 in `training/step_guard`). Where workers have entered a
     generation inside their loops and come to no step, a loss of peers does not count: it may be
     the node that was leaving. Progress resets the count. But a state that advances by snapshots
     has made no progress as long as the same error ends each generation at the same step, and the
     state is not past that step.
 B2  The first error of each generation since the last progress is remembered, and all of them are
     named when the job is given up. An error is remembered until the state is past its step.
 B3  Consecutive errors of one kind, of the same rank or after the same step, are reported as the
     script's or its data's: a lost machine leaves no error, and a bad one not always the same. If
     they are on different nodes, that is certain; on one node alone it may be that machine's too.
     The same exception at the same step in two generations, on two nodes or more, ends the job at
     once. Two errors are the same if their lines are, apart from numbers. Errors of files and
     connections may be transient, and only count (B1).
 B4  A node gets a strike if its workers fail and no other node's do. A failure of another node
     takes the strikes back of those that trained with it, and so does a generation that lasted for
     FORGIVEN_S. From QUARANTINE_STRIKES strikes on, the node is quarantined: it waits for
     QUARANTINE_S, for twice that at the next strike, and for MAX_QUARANTINE_S at most. The same
     exception at the same step, twice on one node and on no other, is worth QUARANTINE_STRIKES
     strikes: the other nodes show whose fault it is.
 B5  If the other nodes are fewer than MIN, quarantined nodes are taken in: as many as are missing,
     and no more. Those with the fewest strikes come first, for their time is shortest; of these the
     one with the least time left.
 B6  A newcomer is a member that has made no step with this job, where others have. Three kinds of
     node are quarantined at once, as by QUARANTINE_STRIKES strikes, if MIN nodes are present
     without them: a newcomer whose workers fail before the first step of the generation, a node
     whose workers fail by bad input (a final failure), and a node with a rank whose state differs
     from that of a majority. The failure does not count (B1), and is not remembered (B2) if the
     node has not trained; the job goes on from the state it has. If the ranks of such a generation
     only lose each other, though no node is lost and none leaves, its newcomers are quarantined. If
     fewer than MIN nodes would be present, a final failure ends the job, and any other is judged by
     B1 to B5.
 B7  A worker that exits without a message, and not with success, has failed by itself if its exit
     had begun when it was told to stop, however late its agent sees it. One that exits after that
     was stopped.
 B8  Of the failures of one generation, one explains the others: a node's own fault before a lost
     peer, and bad input, which another try would meet again, before another error of a script. An
     error may follow from it, as of a rank that reads what the refused one was to write.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from typing import get_args

from elasticzero.errors import same_error
from elasticzero.ipc.failure import Blame, Failed
from elasticzero.launcher.protocol.documents import (
    Failure,
    FailureRecord,
    NodeStrikes,
    Report,
    World,
)

KEPT_SETBACKS = 8
KEPT_STRIKES = 64
MAX_MESSAGE = 300
QUARANTINE_STRIKES = 3
QUARANTINE_S = 30.0
MAX_QUARANTINE_S = 3600.0
FORGIVEN_S = 600.0
OWN_FAULTS = ("user", "killed", "environment", "hung")
"""Kinds of failure that can be a node's own fault; a lost peer, unwritable storage and a damaged
checkpoint are not."""
BLAME_ORDER: tuple[Blame, ...] = get_args(Blame)
"""Kinds of failure, the ones that explain others first; a lost peer explains nothing."""
MAY_PASS = ("oserror", "ioerror", "timeout", "connection", "brokenpipe")
"""Parts of the names of exceptions that concern files and connections."""
AGAIN = "its workers failed time and again, where no others did"

Cause = tuple[str, Failure]
"""A node, and the first error of its workers."""


def root_cause(reports: Mapping[str, Report]) -> Cause | None:
    """Returns the failure that caused the others; of several alike, that of the first rank."""
    failures = [(node, r.failure) for node, r in reports.items() if r.failure is not None]
    return min(failures, key=lambda f: (explains(f[1]), f[1].rank), default=None)


def explains(failure: Failure | Failed) -> tuple[int, bool]:
    """Returns a key by which failures that explain others come first (B8)."""
    return BLAME_ORDER.index(failure.blame), not failure.final


def failures_without_progress(
    world: World,
    resume_step: int,
    cause: Cause | None,
    reports: Mapping[str, Report],
    *,
    excused: bool = False,
) -> int:
    """Returns the number of failures in a row without progress (B1).

    Args:
        world: World of the generation that ends.
        resume_step: Step that the next generation starts from.
        cause: Node and failure that ended the generation; None: it did not fail.
        reports: Reports by node, of the nodes that are not lost.
        excused: Whether the nodes with the failure are set aside for it (B6).
    """
    if _comes_on(world, resume_step, cause):
        return 0
    excused |= cause is not None and cause[1].blame in ("storage", "memory", "rollback")
    if cause is None or excused or _leaves(reports.get(cause[0])):
        return world.fruitless
    all_stay = not any(_leaves(reports.get(member.node)) for member in world.members)
    lost = any(member.node not in reports for member in world.members)
    lost |= world.resume.tier == "live"  # perhaps the node that was leaving
    counts = cause[1].blame != "peer" or (all_stay and not lost)
    counts &= not _in_want(world, cause[1], reports)
    return world.fruitless + 1 if counts else world.fruitless


def _comes_on(world: World, resume_step: int, cause: Cause | None) -> bool:
    """Returns whether progress was made.

    Args:
        world: World of the generation that ends.
        resume_step: Step that the next generation starts from.
        cause: Node and failure that ended the generation; None: it did not fail.
    """
    if cause is not None and recurs(world.setbacks, _setback(world, cause), resume_step):
        return False
    return resume_step > max(world.resume.step, world.furthest)


def recurs(row: Collection[FailureRecord], last: FailureRecord, resume_step: int) -> bool:
    """Returns whether an error has happened at this step before, and the state is not past it
    (B1).

    Args:
        row: Earlier errors that are remembered.
        last: The last error.
        resume_step: Step that the state has reached.
    """
    return resume_step <= last.step and any(_same(earlier, last) for earlier in row)


def _same(one: FailureRecord, other: FailureRecord) -> bool:
    """Returns whether two generations ended by the same error at the same step."""
    alike = one.blame == other.blame != "peer" and one.step == other.step
    return alike and same_error(one.message, other.message)


def progress_floor(world: World, resume_step: int, count: int) -> int:
    """Returns the step that the next generation must get past (B1).

    Args:
        world: World of the generation that ends.
        resume_step: Step that the next generation starts from.
        count: Failures in a row without progress, with this one: `fruitless` of the next world.
    """
    if count <= world.fruitless and resume_step < world.resume.step:
        return resume_step  # what machines took is done again, and that is progress
    return max(resume_step, world.resume.step, world.furthest)


def _in_want(world: World, failure: Failure, present: Collection[str]) -> bool:
    """Returns whether a node failed because a part of the state to start from is lost with its
    holders.

    Args:
        world: World of the generation that ends.
        failure: The node's failure.
        present: Names of the nodes that have answered.
    """
    sources = world.resume.sources if failure.blame == "environment" else ()
    there = {source.rank for source in sources if source.node in present}
    return any(source.rank not in there for source in sources)


def _leaves(report: Report | None) -> bool:
    return report is not None and report.leaving


def setbacks(
    world: World,
    resume_step: int,
    cause: Cause | None,
    reports: Mapping[str, Report] | None = None,
) -> tuple[FailureRecord, ...]:
    """Returns the errors in a row that are remembered after this round (B2).

    Args:
        world: World of the generation that ends.
        resume_step: Step that the next generation starts from.
        cause: Node and failure that ended the generation; None: it did not fail.
        reports: Reports by node, in which the same error is looked for on other nodes; None: in
            none.
    """
    before = world.setbacks
    if _comes_on(world, resume_step, cause):
        before = tuple(setback for setback in before if setback.step >= resume_step)
    if cause is None or cause[1].blame in ("memory", "rollback"):
        return before
    return (*before, _setback(world, cause, reports or {}))[-KEPT_SETBACKS:]


def _setback(
    world: World, cause: Cause, reports: Mapping[str, Report] | None = None
) -> FailureRecord:
    node, failure = cause
    others = (n for n, r in (reports or {}).items() if n != node and _fails_alike(r, failure))
    return FailureRecord(
        generation=world.generation,
        node=node,
        rank=failure.rank,
        blame=failure.blame,
        step=max(failure.step, world.resume.step),
        message=failure.message[:MAX_MESSAGE],
        others=tuple(sorted(others)),
    )


def _fails_alike(report: Report, failure: Failure) -> bool:
    other = report.failure
    if other is None or (other.blame, other.step) != (failure.blame, failure.step):
        return False
    return same_error(other.message, failure.message)


def is_the_scripts(row: tuple[FailureRecord, ...]) -> bool:
    """Returns whether the last error is certainly the script's, so that another try is useless
    (B3)."""
    if not row or row[-1].blame != "user" or may_pass(row[-1].message):
        return False
    last = row[-1]
    before = [setback for setback in row[:-1] if _same(setback, last)]
    nodes = {node for setback in (*before, last) for node in (setback.node, *setback.others)}
    return bool(before) and len(nodes) > 1


def may_pass(message: str) -> bool:
    """Returns whether an error concerns files or connections (B3)."""
    name = message.partition(":")[0].lower()
    return any(part in name for part in MAY_PASS)


def repeated_failure_note(row: tuple[FailureRecord, ...]) -> str:
    """Returns a note on the last errors if they are alike; otherwise an empty text (B3)."""
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
    nodes = {node for setback in row[-alike:] for node in (setback.node, *setback.others)}
    if len(nodes) > 1:
        where, whose = "on different nodes", "not a machine"
    else:
        where, whose = f"on {last.node} alone", "or that machine"
    return f"{alike} generations in a row failed alike, {where}: the script or its data, {whose}"


def _alike(one: FailureRecord, other: FailureRecord) -> bool:
    kinds = [(s.blame, s.message.partition(":")[0]) for s in (one, other)]
    return kinds[0] == kinds[1] and (one.rank == other.rank or one.step == other.step)


def own_failures(world: World, reports: Mapping[str, Report]) -> dict[str, Failure]:
    """Returns the failures that can be the fault of the node they happened on."""
    return {
        node: report.failure
        for node, report in reports.items()
        if report.failure is not None and report.failure.blame in OWN_FAULTS and not report.leaving
        if not _in_want(world, report.failure, reports)
    }


def trained(world: World, reports: Mapping[str, Report], staying: Collection[str]) -> int:
    """Returns how many of the members that stay have made steps; all, if this generation made any
    (B6).

    Args:
        world: World of the generation that ends.
        reports: Reports by node of that generation.
        staying: Names of the members that have a place in the next world.
    """
    members = world.members if _has_trained(reports) else world.members[: world.trained]
    return sum(member.node in staying for member in members)


def _has_trained(reports: Mapping[str, Report]) -> bool:
    """Returns whether this generation made a step, or is of a plain script and ran for a while.

    A single node may have a script that starts slowly, and looks like a plain one.
    """
    if any(report.final_step for report in reports.values()):
        return True
    return bool(reports) and all(report.ran for report in reports.values())


def outliers(
    world: World, reports: Mapping[str, Report], present: Collection[str], least: int
) -> dict[str, Failure]:
    """Returns the nodes that are set aside at once, each with the failure that speaks against it
    (B6).

    Args:
        world: World of the generation that ends.
        reports: Reports by node, of the nodes whose workers have stopped.
        present: Names of the nodes that the next world could have.
        least: Nodes that must be present without those set aside; if they are fewer, none is.
    """
    failures = own_failures(world, reports)
    newcomers = world.nodes[world.trained :] if world.trained else ()
    young = dict.fromkeys(() if _has_trained(reports) else newcomers)
    apart = {n: f for n, f in failures.items() if f.final or f.odd or n in young}
    if not apart and young and _only_lose_each_other(world, reports):
        lost = next(r.failure for r in reports.values() if r.failure is not None)
        apart = {node: reports[node].failure or lost for node in young}
    good = [node for node in present if node not in apart]
    return apart if len(good) >= max(1, least) else {}


def _only_lose_each_other(world: World, reports: Mapping[str, Report]) -> bool:
    """Returns whether all nodes are present, none leaves, and some have failed, but only by their
    peers."""
    answers = [reports.get(member.node) for member in world.members]
    if any(report is None or report.leaving for report in answers):
        return False
    failures = [report.failure for report in answers if report is not None]
    blamed = {failure.blame for failure in failures if failure is not None}
    return blamed == {"peer"}


def strikes(
    world: World,
    reports: Mapping[str, Report],
    lasted_s: float,
    odd: Mapping[str, Failure] | None = None,
) -> tuple[NodeStrikes, ...]:
    """Returns the strikes after this round (B4 and B6).

    Args:
        world: World of the generation that ends.
        reports: Reports by node, of the nodes whose workers have stopped.
        lasted_s: Seconds for which this generation was seen.
        odd: Nodes that are set aside at once, each with its failure; None: there are none.
    """
    present = {member.node for member in world.members}
    away = tuple(struck for struck in world.strikes if struck.node not in present)
    struck_here = tuple(struck for struck in world.strikes if struck.node in present)
    failures = own_failures(world, reports)
    before = () if lasted_s >= FORGIVEN_S else struck_here
    if odd:
        others = tuple(struck for struck in before if struck.node not in odd)
        new = [_struck(node, failure, before, QUARANTINE_STRIKES) for node, failure in odd.items()]
        return (*away, *others, *new)[-KEPT_STRIKES:]
    if not failures:
        return (*away, *before)
    if len(failures) > 1 or len(present) < 2:
        return away
    ((node, failure),) = failures.items()
    last = _setback(world, (node, failure))
    again = [setback for setback in world.setbacks if setback.node == node]
    twice = failure.blame == "user" and any(_same(setback, last) for setback in again)
    least = QUARANTINE_STRIKES if twice else 1
    return (*away, _struck(node, failure, before, least))[-KEPT_STRIKES:]


def _struck(
    node: str, failure: Failure, before: Collection[NodeStrikes], least: int
) -> NodeStrikes:
    """Returns a node's strikes with one added.

    Args:
        node: Name of the node.
        failure: The failure for which it gets the strike.
        before: Strikes of all nodes so far.
        least: Lowest number of strikes that the node has afterwards.
    """
    earlier = sum(struck.count for struck in before if struck.node == node)
    why = f"rank {failure.rank} failed where others did not ({failure.message[:MAX_MESSAGE]})"
    count = max(earlier + 1, least)
    return NodeStrikes(node=node, count=count, why=why if least > 1 else AGAIN)


def quarantine_reason(row: Collection[NodeStrikes], node: str) -> str:
    """Returns why a node is set aside, in words."""
    return next((struck.why for struck in row if struck.node == node and struck.why), AGAIN)


def quarantined(
    before: tuple[NodeStrikes, ...],
    after: tuple[NodeStrikes, ...],
    struck_s: Mapping[str, float],
    now_s: float,
) -> dict[str, float]:
    """Returns the nodes that wait, and for how many more seconds (B4).

    Args:
        before: Strikes of the present world.
        after: Strikes that decide which nodes wait; the time of new ones begins now.
        struck_s: By node, the time since which it has so many strikes.
        now_s: Present time, on the same clock.
    """
    left: dict[str, float] = {}
    for struck in after:
        if struck.count >= QUARANTINE_STRIKES:
            since_s = struck_s.get(struck.node, now_s) if struck in before else now_s
            left_s = since_s + quarantine_s(struck.count) - now_s
            if left_s > 0:
                left[struck.node] = left_s
    return left


def quarantine_s(count: int) -> float:
    """Returns the seconds for which a node with so many strikes waits."""
    doublings = min(count - QUARANTINE_STRIKES, 20)
    return float(min(MAX_QUARANTINE_S, QUARANTINE_S * 2**doublings))


def still_quarantined(
    aside: Mapping[str, float], row: tuple[NodeStrikes, ...], present: Collection[str], least: int
) -> set[str]:
    """Returns the set-aside nodes that a new world does without (B5).

    Args:
        aside: By node, the seconds for which it still waits.
        row: Strikes of all nodes.
        present: Names of the nodes that could be in that world.
        least: Fewest nodes of a world; set-aside nodes fill what is missing.
    """
    counts = {struck.node: struck.count for struck in row}
    struck = [node for node in present if node in aside]
    struck.sort(key=lambda node: (counts[node], aside[node], node))
    wanting = max(0, least - (len(present) - len(struck)))
    return set(aside) - set(struck[:wanting])


def judge_exit(
    rank: int, exit_code: int, step: int, *, stop_requested: bool, exiting: bool
) -> Failure | None:
    """Returns the failure of a worker that exited without a message and without success; None: it
    was stopped (B7).

    Args:
        rank: Rank of the worker.
        exit_code: Its exit status; negative: the number of the signal that killed it.
        step: Last step that it finished.
        stop_requested: Whether it was told to stop before its agent saw its exit.
        exiting: Whether its exit had begun by then.
    """
    if stop_requested and not exiting:
        return None
    if exit_code < 0:
        text = f"killed by {_signal_name(-exit_code)}"
        return Failure(rank=rank, blame="killed", message=text, step=step)
    text = f"exited with status {exit_code}" + " before its training was done" * (exit_code == 0)
    return Failure(rank=rank, blame="user", message=text, step=step)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
