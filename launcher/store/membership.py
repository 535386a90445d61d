"""Registers this node in the store under a lease, and keeps it registered.

A lapsed lease (etcd was away for longer than its TTL) is replaced at once. The node keeps its
incarnation, and so its place, if `world` still names it, or a proposal for the next one, into which
its workers may have come; otherwise it registers as a new one. What stands at the node's key and
cannot be read is written over, unless it has a lease: then it is the registration of another
release's agent.

What stands at the node's key at a lower revision than this node has put there shows that the store
has lost its data (`data_loss`, rule 3).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from zlib import crc32

from elasticzero.errors import StoreUnavailable, UserError
from elasticzero.launcher import addresses
from elasticzero.launcher.protocol.documents import Member, to_bytes
from elasticzero.launcher.store.api import Condition, Entry, Lease, LeaseLost, Store
from elasticzero.launcher.store.decoding import counts_as_node, member_at
from elasticzero.serialization import RecordError

RETRY_S = 0.3
PAUSE_SHARE_OF_TTL = 0.25
OUTAGE_SHARE_OF_TTL = 0.6
"""Share of the TTL; a longer gap between two confirmations means that the store was away, unless no
check was made for so long."""


def new_incarnation() -> str:
    return secrets.token_hex(4)


def bound_socket(host: str = addresses.EVERYWHERE) -> socket.socket:
    """Returns a TCP socket bound to a free port and not listening: the port stays reserved for rank
    0's store.

    It is bound to the address under which other nodes reach this one alone, where it is plain which
    of this machine's that is.
    """
    with suppress(OSError):  # a router translates the address, or it is gone
        return addresses.bound_socket(addresses.only_address(host))
    return addresses.bound_socket()


class Membership:
    """Registers `member` and keeps it registered until `close`."""

    def __init__(
        self,
        store: Store,
        member: Member,
        ttl_s: int,
        store_socket: socket.socket,
        *,
        bind: Callable[[], socket.socket] = bound_socket,
        draw_incarnation: Callable[[], str] = new_incarnation,
    ) -> None:
        """Creates a registration that is not in the store yet.

        Args:
            store: The job's part of etcd.
            member: What is registered.
            ttl_s: Seconds after which the registration lapses if it is not renewed.
            store_socket: Socket that is bound to the member's `store_port`.
            bind: Returns another such socket, for the next world.
            draw_incarnation: Returns a new incarnation, once no world names the present one.
        """
        self.me = member
        self._outage_end_s = 0.0
        self._store = store
        self._ttl_s = ttl_s
        self._socket = store_socket
        self._bind = bind
        self._draw_incarnation = draw_incarnation
        self._lease: Lease | None = None
        self._retry_s = 0.0
        self._tries = 0
        self._is_due = False
        """True if the last check has found that the node is to be registered anew."""
        self._last_confirmed_s = 0.0
        self._last_check_s = 0.0
        self._registered = member
        self._own_incarnations = {member.incarnation}
        """Every incarnation under which this agent was registered: a restored backup may bring back
        an earlier one, which does not lapse where its lease is still renewed."""
        self._is_registered = False
        """True if the registration was put under the present lease."""
        self._seen_revision = 0
        self._was_seen = False
        """True once a registration of this name, be it the own one, was seen; then it is read
        before each write."""
        self._name_taken = False
        """True if the last one that was seen is another agent's."""
        self.revision = 0
        """Revision at which the registration was put."""
        self._put_in_history = 0
        """History of the store in which it was."""
        self.lapses = 0
        """Number of times the lease was lost."""
        self._lapsed: Callable[[], None] | None = None
        """Called when a lease was lost."""

    @property
    def key(self) -> str:
        return f"members/{self.me.node}"

    @property
    def is_registered(self) -> bool:
        """Returns whether the registration was put under a lease that lives, as far as is known."""
        return self._is_registered and self._lease is not None and not self._lease.lost

    @property
    def confirmed_s(self) -> float:
        """Returns when the store last confirmed the lease."""
        return self._lease.confirmed_s if self._lease is not None else 0.0

    @property
    def outage_end_s(self) -> float:
        """Returns the end of the last outage that this node has noticed."""
        return self._outage_end_s

    @property
    def due_s(self) -> float:
        """Returns the time at which `check` has something to do again; infinite: it has nothing
        to do until something changes."""
        return self._retry_s if self._is_due or not self.is_registered else inf

    def call_at_lapse(self, call: Callable[[], None]) -> None:
        """Has `call` be called, in a thread of the store, whenever the lease is lost."""
        self._lapsed = call

    def _note_lapse(self) -> None:
        if self._lapsed is not None:
            self._lapsed()

    def note_outage(self, ended_s: float) -> None:
        """Notes that the store was away until then.

        Other nodes could not write either, so their time to answer begins anew.
        """
        self._outage_end_s = ended_s

    def still_registered(self) -> Condition:
        """Returns a condition that holds only while this registration exists, so that a leader
        whose place was taken cannot write."""
        entry = self._read()
        if entry is None or not self._is_mine(entry):
            self._is_registered &= entry is None or counts_as_node(entry)
            raise StoreUnavailable(
                f"the registration of {self.me.node} has lapsed; it is renewed first"
            )
        return Condition(key=self.key, mod_revision=entry.mod_revision, value=entry.value)

    def lost_data(self, now_s: float) -> None:
        """Has the registration put anew, for the store has lost its data.

        The other nodes have time to do so too before they count as missing.
        """
        self._is_registered = False
        self._seen_revision = -1
        self._retry_s = 0.0
        self.note_outage(now_s)

    def join(
        self,
        waiting: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Registers this node.

        It waits twice the TTL and a second for a predecessor of the same name to lapse, for etcd
        renews leases when it comes back itself.

        Args:
            waiting: Receives a line on what is waited for.
            clock: Returns the time, monotonic.
            sleep: Waits for some seconds.

        Raises:
            UserError: The name stays taken.
            StoreUnavailable: The store is too slow: every lease had lapsed before its first use.
        """
        deadline_s = clock() + 2 * self._ttl_s + 1.0
        reported = False
        while not self._registers():
            late = clock() > deadline_s
            if late and not self._name_taken:
                raise StoreUnavailable(
                    f"{self.me.node} could not register within {2 * self._ttl_s + 1} s: each "
                    f"lease of {self._ttl_s} s had lapsed when it was to be used; the agent tries "
                    "again: check the load of etcd and of this machine, or give a longer "
                    "--lease-ttl"
                )
            if late:
                raise UserError(
                    f"another agent is registered as node {self.me.node!r} and is alive; give each "
                    "node a name of its own with --node-name, or stop the other agent"
                )
            if self._name_taken and not reported:
                waiting(
                    f"a former registration of {self.me.node} has not lapsed yet; waiting for it"
                )
                reported = True
            sleep(RETRY_S)

    def brings(self, step: int, shards: int) -> None:
        """Has registrations say from now on that the node has brought along a state.

        Args:
            step: Its step; 0: they say nothing.
            shards: Number of its shards.
        """
        self.me = replace(self.me, brought_step=step, brought_shards=shards)

    def check(self, now_s: float, *, named: bool, world_revision: int) -> None:
        """Renews what has lapsed, or what the leader ended because this node was silent.

        Args:
            now_s: Present time, monotonic.
            named: Whether the world, or the one that is proposed, has a place for this incarnation,
                or there is no world yet.
            world_revision: Revision of the world's document.
        """
        lease = self._lease
        if lease is None:
            return
        unchecked_s = now_s - self._last_check_s + self._ttl_s / 3
        longest_s = max(OUTAGE_SHARE_OF_TTL * self._ttl_s, unchecked_s)
        if self._last_confirmed_s and lease.confirmed_s - self._last_confirmed_s > longest_s:
            self.note_outage(lease.confirmed_s)
        self._last_check_s = now_s
        self._last_confirmed_s = max(self._last_confirmed_s, lease.confirmed_s)
        left_out = not named and self._seen_revision != world_revision
        self._is_due = not self._is_registered or lease.lost or left_out
        if not self._is_due or now_s < self._retry_s:
            return
        self._retry_s = now_s + self._pause_s()
        self._tries += 1
        if lease.lost:
            self.note_outage(now_s)
        with suppress(StoreUnavailable, LeaseLost):
            if left_out and self._is_in_place():
                self._seen_revision = world_revision
                self._tries, self._is_due = 0, False
                return
            if not named and self.me.incarnation == self._registered.incarnation:
                self.renew_incarnation()
            if self.register():
                self._seen_revision = world_revision
                self._tries, self._is_due = 0, False

    def renew_incarnation(self) -> None:
        """Draws another incarnation, under which the node registers next."""
        self.me = replace(self.me, incarnation=self._draw_incarnation())

    def _pause_s(self) -> float:
        """Returns the seconds before the next try to register anew: longer after each, and
        different for each node, but short enough that the others do not take a live node for a lost
        one."""
        longest_s = max(RETRY_S, PAUSE_SHARE_OF_TTL * self._ttl_s)
        spread = crc32(f"{self.me.node} {self._tries}".encode()) / 2**32
        return min(longest_s, RETRY_S * 2.0 ** min(self._tries, 10)) * (0.5 + 0.5 * spread)

    def _registers(self) -> bool:
        try:
            return self.register()
        except LeaseLost:  # etcd was away for longer than the lease lives: take another
            return False

    def register(self) -> bool:
        """Puts the registration under a live lease; returns False when another incarnation has the
        name."""
        if not self._was_seen and self._put(0):
            return True
        entry = self._read()
        self._name_taken = entry is not None and not self._is_mine(entry) and counts_as_node(entry)
        return not self._name_taken and self._put(entry.mod_revision if entry is not None else 0)

    def _put(self, before: int) -> bool:
        """Writes the registration where the key was last written at that revision; 0: where it does
        not exist."""
        self._was_seen = True
        if self._lease is None or self._lease.lost:
            if self._lease is not None:
                self._lease.close(revoke=False)
                self.lapses += 1
            self._is_registered = False
            self._lease = self._store.lease(self._ttl_s, on_lost=self._note_lapse)
        history = self._store.history.number
        condition = Condition(key=self.key, mod_revision=before)
        put = {self.key: to_bytes(self.me)}
        revision = self._store.write(put, conditions=[condition], lease=self._lease)
        if revision is None:
            return False
        self.revision, self._put_in_history = revision, history
        self._registered = self.me
        self._own_incarnations.add(self.me.incarnation)
        self._is_registered = True
        return True

    def verify(self) -> None:
        """Has the registration put anew if something else is at its key, which no lease tells.

        Raises `StoreUnavailable`.
        """
        if self._is_registered and not self._is_in_place():
            self._is_registered = False

    def _read(self) -> Entry | None:
        """Returns what stands at this node's key; raises `StoreUnavailable` also if that shows that
        the store has lost its data."""
        entry = self._store.read(self.key).entries.get(self.key)
        if entry is not None and entry.mod_revision < self.revision:
            put, is_of = self.revision, entry.mod_revision
            reason = f"{self.key} was put at revision {put} and is of {is_of}"
            if self._store.history.begin(reason, self._put_in_history):
                raise StoreUnavailable(f"etcd lost its data ({reason})")
        return entry

    def _is_in_place(self) -> bool:
        """Returns whether the present registration exists, or that of another agent of this name.

        An earlier one of this agent does not count. A restored backup has brought it back, and its
        lease may still be renewed; a world would name a member that this agent is no more.
        """
        entry = self._read()
        if entry is None or not counts_as_node(entry):
            return False
        return not self._is_mine(entry) or member_at(entry).incarnation == self.me.incarnation

    def _is_mine(self, entry: Entry) -> bool:
        try:
            incarnation = member_at(entry).incarnation
        except RecordError:
            return False
        return incarnation == self.me.incarnation or incarnation in self._own_incarnations

    def take_store_socket(self) -> socket.socket:
        """Returns the socket bound to the registered port, for rank 0; a new one is offered from
        now on."""
        taken = self._socket
        self._socket = self._bind()
        self.me = replace(self.me, store_port=self._socket.getsockname()[1])
        return taken

    def close(self) -> None:
        """Releases the name at once."""
        if self._lease is not None:
            with suppress(StoreUnavailable):
                self._lease.close(revoke=self._store.reachable)
            self._lease = None
        self._socket.close()


def reachable_address(endpoint: str) -> str:
    """Returns the address under which machines that reach an endpoint also reach this one.

    Args:
        endpoint: HOST:PORT, with or without a scheme.
    """
    host = endpoint.rpartition("://")[2].rstrip("/").rpartition(":")[0]
    return addresses.source_address(host or addresses.loopback()) or socket.gethostname()
