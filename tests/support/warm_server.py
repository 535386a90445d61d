"""Forks Python processes from one that has imported what they import.

`python -m tests.support.warm_server FD MODULE…` imports the modules and answers requests over the
socket FD. A process that it forks becomes what a command of Python would be: a script, a module or
code, with that command's arguments, environment, directory and descriptors. It is real in all
respects: it has its own number, signals and end. `tests.support.warm` sends the requests.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from typing import Any, NoReturn

from elasticzero.processes import die_with_parent
from tests.support import warm
from tests.support.warm import Request

MAX_REQUEST_BYTES = 200_000
HIGH_FD = 512
"""Descriptors wait from this number on until those that a process inherits have their numbers."""
FORK_SERVER = ("-m", "elasticzero.launcher.workers.forking.server")
COMMAND_LINES = ("elasticzero.cli", "elasticzero.launcher.cli")
"""Modules that run the command line."""


def serve(sock: socket.socket) -> Request | None:
    """Forks a process for each request; returns the request in each of them, and None in the server
    once the socket has closed."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status_fds: dict[int, int] = {}
    server = os.getpid()
    while True:
        readable = select.select([sock.fileno(), wake_read], [], [])[0]
        if wake_read in readable:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
            report_ends(status_fds)
        if sock.fileno() not in readable:
            continue
        data, fds, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 64)
        if not data:
            return None
        request = Request.decode(data)
        status_fd = fds.pop()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sock.detach()
            become(request, fds, server)
            return request
        status_fds[pid] = status_fd
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


def report_ends(status_fds: dict[int, int]) -> None:
    """Reaps processes, and writes the wait status of each to the descriptor of its request."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status_fd = status_fds.pop(ended[0], None)
            if status_fd is not None:
                with suppress(BrokenPipeError):
                    os.write(status_fd, str(ended[1]).encode())
                os.close(status_fd)


def become(request: Request, fds: list[int], parent: int) -> None:
    """Gives this process all that the request says besides its code."""
    if request.bound_by:
        number = signal.Signals(request.bound_by)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent, number)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in fds]
    os.closerange(3, HIGH_FD)
    for fd, number_there in zip(high, request.numbers, strict=True):
        os.dup2(fd, number_there, inheritable=True)
    os.closerange(HIGH_FD, HIGH_FD + 64)
    if request.new_session:
        os.setsid()
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)


def fork_spare() -> tuple[int, socket.socket]:
    """Forks a process that waits for one request; returns its number and its socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, pid = os.getpid(), os.fork()
    if pid:
        far.close()
        return pid, near
    near.close()
    die_with_parent(parent)
    data, fds, _, _ = socket.recv_fds(far, MAX_REQUEST_BYTES, 64)
    if not data:
        os._exit(0)
    far.detach()
    request = Request.decode(data)
    become(request, fds, parent)
    run_python(request)


def fork_server() -> socket.socket:
    """Forks a server like this one below this process; returns its socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        far.close()
        return near
    near.close()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = None
    with suppress(ConnectionResetError):
        request = serve(far)
    if request is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_python(request)


def run_python(request: Request) -> NoReturn:
    """Runs a command of Python, and ends this process with its exit code."""
    arguments = request.arguments
    runs_command = len(arguments) > 2 and arguments[1] in COMMAND_LINES
    command = arguments[2] if runs_command else ""
    if command == "run":
        warm.install(warm.Spare(*fork_spare(), FORK_SERVER))
    elif command == "local":
        warm.install(warm.Server(fork_server()))
    _set_up(request)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    try:
        if arguments[0] == "-m":
            sys.modules.pop(arguments[1], None)
            sys.argv = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = arguments[0]
            sys.argv = list(arguments)
            with open(arguments[0], "rb") as file:
                code = compile(file.read(), arguments[0], "exec")
            exec(code, main.__dict__)
    except BaseException as error:  # noqa: BLE001 - the top of a process
        _end(_exit_code(error))
    _end(0)


def _set_up(request: Request) -> None:
    """Sets what an interpreter reads from its command line and its environment when it starts."""
    first = {"-m": request.directory, "-c": ""}.get(request.arguments[0])
    if first is None:
        first = os.path.dirname(os.path.realpath(request.arguments[0]))
    named = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([first, *filter(None, named), *warm.BASE_PATH])
    importlib.invalidate_caches()
    if sys.stdout is not None and sys.stderr is not None:
        lines: Any = {"line_buffering": sys.stdout.isatty()}
        if request.environment.get("PYTHONUNBUFFERED"):
            lines = {"write_through": True}
        sys.stdout.reconfigure(**lines)  # type: ignore[union-attr]
    torch: Any = sys.modules.get("torch")
    threads = request.environment.get("OMP_NUM_THREADS", "")
    count = int(threads) if threads.isdecimal() else os.cpu_count() or 1
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _exit_code(error: BaseException) -> int:
    """Prints what Python prints of an error that nothing has caught; returns the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _end(code: int) -> NoReturn:
    """Ends this process as an interpreter does, but does not destroy what torch has imported, which
    costs twenty times what a fork does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main() -> None:
    die_with_parent(os.getppid())
    sock = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    warm.BASE_PATH[:] = sys.path[1:]
    gc.collect()
    gc.freeze()
    gc.enable()
    request = None
    with suppress(ConnectionResetError):
        request = serve(sock)
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_python(request)


if __name__ == "__main__":
    main()
