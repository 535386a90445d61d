"""Sums flat tensors over ranks by messages that a codec has encoded.

Each rank has a chunk of the tensor. It gets this chunk of all others and adds it to its own, in the
format of the tensor: that is a reduce-scatter. For an all-reduce it encodes the sum then and sends
it to all others. All take what it has sent, and so does it itself, so that all ranks have the same
bits. Its own part of the sum is never encoded before. What encoding takes from a number is known to
the rank that encodes it, and is left for `residual.py`.
Shapes: E elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.options.wire import EXACT, Wire
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.codecs import Codec
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.rank_groups.group import RankGroup
from elasticzero.step_clock import wait_for

TAG = 0x6577
"""Keeps these messages apart from those that a script sends by itself."""
_GRAIN = 256
"""Chunks of an all-reduce begin at a multiple of this number of elements."""

Take = Callable[[int], Tensor]
"""Returns memory for messages: as many bytes as it is asked for, with any contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Names the ranks that sum gradients together, and the format of these between them."""

    index: int
    """This rank's place among them."""
    group: RankGroup
    wire: Wire = EXACT
    traffic: Traffic = field(default_factory=Traffic)
    """Counts what is sent."""

    @classmethod
    def of_row(cls, mesh: Mesh, traffic: Traffic) -> Peers:
        return cls(index=mesh.shard, group=mesh.shard_group, traffic=traffic)

    @classmethod
    def of_replicas(cls, mesh: Mesh, traffic: Traffic) -> Peers:
        return cls(index=mesh.replica, group=mesh.replica_group, traffic=traffic)

    @property
    def count(self) -> int:
        return len(self.group.ranks)


class EncodedSum(Protocol):
    """Is a sum over ranks that is under way."""

    def add_up(self) -> None:
        """Waits for the first half of an all-reduce, and begins the second one."""

    def finish(self) -> None:
        """Waits for the sum."""


class ChunkSum:
    """Sums this rank's chunk of all ranks' tensors: a reduce-scatter."""

    def __init__(
        self,
        chunks: Sequence[Tensor],
        codec: Codec,
        peers: Peers,
        errors: Sequence[Tensor],
        take: Take | None = None,
    ) -> None:
        """Begins to send the others their chunks of this rank's tensor.

        Args:
            chunks: The chunk of each rank, by its place among them.
            codec: Encodes what is sent.
            peers: The ranks.
            errors: Become the chunks less what their ranks receive; this rank's own is left as it
                is.
            take: Returns memory for messages; None: it is allocated.
        """
        self._own, self._codec = chunks[peers.index], codec
        take = take or _allocator(self._own)
        sizes = [codec.message_bytes(chunk.numel()) for chunk in chunks]
        targets = _others(peers, 1)
        self._sent = _cut(take, {target: sizes[target] for target in targets})
        for target, message in self._sent.items():
            _encode(codec, chunks[target], message, errors[target])
        self._received = _cut(take, dict.fromkeys(_others(peers, -1), sizes[peers.index]))
        self._works = _begin(self._sent, self._received, peers)

    def add_up(self) -> None:
        """Does nothing: there is no second half."""

    def finish(self) -> None:
        """Waits for the others' messages, and adds them to this rank's chunk."""
        wait_for(self._works)
        for message in self._received.values():
            self._codec.add(message, self._own)
        self._works, self._sent, self._received = [], {}, {}


class CompressedSum:
    """Sums all ranks' tensors: an all-reduce, of which `add_up` begins the second half."""

    def __init__(self, flat_E: Tensor, codec: Codec, peers: Peers, errors_E: Tensor) -> None:
        """Begins to sum.

        Args:
            flat_E: This rank's tensor, which becomes the sum.
            codec: Encodes what is sent.
            peers: The ranks.
            errors_E: Becomes what this rank has not sent: of the others' chunks of its tensor, and
                of the sum of its own. All ranks' together are their tensors' sum less what `flat_E`
                becomes.
        """
        self._codec, self._peers = codec, peers
        bounds = _bounds(flat_E.numel(), peers.count)
        self._chunks = [flat_E[start:stop] for start, stop in bounds]
        self._errors = [errors_E[start:stop] for start, stop in bounds]
        self._sum = ChunkSum(self._chunks, codec, peers, self._errors)
        self._works: list[Any] = []
        self._messages: dict[int, Tensor] = {}
        """The encoded sum of each chunk, by the place of its rank."""

    def add_up(self) -> None:
        """Waits for the first half, and begins to send the sum of this rank's chunk to all."""
        self._sum.finish()
        chunks, codec, index = self._chunks, self._codec, self._peers.index
        sizes = {i: codec.message_bytes(chunk.numel()) for i, chunk in enumerate(chunks)}
        self._messages = _cut(_allocator(chunks[index]), sizes)
        message = self._messages[index]
        _encode(codec, chunks[index], message, self._errors[index])
        others = {place: self._messages[place] for place in _others(self._peers, -1)}
        self._works = _begin(dict.fromkeys(_others(self._peers, 1), message), others, self._peers)

    def finish(self) -> None:
        """Waits for the sums of the others' chunks, and takes all sums as they were sent."""
        wait_for(self._works)
        for place, message in self._messages.items():
            self._codec.decode(message, self._chunks[place])
        self._works, self._messages = [], {}


def _encode(codec: Codec, values_E: Tensor, message: Tensor, errors_E: Tensor) -> None:
    """Encodes values, and leaves in `errors_E` what the message does not have of them."""
    codec.encode(values_E, message)
    codec.decode(message, errors_E)
    torch.sub(values_E, errors_E, out=errors_E)


def _bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Returns the first element of each rank's chunk, and the end of it; the last may be empty."""
    chunk = -(-numel // (ranks * _GRAIN)) * _GRAIN
    return [(min(numel, chunk * i), min(numel, chunk * (i + 1))) for i in range(ranks)]


def _others(peers: Peers, direction: int) -> list[int]:
    """Returns the places of the other ranks by their distance from this one."""
    return [(peers.index + direction * i) % peers.count for i in range(1, peers.count)]


def _allocator(like: Tensor) -> Take:
    """Returns what allocates memory on the device of a tensor."""
    return lambda size: like.new_empty(size, dtype=torch.uint8)


def _cut(take: Take, sizes: dict[int, int]) -> dict[int, Tensor]:
    """Returns memory for a message of each size, end to end."""
    memory, stops = take(sum(sizes.values())), accumulate(sizes.values())
    return {i: memory[stop - sizes[i] : stop] for i, stop in zip(sizes, stops, strict=True)}


def _begin(sent: dict[int, Tensor], received: dict[int, Tensor], peers: Peers) -> list[Any]:
    """Begins to send and receive messages; returns what must be waited for.

    Args:
        sent: What each of the other ranks is sent, by its place; an empty one is not sent.
        received: Room for what each of them sends.
        peers: The ranks.
    """
    group, ranks = peers.group.process_group, peers.group.ranks
    operations = [
        dist.P2POp(function, message, ranks[place], group, TAG)
        for function, messages in ((dist.irecv, received), (dist.isend, sent))
        for place, message in messages.items()
        if message.numel()
    ]
    sizes = [sum(message.nbytes for message in side.values()) for side in (sent, received)]
    peers.traffic.count_messages("gradients", *sizes)
    return dist.batch_isend_irecv(operations) if operations else []
