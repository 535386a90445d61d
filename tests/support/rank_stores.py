"""The ranks' store of a generation in one process, with a client for each rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from elasticzero.comm.store.client import Channel, RankStore, connect
from elasticzero.comm.store.server import StoreServer
from elasticzero.comm.store.wire import generation_secret
from elasticzero.security.certificates import Credentials

SECRET = generation_secret("the generation", "the job")
LIMIT_S = 30.0


@dataclass(slots=True)
class Served:
    """A store, and what is to be closed."""

    server: StoreServer
    port: int
    first: RankStore
    """The store as rank 0 has it."""
    tls: Credentials | None = None
    """With what connections are encrypted; None: they are not."""
    _opened: ExitStack = field(default_factory=ExitStack)

    def rank(self, rank: int, secret: bytes = SECRET, limit_s: float = LIMIT_S) -> RankStore:
        """The store as another rank has it, which is closed with the server."""
        channel = connect(("127.0.0.1", self.port), rank, secret, limit_s)
        if self.tls is not None:
            channel.encrypt(self.tls, limit_s)
        store = RankStore(channel, LIMIT_S)
        self._opened.callback(store.close)
        return store

    def stranger(self) -> socket.socket:
        """A connection that has said nothing, which is closed with the server."""
        sock = socket.create_connection(("127.0.0.1", self.port), LIMIT_S)
        return self._opened.enter_context(sock)

    def close(self) -> None:
        self.first.close()
        self._opened.close()


@contextmanager
def served(
    world_size: int,
    make: type[socket.socket] = socket.socket,
    tls: Credentials | None = None,
) -> Iterator[Served]:
    """A store of so many ranks; nobody but rank 0 is connected yet. `make` makes its listener."""
    listener = make()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = StoreServer(listener, world_size, SECRET, tls)
    told = Served(server, port, RankStore(Channel(server.local), LIMIT_S, server.close), tls)
    try:
        yield told
    finally:
        told.close()
