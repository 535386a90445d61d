"""Starts the fork server and its keeper, and asks it for workers; for the agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from elasticzero.errors import UserError
from elasticzero.ipc.channel import ChannelClosed, readable
from elasticzero.launcher.workers.forking.preload import Preload
from elasticzero.launcher.workers.forking.requests import (
    CLEAN_UP_S,
    COMMAND,
    MAX_MESSAGE_BYTES,
    Answer,
    Launch,
    Preparation,
    Promotion,
    to_json,
)
from elasticzero.security.certificates import Credentials
from elasticzero.serialization import RecordError, decode, parse_json


class ForkServer:
    """Starts the server and its keeper, sends requests for workers, and receives their exits; for
    the agent."""

    def __init__(
        self, modules: tuple[str, ...], named: tuple[str, ...] = (), directory: str = ""
    ) -> None:
        """Starts the server, which imports modules.

        Args:
            modules: Those of this project and of torch.
            named: Those that the user names.
            directory: Where the script lies, from which these are imported too.
        """
        preload = Preload(modules=modules, named=named, directory=directory)
        agent_socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = [str(os.getpid()), str(server_socket.fileno())]
        command = [sys.executable, "-m", COMMAND, *numbers, to_json(preload)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, pass_fds=[server_socket.fileno()], env=environment, start_new_session=True
        )
        server_socket.close()
        self._socket, self._named = agent_socket, named
        self._ready = False
        self._pending: list[Answer] = []
        self._prepared_for: Credentials | None = None

    @property
    def pid(self) -> int:
        """Returns the process id of the keeper, below which all others are."""
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def start(self, launch: Launch, fds: list[int]) -> tuple[int, list[int]]:
        """Forks a worker; returns its process id and the numbers that `fds` have there.

        Raises `ChannelClosed` if the server has died, or refuses.
        """
        data = to_json(launch).encode()
        socket.send_fds(self._socket, [data], fds)
        while True:
            answer = self._receive()
            if answer.started is not None:
                return answer.started, list(answer.fds)
            if answer.refused:
                raise ChannelClosed(f"the fork server refuses a launch: {answer.refused}")
            self._pending.append(answer)

    def prepare(self, tls: Credentials | None) -> None:
        """Has the server make the contexts of a certificate, unless it has those of this one; does
        not wait.

        Where that fails, workers make them.
        """
        if tls is None or tls is self._prepared_for:
            return
        self._prepared_for = tls
        with suppress(OSError):  # it is too long for one message, or the server has died
            data = to_json(Preparation(tls=tls)).encode()
            self._socket.send(data, socket.MSG_DONTWAIT)

    def promote(self, pid: int) -> None:
        """Says that a process that stood by is a worker from now on."""
        with suppress(OSError):  # where the server has died, so has the process
            self._socket.send(to_json(Promotion(promoted=pid)).encode())

    def wait_until_ready(self) -> tuple[str, ...]:
        """Returns when the imports are done, with why modules that the user names are not among
        them.

        Raises:
            UserError: The server died while it imported modules, of which the user names some.
            ChannelClosed: It died, and the user names none.
        """
        try:
            answer = self._receive()
        except ChannelClosed:
            if self._named:
                raise UserError(
                    f"--preload {','.join(self._named)}: the process that imports these modules "
                    "for the workers has ended meanwhile; leave out the one that ends it"
                ) from None
            raise
        self._pending = [answer] if answer.ready is None else []
        return answer.not_imported

    def ended(self) -> list[tuple[int, int]]:
        """Returns (process id, exit code) of every worker that exited since the last call; does
        not wait."""
        answers, self._pending = self._pending, []
        while readable([self._socket.fileno()], 0):
            answers.append(self._receive())
        return [(answer.ended, answer.status) for answer in answers if answer.ended is not None]

    def _receive(self) -> Answer:
        data = self._socket.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ChannelClosed("the fork server ended")
        try:
            answer = decode(Answer, parse_json(data, "answer"), "answer")
        except RecordError as error:
            raise ChannelClosed(f"the fork server's answer cannot be read: {error}") from None
        self._ready = True  # the first answer of all says so
        return answer

    def close(self) -> None:
        """Ends the keeper, the server and every process below them."""
        self._socket.close()
        if self._ready:
            with suppress(subprocess.TimeoutExpired):
                self._process.send_signal(signal.SIGCONT)
                self._process.wait(CLEAN_UP_S + 1.0)
        self._process.kill()
        self._process.wait()
