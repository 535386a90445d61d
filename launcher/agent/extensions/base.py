"""Lets others see what an agent does, and serve it, without a part in what the agent decides.

The agent imports no extension: the command line hands it functions that make them. An extension
that fails is left out from then on, and training goes on. None can be waited for in safety, so each
method returns at once; what takes longer belongs in a thread of the extension's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from elasticzero.checkpoint.ram.store import SnapshotStore
from elasticzero.ipc.messages import Message
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.routes import Route
from elasticzero.launcher.observability.events import EventName
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.workers.group import Ended

log = logging.getLogger(__name__)


class Note(Protocol):
    """Writes an event into the agent's log; called in the agent's thread only."""

    def __call__(self, event: EventName, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """Holds what an extension may ask of its agent."""

    options: AgentOptions
    status: Callable[[], Mapping[str, Any]]
    """Returns what the agent serves at `/status`; callable from any thread."""
    note: Note
    tell: Callable[[Message], None] = lambda message: None
    """Sends a message to this node's workers; called in the agent's thread only."""
    wake: Callable[[], None] = lambda: None
    """Wakes the agent's loop; callable from any thread."""
    metrics: Metrics = field(default_factory=Metrics)
    """The node's metrics."""
    snapshots: SnapshotStore | None = None
    """The node's snapshots; None: it has no memory for them."""


class AgentExtension:
    """Receives what an agent sees; each method does nothing unless an extension overrides it.

    All but `status`, `routes` and `files` are called in the agent's thread.
    """

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        """Notes that this node's workers of a generation start, with these ranks."""

    def received(self, rank: int, message: Message | Ended) -> None:
        """Notes a message of a worker of the present generation, or its end."""

    def recorded(self, event: Mapping[str, Any]) -> None:
        """Notes an event that was written into the agent's log."""

    def turn(self, view: View, access: AgentAccess) -> None:
        """Notes what the agent sees in a turn of its loop.

        Args:
            view: What it sees.
            access: How the job's agents are reached.
        """

    def status(self) -> Mapping[str, Any]:
        """Returns what the agent's `/status` has of this extension, as plain values."""
        return {}

    def routes(self) -> Mapping[str, Route]:
        """Returns what the agent serves of this extension, by path."""
        return {}

    def files(self) -> Mapping[str, Callable[[str], BinaryIO]]:
        """Returns what opens files that other agents of the job read by range: a function of the
        file's name by the folder that they are served in."""
        return {}

    def close(self, outcome: str | None) -> None:
        """Ends what the extension has begun, as the agent ends.

        Args:
            outcome: Outcome of the job; None: it goes on without this node, or later.
        """


ExtensionFactory = Callable[[AgentContext], AgentExtension]
"""Makes an extension for one agent, before that runs."""


class Extensions:
    """Passes what an agent sees on to its extensions; a failure of one stops neither the agent nor
    another one."""

    def __init__(self, factories: Sequence[ExtensionFactory], context: AgentContext) -> None:
        self._extensions = [create(context) for create in factories]
        self._failed: set[int] = set()
        """Places of those that are called no more, but to close them."""

    def started(self, world: World, ranks: tuple[int, ...]) -> None:
        """Passes on that this node's workers of a generation start, with these ranks."""
        self._call(lambda extension: extension.started(world, ranks))

    def received(self, rank: int, message: Message | Ended) -> None:
        """Passes on a message of a worker, or its end."""
        self._call(lambda extension: extension.received(rank, message))

    def recorded(self, event: Mapping[str, Any]) -> None:
        """Passes on an event of the agent's log."""
        self._call(lambda extension: extension.recorded(event))

    def turn(self, view: View, access: AgentAccess) -> None:
        """Passes on what the agent sees in a turn of its loop."""
        self._call(lambda extension: extension.turn(view, access))

    def status(self) -> dict[str, Any]:
        """Returns what `/status` has of all extensions."""
        values: dict[str, Any] = {}
        self._call(lambda extension: values.update(extension.status()))
        return values

    def routes(self) -> dict[str, Route]:
        """Returns what all extensions serve, by path."""
        return {
            path: route
            for extension in self._extensions
            for path, route in extension.routes().items()
        }

    def files(self) -> dict[str, Callable[[str], BinaryIO]]:
        """Returns what opens the files of all extensions, by folder."""
        return {
            folder: open_file
            for extension in self._extensions
            for folder, open_file in extension.files().items()
        }

    def close(self, outcome: str | None) -> None:
        """Ends all extensions, the last one first."""
        for place, extension in reversed(list(enumerate(self._extensions))):
            with self._contained(place, extension):
                extension.close(outcome)

    def _call(self, deliver: Callable[[AgentExtension], None]) -> None:
        for place, extension in enumerate(self._extensions):
            if place not in self._failed:
                with self._contained(place, extension):
                    deliver(extension)

    @contextmanager
    def _contained(self, place: int, extension: AgentExtension) -> Iterator[None]:
        """Keeps an error of an extension from the agent, and leaves the extension out from then
        on."""
        try:
            yield
        except Exception:
            self._failed.add(place)
            log.exception("%s failed; the agent goes on without it", type(extension).__name__)
