"""`elasticzero top` on a real terminal: what it shows, and how it leaves."""

from __future__ import annotations

import fcntl
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
from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, elasticzero, story

PATIENCE_S = 40.0
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
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output[start:]):
            assert time.monotonic() < deadline_s, (text, self.text[-4000:])
            assert self.process.poll() is None, self.text[-4000:]
            self.read()

    def press(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def end(self) -> int:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self.read()
        self.read()
        return self.process.wait(1)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        elasticzero(*words),
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


@pytest.mark.timeout(170)
def test_top_follows_a_job_and_leaves_the_terminal_as_it_was(tmp_path: Path, job: str) -> None:
    with EtcdServer() as etcd:
        words = ["--nnodes", "1:2", str(REGRESSION), "--pause", "0.1"]
        at = ["top", "--interval", "0.2", "--etcd", etcd.endpoint, "--job", job]
        with story(tmp_path, etcd.endpoint, job, words, nodes=2) as told:
            told.wait_for_step(5)
            told.pause(2.0)
            with terminal(*at) as shown:
                shown.wait("● training")
                shown.wait("STEP TIME")
                etcd.pause()
                shown.wait("trying again")
                told.wait_for_step(told.step + 2)
                shown.wait("● training")
                etcd.resume()
                shown.press(b"q")
                assert shown.end() == 0
                left = shown.output
                assert left.index(ENTERS) < left.index(LEAVES)
                assert left.rindex(SHOWS_CURSOR) > left.index(ENTERS)
            for how in (b"\x03", signal.SIGTERM):
                with terminal(*at) as shown:
                    shown.wait("● training")
                    if isinstance(how, bytes):
                        shown.press(how)
                    else:
                        shown.process.send_signal(how)
                    assert shown.end() == 0
                    assert LEAVES in shown.output and "Traceback" not in shown.output
            with terminal(*at) as shown:
                shown.wait("● training")
                told.wait_for_end()
                shown.wait("● finished")
                shown.press(b"q")
                assert shown.end() == 0
