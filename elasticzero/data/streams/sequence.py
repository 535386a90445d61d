"""Reads what one reader has of a stream in an epoch, in its order before the shuffle.

A sequence has a *place*, a tuple of numbers as long as the kind of stream says, from which it can
be opened again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from elasticzero.data.hashing import mix64
from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.data.streams.source import (
    Mixture,
    Pack,
    ShardSource,
    Stream,
    component_order,
)
from elasticzero.errors import UserError

Place = tuple[int, ...]


class SampleSequence(Protocol):
    """Gives samples one after the other."""

    @property
    def place(self) -> Place:
        """Returns the place of the next sample."""

    def take(self, count: int) -> list[Any]:
        """Returns the next samples; fewer than `count` at the end."""


class SharedShard:
    """Reads a shard once for all readers of this process that have every so many-th sample of
    it."""

    def __init__(
        self, source: ShardSource, shard: int, strides: int, offsets: Mapping[int, int]
    ) -> None:
        """Opens a shard for all readers of this process that have a part of it.

        Args:
            source: What reads shards.
            shard: The shard's number.
            strides: Number of readers that share the shard.
            offsets: For each reader, named by its first sample, the number of its samples that it
                does not need.
        """
        self._strides = strides
        self._from = {first: offset * strides + first for first, offset in offsets.items()}
        self._at = min(self._from.values())
        self._samples = source.read(shard, self._at)
        self._waiting: dict[int, deque[Any]] = {first: deque() for first in offsets}

    def of(self, first: int) -> Iterator[Any]:
        """Yields the samples of one reader."""
        samples = self._waiting[first]
        while True:
            while not samples:
                if not self._advance():
                    return
            yield samples.popleft()

    def _advance(self) -> bool:
        for sample in self._samples:
            owner = self._at % self._strides
            if self._at >= self._from.get(owner, self._at + 1):
                self._waiting[owner].append(sample)
            self._at += 1
            return True
        return False


class ShardSequence:
    """Gives the samples of a reader's shards. Place: number of the part, samples of it before."""

    def __init__(
        self,
        source: ShardSource,
        order: StreamOrder,
        reader: int,
        epoch: int,
        place: Place,
        shared: SharedShard | None = None,
    ) -> None:
        """Opens the shards of a reader at a place.

        Args:
            source: What reads shards.
            order: What the order of the stream's samples depends on.
            reader: The reader's number.
            epoch: The epoch.
            place: Where the sequence begins.
            shared: The shard of which the reader has a part, if others in this process have parts
                of it.
        """
        part, offset = place
        self._source = source
        self._shared = shared
        self._parts = order.parts(reader, epoch, part)
        self._part, self._offset = part - 1, offset
        self._samples: Iterator[Any] = iter(())
        if not self._next_part(offset):
            self._part = part

    @property
    def place(self) -> Place:
        return self._part, self._offset

    def take(self, count: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < count:
            taken = list(islice(self._samples, count - len(samples)))
            samples += taken
            self._offset += len(taken)
            if len(samples) < count and not self._next_part(0):
                break
        return samples

    def _next_part(self, offset: int) -> bool:
        """Goes on to the next part, if there is one, at a sample of it."""
        part = next(self._parts, None)
        if part is None:
            return False
        self._part, self._offset = self._part + 1, offset
        if self._shared is not None:
            self._samples = self._shared.of(part.first)
        else:
            start = part.first + offset * part.stride
            self._samples = islice(self._source.read(part.shard, start), 0, None, part.stride)
        return True


class MixedSequence:
    """Draws each sample from one of several sequences, by weights and a key.

    Place: number of draws, and of each component its epoch, or whether it has ended, and its place.
    """

    def __init__(
        self,
        mixture: Mixture,
        open_component: Callable[[int, int, Place], SampleSequence],
        key: int,
        place: Place,
    ) -> None:
        """Opens the components of a mixture at a place.

        Args:
            mixture: The streams and their weights.
            open_component: Opens a component, by its number, in an epoch at a place.
            key: Seeds the draws.
            place: Where the sequence begins.
        """
        self._mixture = mixture
        self._open = open_component
        self._key = key
        self._draws, *rest = place
        self._epochs: list[int] = []
        self._components: list[SampleSequence] = []
        for number, stream in enumerate(mixture.streams):
            width = place_width(stream)
            epoch, *at = rest[: width + 1]
            rest = rest[width + 1 :]
            self._epochs.append(epoch)
            opened = epoch if mixture.repeat else 0
            self._components.append(open_component(number, opened, tuple(at)))

    @property
    def place(self) -> Place:
        parts: list[int] = [self._draws]
        for epoch, component in zip(self._epochs, self._components, strict=True):
            parts += [epoch, *component.place]
        return tuple(parts)

    def take(self, count: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < count:
            number = self._draw()
            if number is None:
                break
            taken = self._components[number].take(1) or self._begin_again(number)
            if taken:
                samples += taken
                self._draws += 1
        return samples

    def _draw(self) -> int | None:
        """Returns the component of the next sample; None: all have ended."""
        weights = [
            weight if self._mixture.repeat or not epoch else 0.0
            for weight, epoch in zip(self._mixture.weights, self._epochs, strict=True)
        ]
        total = sum(weights)
        if not total:
            return None
        drawn = mix64(self._key + mix64(self._draws)) / 2**64 * total
        for number, weight in enumerate(weights):
            drawn -= weight
            if drawn < 0:
                return number
        return max(number for number, weight in enumerate(weights) if weight)

    def _begin_again(self, number: int) -> list[Any]:
        """Returns the first sample of a component's next epoch, or notes that it has ended."""
        self._epochs[number] += 1
        if not self._mixture.repeat:
            return []
        width = place_width(self._mixture.streams[number])
        self._components[number] = self._open(number, self._epochs[number], (0,) * width)
        first = self._components[number].take(1)
        if not first:
            raise UserError(
                f"component {number} of a mixture has no sample for one of its readers: give it "
                "more shards, or the mixture fewer readers"
            )
        return first


class PackedSequence:
    """Gives lists of samples that are together at most so long. Place: that of the first one."""

    def __init__(self, pack: Pack, samples: SampleSequence) -> None:
        self._pack = pack
        self._samples = samples
        self._next: tuple[Place, Any] | None = None
        """The sample that did not fit the last list, and its place."""

    @property
    def place(self) -> Place:
        return self._next[0] if self._next is not None else self._samples.place

    def take(self, count: int) -> list[Any]:
        lists: list[Any] = []
        while len(lists) < count and (packed := self._one()):
            lists.append(packed)
        return lists

    def _one(self) -> list[Any]:
        packed: list[Any] = []
        length = 0
        while True:
            if self._next is None:
                place = self._samples.place
                taken = self._samples.take(1)
                if not taken:
                    return packed
                self._next = place, taken[0]
            size = self._pack.size(self._next[1])
            if packed and length + size > self._pack.length:
                return packed
            packed.append(self._next[1])
            length += size
            self._next = None


def place_width(stream: Stream) -> int:
    """Returns the count of numbers in a place of a stream's sequences."""
    match stream.source:
        case Mixture() as mixture:
            return 1 + sum(1 + place_width(component) for component in mixture.streams)
        case Pack() as pack:
            return place_width(pack.stream)
        case _:
            return 2


def open_sequence(
    stream: Stream,
    order: StreamOrder,
    reader: int,
    epoch: int,
    place: Place,
    shared: SharedShard | None = None,
) -> SampleSequence:
    """Opens what a reader has of a stream in an epoch, at a place.

    Args:
        stream: The stream.
        order: What the order of the stream's samples depends on.
        reader: The reader's number.
        epoch: The epoch.
        place: Where the sequence begins.
        shared: The shard of which the reader has a part, if others in this process have parts of
            it; None: the reader opens its shards itself.

    Returns:
        The samples from the place on.
    """
    match stream.source:
        case Mixture() as mixture:

            def open_component(number: int, again: int, at: Place) -> SampleSequence:
                component = mixture.streams[number]
                of_component = component_order(component, order, number)
                return open_sequence(component, of_component, reader, mix64(epoch) + again, at)

            key = mix64(mix64(order.seed + 0x6A09E667F3BCC909) + mix64(epoch) + mix64(~reader))
            return MixedSequence(mixture, open_component, key, place)
        case Pack() as pack:
            inner = open_sequence(pack.stream, order, reader, epoch, place, shared)
            return PackedSequence(pack, inner)
        case source:
            return ShardSequence(source, order, reader, epoch, place, shared)
