"""Locates workers that make no step, and writes their stacks into their logs.

Nothing here waits: the agent's loop calls `poll` until the dump is over. Each worker is first asked
where it is; a thread of the worker answers unless the process is suspended or something holds
Python's lock. When all that are not suspended have answered, or ANSWER_S later, their stacks are
dumped. py-spy does that if it is installed and may read them, also of a suspended process; else a
signal whose handler (`faulthandler`) needs no lock. If neither can, the log has the kernel's
account of the process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticzero.ipc.messages import Located
from elasticzero.launcher.protocol.hang_rules import SUSPENDED, StalledWorker
from elasticzero.launcher.workers.forking.server import DUMP_SIGNAL
from elasticzero.processes import kernel_account, kernel_wait, process_state

ANSWER_S = 1.0
FAULTHANDLER_S = 0.5
"""Seconds after the signal within which the handler has written a stack, if it can."""
PY_SPY_S = 5.0


def find_py_spy() -> str | None:
    """Returns the path of py-spy, which reads a process's Python stack from outside, or None."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


@dataclass(slots=True)
class DumpTarget:
    """Holds a worker that is examined, and what is found about it."""

    rank: int
    pid: int
    log: Path
    step: int
    silent_since_s: float
    due_s: float
    """Seconds without progress after which it is past its time."""
    request_location: Callable[[], None]
    """Requests a report of where its main thread is."""
    starting: bool = False
    """True if it answers no request yet; only a suspension by a signal is a finding then."""
    located: Located | None = None
    state: str = ""
    wait: str = ""
    moved: bool = False
    """True if it made a step meanwhile, or exited."""
    py_spy: subprocess.Popen[bytes] | None = None
    signalled_s: float | None = None
    log_bytes: int = 0
    """Size of the log when it was signalled."""
    dumped: bool = False


class StackDumper:
    """Examines some workers of a node once."""

    def __init__(
        self, targets: Sequence[DumpTarget], now_s: float, *, py_spy: str | None = None
    ) -> None:
        """Requests a location from each target.

        Args:
            targets: The workers to examine.
            now_s: Present time.
            py_spy: Path of the program py-spy; None: it is not used.
        """
        self.targets = list(targets)
        self._py_spy = py_spy
        self._began_s = now_s
        self._dumping_s: float | None = None
        for target in self.targets:
            target.request_location()

    @property
    def over(self) -> bool:
        return all(target.dumped for target in self.targets)

    def located(self, rank: int, answer: Located) -> None:
        for target in self.targets:
            if target.rank == rank:
                target.located = answer

    def moved(self, rank: int) -> None:
        """Records that a worker makes steps again or has exited; it is left out of the findings."""
        for target in self.targets:
            if target.rank == rank:
                target.moved = True

    def findings(self, now_s: float) -> list[StalledWorker]:
        """Returns the findings about the workers that still make no step."""
        return [
            StalledWorker(
                rank=target.rank,
                step=target.step,
                silent_s=now_s - target.silent_since_s,
                overdue=now_s - target.silent_since_s >= target.due_s,
                state=target.state,
                wait=target.wait,
                located=target.located,
            )
            for target in self.targets
            if not target.moved
        ]

    def poll(self, now_s: float) -> bool:
        """Continues as far as is possible without waiting; returns whether it is over."""
        if self._dumping_s is None:
            silent = [s for s in self.targets if s.located is None and not s.moved]
            silent = [s for s in silent if process_state(s.pid) != SUSPENDED]
            if silent and now_s - self._began_s < ANSWER_S:
                return False
            self._dumping_s = now_s
            for target in self.targets:
                self._begin_dump(target, now_s)
        for target in self.targets:
            if not target.dumped:
                self._continue_dump(target, now_s)
        return self.over

    def close(self) -> None:
        """Ends the programs that still dump stacks."""
        for target in self.targets:
            if target.py_spy is not None and target.py_spy.poll() is None:
                target.py_spy.kill()
                target.py_spy.wait()

    def _begin_dump(self, target: DumpTarget, now_s: float) -> None:
        target.state, target.wait = process_state(target.pid), kernel_wait(target.pid)
        runs = target.state in ("", "Z") or (target.starting and target.state != SUSPENDED)
        if target.moved or runs:
            target.moved = target.dumped = True
            return
        answer = target.located
        where = "it does not answer" if answer is None else f"it is at {answer.place}"
        _write(
            target.log,
            f"elasticzero: rank {target.rank} (process {target.pid}) made no step for "
            f"{now_s - target.silent_since_s:.1f} s, the last one is {target.step}; {where}; "
            f"state {target.state} {target.wait}".rstrip(),
        )
        if self._py_spy is not None:
            target.py_spy = _start_py_spy(self._py_spy, target)
        if target.py_spy is None:
            self._signal(target, now_s)

    def _continue_dump(self, target: DumpTarget, now_s: float) -> None:
        program = target.py_spy
        if program is not None:
            code = program.poll()
            assert self._dumping_s is not None
            if code is None and now_s - self._dumping_s >= PY_SPY_S:
                program.kill()
                code = program.wait()
            if code is None:
                return
            target.py_spy = None
            if code == 0:
                target.dumped = True
            else:
                self._signal(target, now_s)
        elif target.signalled_s is not None and now_s - target.signalled_s >= FAULTHANDLER_S:
            if _size(target.log) <= target.log_bytes:
                _write(target.log, kernel_account(target.pid))
            target.dumped = True

    def _signal(self, target: DumpTarget, now_s: float) -> None:
        """Makes faulthandler dump the stacks; a suspended process gets the kernel's account
        instead."""
        if target.state == SUSPENDED:
            _write(target.log, kernel_account(target.pid))
            target.dumped = True
            return
        target.log_bytes, target.signalled_s = _size(target.log), now_s
        try:
            os.kill(target.pid, DUMP_SIGNAL)
        except ProcessLookupError:
            target.moved = target.dumped = True


def _start_py_spy(program: str, target: DumpTarget) -> subprocess.Popen[bytes] | None:
    try:
        with target.log.open("ab") as log:
            return subprocess.Popen(
                [program, "dump", "--nonblocking", "--pid", str(target.pid)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.DEVNULL,
            )
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write(path: Path, text: str) -> None:
    with suppress(OSError), path.open("ab") as file:
        file.write(text.encode() + b"\n")
