"""Describes tensors where other programs have saved them, and reads their elements by range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from elasticzero.checkpoint.convert.pickled.archive import Archive
from elasticzero.checkpoint.format.dtypes import byte_view, tensor_spec, torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec, itemsize
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import TensorSource
from elasticzero.spans import Span

_LARGEST_READ_BYTES = 8 << 20


class Leaf(Protocol):
    """Describes one tensor, and reads it."""

    @property
    def spec(self) -> TensorSpec:
        """Returns the tensor's dtype and shape."""
        ...

    def chunks(self, span: Span, reader: LeafReader) -> Iterator[memoryview]:
        """Yields the bytes of a span, as `TensorSource.chunks` does."""
        ...


class LeafReader:
    """Reads named leaves in one thread."""

    def __init__(self, leaves: Mapping[str, Leaf], buffer_bytes: int) -> None:
        """Prepares to read.

        Args:
            leaves: The tensors by name.
            buffer_bytes: Memory for the bytes that are read at a time.
        """
        self._leaves = leaves
        self.specs = {name: leaf.spec for name, leaf in leaves.items()}
        self.buffer = memoryview(bytearray(max(8, min(_LARGEST_READ_BYTES, buffer_bytes))))
        self.last_view: tuple[Leaf, torch.Tensor] | None = None
        """The last tensor whose elements are not in row-major order, whole."""
        self._sources: dict[int, TensorSource] = {}

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        """Yields the bytes as `TensorSource.chunks` does."""
        if span:
            yield from self._leaves[name].chunks(span, self)

    def source(self, foreign: ForeignCheckpoint) -> TensorSource:
        """Returns the source of another checkpoint, which is opened once for each thread."""
        if id(foreign) not in self._sources:
            self._sources[id(foreign)] = foreign.open_source(len(self.buffer))
        return self._sources[id(foreign)]


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """Describes a view of a storage in a file of `torch.save`."""

    archive: Archive
    key: str
    """The storage."""
    offset: int
    """Number of elements before the first, in the storage."""
    spec: TensorSpec
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Returns whether the elements lie in row-major order, one after the other."""
        expected = 1
        for size, stride in zip(self.spec.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != expected:
                return not self.spec.numel
            expected *= size
        return True

    def chunks(self, span: Span, reader: LeafReader) -> Iterator[memoryview]:
        """Yields the bytes; of a tensor that is not contiguous, memory holds the whole."""
        width = itemsize(self.spec.dtype)
        if not self.is_contiguous:
            yield byte_view(self._whole(reader)[span.start : span.stop])
            return
        position, stop = ((self.offset + at) * width for at in (span.start, span.stop))
        most = len(reader.buffer) // width * width
        while position < stop:
            view = reader.buffer[: min(most, stop - position)]
            self.archive.read_into(self.key, position, view)
            yield view
            position += len(view)

    def _whole(self, reader: LeafReader) -> torch.Tensor:
        """Returns all elements in row-major order, flat."""
        if reader.last_view is None or reader.last_view[0] is not self:
            dtype, width = torch_dtype(self.spec.dtype), itemsize(self.spec.dtype)
            last = sum((n - 1) * s for n, s in zip(self.spec.shape, self.strides, strict=True))
            data = bytearray((last + 1) * width)
            self.archive.read_into(self.key, self.offset * width, memoryview(data))
            held = torch.frombuffer(data, dtype=dtype)
            view = torch.as_strided(held, self.spec.shape, self.strides)
            reader.last_view = (self, view.contiguous().reshape(-1))
        return reader.last_view[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """Holds a small tensor in memory."""

    tensor: torch.Tensor

    @property
    def spec(self) -> TensorSpec:
        return tensor_spec(self.tensor)

    def chunks(self, span: Span, reader: LeafReader) -> Iterator[memoryview]:
        yield byte_view(self.tensor.reshape(-1)[span.start : span.stop])


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTensor:
    """Names a tensor of a checkpoint that another importer has opened."""

    foreign: ForeignCheckpoint
    name: str

    @property
    def spec(self) -> TensorSpec:
        return self.foreign.specs[self.name]

    def chunks(self, span: Span, reader: LeafReader) -> Iterator[memoryview]:
        yield from reader.source(self.foreign).chunks(self.name, span)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedTensor:
    """Describes a tensor whose elements lie one after the other in parts of others."""

    spec: TensorSpec
    parts: tuple[tuple[Leaf, Span], ...]
    """Each part and the span of it, of as many elements together as the tensor has."""

    def chunks(self, span: Span, reader: LeafReader) -> Iterator[memoryview]:
        passed = 0
        for leaf, part in self.parts:
            start, stop = max(span.start, passed), min(span.stop, passed + len(part))
            if start < stop:
                shift = part.start - passed
                yield from leaf.chunks(Span(start + shift, stop + shift), reader)
            passed += len(part)
