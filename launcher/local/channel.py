"""Connects `elasticzero local` with each of its agents, by a socket that the agent inherits.

Each message is one JSON object. The agent says that it is ready to register (`ready`), and that a
rank waits for a fault (`waits`). The command says that the nodes may register (`begin`), and that
faults have come (`struck`). Where the command is gone, its agents end; until then they neither wait
for it nor hold their workers.

Rules of the start:
 LS1  An agent that has done its imports waits until every agent that was started with it, and still
      runs, has done so too. Then all register at once, and the first generation has all of them.
      On a busy machine imports take 10 s and more, and end seconds apart: the time for which a
      first generation waits for more nodes (--settle) would be over.
 LS2  An agent that has ended is not waited for, nor one that is to leave.
 LS3  An agent that is started later waits for none.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from elasticzero.ipc.messages import AwaitsFault, FaultStruck, Message
from elasticzero.launcher.agent.extensions.base import (
    AgentContext,
    AgentExtension,
    ExtensionFactory,
)
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.workers.group import Ended

VARIABLE = "ELASTICZERO_LOCAL_FD"
"""Environment variable with the descriptor of the agent's end."""
MAX_MESSAGE_BYTES = 4096
LOOK_EVERY_S = 0.1
"""Pause in seconds between two looks at whether a node that waits to register is to leave."""
EVERY_STEP = 1 << 62
"""A step behind all others."""


class LocalChannel:
    """Sends and receives at one end of the socket; it never waits unless it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a socket that keeps the borders of messages."""
        sock.setblocking(False)
        self._socket = sock
        self.closed = False
        """True once the other end is gone."""

    @classmethod
    def pair(cls) -> tuple[LocalChannel, socket.socket]:
        """Returns the command's end, and the socket that an agent is to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def send(self, **message: Any) -> None:
        """Sends a message; does nothing where the other end is gone, or takes no more."""
        with suppress(OSError):
            self._socket.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)

    def receive(self, limit_s: float = 0.0) -> Iterator[Mapping[str, Any]]:
        """Yields the messages that have come.

        Args:
            limit_s: Seconds for which the first is waited for.
        """
        if limit_s > 0.0 and not self.closed:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            poller.poll(limit_s * 1000)
        while not self.closed:
            try:
                data = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return
            yield json.loads(data)

    def close(self) -> None:
        """Closes this end."""
        self.closed = True
        self._socket.close()


def inherited_channel(environment: MutableMapping[str, str]) -> LocalChannel | None:
    """Returns the channel to the command that has started this agent, and takes the variable out of
    the environment, for workers have nothing to do with it; None: no such command has.

    Args:
        environment: The agent's environment.
    """
    number = environment.pop(VARIABLE, "")
    if not number.isdecimal():
        return None
    fd = int(number)
    try:
        os.set_inheritable(fd, False)
        return LocalChannel(socket.socket(fileno=fd))
    except OSError:  # the variable is left over from another process
        return None


def await_start(channel: LocalChannel, is_leaving: Callable[[], bool]) -> None:
    """Waits until this node may register: LS1 to LS3.

    Args:
        channel: The agent's end.
        is_leaving: Returns whether the node is to leave, and so need not wait.
    """
    channel.send(ready=True)
    while not (channel.closed or is_leaving()):
        if any("begin" in message for message in channel.receive(LOOK_EVERY_S)):
            return


class FaultRelay(AgentExtension):
    """Passes on to the command which ranks wait for a fault, and to the workers that it has
    come."""

    def __init__(self, channel: LocalChannel, tell: Callable[[Message], None]) -> None:
        """Begins before any worker is started.

        Args:
            channel: The agent's end.
            tell: Sends a message to the node's workers.
        """
        self._channel = channel
        self._tell = tell
        self._generation = self._count = 0
        """Number of the generation, and of its ranks on this node."""
        self._struck = -1

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        """Notes the generation of the ranks that wait from now on."""
        self._generation, self._count = world.generation, len(ranks)

    def received(self, rank: int, message: Message | Ended) -> None:
        """Tells the command that a rank waits, or lets it go on where the fault has come."""
        if not isinstance(message, AwaitsFault):
            return
        if message.step <= self._struck:
            self._tell(FaultStruck(step=self._struck))
            return
        place = {"generation": self._generation, "rank": rank, "ranks": self._count}
        self._channel.send(waits=message.step, **place)

    def turn(self, view: View, access: AgentAccess) -> None:
        """Tells the workers which faults have come; all of them where the command is gone."""
        before = self._struck
        for message in self._channel.receive():
            self._struck = max(self._struck, int(message.get("struck", -1)))
        if self._channel.closed:
            self._struck = EVERY_STEP
        if self._struck > before:
            self._tell(FaultStruck(step=self._struck))

    def close(self, outcome: str | None) -> None:
        """Closes the agent's end."""
        self._channel.close()


def fault_relay(channel: LocalChannel) -> ExtensionFactory:
    """Returns what makes the extension of an agent that `elasticzero local` has started."""

    def create(context: AgentContext) -> AgentExtension:
        return FaultRelay(channel, context.tell)

    return create


class Start:
    """Lets the agents of a cluster register together: LS1 to LS3."""

    def __init__(self) -> None:
        """Begins before any agent is ready."""
        self._ready: set[str] = set()
        self._begun = False

    def note_ready(self, node: str) -> None:
        """Notes that a node's agent has done its imports."""
        self._ready.add(node)

    def may_register(self, running: Iterable[str]) -> list[str]:
        """Returns the nodes that may register now, each once.

        Args:
            running: The nodes whose agents run.
        """
        living = set(running)
        self._begun |= bool(living) and living <= self._ready
        if not self._begun:
            return []
        released, self._ready = sorted(self._ready & living), set()
        return released
