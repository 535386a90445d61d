"""What operators ask for: checked, idempotent, and right with two of them at once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from elasticzero.cli.main import main
from elasticzero.errors import ExitCode, OperatorError, UserError
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.cli.control import drain, read_job, scale, stop, update_control
from elasticzero.launcher.cli.job_access import OperatorCredentials
from elasticzero.launcher.cli.status import read_stored_job
from elasticzero.launcher.observability.job_status import Job
from elasticzero.launcher.protocol.documents import (
    Control,
    Done,
    Drain,
    Member,
    Run,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.policy import JobPolicy, with_operator_overrides
from elasticzero.launcher.store.job_run import RUN
from tests.support.memory_store import MemoryServer, MemoryStore

JOB = "j"


def member(name: str, incarnation: str = "1") -> Member:
    return Member(name, incarnation, "127.0.0.1", 9400, 29500, 1)


def register(store: MemoryStore, *members: Member) -> None:
    for one in members:
        store.write({f"members/{one.node}": to_bytes(one)})


def place(store: MemoryStore, *members: Member, generation: int = 1) -> None:
    world = World(
        generation=generation,
        token="t",
        members=members,
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="test",
    )
    store.write({"world": to_bytes(world)})


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(lambda: 0.0)


@pytest.fixture
def store(server: MemoryServer) -> MemoryStore:
    """Two nodes train, a third waits."""
    store = MemoryStore(server)
    register(store, member("a"), member("b"), member("c"))
    place(store, member("a"), member("b"))
    return store


def asked(store: MemoryStore) -> Control:
    return read_job(store, JOB).control


def test_a_drain_names_the_registration(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drain(store, JOB, "b", None) == ExitCode.DONE
    assert asked(store) == Control(drain=(Drain(node="b", incarnation="1"),))
    assert asked(store).run == 1
    assert asked(store).drains(member("b"))
    assert not asked(store).drains(member("b", "2")), "the node may come back"
    assert capsys.readouterr().out == "b leaves at the next step\n"
    drain(store, JOB, "b", None)
    assert capsys.readouterr().out == "b was requested to leave before\n"
    assert len(asked(store).drain) == 1


def test_a_command_for_the_run_before_changes_nothing_of_the_next(store: MemoryStore) -> None:
    """The job is begun again between what the command reads and what it writes."""
    runs: list[int] = []

    def change(job: Job) -> Control:
        runs.append(len(runs) + 1)
        if len(runs) == 1:
            store.write({RUN: to_bytes(Run(number=2))})
        return Control(nnodes=(1, len(runs)))

    update_control(store, JOB, change)
    assert (asked(store).nnodes, asked(store).run) == ((1, 2), 2)


def test_drains_of_nodes_that_have_left_are_forgotten(store: MemoryStore) -> None:
    drain(store, JOB, "c", None)
    store.write({}, deletes=["members/c"])
    drain(store, JOB, "b", None)
    assert [one.node for one in asked(store).drain] == ["b"]


def test_a_node_that_came_back_can_be_drained_again(store: MemoryStore) -> None:
    drain(store, JOB, "c", None)
    register(store, member("c", "2"))
    drain(store, JOB, "c", None)
    assert asked(store).drain == (Drain(node="c", incarnation="2"),)


def test_a_member_whose_lease_has_lapsed_can_be_drained(store: MemoryStore) -> None:
    store.write({}, deletes=["members/b"])
    assert drain(store, JOB, "b", None) == ExitCode.DONE


def test_what_cannot_be_is_refused(store: MemoryStore, server: MemoryServer) -> None:
    with pytest.raises(UserError, match=r"drain z: job 'j' has no such node; .* are a, b, c"):
        drain(store, JOB, "z", None)
    store.write({"done": to_bytes(Done(outcome="failed", step=3, reason="it broke"))})
    with pytest.raises(UserError, match="job 'j' is over: it broke"):
        drain(store, JOB, "a", None)
    with pytest.raises(UserError, match="job 'j' is over: it broke"):
        scale(store, JOB, (1, 2), None)
    assert asked(store) == Control()
    with pytest.raises(UserError, match="has no job 'j'"):
        stop(MemoryStore(MemoryServer(lambda: 0.0)), JOB, None)


@pytest.mark.parametrize("limits", ["3:1", "0:2", "x"])
def test_invalid_limits_are_refused_before_etcd_is_read(
    limits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["scale", limits, "--job", JOB, "--etcd", "127.0.0.1:1"]
    assert main(command) == ExitCode.USAGE
    assert f"error: scale {limits}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (1, 1, "at the next step b gives up its place and waits as a spare"),
        (1, 3, "c joins at the next step"),
        (1, 2, "nothing changes now"),
        (4, 4, "c joins at the next step"),
    ],
)
def test_scale_says_what_will_happen(
    least: int, most: int, text: str, store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(store, JOB, (least, most), None) == ExitCode.DONE
    assert capsys.readouterr().out == f"job j has {least}:{most} nodes: {text}\n"
    scale(store, JOB, (least, most), None)
    assert capsys.readouterr().out == f"job j has {least}:{most} nodes already: {text}\n"


def test_scale_below_min_waits_for_the_next_change(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write({}, deletes=["members/c"])
    scale(store, JOB, (3, 4), None)
    out = capsys.readouterr().out
    assert "2 nodes go on; the next change of the world waits for 3" in out


def test_stop_is_idempotent_and_right_when_the_job_is_over(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(store, JOB, None)
    stop(store, JOB, None)
    assert asked(store) == Control(stop=True)
    store.write({"done": to_bytes(Done(outcome="stopped", step=3, reason="stopped by x"))})
    assert stop(store, JOB, None) == ExitCode.DONE
    output = capsys.readouterr().out.splitlines()
    assert output[1:] == [
        "job j was requested to stop before",
        "job j is over already: stopped by x",
    ]


def test_what_one_operator_asks_is_kept_when_another_asks(server: MemoryServer) -> None:
    stores = [MemoryStore(server) for _ in range(8)]
    names = [f"n{i}" for i in range(8)]
    register(stores[0], *(member(name) for name in names))
    threads = [
        threading.Thread(target=drain, args=(store, JOB, name, None))
        for store, name in zip(stores, names, strict=True)
    ]
    threads += [
        threading.Thread(target=scale, args=(stores[0], JOB, (1, 9), None)),
        threading.Thread(target=stop, args=(stores[1], JOB, None)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    control = asked(stores[0])
    assert sorted(one.node for one in control.drain) == names
    assert (control.nnodes, control.stop) == ((1, 9), True)


def test_a_change_that_never_wins_is_given_up(store: MemoryStore) -> None:
    rival = iter(range(100, 1000))

    def change(job: Job) -> Control:
        store.write({"control": to_bytes(Control(nnodes=(1, next(rival))))})
        return replace(job.control, stop=True)

    with pytest.raises(OperatorError, match="other operators changed job"):
        update_control(store, JOB, change)


def test_wait_returns_when_it_has_happened(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave() -> None:
        place(store, member("a"), generation=2)
        store.write({}, deletes=["members/b"])

    timer = threading.Timer(0.3, leave)
    timer.start()
    assert drain(store, JOB, "b", 30.0) == ExitCode.DONE
    timer.join()
    assert capsys.readouterr().out.endswith("b has left; generation 2 has a; c waiting\n")
    assert scale(store, JOB, (1, 1), 30.0) == ExitCode.DONE
    with pytest.raises(OperatorError, match=r"has not happened within 0.1 s \(--wait-timeout\)"):
        stop(store, JOB, 0.1)
    store.write({"done": to_bytes(Done(outcome="failed", step=3, reason="it broke"))})
    assert stop(store, JOB, 0.1) == ExitCode.DONE


def test_waiting_for_a_stop_that_ends_in_a_failure_says_so(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Done(outcome="failed", step=3, reason="it broke")
    timer = threading.Timer(0.3, lambda: store.write({"done": to_bytes(done)}))
    timer.start()
    assert stop(store, JOB, 30.0) == ExitCode.FAILED
    timer.join()
    assert capsys.readouterr().out.endswith("the job is over: it broke\n")


def test_limits_as_operators_changed_them() -> None:
    policy = JobPolicy(min_nodes=2, max_nodes=4)
    assert with_operator_overrides(policy, Control(stop=True)) == policy
    assert with_operator_overrides(policy, Control(nnodes=(1, 3))) == replace(
        policy, min_nodes=1, max_nodes=3
    )


ODD = b"not json"


def test_an_odd_member_is_named_and_left_out(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended each command in a traceback."""
    store.write({"members/zz": ODD})
    assert set(read_job(store, JOB).members) == {"a", "b", "c"}
    drain(store, JOB, "b", None)
    shown = capsys.readouterr()
    assert shown.out == "b leaves at the next step\n"
    assert shown.err.startswith("/elasticzero/j/members/zz cannot be read (member: no JSON")
    assert shown.err.count("\n") == 1


def test_an_odd_request_is_replaced_by_the_next(
    store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write({"control": ODD})
    drain(store, JOB, "b", None)
    assert asked(store).drain == (Drain(node="b", incarnation="1"),)
    assert "/elasticzero/j/control cannot be read" in capsys.readouterr().err


def test_a_job_whose_end_is_odd_takes_requests(store: MemoryStore) -> None:
    store.write({"done": ODD})
    scale(store, JOB, (1, 2), None)
    assert asked(store).nnodes == (1, 2)
    job = read_job(store, JOB)
    assert job.done is None
    assert job.unreadable_done_revision


def test_an_odd_world_is_one_sentence(store: MemoryStore) -> None:
    store.write({"world": ODD})
    with pytest.raises(OperatorError, match="/elasticzero/j/world in etcd cannot be read"):
        read_job(store, JOB)


def test_an_odd_report_has_no_phase(store: MemoryStore) -> None:
    store.write({"reports/1/a": ODD, "reports/1/b": b'{"incarnation": "1", "phase": "restored"}'})
    _, phases, _ = read_stored_job(store, JOB, OperatorCredentials())
    assert phases == {"b": "restored"}


def test_a_job_with_islands_is_none_itself() -> None:
    store = MemoryStore(MemoryServer(lambda: 0.0))
    store.write({"rounds/islands/node-0": b"{}"})
    with pytest.raises(UserError, match=r"has islands, .* such as --job j/islands/node-0$"):
        read_job(store, JOB)
