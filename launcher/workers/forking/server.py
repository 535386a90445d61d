"""Forks workers on request from a process that has done the heavy imports.

The command is `python -m ... AGENT FD PRELOAD`, where PRELOAD says in JSON what is imported, or
`... serve KEEPER FD PRELOAD` where the server begins again without a module after which no process
may fork. The agent sends one JSON object a message over the inherited socket FD (SOCK_SEQPACKET). A
request carries the worker's descriptors. The server is single-threaded and the workers' parent: it
reaps them, and reports their exits to the agent at once. When a worker exits, the server kills its
process group; when the last one has exited, it kills what has left those groups, but for processes
that stand by. When the agent exits the socket closes, and the server ends every process below it,
then itself. The workers die with the server by a parent-death signal, whatever kills it. A request
that the server cannot read it refuses, and goes on; to an answer that the agent cannot read the
agent does as if the server had died.

In a job with TLS the server makes the contexts of the node's certificate before a worker is needed.
Its workers inherit them, and OpenSSL as it is after its first connection.

Between the agent and the server stands its keeper, a process that only waits. Whatever the workers
have started is the keeper's when the server is killed, even if it left their groups and sessions.
So whichever of agent, keeper and server is killed alone, the others leave no process behind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from elasticzero.errors import UserError, is_final, is_peer_error, one_line, script_traceback
from elasticzero.ipc.channel import (
    CHANNEL_FD_VARIABLE,
    WAKEUP_FD_VARIABLE,
    Channel,
    ChannelClosed,
)
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Message, ScriptEnded
from elasticzero.ipc.rank_variables import leave_world_variables
from elasticzero.launcher import secrets
from elasticzero.launcher.workers.forking.preload import Preload, Unforkable, import_modules
from elasticzero.launcher.workers.forking.requests import (
    CLEAN_UP_S,
    COMMAND,
    MAX_MESSAGE_BYTES,
    Launch,
    Preparation,
    Promotion,
    to_json,
)
from elasticzero.launcher.workers.forking.script_exit import exit_process
from elasticzero.log_output import keep_write_errors, missing_output, reported
from elasticzero.processes import (
    STANDBY_NAME,
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    kill_strays,
    set_name,
)
from elasticzero.security.certificates import contexts_of
from elasticzero.serialization import RecordError, decode, parse_json

CANNOT_EXECUTE = 126
"""Exit status for a program that cannot be started, as shells use it."""
_FIRST_ON_PATH = sys.path[0]
"""In the server, what Python has put there; a script's directory takes its place."""
_ENVIRONMENT_AT_START = dict(os.environ)
_THREADS_AT_START = os.environ.get("OMP_NUM_THREADS")
DUMP_SIGNAL = signal.SIGRTMAX - 1
"""Signal at which a worker writes the stacks of its threads into its log, without Python's lock."""


def keep(agent: int, sock: socket.socket, preload: Preload) -> None:
    """Forks the server and waits until it or the agent has ended; then no process below is left.

    SIGTERM, which may reach every process of a machine that is to stop, is left to the agent.

    Args:
        agent: Process id of the agent, which is this process's parent.
        sock: The server's socket to the agent.
        preload: What the server imports.
    """
    die_with_parent(agent, signal.SIGCONT)  # which resumes a suspended keeper too
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    adopt_orphans()
    awaited = {signal.SIGCHLD, signal.SIGCONT}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    keeper = os.getpid()
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        serve(keeper, sock, preload)
        return
    sock.close()
    try:
        while os.getppid() == agent and _reap(server):
            if signal.sigwait(awaited) == signal.SIGCONT:
                with suppress(ProcessLookupError):
                    os.kill(server, signal.SIGCONT)
    finally:
        kill_descendants(CLEAN_UP_S)


def _reap(server: int) -> bool:
    """Reaps processes that have exited; returns whether the server still runs."""
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            if pid == server:
                return False
        return True
    return False


def serve(keeper: int, sock: socket.socket, preload: Preload) -> None:
    """Answers requests until the agent closes the socket or dies; then no process below is left.

    Args:
        keeper: Process id of the keeper, which is this process's parent.
        sock: The socket to the agent.
        preload: What it imports first.
    """
    die_with_parent(keeper)
    adopt_orphans()
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            _serve_requests(keeper, sock, preload)
    finally:
        kill_descendants(CLEAN_UP_S)


def _serve_requests(keeper: int, sock: socket.socket, preload: Preload) -> None:
    keep_write_errors()  # before the imports: some of them keep a stream
    for variable in secrets.VARIABLES:  # a module of the user's has no use for them
        os.environ.pop(variable, None)
        _ENVIRONMENT_AT_START.pop(variable, None)
    try:
        preload = import_modules(preload)
    except Unforkable as left:
        numbers = [str(keeper), str(sock.fileno())]
        sock.set_inheritable(True)
        command = [sys.executable, "-m", COMMAND, "serve", *numbers, to_json(left.without)]
        os.execve(sys.executable, command, _ENVIRONMENT_AT_START)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGCONT, lambda *_: None)
    # From now on SIGCONT says that the keeper may be dead, and resumes a suspended server for it.
    die_with_parent(keeper, signal.SIGCONT)
    ready = {"ready": os.getpid(), "not_imported": preload.refused}
    sock.send(json.dumps(ready).encode())
    workers: set[int] = set()
    standbys: set[int] = set()
    while os.getppid() == keeper:
        readable = select.select([sock.fileno(), wake_read], [], [])[0]
        if wake_read in readable:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap_workers(sock, workers, standbys)
        if sock.fileno() in readable:
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 8)
            if not data:
                return
            answer = _launch(sock, data, fds, (wake_read, wake_write), preload, standbys)
            for fd in fds:
                os.close(fd)
            if "started" in answer:
                workers.add(answer["started"])
            if answer:
                sock.send(json.dumps(answer).encode())


def _launch(
    sock: socket.socket,
    data: bytes,
    fds: list[int],
    wake: tuple[int, int],
    preload: Preload,
    standbys: set[int],
) -> dict[str, Any]:
    """Forks the worker of a request, or prepares for workers; returns the answer, which may be
    empty.

    Args:
        sock: The server's socket to the agent.
        data: The request.
        fds: The worker's descriptors.
        wake: The server's own wake-up pipe.
        preload: What the server has imported.
        standbys: Process ids of those that stand by, which this keeps.
    """
    try:
        request = parse_json(data, "launch")
        if isinstance(request, dict) and "promoted" in request:
            standbys.discard(decode(Promotion, request, "promotion").promoted)
            return {}
        if isinstance(request, dict) and "tls" in request:
            _prepare(decode(Preparation, request, "preparation"))
            return {}
        launch = decode(Launch, request, "launch")
    except RecordError as error:
        return {"refused": str(error)}
    environment, before = launch.environment, _ENVIRONMENT_AT_START
    changed = {k: v for k, v in preload.environment.items() if environment.get(k) == before.get(k)}
    launch = replace(launch, environment=environment | changed)
    started = _fork(sock, launch, fds, wake)
    if launch.stands_by:
        standbys.add(started)
    return {"started": started, "fds": fds}


def _prepare(preparation: Preparation) -> None:
    """Makes what workers inherit; where that fails, a worker that makes a connection reports it."""
    with suppress(OSError, ValueError):
        contexts_of(preparation.tls).check()


def _reap_workers(sock: socket.socket, workers: set[int], standbys: set[int]) -> None:
    """Reaps processes that have exited; reports workers once their process groups are killed.

    Args:
        sock: The server's socket to the agent.
        workers: Process ids of the workers, and of those that stand by.
        standbys: Process ids of those that stand by.
    """
    ended: list[tuple[int, int]] = []
    with suppress(ChildProcessError):
        while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if exited.si_pid in workers:  # not reaped yet, so the group is still its own
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(exited.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(exited.si_pid, 0)
            if pid in workers:
                workers.discard(pid)
                standbys.discard(pid)
                ended.append((pid, os.waitstatus_to_exitcode(status)))
    if ended and workers == standbys:  # no worker is left
        if standbys:
            kill_strays(CLEAN_UP_S, spared=standbys)
        else:
            kill_descendants(CLEAN_UP_S)
    for pid, code in ended:
        sock.send(json.dumps({"ended": pid, "status": code}).encode())


def _fork(sock: socket.socket, launch: Launch, fds: list[int], wake: tuple[int, int]) -> int:
    """Forks a worker.

    Args:
        sock: The server's socket to the agent.
        launch: What the worker runs.
        fds: Log, channel, the agent's wake-up pipe, for rank 0 the store's bound socket, and the
            file of stdout if that is separate. Of a process that stands by, the log of its worker
            and, if that is separate, the one of stdout are in the socket's place.
        wake: The server's own wake-up pipe.
    """
    server = os.getpid()
    pid = os.fork()
    if pid:
        _lead_process_group(pid)
        return pid
    try:
        if launch.stands_by:
            set_name(STANDBY_NAME)
        die_with_parent(server)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGCONT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _lead_process_group(0)
        sock.close()
        for fd in wake:
            os.close(fd)
        _run_target(launch, fds)
    except BaseException:  # noqa: BLE001 - the top of a process: print, and never return to serve()
        traceback.print_exc()
    finally:
        os._exit(1)


def _lead_process_group(pid: int) -> None:
    """Makes `pid` (0: this process) the leader of a process group.

    Parent and child both call it, so that the group exists before either of them signals it.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, 0 if pid == 0 else pid)


def _set_up_streams(launch: Launch, fds: list[int]) -> None:
    """Has stdout and stderr go into the worker's logs, stdin be empty, and a crash leave stacks.

    Args:
        launch: What the worker runs.
        fds: Its descriptors; the one of a separate stdout is removed.
    """
    os.dup2(fds[-1] if launch.separate_stdout else fds[0], 1)
    os.dup2(fds[0], 2)
    os.close(fds[0])
    if launch.separate_stdout:
        os.close(fds.pop())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    faulthandler.enable(file=2)  # a crash in native code leaves the stacks of Python's threads
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run_target(launch: Launch, fds: list[int]) -> NoReturn:
    _set_up_streams(launch, fds)
    os.chdir(launch.directory)
    os.environ.clear()
    os.environ.update(launch.environment)
    os.environ[CHANNEL_FD_VARIABLE] = str(fds[1])
    os.environ[WAKEUP_FD_VARIABLE] = str(fds[2])
    if launch.is_program:
        _execute(launch, fds[1:])
    if launch.stands_by:
        _begin_standby(fds[1], fds[2], fds[3:])
    _limit_threads()
    sys.argv = [launch.target, *launch.arguments]
    gloo = sys.modules.get("elasticzero.comm.gloo")
    if gloo is not None:
        gloo.wait_before_destroying()
    code, left = 0, list[object]()  # what the script leaves is not destroyed
    _import_from(launch.import_directory)
    try:
        if launch.is_module:
            left.append(runpy.run_module(launch.target, run_name="__main__", alter_sys=True))
        else:
            left.append(runpy.run_path(launch.target, run_name="__main__"))
    except SystemExit as stop:
        code = _exit_code(stop)
        if code != 0:  # reported now: exit functions may be slow, and peers may fail meanwhile
            why = ": it does not take its arguments" if is_final(stop) else ""
            _report(fds[1], fds[2], _failure_of(stop, f"exited with status {code}{why}"))
    except BaseException as error:  # noqa: BLE001 - the top of a process: every error ends here
        if sys.excepthook is not sys.__excepthook__:
            with suppress(BaseException):  # a hook that fails must not hide the script's error
                sys.excepthook(type(error), error, error.__traceback__)  # as Python does
        text = reported(script_traceback(error))
        print(text, end="", file=sys.stderr)  # as Python does, not by logging
        _report(fds[1], fds[2], _failure_of(error))
        code = 1
        left.append(error)  # and with it what the script's frames hold
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    leave_world_variables()  # of a process that stood by its rank is known by now
    rank = os.environ.get("RANK", "0")
    exit_process(code, rank, launch.exit_timeout_s, lambda: _report_end(fds[1], fds[2], code))


def _import_from(directory: str) -> None:
    """Has imports look into a script's directory, behind what preloaded modules have put first."""
    if _FIRST_ON_PATH in sys.path:
        sys.path[sys.path.index(_FIRST_ON_PATH)] = directory
    else:
        sys.path.insert(0, directory)


def _begin_standby(channel_fd: int, wakeup_fd: int, logs: list[int]) -> None:
    """Has this process wait for a rank at `elasticzero.run`, and watches its script until then.

    Args:
        channel_fd: Descriptor of its end of the channel.
        wakeup_fd: Descriptor of the pipe that wakes the agent.
        logs: Descriptors of the logs of its worker.
    """
    from elasticzero.ipc.standby import begin_standby

    begin_standby(lambda message: _report(channel_fd, wakeup_fd, message), logs)


def _execute(launch: Launch, fds: list[int]) -> NoReturn:
    """Executes a program, which inherits `fds`: a Python may call `elasticzero.run`."""
    for fd in fds:
        os.set_inheritable(fd, True)
    faulthandler.unregister(DUMP_SIGNAL)
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # its default would end the program
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(launch.target, [launch.target, *launch.arguments], os.environ)
    except OSError as error:
        # As a shell does, not by logging: the user sees it in place of the program's output.
        print(f"{launch.target}: {error.strerror}", file=sys.stderr, flush=True)
        failure = UserError(f"{launch.target} cannot be run: {error.strerror}")
        _report(fds[0], fds[1], _failure_of(failure))
        os._exit(CANNOT_EXECUTE)


def _limit_threads() -> None:
    """Sets torch's number of threads if the worker has an OMP_NUM_THREADS of its own.

    torch has read the server's variable when the server imported it.
    """
    thread_count = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and thread_count.isdecimal()
        and int(thread_count) > 0
        and thread_count != _THREADS_AT_START
    ):
        torch.set_num_threads(int(thread_count))


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)  # as Python does for `sys.exit(TEXT)`
    return 1


def _failure_of(error: BaseException, text: str = "") -> Failed:
    """Returns the message about an error that ended a script outside `elasticzero.run`.

    Args:
        error: The error.
        text: Replaces the error's own message and its traceback.
    """
    return Failed(
        step=0,
        blame="peer" if is_peer_error(error) else "user",
        message=text or one_line(error),
        traceback="" if text else script_traceback(error),
        final=is_final(error),
    )


def _report_end(channel_fd: int, wakeup_fd: int, code: int) -> None:
    """Reports that the script has ended, and what of its output is missing in the logs."""
    missing, why = missing_output()
    ended = ScriptEnded(exit_code=code, missing_bytes=missing, missing_why=why)
    _report(channel_fd, wakeup_fd, ended)


def _report(channel_fd: int, wakeup_fd: int, message: Message) -> None:
    with suppress(ChannelClosed, OSError):
        Channel(socket.socket(fileno=os.dup(channel_fd)), wakeup_fd).send(message)


if __name__ == "__main__":
    *begins_again, parent, number, told = sys.argv[1:]
    begin = serve if begins_again else keep
    imports = decode(Preload, parse_json(told.encode(), "preload"), "preload")
    begin(int(parent), socket.socket(fileno=int(number)), imports)
