"""Defines the coordination store as an agent uses it: its interface, and its values.

Keys are relative: an implementation puts the job's own prefix before them. One contract test suite
runs against `etcd.store.EtcdStore` and against the store in memory of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticzero.errors import RetryError

MAX_OPERATIONS = 128
"""etcd refuses transactions with more operations."""


class LeaseLost(RetryError):
    """The lease of a write no longer exists: take a new one, register again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key and what the store knows about it."""

    key: str
    value: bytes
    create_revision: int
    """Revision of the write that made the key; a key deleted and written again has a new one."""
    mod_revision: int
    """Revision of the last write."""
    leased: bool = False
    """The key goes when its writer's lease does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixState:
    """Every entry under a prefix as of one revision, oldest first (by create revision)."""

    revision: int
    entries: Mapping[str, Entry]
    history: int = 0
    """How often the store had lost its data before, as far as this connection knows: revisions of
    two histories cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What must be so for a write to happen; at least one of the two revisions."""

    key: str
    mod_revision: int | None = None
    """The key was last written at this revision; 0: the key does not exist."""
    create_revision: int | None = None
    """The key was made at this revision; 0: the key does not exist."""
    value: bytes | None = None
    """The key has this value, too: a revision alone may be that of another history."""

    def __post_init__(self) -> None:
        if self.mod_revision is None and self.create_revision is None:
            raise ValueError(f"condition on {self.key!r} names no revision")


class Watch(Protocol):
    """A watch that goes on until it is closed."""

    def close(self) -> None:
        """No call of `changed` begins after this; may be called from within one."""


class Lease(Protocol):
    """A promise to be there, kept alive by a thread of its own until it is closed."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> int:
        """What the store granted, which may be more than was asked."""

    @property
    def lost(self) -> bool:
        """The store said that the lease is gone; it never comes back, a new one must be taken."""

    @property
    def confirmed_s(self) -> float:
        """When the last confirmed keepalive was sent (monotonic clock of this process): the lease
        lives at least until `confirmed_s + ttl_s`."""

    def close(self, *, revoke: bool) -> None:
        """Stop keeping it alive; `revoke` deletes its keys at once, if the store can be reached."""


class Store(Protocol):
    """A revisioned key-value store shared by all agents of a job.

    Every method raises `StoreUnavailable` when the store does not answer in time.
    """

    @property
    def reachable(self) -> bool:
        """The last thing heard of the store was an answer."""

    @property
    def last_outage_end_s(self) -> float:
        """When the store last came back after it was silent or out of reach, on the monotonic clock
        of this process; 0.0 if it never was."""

    @property
    def history(self) -> int:
        """How often so far the store was found to have lost its data: wiped, restored from a
        backup, or replaced by another. From then on revisions and leases are others."""

    @property
    def loss(self) -> str:
        """How that was found, the last time."""

    def distrust(self, reason: str, history: int) -> None:
        """What the caller has found in this history says that the store has lost its data."""

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        """All entries whose key begins with `prefix`; with a limit, the first so many by create
        revision. Linearizable."""

    def count(self, prefix: str, revision: int) -> int:
        """How many entries stood under `prefix` at a revision; those that are gone since may be
        left out. It costs the store hardly more than a read of one key."""

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        """One transaction, all or nothing: its revision, or None when a condition did not hold.

        A name in `deletes` that ends in "/" deletes every key under it. Raises `LeaseLost` when the
        lease is gone, `ValueError` for what no transaction can hold, and `StoreUnavailable` when
        it is not known whether the write took place (its message says so).
        """

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> Watch:
        """Call `changed` with the whole of `prefix` now and after every change, from one thread.

        The calls come in the order of histories and revisions; changes that come close together
        may be told as one. An outage of the store delays the calls and nothing else.
        """

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> Lease:
        """A new lease; `on_lost` is called once, from the lease's own thread, when it is lost."""

    def close(self) -> None:
        """End all watches and keepalives; leases that were not revoked run out by themselves."""


def check_write(
    puts: Mapping[str, bytes], deletes: Sequence[str], conditions: Sequence[Condition]
) -> None:
    """Raise `ValueError` for a transaction that etcd would refuse whatever it holds."""
    sizes = {"puts and deletes": len(puts) + len(deletes), "conditions": len(conditions)}
    for what, count in sizes.items():
        if count > MAX_OPERATIONS:
            raise ValueError(f"{count} {what} in one write; the store takes {MAX_OPERATIONS}")
    for name in deletes:
        for key in puts:
            if key == name or (name.endswith("/") and key.startswith(name)):
                raise ValueError(f"one write both puts and deletes {key!r}")


def job_prefix(job: str) -> str:
    """Where everything about one job stands."""
    return f"/elasticzero/{job}/"
