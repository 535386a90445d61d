"""Encodes gradients in fewer bytes for their way between ranks, and decodes them. Pure.

Shapes: E elements of a message, N blocks of B elements, the K largest elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from elasticzero.options.wire import (
    BLOCK_ELEMENTS,
    LEAST_GAIN,
    PLACE_BYTES,
    SCALE_BYTES,
    VALUE_BYTES,
    Wire,
    WireFormat,
)

LEAST_ELEMENTS = 1024
"""A smaller parameter's gradient is sent as it is: that costs less than to encode it."""
_GRAIN_BYTES = 16
"""The size of a message is a multiple of this, so that messages may lie end to end."""
_SLICE_ELEMENTS = 1 << 16
"""Number of elements that the CPU encodes or decodes at a time, while they are in its cache."""


class Codec(Protocol):
    """Encodes numbers in bytes."""

    def message_bytes(self, numel: int) -> int:
        """Returns the size of a message with this many elements."""

    def encode(self, values_E: Tensor, message: Tensor) -> None:
        """Writes values to a message, whose size is `message_bytes` of their number or more."""

    def decode(self, message: Tensor, values_E: Tensor) -> None:
        """Writes the values of a message to `values_E`."""

    def add(self, message: Tensor, sums_E: Tensor) -> None:
        """Adds the values of a message to `sums_E`, in the format of these."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds each number to a shorter format."""

    dtype: torch.dtype

    def message_bytes(self, numel: int) -> int:
        return _whole_grains(numel * self.dtype.itemsize)

    def encode(self, values_E: Tensor, message: Tensor) -> None:
        self._numbers(message, values_E.numel()).copy_(values_E)

    def decode(self, message: Tensor, values_E: Tensor) -> None:
        values_E.copy_(self._numbers(message, values_E.numel()))

    def add(self, message: Tensor, sums_E: Tensor) -> None:
        sums_E.add_(self._numbers(message, sums_E.numel()))

    def _numbers(self, message: Tensor, numel: int) -> Tensor:
        return message.view(self.dtype)[:numel]


@dataclass(frozen=True, slots=True)
class ScaledBlocks:
    """Divides each block of numbers by a scale of its own, so that its largest number is the
    largest of a short format, and rounds to that.

    A message has the scales first, then the numbers. A block that is not finite has a scale that is
    not finite, and so has what it is decoded to.
    """

    most: float
    """The largest number of the format."""
    dtype: torch.dtype
    """The format."""
    packed: bool = False
    """Whether two numbers, which are whole and from -7 to 7, share a byte."""

    def message_bytes(self, numel: int) -> int:
        blocks = _blocks(numel)
        return _whole_grains(blocks * (SCALE_BYTES + BLOCK_ELEMENTS // (1 + self.packed)))

    def encode(self, values_E: Tensor, message: Tensor) -> None:
        for part, scales_N, codes in self._parts(message, values_E):
            blocks_NB = _whole_blocks(part)
            largest_N = torch.linalg.vector_norm(blocks_NB, torch.inf, dim=1)
            scales_N.copy_(largest_N / self.most)
            scales_N.masked_fill_(scales_N == 0, 1)  # a block of zeros, or of what rounds to that
            scaled_NB = blocks_NB / scales_N[:, None]
            # What is next to nothing has a scale of few digits, with which it may be too large.
            scaled_NB.clamp_(-self.most, self.most)
            if not self.dtype.is_floating_point:
                scaled_NB.round_()
            numbers = scaled_NB.view(-1)
            codes.copy_(_pack(numbers) if self.packed else numbers)

    def decode(self, message: Tensor, values_E: Tensor) -> None:
        for part, scales_N, codes in self._parts(message, values_E):
            part.copy_(self._decoded(scales_N, codes, part.dtype)[: part.numel()])

    def add(self, message: Tensor, sums_E: Tensor) -> None:
        for part, scales_N, codes in self._parts(message, sums_E):
            part.add_(self._decoded(scales_N, codes, part.dtype)[: part.numel()])

    def _decoded(self, scales_N: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the numbers of whole blocks."""
        numbers = (_unpack(codes) if self.packed else codes).to(dtype)
        return numbers.view(-1, BLOCK_ELEMENTS).mul_(scales_N[:, None]).view(-1)

    def _parts(self, message: Tensor, values_E: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields some elements, and of their blocks in a message the scales and the codes."""
        numel, blocks = values_E.numel(), _blocks(values_E.numel())
        scales_N = message[: blocks * SCALE_BYTES].view(torch.float32)
        codes = message[blocks * SCALE_BYTES :].view(self.dtype)
        step = _SLICE_ELEMENTS if values_E.device.type == "cpu" else max(numel, 1)
        for start in range(0, numel, step):
            first, last = start // BLOCK_ELEMENTS, _blocks(min(start + step, numel))
            width = BLOCK_ELEMENTS // (1 + self.packed)
            part_codes = codes[first * width : last * width]
            yield values_E[start : start + step], scales_N[first:last], part_codes


@dataclass(frozen=True, slots=True)
class Largest:
    """Keeps the largest of the numbers, and leaves out the others.

    A message has their places first, then their values. What is not finite is among the largest.
    """

    share: float
    """Share of the numbers that it keeps, rounded up."""

    def message_bytes(self, numel: int) -> int:
        return _whole_grains(self._count(numel) * (PLACE_BYTES + VALUE_BYTES))

    def encode(self, values_E: Tensor, message: Tensor) -> None:
        places_K, numbers_K = self._parts(message, values_E.numel())
        largest_K = values_E.abs().topk(len(places_K), sorted=False).indices
        places_K.copy_(largest_K)
        numbers_K.copy_(values_E[largest_K])

    def decode(self, message: Tensor, values_E: Tensor) -> None:
        self.add(message, values_E.zero_())

    def add(self, message: Tensor, sums_E: Tensor) -> None:
        places_K, numbers_K = self._parts(message, sums_E.numel())
        sums_E.index_add_(0, places_K, numbers_K.to(sums_E.dtype))

    def _count(self, numel: int) -> int:
        return min(math.ceil(numel * self.share), numel)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns the places and the values of a message."""
        count = self._count(numel)
        places = message[: count * PLACE_BYTES].view(torch.int32)
        values = message[count * PLACE_BYTES : count * (PLACE_BYTES + VALUE_BYTES)]
        return places, values.view(torch.float32)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Sends a matrix as two narrow ones (`low_rank.py`)."""

    rank: int
    """Number of their columns."""

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether these are much smaller than the matrix of a parameter."""
        rows, columns = parameter.shape[0], parameter.shape[1:].numel()
        return LEAST_GAIN * self.rank * (rows + columns) <= rows * columns


Encoding = Codec | LowRank
_CODECS: Mapping[WireFormat, Codec] = {
    "bf16": Cast(torch.bfloat16),
    "fp8": ScaledBlocks(448.0, torch.float8_e4m3fn),
    "int8": ScaledBlocks(127.0, torch.int8),
    "int4": ScaledBlocks(7.0, torch.uint8, packed=True),
}


def encoding_of(wire: Wire, parameter: Tensor) -> Encoding | None:
    """Returns how the gradient of a parameter is encoded; None: it is sent as it is.

    Vectors are, for they are few and a step depends on each of their elements more than on one of a
    matrix. So is what has 16 bits already.
    """
    if parameter.dim() < 2 or parameter.numel() < LEAST_ELEMENTS:
        return None
    if parameter.element_size() <= torch.bfloat16.itemsize:
        return None
    if wire.format == "powersgd":
        low_rank = LowRank(wire.rank)
        return low_rank if low_rank.fits(parameter) else None
    return Largest(wire.share) if wire.format == "topk" else _CODECS.get(wire.format)


def _whole_grains(size: int) -> int:
    return -(-size // _GRAIN_BYTES) * _GRAIN_BYTES


def _blocks(numel: int) -> int:
    """Returns the number of blocks that so many elements begin."""
    return -(-numel // BLOCK_ELEMENTS)


def _whole_blocks(part: Tensor) -> Tensor:
    """Returns the elements in blocks, the last one filled up with zeros."""
    if missing := -part.numel() % BLOCK_ELEMENTS:
        part = pad(part, (0, missing))
    return part.view(-1, BLOCK_ELEMENTS)


def _pack(numbers: Tensor) -> Tensor:
    """Returns two whole numbers from -8 to 7 in each byte."""
    pairs = (numbers + 8).to(torch.uint8).view(-1, 2)
    return pairs[:, 0] + (pairs[:, 1] << 4)


def _unpack(codes: Tensor) -> Tensor:
    """Returns the numbers that `_pack` has put together."""
    return torch.stack((codes & 15, codes >> 4), dim=1).view(-1).to(torch.int8) - 8
