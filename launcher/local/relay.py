"""Passes the output of agents on to a terminal on which a line moves, so that both stay readable.

Without such a line the agents write to the output of this process themselves.
"""

from __future__ import annotations

import os

from elasticzero.launcher.observability.output import terminal

READ_BYTES = 1 << 16
"""Maximum number of bytes that are read at a time."""


class OutputRelay:
    """Holds a pipe that agents write to, and repeats its whole lines on this process's output.

    What the terminal does not take yet stays in the pipe, and the agents keep what finds no room
    there in the workers' logs.
    """

    def __init__(self) -> None:
        self._read, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._rest = b""
        self._waits = False

    def pass_on(self) -> None:
        """Has new output repeated; does not wait for the terminal."""
        if not self._waits:
            self._waits = True  # before the thread may do it, and says so
            if not terminal.do(self._repeat):
                self._waits = False

    def close(self) -> None:
        """Has the rest repeated; no agent runs any more."""
        terminal.do(self._repeat_rest)

    def _repeat(self) -> None:
        self._waits = False
        while terminal.takes_output() and (data := self._new_data()):
            lines, end, rest = (self._rest + data).rpartition(b"\n")
            self._rest = rest
            if end:
                terminal.repeat(lines.decode(errors="replace") + "\n")

    def _repeat_rest(self) -> None:
        self._repeat()
        if self._rest:
            terminal.repeat(self._rest.decode(errors="replace") + "\n")
        os.close(self._read)
        os.close(self.write_fd)

    def _new_data(self) -> bytes:
        try:
            return os.read(self._read, READ_BYTES)
        except BlockingIOError:
            return b""
