"""A look at real processes that hang: what is found, and that the stack gets into the log."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticzero.ipc.messages import Attached, Busy, SnapshotHeld, Stepped
from elasticzero.launcher.protocol.hang_rules import STOPPED_S
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import WorkerGroupState
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.group import WorkerGroup
from elasticzero.launcher.workers.progress_monitor import WorkerProgress
from elasticzero.launcher.workers.stack_dump import (
    DumpTarget,
    StackDumper,
    find_py_spy,
)
from elasticzero.processes import process_state
from tests.integration.test_workers import Play
from tests.support.cases import slow
from tests.support.deadlines import patience

PATIENCE_S = 60.0
HANGS = {
    "stop": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "gil": "import ctypes; [ctypes.PyDLL(None).sleep(600) for _ in range(600)]",
    "loop": "while True: pass",
    "wait": "import threading; threading.Event().wait()",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(())
    server.wait_until_ready()
    yield server
    server.close()


def until(so: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while not so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        *((kind, "py-spy") for kind in HANGS),
        *(slow(kind, "faulthandler") for kind in ("stop", "gil", "wait")),
        ("loop", "faulthandler"),
    ],
)
def test_the_stack_of_a_hung_process_is_dumped(
    server: ForkServer, tmp_path: Path, kind: str, tool: str
) -> None:
    py_spy = find_py_spy() if tool == "py-spy" else None
    if tool == "py-spy" and py_spy is None:
        pytest.skip("py-spy is not installed: pip install 'elasticzero[hangs]'")
    code = f"def hangs_here():\n    print('up', flush=True)\n    {HANGS[kind]}\nhangs_here()\n"
    play = Play(server, tmp_path, code)
    play.wait(lambda: "up" in play.log())
    worker = play.group.workers[0]
    until(lambda: kind != "stop" or process_state(worker.pid) == "T", "it is stopped")
    asked: list[str] = []
    subject = DumpTarget(
        rank=0,
        pid=worker.pid,
        log=worker.log,
        step=7,
        silent_since_s=time.monotonic() - 5.0,
        due_s=4.0,
        request_location=lambda: asked.append("where are you?"),
    )
    began_s = time.monotonic()
    look = StackDumper([subject], began_s, py_spy=py_spy)
    waits = kind != "stop"  # no answer is waited for that a suspended process cannot give
    until(lambda: look.poll(time.monotonic() if waits else began_s), "the look is over")
    look.close()
    (silence,) = look.findings(time.monotonic())
    play.group.kill()
    play.wait_for_end()
    assert asked == ["where are you?"]
    assert (silence.rank, silence.step, silence.overdue) == (0, 7, True)
    assert (silence.state == "T") == (kind == "stop")
    log = play.log()
    assert "elasticzero: rank 0" in log
    no_stack = "State:\tT (stopped)" in log  # no handler runs in a stopped process
    assert "hangs_here" in log or (kind == "stop" and no_stack), log


def test_a_look_without_py_spy_s_permission_falls_back(server: ForkServer, tmp_path: Path) -> None:
    play = Play(server, tmp_path, "print('up', flush=True)\nimport time\ntime.sleep(600)\n")
    play.wait(lambda: "up" in play.log())
    worker = play.group.workers[0]
    false = shutil.which("false")
    assert false is not None
    subject = DumpTarget(
        rank=0,
        pid=worker.pid,
        log=worker.log,
        step=0,
        silent_since_s=0.0,
        due_s=1.0,
        request_location=lambda: None,
    )
    look = StackDumper([subject], time.monotonic(), py_spy=false)
    until(lambda: look.poll(time.monotonic()), "the look is over")
    play.group.kill()
    play.wait_for_end()
    assert 'script.py", line 3' in play.log()


def stepped(at_s: float) -> Stepped:
    return Stepped(step=3, at_s=at_s, step_s=1.0, data_wait_s=0.0, samples=8)


def test_a_worker_that_goes_on_meanwhile_is_not_judged(server: ForkServer, tmp_path: Path) -> None:
    play = Play(server, tmp_path, "import time\ntime.sleep(600)\n")
    monitor, now_s = play.group.progress_monitor, time.monotonic()
    monitor.note(0, Attached(pid=play.group.workers[0].pid), now_s - 101.0)
    monitor.note(0, stepped(now_s - 100.0), now_s - 99.0)  # heard later
    assert monitor.with_progress(WorkerGroupState(), now_s).silent_s == 100.0
    monitor.note(0, Busy(doing="evaluating"), now_s - 90.0)
    assert monitor.with_progress(WorkerGroupState(), now_s).silent_s == 0.0
    monitor.note(0, Busy(doing=None), now_s - 50.0)
    assert monitor.with_progress(WorkerGroupState(), now_s).silent_s == 50.0
    monitor.dump_stacks(10.0, now_s)
    assert monitor.with_progress(WorkerGroupState(), now_s).examination == "open"
    monitor.note(0, stepped(now_s), now_s)
    until(lambda: monitor.poll(time.monotonic()) or not monitor.examining, "the look is over")
    assert not monitor.at_fault
    play.group.kill()
    play.wait_for_end()


def test_a_process_that_runs_between_two_looks_is_not_suspended(tmp_path: Path) -> None:
    """It sleeps, so that it uses next to no CPU time as it runs."""
    process = subprocess.Popen(["sleep", "600"])
    progress = WorkerProgress(
        rank=0, pid=process.pid, log=tmp_path / "0.log", request_location=lambda: None
    )

    def send(number: signal.Signals, state: str) -> None:
        process.send_signal(number)
        until(lambda: process_state(process.pid) == state, "the signal has come")

    try:
        until(lambda: process_state(process.pid) == "S", "it sleeps")
        frozen_s = []
        for at_s, resumed in enumerate((True, False, False, True, True, False)):
            if resumed:
                send(signal.SIGCONT, "S")
                send(signal.SIGSTOP, "T")
            progress.look(float(at_s))
            frozen_s.append(progress.frozen_s)
        assert frozen_s == [0.0, 1.0, 2.0, 0.0, 0.0, 1.0]
        send(signal.SIGCONT, "S")
        progress.look(6.0)
        assert progress.suspension is None
    finally:
        process.kill()
        process.wait()
    progress.look(7.0)
    assert progress.suspension is None


def test_only_a_worker_that_stays_suspended_is_examined_for_that(
    server: ForkServer, tmp_path: Path
) -> None:
    """Another that is suspended for less is left alone, and so is one that runs again."""
    play = Play(
        server, tmp_path, "print('up', flush=True)\nimport time\ntime.sleep(600)\n", workers=3
    )
    play.wait(lambda: all("up" in play.log(rank) for rank in range(3)))
    pids = [worker.pid for worker in play.group.workers]
    monitor = play.group.progress_monitor

    def seen() -> WorkerGroupState:
        play.group.poll_stalls(time.monotonic())
        return play.group.view(time.monotonic())

    os.kill(pids[0], signal.SIGSTOP)
    until(lambda: seen().frozen_s >= 0.4, "it is seen")
    os.kill(pids[0], signal.SIGCONT)
    until(lambda: process_state(pids[0]) != "T", "it runs")
    monitor.note(0, Attached(pid=pids[0]), time.monotonic())
    monitor.dump_stacks(60.0, time.monotonic(), 0.4)
    until(lambda: seen().examination == "none", "the look is over")
    assert not monitor.at_fault and not monitor.unresponsive and not seen().failed
    os.kill(pids[0], signal.SIGSTOP)
    until(lambda: seen().frozen_s >= 0.4, "it is seen again")
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: process_state(pids[1]) == "T", "the other is suspended")
    monitor.dump_stacks(60.0, time.monotonic(), 0.4)
    until(lambda: seen().examination == "over", "the second look is over")
    assert monitor.at_fault == monitor.unresponsive == {0}
    assert [play.log(rank).count("made no step") for rank in range(3)] == [2, 0, 0]
    play.group.kill_unresponsive()
    until(lambda: play.group.poll_messages(time.monotonic(), server.ended()), "its end")
    play.group.kill()
    play.wait_for_end()


def test_a_suspended_worker_is_killed_and_a_slow_one_is_not(
    server: ForkServer, tmp_path: Path
) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    play = Play(server, tmp_path, f"{code}print('up', flush=True)\ntime.sleep(600)\n", workers=2)
    play.wait(lambda: "up" in play.log(0) and "up" in play.log(1))
    slow, stopped = play.group.workers

    def stopped_s() -> float:
        play.group.poll_stalls(time.monotonic())
        return play.group.view(time.monotonic()).stopped_s

    play.group.stop("the generation is over", time.monotonic())
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: stopped_s() > 0.0, "it is seen")
    os.kill(stopped.pid, signal.SIGCONT)
    until(lambda: stopped_s() == 0.0, "it goes on")
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: stopped_s() >= STOPPED_S, "it stays stopped")
    play.group.kill_suspended()
    until(lambda: play.group.poll_messages(time.monotonic(), server.ended()), "its end")
    assert (stopped.exit_code, slow.exit_code) == (-signal.SIGKILL, None)
    assert stopped_s() == 0.0
    assert not play.group.view(time.monotonic()).failed, "who was told to stop has not failed"
    play.group.kill()
    play.wait_for_end()


def test_a_worker_that_does_not_read_holds_nobody_up(server: ForkServer, tmp_path: Path) -> None:
    """More than its socket holds is sent to a stopped worker; the agent's loop must not wait."""
    play = Play(server, tmp_path, "print('up', flush=True)\nimport time\ntime.sleep(600)\n")
    play.wait(lambda: "up" in play.log())
    worker = play.group.workers[0]
    room = socket.socket(fileno=worker.channel.fileno())
    size = room.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    room.detach()
    text = "x" * 1000
    for step in range(size // 500):
        play.group.broadcast(SnapshotHeld(step=step, generation=3, error=text))
    play.group.kill()
    assert play.wait_for_end() == [-signal.SIGKILL]


def test_the_agent_is_woken_when_a_worker_dies(server: ForkServer, tmp_path: Path) -> None:
    """Nobody polls: the fork server's message wakes whoever waits for it."""
    play = Play(server, tmp_path, "print('up', flush=True)\nimport time\ntime.sleep(600)\n")
    play.wait(lambda: "up" in play.log())
    worker = play.group.workers[0]
    assert not select.select([server], [], [], 0)[0]
    os.kill(worker.pid, signal.SIGKILL)
    assert select.select([server], [], [], PATIENCE_S)[0]
    assert server.ended() == [(worker.pid, -signal.SIGKILL)]
    worker.channel.close()


def test_seen_fits_what_decide_sees() -> None:
    group = WorkerGroup(None, 1, 0)  # type: ignore[arg-type]
    assert group.progress_monitor.with_progress(WorkerGroupState(), 0.0) == WorkerGroupState()
    assert JobPolicy(min_nodes=1, max_nodes=1).hang_timeout_s is None
