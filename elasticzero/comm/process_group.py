"""Sets up the process groups of one generation under a deadline, aborts them, ends them by name,
and verifies the results of their collectives.

The group of all ranks is torch's default group too, for scripts that call collectives by
themselves. No call here relies on that: each names its group.

Gloo's own abort does not wake a collective that waits for a stopped peer, and only the ranks that
are connected to a killed peer in the running collective notice its death. Shutting the group's TCP
connections does both: the first rank that notices shuts them, and all others notice within
milliseconds. NCCL has an abort, after which its collectives end with arbitrary values: so their
results count only after `ProcessGroups.verify_collectives`.
"""

from __future__ import annotations

import gc
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from elasticzero.comm import barriers, nccl
from elasticzero.comm.barriers import LEAST, Call
from elasticzero.comm.control_tree import WIDTH, MaxTree, join
from elasticzero.comm.gloo import destroy_process_group
from elasticzero.comm.rendezvous import ClosableStore, RankInfo
from elasticzero.comm.store.addressed import AddressedStore
from elasticzero.data.hashing import mix64
from elasticzero.rank_groups.connections import Connections, new_connections, shut_connections
from elasticzero.rank_groups.group import RankGroup
from elasticzero.torch_internals.groups import (
    OWN_GROUP,
    PrefixStore,
    collectives_begun,
    forget_group,
    replace_default_group,
    script_groups,
)

WORLD, APART, ROW, REPLICAS = "all ranks", "all ranks, apart", "a row", "the replicas of a shard"
"""The names of a generation's groups."""
DESTROY_TIMEOUT_S = 0.5
"""Time in seconds after which the destruction of groups counts as hanging."""
CLOSED = "nccl: the connections to the other ranks are closed"
POLL_S = 0.1
"""Pause in seconds between two queries of NCCL's errors."""

_closed_groups: list[dist.ProcessGroup] = []
"""Groups that were closed but are never destroyed. Gloo's destructor joins its threads while it
holds Python's global lock, and such a thread may wait for that lock to drop a finished operation:
destroying a group can hang (seen with torch 2.13, one time in six)."""

MAX_TEXT_BYTES = 512
"""Maximum length of a text that one rank gives to all; the rest is cut off."""


_OF_WORLD = (
    *("rank_info", "control_tree", "world", "_store", "_row", "_apart", "_open"),
    *("_verified_at", "_number"),
)
"""The attributes of `ProcessGroups` that `enter` exchanges."""


class ProcessGroups:
    """Connects the ranks of one generation by groups, for tensors, and the control tree.

    Where a generation is entered inside of a loop, the same object connects those of the next.
    """

    def __init__(
        self,
        info: RankInfo,
        device: torch.device,
        tree: MaxTree,
        world: RankGroup,
        store: AddressedStore | None = None,
    ) -> None:
        """Takes over the groups that `connect` has set up.

        Args:
            info: This rank's place among the ranks.
            device: The device of the tensors that collectives take.
            tree: The tree by which ranks exchange a few numbers.
            world: The group of all ranks.
            store: The store of the ranks, which lives as long as the groups: torch's C++ keeps no
                object of Python; None: nobody uses it any more.
        """
        self.rank_info = info
        self.control_tree = tree
        self.world = world
        """The group of all ranks."""
        self._store = store
        self._row: RankGroup | None = None
        """The group of this rank's row; None: `divide` has made none."""
        self._apart: RankGroup | None = None
        """The group of all ranks for collectives inside of a backward; None: none is made yet."""
        self._open = {world.name: world} if world.is_connected else {}
        """The groups that have not ended, in the order in which they were made."""
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._has_met = world.is_connected
        """True once the ranks were connected."""
        self._shut = threading.Event()
        self._shut_lock = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._verified_at: tuple[int, int] | None = None
        self._number = zlib.crc32(info.token.encode()) << 32
        self.awaits_gpu = False
        """True while the main thread waits for the GPU."""
        if self._on_gpu:
            threading.Thread(target=self._poll_nccl, name="elasticzero-nccl", daemon=True).start()

    @property
    def results_suspect(self) -> bool:
        """Returns whether collectives were aborted here, after which their results may be
        arbitrary."""
        return self._on_gpu and self._shut.is_set()

    def shut(self) -> None:
        """Breaks every connection of this generation's groups, in any state; any thread may call
        it.

        A collective that runs here or in a peer ends at once: gloo's with an error, and NCCL's as
        if it had succeeded, which `verify_collectives` detects.
        """
        with self._shut_lock:
            if self._shut.is_set():
                return
            self._shut.set()
            self.control_tree.shut()
            shut_connections(group.connections for group in self._open.values())
            if self._on_gpu:
                abort = threading.Thread(
                    target=nccl.abort,
                    args=(self._with_script_groups(),),
                    name="elasticzero-abort",
                    daemon=True,
                )
                abort.start()
                self._aborting = abort

    def _with_script_groups(self) -> list[dist.ProcessGroup]:
        """Returns the process groups of this generation, and those that its script has made, if
        this is the world that the script is in; the caller has the lock."""
        made = [group.process_group for group in self._open.values()]
        return [*made, *script_groups()] if dist.group.WORLD in made else made

    def divide(self, row: int) -> tuple[RankGroup, RankGroup]:
        """Sets up the groups of a world of rows of `row` ranks; all ranks call this together.

        Returns the group of this rank's row, and that of the ranks at its place in all rows. They
        are shut with the other groups. The loss of a peer raises an error of torch.
        """
        info = self.rank_info
        first, place = info.rank - info.rank % row, info.rank % row
        self._row = self._make(ROW, range(first, first + row))
        return self._row, self._make(REPLICAS, range(place, info.world_size, row))

    def _make(self, name: str, ranks: Sequence[int]) -> RankGroup:
        """Returns a new group of these ranks once they are connected; they make it together.

        Args:
            name: A name that no other group of the generation has.
            ranks: Its ranks.
        """
        with _recording(self.rank_info, self._device, self._store) as connections:
            process_group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=self.rank_info.collective_timeout_s),
                use_local_synchronization=True,
                group_desc=OWN_GROUP,
            )
            group = RankGroup(name, ranks, process_group, connections)
            with self._shut_lock:
                self._open[name] = group
            self._break_late(group)
            dist.all_reduce(torch.zeros(1, device=self._device), group=process_group)
        self._break_late(group)
        return group

    def _break_late(self, group: RankGroup) -> None:
        """Breaks the connections that were made after the other groups were shut."""
        if self._shut.is_set():
            shut_connections([group.connections])

    def apart(self) -> RankGroup:
        """Returns a group of all ranks for collectives that a backward calls; all ranks call this
        together the first time.

        The exchanges of buckets begin in the group of all ranks while a backward runs, on each rank
        as soon as its own gradients are there. A collective of the same group would come before
        them on one rank and after them on another, and one would take the other's values.
        """
        if self._apart is None:
            self._apart = self._make(APART, self.world.ranks)
        return self._apart

    def _poll_nccl(self) -> None:
        """Shuts the groups when NCCL reports an error, which a wait for the GPU does not notice."""
        while not self._shut.wait(POLL_S):
            if self._has_failed():
                self.shut()

    def _has_failed(self) -> bool:
        with self._shut_lock:
            groups = self._with_script_groups()
        return nccl.failed(groups)  # which may wait for a communicator that is being set up

    def verify_collectives(self) -> None:
        """Waits for the GPU on every rank; raises if any rank's groups were shut before.

        All ranks call this together. Results of NCCL's collectives may be used for good only after
        it. Gloo's collectives raise by themselves.
        """
        if not self._on_gpu or not self._has_met or self.rank_info.world_size == 1:
            return
        self.awaits_gpu = True
        try:
            done = torch.cuda.Event(blocking=True)
            done.record()
            done.synchronize()
            if self._shut.is_set():
                raise dist.DistBackendError(CLOSED)
            self.verify_with_peers()
            self._verified_at = collectives_begun(self.world.process_group)
        finally:
            self.awaits_gpu = False

    @property
    def no_collective_since_verified(self) -> bool:
        """Returns whether this rank has begun no collective since `verify_collectives`.

        Then none of its values comes from an aborted one. torch does not count what `recv` gets
        from one rank.
        """
        verified_at = self._verified_at
        return verified_at is not None and verified_at == collectives_begun(
            self.world.process_group
        )

    def verify_with_peers(self) -> None:
        """Raises unless every rank takes part, and none aborts meanwhile.

        The ranks sum a fresh number that each of them can compute. If a rank gave none, or its
        number was lost, other bytes of some buffer take its place, and the sum is wrong.
        """
        self._number += 1
        number = mix64(self._number) >> 32
        total = torch.full((1,), number, dtype=torch.int64, device=self._device)
        dist.all_reduce(total, group=self.world.process_group)
        if int(total.item()) != number * self.rank_info.world_size or self._shut.is_set():
            raise dist.DistBackendError(CLOSED)

    def drain_sends(self) -> None:
        """Waits until this rank's sends to a peer's GPU have arrived, before the rank leaves.

        All ranks have agreed to stop. Gloo's collectives leave nothing to wait for.
        """
        if self._on_gpu:
            self.control_tree.allreduce_max(0)

    def barrier(self, call: Call, number: int = 0, where: str = "") -> int:
        """Waits until all ranks make this call.

        Args:
            call: The call that all ranks are expected to make.
            number: This rank's number, such as 1 for a request; by default 0, for a call that
                carries none.
            where: This rank's place, which follows the call in the message of an error.

        Returns:
            The greatest of the ranks' numbers.

        Raises:
            UserError: This rank makes another call than the rest.
            RetryError: Another rank makes another call.
        """
        if self.rank_info.world_size == 1:
            return number
        rank = self.rank_info.rank
        fill = [LEAST] * (WIDTH - 3)
        maxima = self.control_tree.allreduce_maxima([number, *fill, *barriers.marks(call, rank)])
        barriers.check(maxima[-2:], call, rank, where)
        return maxima[0]

    def all_equal(self, call: Call, number: int, where: str = "") -> bool:
        """Returns whether all ranks give the same number; all ranks call this together.

        Args:
            call: The call that all ranks are expected to make.
            number: This rank's number, of 63 bits.
            where: This rank's place, which follows the call in the message of an error.

        Raises:
            UserError: This rank makes another call than the rest.
            RetryError: Another rank makes another call.
        """
        if self.rank_info.world_size == 1:
            return True
        rank = self.rank_info.rank
        fill = [LEAST] * (WIDTH - 4)
        numbers = [number, ~number, *fill, *barriers.marks(call, rank)]
        maxima = self.control_tree.allreduce_maxima(numbers)
        barriers.check(maxima[-2:], call, rank, where)
        return maxima[0] == ~maxima[1]

    def share_text(self, text: str | None) -> str:
        """Returns one rank's text on every rank: that of the highest rank that gives one.

        If none does, the text is empty. All ranks call this together.
        """
        if self.rank_info.world_size == 1:
            return text or ""
        source = self.control_tree.allreduce_max(-1 if text is None else self.rank_info.rank)
        table = torch.zeros(MAX_TEXT_BYTES, dtype=torch.int64)
        if text is not None and source == self.rank_info.rank:
            data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
            table[: len(data)] = torch.tensor(list(data), dtype=torch.int64)
        text_bytes = bytes(self.sum(table).tolist()).rstrip(bytes(1))
        return text_bytes.decode(errors="ignore")

    def sum(self, table: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' tensors, on the CPU; all ranks call this together."""
        if self.rank_info.world_size == 1:
            return table
        summed = table.to(self._device)
        dist.all_reduce(summed, group=self.world.process_group)
        self.verify_collectives()
        return summed.cpu()

    def sum_of_row(self, table: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the tensors of this rank's row, on the CPU, where `divide` was
        called; all ranks of the row call this together."""
        assert self._row is not None
        summed = table.to(self._device)
        dist.all_reduce(summed, group=self._row.process_group)
        return summed.cpu()

    def exchange(self, message: bytes) -> list[bytes]:
        """Returns the value of each rank, by rank; all ranks call this together.

        When it returns every rank has all values: a broken connection cannot take them away.
        """
        messages = self._gather(message)
        with suppress(dist.DistError):
            self.control_tree.allreduce_max(0)
        return messages

    def _gather(self, message: bytes) -> list[bytes]:
        if self.rank_info.world_size == 1:
            return [message]
        longest = self.control_tree.allreduce_max(len(message))
        padded = len(message).to_bytes(8, "little") + message.ljust(longest, b"\0")
        padded_bytes = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self._device)
        gathered = [torch.empty_like(padded_bytes) for _ in range(self.rank_info.world_size)]
        dist.all_gather(gathered, padded_bytes, group=self.world.process_group)
        self.verify_collectives()
        texts = [bytes(tensor.cpu().numpy()) for tensor in gathered]
        return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives every rank the tensors of rank 0, in one operation per dtype.

        If it fails, no tensor is changed.
        """
        if self.rank_info.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        with torch.no_grad():
            flat = {
                dtype: torch.cat([tensor.detach().reshape(-1) for tensor in same])
                for dtype, same in by_dtype.items()
            }
            for values in flat.values():
                dist.broadcast(values.view(torch.uint8), 0, group=self.world.process_group)
            self.verify_collectives()
            for dtype, same in by_dtype.items():
                parts = flat[dtype].split([tensor.numel() for tensor in same])
                for tensor, part in zip(same, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    @property
    def collective_count(self) -> tuple[int, int] | None:
        """Returns how many collectives of the group of all ranks have begun here; None: that is not
        known, or this rank is not connected."""
        return collectives_begun(self.world.process_group) if self.world.is_connected else None

    @property
    def store(self) -> AddressedStore:
        """Returns the store at which the ranks have met."""
        assert self._store is not None
        return self._store

    @property
    def device(self) -> torch.device:
        """Returns the device of messages between ranks."""
        return self._device

    def broadcast_bytes(self, values: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's bytes on every rank, in the memory of `values`, of the same number."""
        dist.broadcast(values, 0, group=self.world.process_group)
        self.verify_collectives()
        return values

    def enter(self, following: ProcessGroups) -> None:
        """Goes over to the groups of the next world, and gives `following` those of this one, which
        `following.retire` ends.

        Objects that refer to this one are then of the next world. The main thread calls this
        between two steps, where no collective runs; all ranks that stay do so at one boundary.

        Args:
            following: What `next_world.connect_beside` has returned.

        Raises:
            DistBackendError: The groups of one of the two were shut; nothing is changed then.
        """
        with self._shut_lock, following._shut_lock:
            self._become_default(following)
            for name in _OF_WORLD:
                theirs = getattr(following, name)
                setattr(following, name, getattr(self, name))
                setattr(self, name, theirs)
        for ended in following._open.values():  # torch names new groups by the number of others
            self._forget(ended.process_group)

    def connect_as(self, connected: ProcessGroups) -> None:
        """Takes over the groups of the world that this rank has prepared for without being
        connected to it (`unconnected`); objects that refer to this one, or to its group of all
        ranks, are connected then.

        Args:
            connected: What `next_world.connect_beside` has returned, which has no groups then.

        Raises:
            DistBackendError: The groups were shut; nothing is changed then.
        """
        with self._shut_lock, connected._shut_lock:
            self._become_default(connected)
            self.world.adopt(connected.world)
            self.control_tree, self._store = connected.control_tree, connected._store
            self._open, connected._open = {self.world.name: self.world}, {}
            self._has_met = True
            connected._shut.set()

    def _become_default(self, following: ProcessGroups) -> None:
        """Makes the group of all ranks of another world torch's default group; the caller has both
        locks. Raises `DistBackendError` if the groups of one of the two were shut."""
        info, store = following.rank_info, following.store
        if self._shut.is_set() or following._shut.is_set():
            raise dist.DistBackendError(CLOSED)
        group, name = following.world.process_group, f"{OWN_GROUP}/{info.token}"
        backend = "nccl" if self._on_gpu else "gloo"
        replace_default_group(group, name, PrefixStore(info.token, store), backend)

    def retire(self) -> threading.Thread:
        """Ends these groups in a thread, which this returns; torch has forgotten them at once."""
        with self._shut_lock:
            last = [self._open.pop(name).take() for name in reversed(tuple(self._open))]
        for group in last:
            self._forget(group)

        def end() -> None:
            self.release()
            nccl.abort(last)
            last.clear()

        thread = threading.Thread(target=end, name="elasticzero-retire", daemon=True)
        thread.start()
        return thread

    def _forget(self, process_group: dist.ProcessGroup) -> None:
        """Has torch forget a group; NCCL's communicator is ended where nothing waits for that."""
        if self._on_gpu:
            forget_group(process_group)
        else:
            _unregistered(process_group)

    def release(self) -> None:
        """Ends all work on the groups: when this returns, none runs any more."""
        with self._shut_lock:
            self._shut.set()
            aborting = self._aborting
        if aborting is not None:
            aborting.join()
        self.control_tree.close()
        if self._store is not None:
            self._store.close()

    def close(self) -> None:
        """Closes the groups; call it once no work runs on them."""
        self.release()
        _closed_groups.extend(self._take(*reversed(self._open)))

    def end_all(self) -> bool:
        """Ends all groups of a generation that has ended, as `end` does."""
        self.release()
        return self.end(*reversed(self._open))

    def end(self, *names: str) -> bool:
        """Ends these groups, in which no rank calls a collective any more; the others go on.

        Gloo's destructor waits for the operations of a group, and one of these may hang for good
        (seen with torch 2.13: a send that a closed connection has swallowed). So a separate thread
        drops the last reference, and the destructor releases Python's lock.

        Returns whether they have ended; False: an operation hangs in one.
        """
        last = self._take(*names)
        gc.collect()
        thread = threading.Thread(target=last.clear, name="elasticzero-release", daemon=True)
        thread.start()
        thread.join(DESTROY_TIMEOUT_S)
        return not thread.is_alive()

    def _take(self, *names: str) -> list[dist.ProcessGroup]:
        """Returns the last references to these groups, which are torch's no more."""
        with self._shut_lock:
            taken = [self._open.pop(name).take() for name in names]
        return [_unregistered(group) for group in taken]


def _unregistered(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group once torch has forgotten it, unless the script has ended it already. With its
    default group torch forgets all."""
    with suppress(ValueError):
        destroy_process_group(process_group)
    return process_group


def connect(info: RankInfo, device: torch.device, store: ClosableStore) -> ProcessGroups:
    """Sets up the groups of the ranks at this rendezvous.

    The loss of a peer raises an error of torch. The caller needs a watchdog as its limit, because
    torch's store can block far past its timeout.

    Args:
        info: This rank's place, the token that keeps generations apart, and the time limits.
        device: The device of the tensors that collectives take; a GPU means NCCL, the CPU gloo.
        store: The store that `rendezvous` has returned; the groups close it.

    Returns:
        The groups, whose ranks have all made one collective.
    """
    try:
        return _connect(info, device, store)
    except BaseException:
        store.close()
        raise


def _connect(info: RankInfo, device: torch.device, store: ClosableStore) -> ProcessGroups:
    addressed = AddressedStore(store)
    if device.type == "cuda":
        nccl.set_up(device)
    with _recording(info, device, addressed) as connections:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(info.token, addressed),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=info.collective_timeout_s),
        )
        world = RankGroup(WORLD, range(info.world_size), dist.group.WORLD, connections)
        dist.all_reduce(torch.zeros(1, device=device), group=world.process_group)
        if device.type == "cuda":
            torch.cuda.synchronize()
    tree = join(info, store)
    return ProcessGroups(info, device, tree, world, addressed)


def _recording(
    info: RankInfo, device: torch.device, store: AddressedStore | None
) -> AbstractContextManager[Connections]:
    """Returns a context that yields what the connections of a group are known by that is made and
    connected in it. NCCL does not tell its ports.

    Args:
        info: This rank's place.
        device: The device of the group's tensors.
        store: The store at which the ranks of the group meet.
    """
    if device.type == "cuda":
        return new_connections(info.master_port)
    assert store is not None
    return store.recording()
