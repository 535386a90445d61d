"""`elasticzero top` on a real terminal: what it shows, and how it leaves."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.observability.event_log import LogPart
from elasticzero.launcher.protocol.documents import Member, World, to_bytes
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.job_token import Record
from elasticzero.ops.dashboard.service import job_routes
from tests.integration.clusters import elasticzero
from tests.support.deadlines import patience
from tools.sample_job import document

PATIENCE_S = 90.0
TOKEN = "the-job's-own-password"
ENTERS, LEAVES, SHOWS_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@dataclass
class Terminal:
    """A command on a terminal of 80 columns and 24 rows."""

    process: subprocess.Popen[bytes]
    descriptor: int
    output: str = ""

    def read(self) -> None:
        while select.select([self.descriptor], [], [], 0.05)[0]:
            try:
                data = os.read(self.descriptor, 65536)
            except OSError:  # the other side is closed
                return
            self.output += data.decode(errors="replace")

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output)

    def wait(self, text: str) -> None:
        """Until the text is shown, from now on."""
        start = len(self.output)
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output[start:]):
            assert time.monotonic() < deadline_s, (text, self.text[-4000:])
            assert self.process.poll() is None, self.text[-4000:]
            self.read()

    def press(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def end(self) -> int:
        deadline_s = time.monotonic() + patience(PATIENCE_S)
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self.read()
        self.read()
        return self.process.wait(1)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        elasticzero(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    opened = Terminal(process, ours)
    try:
        yield opened
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.fixture
def agent() -> Iterator[tuple[AgentServer, dict[str, Any]]]:
    """An agent that leads a job, and what it says of it; a test may change that."""
    status = document()
    with AgentServer(
        listen("127.0.0.1", 0),
        routes=job_routes(lambda *, pass_on: status),
        events=lambda most_bytes: LogPart(b"", io.BytesIO(), 0, 0),
        snapshots=None,  # type: ignore[arg-type]
        token=lambda: Secret(TOKEN),
    ) as server:
        yield server, status


def register(etcd: EtcdServer, job: str, port: int) -> None:
    """Writes a job of one node, whose agent listens at `port`, and its token."""
    member = Member("node-0", "i", "127.0.0.1", port, 1, 1)
    world = World(
        generation=1,
        token="t",
        members=(member,),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="test",
    )
    with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
        record = Record(digest=hashlib.sha256(TOKEN.encode()).hexdigest(), token=TOKEN)
        store.write({"members/node-0": to_bytes(member), "world": to_bytes(world)})
        store.write({"token": to_bytes(record)})


@pytest.mark.timeout(600)
def test_top_follows_a_job_and_leaves_the_terminal_as_it_was(
    job: str, agent: tuple[AgentServer, dict[str, Any]]
) -> None:
    server, status = agent
    with EtcdServer() as etcd:
        register(etcd, job, server.port)
        at = ["top", "--interval", "0.2", "--etcd", etcd.endpoint, "--job", job]
        with terminal(*at) as shown:
            shown.wait("● training")
            shown.wait("STEP TIME")
            etcd.pause()
            shown.wait("etcd is tried again")
            status["step"] = 7_654_321
            shown.wait("7,654,321 of 12,000")
            etcd.resume()
            status["state"] = "regrouping"
            shown.wait("● regrouping")
            shown.press(b"q")
            assert shown.end() == 0
            left = shown.output
            assert left.index(ENTERS) < left.index(LEAVES)
            assert left.rindex(SHOWS_CURSOR) > left.index(ENTERS)
        for how in (b"\x03", signal.SIGTERM):
            with terminal(*at) as shown:
                shown.wait("● regrouping")
                if isinstance(how, bytes):
                    shown.press(how)
                else:
                    shown.process.send_signal(how)
                assert shown.end() == 0
                assert LEAVES in shown.output and "Traceback" not in shown.output
        with terminal(*at) as shown:
            shown.wait("● regrouping")
            server.close()
            shown.wait("no agent that leads the job answers")
            shown.press(b"q")
            assert shown.end() == 0
