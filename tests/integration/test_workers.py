"""Workers from a real fork server: what they see, how they end, and with whom they die."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.ipc.assignment import Assignment, Resume
from elasticzero.ipc.channel import ChannelClosed
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Stepped
from elasticzero.launcher.workers import group
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.group import Received, WorkerGroup
from elasticzero.launcher.workers.process import worker_environment
from elasticzero.processes import children_of, descendants, is_alive, is_exiting
from elasticzero.security.certificates import Credentials
from tests.support.certificates import credentials_of
from tests.support.deadlines import patience

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(("json",))
    server.wait_until_ready()
    yield server
    server.close()


def assignment(rank: int, of: int) -> Assignment:
    return Assignment(
        job="j",
        node="n",
        generation=3,
        token="t",
        rank=rank,
        local_rank=rank,
        world_size=of,
        local_world_size=of,
        group_rank=0,
        master_address="127.0.0.1",
        master_port=1234,
        store_fd=None,
        strategy="ddp",
        resume=Resume(tier="fresh"),
        snapshot_root="/dev/shm/none",
    )


class Play:
    """A group that runs a script, and all that was heard of it."""

    def __init__(
        self,
        server: ForkServer,
        tmp_path: Path,
        code: str,
        workers: int = 1,
        tls: Credentials | None = None,
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text(code)
        launch = Launch(
            target=str(script),
            is_module=False,
            arguments=("--lr", "3"),
            environment=worker_environment({**os.environ, "MINE": "yes"}),
            directory=str(tmp_path),
        )
        self.logs = tmp_path / "logs"
        self.heard: list[Received] = []
        self.wakeup_fd, rings = os.pipe2(os.O_NONBLOCK)
        self.group = WorkerGroup(server, 3, rings, started_s=time.monotonic())
        assignments = [replace(assignment(rank, workers), tls=tls) for rank in range(workers)]
        self.group.start(assignments, launch, self.logs, None)

    def wait(self, so: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while not so():
            assert time.monotonic() < deadline_s, self.heard
            now_s = time.monotonic()
            self.heard += self.group.poll_messages(now_s, self.group.server.ended())
            self.group.kill_unresponsive_scripts(now_s)
            time.sleep(0.01)

    def wait_for_end(self) -> list[int]:
        self.wait(lambda: not self.group.view(time.monotonic()).running)
        return [worker.exit_code or 0 for worker in self.group.workers]

    def log(self, rank: int = 0) -> str:
        path = self.logs / f"{rank}.log"
        return path.read_text() if path.exists() else ""


def test_a_plain_script_finishes(server: ForkServer, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "print(__name__, sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
        "print(os.environ['MINE'], os.environ['TORCHELASTIC_RESTART_COUNT'], os.getcwd())\n"
    )
    play = Play(server, tmp_path, code, workers=2)
    assert play.wait_for_end() == [0, 0]
    assert play.group.view(time.monotonic()).finished
    first = f"__main__ ['--lr', '3'] 1 2\nyes 2 {tmp_path}\n"
    assert play.log(1) == first


def test_a_worker_rings_for_all_but_what_comes_with_every_step(
    server: ForkServer, tmp_path: Path
) -> None:
    code = """
import time
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import Attached, Logged, Stepped
link = AgentClient.from_environment()
link.send(Stepped(step=1, at_s=2.5, step_s=0.1, data_wait_s=0.0, samples=8))
link.send(Logged(step=1, scalars={"loss": 0.5}))
print("stepped", flush=True)
while not link.flags:
    time.sleep(0.01)
link.send(Attached(pid=1))
print("attached", flush=True)
time.sleep(600)
"""
    play = Play(server, tmp_path, code)
    play.wait(lambda: "stepped" in play.log())
    assert not rings(play.wakeup_fd)
    play.group.request(1)
    play.wait(lambda: "attached" in play.log())
    assert rings(play.wakeup_fd)
    play.wait(lambda: len(play.heard) == 3)
    assert isinstance(play.heard[0][1], Stepped) and play.heard[0][1].at_s == 2.5
    play.group.kill()
    play.wait_for_end()


def test_a_worker_shows_notes_as_their_bare_messages(server: ForkServer, tmp_path: Path) -> None:
    """Those of this package; what the script logs is the script's."""
    code = """
import logging
from elasticzero.ipc.agent_client import AgentClient
AgentClient.from_environment()
logging.getLogger("elasticzero.training.preparation").info("a note of the package")
logging.getLogger("script").info("a note of the script")
"""
    play = Play(server, tmp_path, code)
    assert play.wait_for_end() == [0]
    assert play.log() == "a note of the package\n"


def rings(wakeup_fd: int) -> bool:
    return bool(select.select([wakeup_fd], [], [], 0)[0])


@pytest.mark.parametrize(
    ("code", "exit_code", "blame", "message", "final"),
    [
        ("raise ValueError('no')", 1, "user", "ValueError: no", False),
        ("import not_there_at_all", 1, "user", "ModuleNotFoundError: No module named", True),
        ("def f(:", 1, "user", "SyntaxError", True),
        ("raise RuntimeError('Connection closed by peer')", 1, "peer", "RuntimeError", False),
        ("import sys; sys.exit(3)", 3, "user", "exited with status 3", False),
        ("import sys; sys.exit(2)", 2, "user", "exited with status 2", False),
        (
            "import argparse; p = argparse.ArgumentParser(); p.parse_args(['--no'])",
            2,
            "user",
            "exited with status 2: it does not take its arguments",
            True,
        ),
        ("import os; os.kill(os.getpid(), 9)", -9, "killed", "killed by SIGKILL", False),
    ],
)
def test_how_a_script_fails(
    server: ForkServer,
    tmp_path: Path,
    code: str,
    exit_code: int,
    blame: str,
    message: str,
    final: bool,
) -> None:
    play = Play(server, tmp_path, code)
    assert play.wait_for_end() == [exit_code]
    failure = play.group.failure
    assert failure is not None
    assert (failure.blame, failure.final) == (blame, final)
    assert failure.message.startswith(message)
    assert play.group.view(time.monotonic()).failed


def test_the_failure_that_explains_the_others_is_kept(server: ForkServer, tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '0': raise RuntimeError('gloo: connection reset')\n"
        "time.sleep(0.3); raise KeyError('mine')\n"
    )
    play = Play(server, tmp_path, code, workers=2)
    play.wait_for_end()
    assert play.group.failure is not None
    assert (play.group.failure.rank, play.group.failure.blame) == (1, "user")
    assert "KeyError: 'mine'" in play.group.failure.traceback
    assert len([m for _, m in play.heard if isinstance(m, Failed)]) == 2


@pytest.mark.parametrize("deaf", [False, True])
def test_a_plain_script_is_stopped(server: ForkServer, tmp_path: Path, deaf: bool) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else ""
    code = f"import signal, time\n{ignore}print('up', flush=True)\ntime.sleep(60)\n"
    play = Play(server, tmp_path, code)
    play.wait(lambda: "up" in play.log())
    play.group.stop("the generation is over", time.monotonic())
    assert play.wait_for_end() == [-9 if deaf else -15]
    assert not play.group.view(time.monotonic()).failed, "who was told to stop has not failed"


def test_a_crash_the_agent_learns_of_late_is_the_workers_own(
    server: ForkServer, tmp_path: Path
) -> None:
    """Its peers' loss of it opened a round, and had it asked to stop, before its exit was read: it
    got no strike, and the peers were named."""
    code = "import time\nprint('up', flush=True)\ntime.sleep(60)\n"
    play = Play(server, tmp_path, code)
    play.wait(lambda: "up" in play.log())
    pid = play.group.workers[0].pid
    os.kill(pid, signal.SIGSEGV)
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while not is_exiting(pid) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    play.group.stop("rank 1 lost a peer", time.monotonic())
    assert play.wait_for_end() == [-11]
    failure = play.group.failure
    assert failure is not None
    assert (failure.blame, failure.message) == ("killed", "killed by SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in play.log()
    assert failure.traceback.startswith("Fatal Python error: Segmentation fault")
    assert "script.py" in failure.traceback


def test_a_status_is_told_before_what_runs_at_exit(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow end: peers are lost, and the round begins, while functions of atexit still run."""
    monkeypatch.setattr(group, "EXIT_FUNCTIONS_S", group.UNASKED_GRACE_S + 0.5)
    code = (
        "import atexit, sys, time\n"
        "def last(): print('ending', flush=True); time.sleep(60)\n"
        "atexit.register(last)\nsys.exit(3)\n"
    )
    play = Play(server, tmp_path, code)
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while "ending" not in play.log() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    play.group.stop("rank 1 lost a peer", time.monotonic())
    assert play.wait_for_end() == [-9]
    assert play.group.failure is not None
    assert play.group.failure.message == "exited with status 3"
    assert next(type(message) for _, message in play.heard) is Failed


def test_what_a_script_says_of_its_stop_is_no_failure(server: ForkServer, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.01)\n"
    )
    play = Play(server, tmp_path, code)
    play.wait(lambda: "up" in play.log())
    play.group.stop("the generation is over", time.monotonic())
    assert play.wait_for_end() == [143]
    assert not play.group.view(time.monotonic()).failed


def test_killing_a_worker_ends_its_children_too(server: ForkServer, tmp_path: Path) -> None:
    code = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"
    )
    play = Play(server, tmp_path, code)
    play.wait(lambda: play.log().strip())
    child = int(play.log())
    play.group.kill()
    assert play.wait_for_end() == [-9]
    play.wait(lambda: not is_alive(child))


def test_workers_die_with_the_fork_server(tmp_path: Path) -> None:
    server = ForkServer(())
    server.wait_until_ready()
    play = Play(server, tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    play.wait(lambda: "up" in play.log())
    pid = play.group.workers[0].pid
    server.close()
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_alive(pid)
    play.group.fail_all("the fork server died")
    assert play.group.workers[0].exit_code == -9
    failure = play.group.view(time.monotonic()).failure
    assert failure is not None
    assert failure.message == "the fork server died"


def test_workers_inherit_the_contexts_of_the_certificate(
    server: ForkServer, tmp_path: Path
) -> None:
    """Each worker had to make them while the others waited for it."""
    code = (
        "from elasticzero.security.certificates import contexts_of\n"
        "print('contexts', contexts_of.cache_info().currsize)\n"
    )
    play = Play(server, tmp_path, code, tls=credentials_of("the token"))
    assert play.wait_for_end() == [0]
    assert play.log().split() == ["contexts", "1"]


@pytest.mark.parametrize("killed", ["server", "keeper", "server of a suspended keeper"])
def test_a_daemon_ends_with_the_fork_server(tmp_path: Path, killed: str) -> None:
    """A process of a session of its own outlived the server that was killed alone."""
    code = (
        "import subprocess, time\n"
        "daemon = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print(daemon.pid, flush=True)\ntime.sleep(300)\n"
    )
    server = ForkServer(())
    server.wait_until_ready()
    play = Play(server, tmp_path, code)
    play.wait(lambda: play.log().strip())
    pids = [play.group.workers[0].pid, int(play.log())]
    (forking,) = children_of(server.pid)
    if killed == "server of a suspended keeper":
        os.kill(server.pid, signal.SIGSTOP)
    os.kill(server.pid if killed == "keeper" else forking, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        while True:
            server.ended()
            time.sleep(0.01)
    server.close()
    play.group.fail_all("the fork server died")
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_a_fork_server_that_is_closed_while_it_imports_leaves_nothing() -> None:
    server = ForkServer(("elasticzero.launcher.options.table",))
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while not (below := descendants(server.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    server.close()
    while any(map(is_alive, below)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert below and not any(map(is_alive, below))


def test_the_fork_server_dies_with_the_agent(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from elasticzero.launcher.workers.forking.client import ForkServer\n"
        "server = ForkServer(()); server.wait_until_ready()\n"
        "print(server.pid, flush=True)\ntime.sleep(60)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    agent.send_signal(signal.SIGKILL)
    agent.communicate()
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_alive(pid)
