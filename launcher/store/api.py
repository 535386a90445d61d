"""Defines the coordination store as an agent uses it: its interface, and its values.

Keys are relative: an implementation puts the job's own prefix before them. One contract test suite
runs against `etcd.store.EtcdStore` and against the store in memory of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticzero.errors import ElasticZeroError, RetryError
from elasticzero.launcher.store.data_loss import History

MAX_OPERATIONS = 128
"""Maximum number of operations in a transaction; etcd refuses more."""
MAX_COMPARED_BYTES = 1 << 19
"""Maximum number of bytes of a value that a condition repeats: with it, and with what is put, a
request must have at most the 1.5 MiB that etcd takes."""


class LeaseLost(RetryError):
    """Says that the lease of a write no longer exists: take a new one, and register again."""


class RequestTooLarge(ElasticZeroError):
    """Says that the store refused a write for its size, as it will each time; nothing was
    written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Holds one key with its value and revisions."""

    key: str
    value: bytes
    create_revision: int
    """Revision of the write that created the key; a key deleted and written again has a new one."""
    mod_revision: int
    """Revision of the last write."""
    leased: bool = False
    """True if the key is deleted when its writer's lease ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixState:
    """Holds every entry under a prefix as of one revision, oldest first (by create revision)."""

    revision: int
    entries: Mapping[str, Entry]
    history: int = 0
    """Number of times the store has lost its data, as far as this connection has seen: revisions of
    two histories cannot be compared."""


def is_before(state: PrefixState, written: tuple[int, int]) -> bool:
    """Returns whether what a watch has seen is from before a write.

    Args:
        state: What it has seen.
        written: The history that the write was made in, and its revision.
    """
    return state.history == written[0] and state.revision < written[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """States what must hold for a write to happen; at least one of the two revisions is given."""

    key: str
    mod_revision: int | None = None
    """The key was last written at this revision; 0: the key does not exist."""
    create_revision: int | None = None
    """The key was created at this revision; 0: the key does not exist."""
    value: bytes | None = None
    """The key also has this value: a revision alone may be that of another history."""

    def __post_init__(self) -> None:
        if self.mod_revision is None and self.create_revision is None:
            raise ValueError(f"condition on {self.key!r} names no revision")


def unchanged(key: str, entry: Entry | None) -> Condition:
    """Returns a condition that holds as long as a key is as it was read.

    A value of more than MAX_COMPARED_BYTES is told by its revision alone.

    Args:
        key: The key.
        entry: What was read; None: the key did not exist.
    """
    if entry is None:
        return Condition(key=key, mod_revision=0)
    value = entry.value if len(entry.value) <= MAX_COMPARED_BYTES else None
    return Condition(key=key, mod_revision=entry.mod_revision, value=value)


class Watch(Protocol):
    """Watches a prefix until it is closed."""

    def close(self) -> None:
        """Ends the watch: no call of `changed` begins after this; may be called from within one."""


class Lease(Protocol):
    """Keeps keys in the store alive, by a thread of its own, until it is closed."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> int:
        """Returns the TTL that the store granted, which may be more than was requested."""

    @property
    def lost(self) -> bool:
        """Returns whether the store said that the lease is gone; it never comes back."""

    @property
    def confirmed_s(self) -> float:
        """Returns when the last confirmed keepalive was sent (monotonic clock of this process).

        The lease lives at least until `confirmed_s + ttl_s`.
        """

    def close(self, *, revoke: bool) -> None:
        """Ends the keepalives; `revoke` deletes the lease's keys at once, if the store can be
        reached."""


class Store(Protocol):
    """Stores keys with revisions for all agents of a job.

    Every method raises `StoreUnavailable` when the store does not answer in time.
    """

    @property
    def reachable(self) -> bool:
        """Returns whether the last request to the store was answered."""

    @property
    def last_outage_end_s(self) -> float:
        """Returns when the store last came back after an outage, on the monotonic clock of this
        process; 0.0 if it had none."""

    @property
    def history(self) -> History:
        """Returns how often the store was found to have lost its data: wiped, restored from a
        backup, or replaced by another. From then on revisions and leases are others. A caller that
        finds a loss begins another history in it."""

    def read(self, prefix: str, *, limit: int = 0) -> PrefixState:
        """Returns all entries whose key begins with `prefix`; with a limit, the first so many by
        create revision. Linearizable."""

    def count(self, prefix: str, revision: int) -> int:
        """Returns how many entries existed under `prefix` at a revision; those that are gone since
        may be left out. It costs the store hardly more than a read of one key."""

    def write(
        self,
        puts: Mapping[str, bytes],
        *,
        deletes: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        lease: Lease | None = None,
    ) -> int | None:
        """Writes in one transaction, all or nothing.

        Args:
            puts: Values to put, by name.
            deletes: Names to delete; one that ends in "/" deletes every key under it.
            conditions: What must hold for anything to be written.
            lease: Lease with which the keys end; None: they stay.

        Returns:
            The revision of the write, or None when a condition did not hold.

        Raises:
            LeaseLost: The lease is gone.
            ValueError: No transaction can hold this.
            StoreUnavailable: It is not known whether the write took place; the message says so.
        """

    def watch(self, prefix: str, changed: Callable[[PrefixState], None]) -> Watch:
        """Calls `changed` with the whole of `prefix` now and after every change, from one thread.

        The calls come in the order of histories and revisions; changes that come close together may
        be combined in one. An outage of the store delays the calls and nothing else. A call may
        begin and close watches, but not wait for the store, whose answers come in the same thread.
        """

    def lease(self, ttl_s: int, *, on_lost: Callable[[], None] | None = None) -> Lease:
        """Returns a new lease; `on_lost` is called once, from the store's thread, when it is
        lost."""

    def close(self) -> None:
        """Ends all watches and keepalives; leases that were not revoked expire by themselves."""


def check_write(
    puts: Mapping[str, bytes], deletes: Sequence[str], conditions: Sequence[Condition]
) -> None:
    """Refuses a transaction that etcd would refuse whatever it holds.

    Args:
        puts: Values to put, by name.
        deletes: Names to delete.
        conditions: What must hold.

    Raises:
        ValueError: The transaction has too many operations, or two for one key.
    """
    sizes = {"puts and deletes": len(puts) + len(deletes), "conditions": len(conditions)}
    for what, count in sizes.items():
        if count > MAX_OPERATIONS:
            raise ValueError(f"{count} {what} in one write; the store takes {MAX_OPERATIONS}")
    for name in deletes:
        for key in puts:
            if key == name or (name.endswith("/") and key.startswith(name)):
                raise ValueError(f"one write both puts and deletes {key!r}")


def job_prefix(job: str) -> str:
    """Returns the prefix of all keys of one job."""
    return f"/elasticzero/{job}/"
