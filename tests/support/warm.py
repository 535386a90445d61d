"""Starts the Python processes of a test by a fork from one that has imported torch and elasticzero.

Each `python` that a story starts would spend two to three seconds of a core on imports: every agent
does, and its fork server again. While this is installed, `subprocess.Popen` sends such a command to
the test process's own `warm_server` instead. Commands of other programs, and those with options or
variables that an interpreter reads as it starts, are started as ever; so are all of a test marked
`cold`, and all tests with `TESTS_COLD=1`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from elasticzero.launcher.workers.forking.preload import MODULES
from elasticzero.processes import bound_to_this_process
from tests.support.deadlines import patience

ROOT = Path(__file__).resolve().parents[2]
BASE_PATH: list[str] = []
"""Where Python looks for modules besides the script's directory and PYTHONPATH."""
IMPORTED = (*MODULES, "elasticzero.cli.commands", "elasticzero.launcher.agent.main")
IMPORTED_AT_START = (
    "LD_",
    "MALLOC_",
    "MKL_",
    "KMP_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH",
    "CUDA",
)
"""Beginnings of variables that have been read by the time a process is forked."""
FOLLOWED = ("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")
"""Those of them that a forked process follows none the less."""

_cold_popen = subprocess.Popen


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Says what a process is to become."""

    arguments: list[str]
    """The words after `python` on the command line."""
    environment: dict[str, str]
    directory: str
    new_session: bool
    numbers: list[int]
    """The number that each descriptor of the request has in the process."""
    bound_by: int = 0
    """Signal that the process gets when its parent ends; 0: none."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Request:
        return cls(**json.loads(data))


class Starter(Protocol):
    """Starts processes; None: not this one."""

    def start(self, request: Request, fds: Sequence[int]) -> tuple[int, int | None] | None:
        """Returns the process id, and a descriptor with its wait status if another reaps it."""


_starter: Starter | None = None
_at_start: dict[str, str] = {}
"""The environment that the imports have read."""


def install(starter: Starter | None) -> None:
    """Has `starter` start the processes of this one from now on; None: they start as ever, with
    deadlines that fit the machine."""
    global _starter
    _starter = starter
    if not _at_start:
        _at_start.update(os.environ)
    subprocess.Popen = WarmPopen  # type: ignore[misc]


def uninstall() -> None:
    """Has processes start as if this module were not there."""
    subprocess.Popen = _cold_popen  # type: ignore[misc]


class Server:
    """The socket of a `warm_server`, which starts with the first process that is asked for."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, request: Request, fds: Sequence[int]) -> tuple[int, int | None] | None:
        if request.arguments[:2] == ["-m", "elasticzero.launcher.workers.forking.server"]:
            return None  # it ends unless the process that starts it is its parent
        read, write = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            if self._socket is None:
                self._socket = self._begin()
            socket.send_fds(self._socket, [request.encode()], [*fds, write])
            os.close(write)
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the server of warm processes has ended")
        return int(answer), read

    def _begin(self) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.warm_server", str(far.fileno()), *IMPORTED]
        environment = {k: v for k, v in _at_start.items() if k != "PYTHONPATH"}
        self._process = _cold_popen(
            command,
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[far.fileno()],
            start_new_session=True,
        )
        far.close()
        return near

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()


class Spare:
    """A child of this process that becomes one command, and no other."""

    def __init__(self, pid: int, sock: socket.socket, command: tuple[str, ...]) -> None:
        self._pid = pid
        self._socket = sock
        self._command = command
        self._used = False

    def start(self, request: Request, fds: Sequence[int]) -> tuple[int, int | None] | None:
        if self._used or tuple(request.arguments[: len(self._command)]) != self._command:
            return None
        self._used = True
        socket.send_fds(self._socket, [request.encode()], list(fds))
        self._socket.close()
        return self._pid, None


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, whose processes are forked where they can be.

    It replaces the parts of CPython's class that start a process and read its exit status.
    """

    _status_fd: int | None = None

    def _execute_child(self, *parts: Any) -> None:
        names = (
            "args executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell "
            "p2cread p2cwrite c2pread c2pwrite errread errwrite restore_signals gid gids uid umask "
            "start_new_session process_group"
        )
        values = dict(zip(names.split(), parts, strict=True))
        request = requested(values)
        started = None
        if request is not None and _starter is not None:
            ends = (values["p2cread"], values["c2pwrite"], values["errwrite"])
            standard = [number if end == -1 else end for number, end in enumerate(ends)]
            started = _starter.start(request, [*standard, *values["pass_fds"]])
        if started is None:
            super()._execute_child(*parts)  # type: ignore[misc]
            return
        self.pid, self._status_fd = started
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(
                values[name]
                for name in ["p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"]
            )
        )

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        return super().communicate(input, timeout and patience(timeout))

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(timeout and patience(timeout))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status_fd is None:
            result: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return result
        wait_s = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._status_fd], [], [], wait_s)[0]:
            return 0, 0
        status = os.read(self._status_fd, 64)
        os.close(self._status_fd)
        return self.pid, int(status) if status else signal.SIGKILL

    def _internal_poll(self, _deadstate: int | None = None, *rest: Any) -> int | None:
        if self._status_fd is None:
            code: int | None = super()._internal_poll(_deadstate, *rest)  # type: ignore[misc]
            return code
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def requested(values: Mapping[str, Any]) -> Request | None:
    """Returns what a forked process is to become by the values of `Popen`; None: not by a fork."""
    unusual = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    if (
        any(values[name] for name in unusual)
        or values["umask"] >= 0
        or values["process_group"] >= 0
    ):
        return None
    arguments = values["args"]
    if isinstance(arguments, (str, bytes, os.PathLike)):
        return None
    arguments = [os.fsdecode(word) for word in arguments]
    bound_by = 0
    binder = bound_to_this_process([])
    if arguments[:5] == binder[:5]:
        bound_by, arguments = int(arguments[5]), arguments[len(binder) :]
    if len(arguments) < 2 or arguments[0] != sys.executable:
        return None
    if arguments[1] == "-m" or arguments[1] == "-c":
        if len(arguments) < 3:
            return None
    elif arguments[1].startswith("-") or not os.path.isfile(
        os.path.join(values["cwd"] or "", arguments[1])
    ):
        return None
    environment = dict(os.environ if values["env"] is None else values["env"])
    if not _follows(environment, os.fsdecode(values["cwd"] or "")):
        return None
    return Request(
        arguments=arguments[1:],
        environment={os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
        directory=os.fsdecode(values["cwd"] or os.getcwd()),
        new_session=bool(values["start_new_session"]),
        numbers=[0, 1, 2, *values["pass_fds"]],
        bound_by=bound_by,
    )


def _follows(environment: Mapping[str, str], directory: str) -> bool:
    """Whether a process that was forked may have these variables and this directory: not where it
    would import another copy of the code, such as one with a rule that is broken on purpose."""

    def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(IMPORTED_AT_START) and name not in FOLLOWED
        }

    named = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    customized = any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in named)
    copied = any(_has_other_code(path) for path in (directory, *named))
    alike = read_at_start(environment) == read_at_start(_at_start)
    return alike and not customized and not copied


def _has_other_code(path: str) -> bool:
    return os.path.isdir(os.path.join(path, "elasticzero")) and not os.path.samefile(
        path or os.curdir, ROOT
    )
