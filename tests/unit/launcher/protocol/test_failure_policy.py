"""Which failures count, whose they are, and who is set aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.assignment import LeftOutBatch, Resume, Source
from elasticzero.launcher.protocol.documents import (
    Failure,
    FailureRecord,
    Member,
    NodeStrikes,
    Report,
    World,
    to_bytes,
    world_from_bytes,
)
from elasticzero.launcher.protocol.failure_policy import (
    FORGIVEN_S,
    KEPT_SETBACKS,
    MAX_QUARANTINE_S,
    QUARANTINE_STRIKES,
    failures_without_progress,
    is_the_scripts,
    judge_exit,
    outliers,
    progress_floor,
    quarantine_reason,
    quarantined,
    repeated_failure_note,
    root_cause,
    setbacks,
    still_quarantined,
    strikes,
    trained,
)
from elasticzero.launcher.protocol.regroup import left_out_after

OWN = Failure(rank=0, blame="user", message="ValueError: no", step=20)
PEER = Failure(rank=1, blame="peer", message="connection reset")


def member(name: str) -> Member:
    return Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, 1)


def world(**changes: Any) -> World:
    plain = World(
        generation=3,
        token="t",
        members=(member("a"), member("b")),
        strategy="ddp",
        resume=Resume(tier="storage", step=20),
        reason="test",
        fruitless=1,
    )
    return replace(plain, **changes)


def test_peers_that_a_leaver_took_along_do_not_count() -> None:
    """Through its workers others come to the boundary at which they go on without it."""
    entered, stopped = Resume(tier="live", step=20), Report(incarnation="i", phase="stopped")
    reports = {"a": stopped, "b": stopped}
    inside = world(resume=entered)
    assert failures_without_progress(inside, 20, ("b", PEER), reports) == 1
    assert failures_without_progress(inside, 20, ("b", OWN), reports) == 2
    again = world(resume=Resume(tier="ram", step=20))
    assert failures_without_progress(again, 20, ("b", PEER), reports) == 2


@pytest.mark.parametrize(
    ("resume_step", "cause", "reports", "expected"),
    [
        (21, ("a", OWN), "ab", 0),
        (20, ("a", OWN), "ab", 2),
        (20, ("a", OWN), "a", 2),
        (20, ("b", PEER), "ab", 2),
        (20, ("b", PEER), "b", 1),
        (20, None, "ab", 1),
        (20, None, "a", 1),
        (20, ("a", OWN), "Ab", 1),
        (20, ("b", OWN), "Ab", 2),
        (20, ("b", PEER), "Ab", 1),
    ],
    ids=[
        *("progress", "own", "own, and a node is lost", "network", "lost node", "drain", "lapse"),
        *("on a node that leaves", "beside one that leaves", "peer of one that leaves"),
    ],
)
def test_what_counts_against_max_restarts(
    resume_step: int, cause: tuple[str, Failure] | None, reports: str, expected: int
) -> None:
    """reports: the nodes that made one; those that leave in capitals."""
    reports_by_node = {
        name.lower(): replace(report(None), leaving=name.isupper()) for name in reports
    }
    assert failures_without_progress(world(), resume_step, cause, reports_by_node) == expected


def test_a_lack_of_memory_counts_for_nothing() -> None:
    """The next generation has smaller micro-batches; it is no fault of the node's."""
    short = Failure(rank=0, blame="memory", message="out of memory", step=20, micro_batch=4)
    reports = {"a": report(short), "b": report(PEER)}
    assert root_cause(reports) == ("a", short)
    assert failures_without_progress(world(), 20, ("a", short), reports) == world().fruitless
    assert setbacks(world(), 20, ("a", short), reports) == ()
    assert strikes(world(), reports, 1.0) == ()
    assert outliers(world(trained=1), reports, "ab", 1) == {}


def test_bad_input_explains_other_errors_of_a_script() -> None:
    """Rank 0 read a file that rank 1 was refused to write."""
    missing = Failure(rank=0, blame="user", message="FileNotFoundError: a.pt", step=20)
    refused = Failure(rank=1, blame="user", message="use strategy ddp", step=20, final=True)
    reports = {"a": report(missing), "b": report(refused), "c": report(PEER)}
    assert root_cause(reports) == ("b", refused)


def test_a_rollback_is_no_failure() -> None:
    batch = LeftOutBatch(step=31, dataset=0, epoch=0, start=240, stop=248)
    back = Failure(rank=0, blame="rollback", message="step 31", step=30, left_out=batch)
    reports = {"a": report(back), "b": report(PEER)}
    assert root_cause(reports) == ("a", back)
    assert failures_without_progress(world(), 20, ("a", back), reports) == world().fruitless
    assert setbacks(world(), 20, ("a", back), reports) == ()
    assert strikes(world(), reports, 1.0) == ()
    assert outliers(world(trained=1), reports, "ab", 1) == {}


def test_a_batch_is_left_out_until_a_state_records_it() -> None:
    batches = [
        LeftOutBatch(step=step, dataset=0, epoch=0, start=8 * step - 8, stop=8 * step)
        for step in (25, 31, 32)
    ]
    failures = [Failure(rank=0, blame="rollback", message="", left_out=b) for b in batches[1:]]
    before = world(left_out=(batches[0],))
    reports = {"a": report(failures[0]), "b": report(failures[1]), "c": report(PEER)}
    for step, left in ((20, batches), (25, batches[1:]), (31, batches[2:]), (40, [])):
        assert list(left_out_after(before, Resume(tier="ram", step=step), reports)) == left
    stored = world(left_out=tuple(batches))
    assert world_from_bytes(to_bytes(stored)) == stored
    assert b"left_out" not in to_bytes(world())


HELD_BY_C = Resume(
    tier="ram",
    step=20,
    generation=2,
    sources=tuple(Source(rank=rank, node=node, address="") for rank, node in enumerate("ac")),
)
UNREAD = Failure(rank=0, blame="environment", message="a shard cannot be read", step=20)


@pytest.mark.parametrize(
    ("failure", "nodes", "counts"),
    [(UNREAD, "ab", False), (UNREAD, "abc", True), (OWN, "ab", True)],
    ids=["its holder is gone", "all holders are there", "another failure"],
)
def test_a_state_whose_holder_is_gone_is_nobodys_fault(
    failure: Failure, nodes: str, counts: bool
) -> None:
    reports = dict.fromkeys(nodes, report(None)) | {"a": report(failure)}
    started = world(resume=HELD_BY_C)
    assert (
        failures_without_progress(started, 20, ("a", failure), reports)
        == world().fruitless + counts
    )
    assert bool(strikes(started, reports, 1.0)) == counts


@pytest.mark.parametrize(
    ("start", "before", "resume", "counted", "expected"),
    [
        (20, 10, 30, False, 30),
        (20, 20, 5, True, 20),
        (5, 20, 15, True, 20),
        (5, 20, 10, False, 20),
        (20, 20, 5, False, 5),
    ],
    ids=["progress", "thrown back", "not past it", "a drain", "a loss takes it back"],
)
def test_what_must_be_got_past(
    start: int, before: int, resume: int, counted: bool, expected: int
) -> None:
    then = world(resume=Resume(tier="storage", step=start), furthest=before)
    assert progress_floor(then, resume, then.fruitless + counted) == expected


def test_steps_that_were_reached_before_are_no_progress() -> None:
    """A failure had thrown the job back behind them."""
    behind = world(resume=Resume(tier="fresh"), furthest=20, setbacks=(told(2),))
    reports = dict.fromkeys("ab", report(None))
    assert failures_without_progress(behind, 20, ("a", OWN), reports) == behind.fruitless + 1
    assert setbacks(behind, 20, ("a", OWN)) == (told(2), told(3))
    assert failures_without_progress(behind, 21, ("a", OWN), reports) == 0


@pytest.mark.parametrize(("resume", "counts"), [(15, True), (20, True), (21, False)])
def test_another_error_within_steps_that_were_reached_counts(resume: int, counts: bool) -> None:
    """It has not happened before, and the state is past the step that the generation began from."""
    behind = world(resume=Resume(tier="storage", step=10), furthest=20, setbacks=())
    reports = dict.fromkeys("ab", report(None))
    expected = behind.fruitless + 1 if counts else 0
    assert failures_without_progress(behind, resume, ("a", OWN), reports) == expected


def told(generation: int, **changes: Any) -> FailureRecord:
    plain = FailureRecord(
        generation=generation, node="a", rank=0, blame="user", step=20, message="ValueError: no"
    )
    return replace(plain, **changes)


def test_the_first_errors_in_a_row_stay_until_progress() -> None:
    row = setbacks(world(setbacks=(told(2),)), 20, ("a", OWN))
    assert row == (told(2), told(3))
    assert setbacks(world(setbacks=row), 20, None) == row
    assert setbacks(world(setbacks=row), 21, ("a", OWN)) == (told(3),)
    assert setbacks(world(setbacks=row), 21, None) == ()
    assert len(setbacks(world(setbacks=row * 10), 20, ("a", OWN))) == KEPT_SETBACKS


def test_a_killed_worker_without_a_step_names_its_first_step() -> None:
    killed = Failure(rank=1, blame="killed", message="killed by SIGKILL")
    assert setbacks(world(), 20, ("a", killed))[0].step == 20


ALIKE = "generations in a row failed alike, on a alone: the script or its data, or that machine"
SURE = (
    "2 generations in a row failed alike, on different nodes: the script or its data, not a machine"
)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((), ""),
        ((told(1),), ""),
        ((told(1), told(2)), f"2 {ALIKE}"),
        ((told(1), told(2), told(3)), f"3 {ALIKE}"),
        ((told(1), told(2, node="b", rank=1)), SURE),
        ((told(1, message="KeyError: 1", node="b"), told(2), told(3)), f"2 {ALIKE}"),
        ((told(1, step=10), told(2, message="ValueError: other words")), f"2 {ALIKE}"),
        ((told(1, step=10, rank=1), told(2)), ""),
        ((told(1, message="KeyError: 'x'"), told(2)), ""),
        ((told(1, message="KeyError: 'x'"), told(2), told(3)), f"2 {ALIKE}"),
        ((told(1, blame="killed"), told(2, blame="killed")), ""),
        ((told(1, blame="environment"), told(2, blame="environment")), ""),
    ],
)
def test_errors_that_are_alike_are_the_scripts(
    row: tuple[FailureRecord, ...], expected: str
) -> None:
    assert repeated_failure_note(row) == expected


def report(failure: Failure | None) -> Report:
    return Report(incarnation="i", phase="stopped", failure=failure)


TWICE = (NodeStrikes(node="a", count=2),)
AWAY = (NodeStrikes(node="c", count=4),)
THRICE = (NodeStrikes(node="a", count=3),)


@pytest.mark.parametrize(
    ("before", "a", "b", "lasted_s", "after"),
    [
        ((), OWN, None, 1.0, (NodeStrikes(node="a", count=1),)),
        ((), OWN, PEER, 1.0, (NodeStrikes(node="a", count=1),)),
        (TWICE, OWN, PEER, 1.0, THRICE),
        (TWICE, OWN, PEER, FORGIVEN_S, (NodeStrikes(node="a", count=1),)),
        (TWICE, None, OWN, 1.0, (NodeStrikes(node="b", count=1),)),
        (TWICE, OWN, OWN, 1.0, ()),
        (TWICE, None, None, 1.0, TWICE),
        (TWICE, None, None, FORGIVEN_S, ()),
        (TWICE, PEER, PEER, 1.0, TWICE),
        (AWAY, OWN, None, FORGIVEN_S, (*AWAY, NodeStrikes(node="a", count=1))),
    ],
    ids=[
        *("first", "peers suffer", "third", "long ago", "another node", "both nodes"),
        *("drain", "went well", "network", "one is away"),
    ],
)
def test_strikes(
    before: tuple[NodeStrikes, ...],
    a: Failure | None,
    b: Failure | None,
    lasted_s: float,
    after: tuple[NodeStrikes, ...],
) -> None:
    assert strikes(world(strikes=before), {"a": report(a), "b": report(b)}, lasted_s) == after


def test_a_node_alone_gets_no_strikes() -> None:
    alone = world(members=(member("a"),), strikes=TWICE)
    assert strikes(alone, {"a": report(OWN)}, 1.0) == ()


def left(count: int, waited_s: float | None) -> float | None:
    row = (NodeStrikes(node="a", count=count),)
    since = {} if waited_s is None else {"a": 1000.0 - waited_s}
    return quarantined(row, row, since, 1000.0).get("a")


def test_a_node_is_set_aside_ever_longer_and_never_forever() -> None:
    assert left(2, 0.0) is None
    assert left(3, 0.0) == 30.0
    assert left(3, 29.0) == 1.0
    assert left(3, 30.0) is None
    assert left(4, 0.0) == 60.0
    assert left(5, None) == 120.0
    assert left(500, 0.0) == MAX_QUARANTINE_S


def test_the_time_counts_from_the_last_strike() -> None:
    assert quarantined(TWICE, THRICE, {"a": 0.0}, 1000.0) == {"a": 30.0}
    assert quarantined(THRICE, THRICE, {"a": 0.0}, 1000.0) == {}


@pytest.mark.parametrize(
    ("nodes", "least", "waits"),
    [
        ("abcd", 1, "bcd"),
        ("abcd", 2, "bd"),
        ("abcd", 3, "b"),
        ("abcd", 5, ""),
        ("bcd", 1, "bd"),
        ("abd", 2, "bc"),
        ("acd", 2, "bd"),
        ("a", 2, "bcd"),
    ],
)
def test_as_many_are_taken_back_as_are_wanting(nodes: str, least: int, waits: str) -> None:
    row = tuple(
        NodeStrikes(node=node, count=count) for node, count in (("b", 4), ("c", 3), ("d", 3))
    )
    aside = {"b": 5.0, "c": 10.0, "d": 20.0}
    assert still_quarantined(aside, row, set(nodes), least) == set(waits)


BAD_INPUT = Failure(rank=1, blame="user", message="ImportError: no", final=True)
KILLED = Failure(rank=1, blame="killed", message="killed by SIGSEGV")


@pytest.mark.parametrize(
    ("trained", "a", "b", "c", "odd"),
    [
        (2, None, None, OWN, "c"),
        (2, PEER, PEER, KILLED, "c"),
        (2, PEER, PEER, BAD_INPUT, "c"),
        (1, PEER, OWN, OWN, "bc"),
        (2, OWN, None, OWN, "c"),
        (2, OWN, None, None, ""),
        (2, PEER, PEER, PEER, "c"),
        (2, PEER, None, None, "c"),
        (2, None, None, None, ""),
        (2, UNREAD, None, PEER, ""),
        (3, None, None, OWN, ""),
        (3, None, None, BAD_INPUT, "c"),
        (0, None, None, OWN, ""),
        (0, None, PEER, BAD_INPUT, "c"),
        (0, BAD_INPUT, BAD_INPUT, BAD_INPUT, ""),
        (0, None, BAD_INPUT, BAD_INPUT, ""),
    ],
    ids=[
        *("newcomer", "newcomer's worker is killed", "newcomer's input", "two newcomers"),
        *("an old node fails too", "only an old node", "they only lose each other"),
        *("a peer is lost on an old node", "a drain", "not a peer alone", "no newcomer"),
        *("input of an old node", "none has trained", "input at the start", "input of all"),
        "fewer than MIN would be left",
    ],
)
def test_which_nodes_are_set_aside_at_once(
    trained: int, a: Failure | None, b: Failure | None, c: Failure | None, odd: str
) -> None:
    three = world(members=tuple(map(member, "abc")), trained=trained)
    reports = {"a": report(a), "b": report(b), "c": report(c)}
    assert set(outliers(three, reports, set("abc"), least=2 if trained == 0 else 1)) == set(odd)


def test_a_newcomer_that_made_steps_is_judged_like_the_others() -> None:
    three = world(members=tuple(map(member, "abc")), trained=2)
    reports = {"a": replace(report(None), final_step=21), "b": report(None), "c": report(OWN)}
    assert not outliers(three, reports, set("abc"), 1)
    assert trained(three, reports, {"a", "b", "c"}) == 3
    assert trained(three, {"a": report(None)}, {"a", "c"}) == 1


def test_a_script_that_starts_slowly_on_one_node_has_not_trained() -> None:
    three = world(members=tuple(map(member, "abc")), trained=2)
    ran = {node: replace(report(None), ran=True) for node in "abc"}
    reports = {**ran, "a": report(None), "c": report(OWN)}
    assert set(outliers(three, reports, set("abc"), 1)) == {"c"}
    assert trained(three, ran, set("abc")) == 3, "all run a plain script"


@pytest.mark.parametrize(
    "c", [replace(report(PEER), leaving=True), None], ids=["leaves", "is lost"]
)
def test_a_lost_peer_is_no_newcomers_fault_where_one_is_gone(c: Report | None) -> None:
    three = world(members=tuple(map(member, "abc")), trained=2)
    reports = {"a": report(PEER), "b": report(PEER)} | ({"c": c} if c is not None else {})
    assert not outliers(three, reports, set("ab"), 1)


def test_a_failure_that_sets_a_node_aside_strikes_at_once() -> None:
    """It does not count as a failure of the job."""
    reports = {"a": report(PEER), "b": report(BAD_INPUT)}
    assert (
        failures_without_progress(world(), 20, ("b", BAD_INPUT), reports, excused=True)
        == world().fruitless
    )
    row = (NodeStrikes(node="a", count=1),)
    after = strikes(world(strikes=row), reports, 1.0, {"b": BAD_INPUT})
    assert after == (*row, NodeStrikes(node="b", count=QUARANTINE_STRIKES))
    assert quarantine_reason(after, "b") == "rank 1 failed where others did not (ImportError: no)"
    again = strikes(world(strikes=after), reports, 1.0, {"b": BAD_INPUT})
    assert again[-1] == NodeStrikes(node="b", count=QUARANTINE_STRIKES + 1), (
        "and waits for twice as long"
    )


@pytest.mark.parametrize(
    ("row", "so"),
    [
        ((told(1),), False),
        ((told(1), told(2)), False),
        ((told(1), told(2, node="b", rank=1)), True),
        ((told(1, others=("b",)), told(2)), True),
        ((told(1), told(2, others=("b",))), True),
        ((told(1), told(2, message="KeyError: 1"), told(3, node="b")), True),
        ((told(1), told(2, node="b", step=21)), False),
        ((told(1), told(2, node="b", message="KeyError: 1")), False),
        ((told(1, message="E: row 17"), told(2, node="b", message="E: row 23")), True),
        ((told(1, message="OSError: gone"), told(2, node="b", message="OSError: gone")), False),
        ((told(1, blame="killed"), told(2, node="b", blame="killed")), False),
    ],
)
def test_the_same_exception_at_one_step_on_two_nodes(
    row: tuple[FailureRecord, ...], so: bool
) -> None:
    assert is_the_scripts(row) is so


def test_all_nodes_that_fail_alike_are_remembered() -> None:
    reports = {"a": report(OWN), "b": report(replace(OWN, rank=1)), "c": report(PEER)}
    (setback,) = setbacks(world(), 20, ("a", OWN), reports)
    assert (setback.node, setback.others) == ("a", ("b",))


@pytest.mark.parametrize(
    ("resume_step", "step", "message", "count"),
    [
        (18, 25, "ValueError: no", 2),
        (18, 26, "ValueError: no", 0),
        (18, 25, "KeyError: 3", 0),
        (26, 25, "ValueError: no", 0),
    ],
    ids=["at the same step", "at another step", "another error", "the state is past it"],
)
def test_snapshots_are_no_progress_for_a_crash_that_recurs(
    resume_step: int, step: int, message: str, count: int
) -> None:
    """The state comes on from step 15 to 18 by a snapshot; it failed before after step 25."""
    failure = replace(OWN, step=step, message=message)
    creeps = world(resume=Resume(tier="ram", step=15), setbacks=(told(2, step=25),))
    reports = dict.fromkeys("ab", report(None))
    assert failures_without_progress(creeps, resume_step, ("a", failure), reports) == count
    kept = told(2, step=25) in setbacks(creeps, resume_step, ("a", failure), reports)
    assert kept == (resume_step <= 25), "remembered until the state is past that step"


def test_the_same_exception_twice_on_one_node_sets_it_aside() -> None:
    """The others show whether it is the script's."""
    once = world(setbacks=(told(2),), strikes=(NodeStrikes(node="a", count=1),))
    assert strikes(once, {"a": report(OWN), "b": report(PEER)}, 1.0)[0].count == QUARANTINE_STRIKES
    killed = world(setbacks=(told(2, blame="killed", message=KILLED.message),))
    assert strikes(killed, {"a": report(KILLED), "b": report(PEER)}, 1.0)[0].count == 1


@pytest.mark.parametrize(
    ("code", "stop_requested", "exiting", "blame"),
    [
        (-11, False, False, "killed"),
        (-11, True, True, "killed"),
        (-15, True, False, None),
        (-9, True, False, None),
        (3, False, False, "user"),
        (3, True, True, "user"),
        (75, True, False, None),
        (0, False, False, "user"),
        (0, True, False, None),
    ],
)
def test_a_death_is_judged_by_when_it_began(
    code: int, stop_requested: bool, exiting: bool, blame: str | None
) -> None:
    failure = judge_exit(2, code, 7, stop_requested=stop_requested, exiting=exiting)
    assert (failure.blame if failure is not None else None) == blame
    assert failure is None or (failure.rank, failure.step) == (2, 7)
