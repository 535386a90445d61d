"""The output of agents beside a line that moves: whole lines, all of them, in order."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from elasticzero.launcher.local import relay
from elasticzero.launcher.local.relay import OutputRelay
from elasticzero.launcher.observability.output import Terminal
from tests.watching import DEADLINE_S


class Shown(Terminal):
    """Does work at once, as a thread that is faster than its caller, and keeps what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.open = True

    def do(self, work: Callable[[], object]) -> bool:
        work()
        return True

    def repeat(self, text: str) -> None:
        self.text += text

    def takes_output(self) -> bool:
        return self.open


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(relay, "terminal", shown)
    return shown


def test_lines_are_passed_on_whole(shown: Shown) -> None:
    """After the first lines nothing more came, if the thread was faster than its caller."""
    output = OutputRelay()
    output.pass_on()
    os.write(output.write_fd, b"[0] one\n[1] tw")
    output.pass_on()
    assert shown.text == "[0] one\n"
    os.write(output.write_fd, "o é\n[0] last".encode())
    output.pass_on()
    assert shown.text == "[0] one\n[1] two é\n"
    output.close()
    assert shown.text == "[0] one\n[1] two é\n[0] last\n"


def test_lines_wait_in_the_pipe_for_a_terminal_that_stalls(shown: Shown) -> None:
    output = OutputRelay()
    shown.open = False
    os.write(output.write_fd, b"[0] one\n")
    output.pass_on()
    assert shown.text == ""
    shown.open = True
    output.pass_on()
    assert shown.text == "[0] one\n"
    output.close()


def test_a_thread_passes_all_lines_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The capture is read once, at the end: what is written while pytest reads it is lost."""
    terminal = Terminal()
    monkeypatch.setattr(relay, "terminal", terminal)
    with terminal.in_background():
        output = OutputRelay()
        for number in range(200):
            os.write(output.write_fd, f"{number}\n".encode())
            output.pass_on()
        output.close()
        assert terminal.flush(DEADLINE_S)
    assert capfd.readouterr().out.splitlines() == [str(number) for number in range(200)]
