"""What an agent has of the store, its loop taken by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.job_run import RunStore, stored_run
from elasticzero.launcher.store.job_token import agree_on_token
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.recovery import AGAIN_S, LAST_TURN_S, StoreRecovery
from elasticzero.launcher.store.watch_cache import ALARM, CONTROL, DONE, WORLD, WatchCache
from tests.support.memory_store import MemoryServer, MemoryStore

FOLLOWED = (WORLD, CONTROL, DONE, ALARM)


class Node:
    """What an agent has of the store, its loop taken by hand."""

    def __init__(
        self,
        server: MemoryServer,
        name: str,
        secret: Secret | None = None,
        *,
        fenced: bool = True,
        before_joining: Callable[[], None] = lambda: None,
    ) -> None:
        """Registers a node in the run that the store has.

        Args:
            server: The store.
            name: Name of the node.
            secret: Token of the job, if the node was given one.
            fenced: False: nothing binds its writes to its run.
            before_joining: Called once the token is agreed on.
        """
        self.name = name
        connection = MemoryStore(server)
        run = stored_run(connection)
        self.store: Store = RunStore(connection, run) if fenced else connection
        self.agreed = agree_on_token(self.store, secret)
        before_joining()
        me = Member(name, name, "localhost", 1, 2, 1, run=run.number)
        self.membership = Membership(self.store, me, 5, _Port())  # type: ignore[arg-type]
        self.membership.join(lambda text: None)
        self.observer = WatchCache(self.store, lambda: None, run=run.number)
        self.messages: list[str] = []
        self.recovery = StoreRecovery(
            self.store, self.observer, self.membership, None, self.agreed, self.messages.append
        )
        self.now_s = 100.0
        self.look()

    def look(self, *prefixes: str) -> None:
        """What the watches tell, of all prefixes or of these."""
        for prefix in prefixes or FOLLOWED:
            self.observer.put(prefix, self.store.read(prefix))

    def turn(self) -> None:
        """What a turn of the loop maintains in the store."""
        now_s = self.now_s
        self.now_s += LAST_TURN_S + AGAIN_S
        self.recovery.poll(now_s)
        self.membership.check(now_s, named=True, world_revision=0)

    def turns(self) -> None:
        """So many turns of the loop that all that is due is done."""
        self.look()
        for _ in range(3):
            self.turn()

    def lose_lease(self) -> None:
        """Its keepalive finds that the lease is gone."""
        lease = self.membership._lease
        assert lease is not None
        lease.lose()  # type: ignore[attr-defined]


class _Port:
    def close(self) -> None:
        return


def world(generation: int, *names: str, token: str = "", step: int = 0, run: int = 0) -> World:
    return World(
        generation=generation,
        token=token or f"g{generation}",
        members=tuple(Member(name, name, "localhost", 1, 2, 1) for name in names),
        strategy="ddp",
        resume=Resume(tier="storage", step=step) if step else Resume(tier="fresh"),
        reason="",
        run=run,
    )


def stands(server: MemoryServer) -> dict[str, Any]:
    entries = MemoryStore(server).read("").entries
    return {key: json.loads(entry.value) for key, entry in entries.items()}
