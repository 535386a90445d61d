"""Encodes what islands send each other of a round in fewer bytes. Pure.

A file of a contribution, or of a mean, has the elements of a fragment piece by piece: first those
that are encoded, then those that are sent as they are, of vectors, small parameters and buffers.
Blocks of 256 elements share a scale of 4 bytes: `fp8`, `int8` and `int4` have so many bits for each
element of a block, `bf16` needs no scale. `topk` has the places and values of the largest elements
of a piece; a mean of several contributions then has as many as all of them.

With `powersgd` a piece is a matrix, of which two narrow factors are sent (`low_rank`). The mean of
several contributions has the columns of all of them.
Shapes: E elements of a fragment, P of a piece, B blocks of a piece, K elements that `topk` sends;
a matrix of N rows and M columns has factors of R columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticzero.ipc.low_rank import Singles, factors_of, product_of
from elasticzero.ipc.rounds import FragmentShape
from elasticzero.options.wire import PLACE_BYTES, SCALE_BYTES, VALUE_BYTES, Wire, parse_wire

Elements = npt.NDArray[np.floating[Any]]
Bytes = npt.NDArray[np.uint8]

BLOCK = 256
"""Elements that have one scale."""
PIECE = 1 << 20
"""Elements that are encoded at a time, a multiple of `BLOCK`."""
SMALL = 1024
"""Parameters of fewer elements are sent as they are, as vectors are."""
_LEVELS = {"fp8": 448, "int8": 127, "int4": 7}
"""Largest number that stands for an element."""
_EIGHTHS, _POWERS = np.arange(127) % 8 / 8, np.arange(127) // 8
_FP8 = (_EIGHTHS + (_POWERS > 0)) * 2.0 ** (np.maximum(_POWERS, 1) - 7)
"""Numbers that 7 bits stand for in `fp8`: 4 of them are of a power of two, 3 of eighths (E4M3 of
Micikevicius et al., arXiv 2209.05433)."""
_FP8_MIDDLES = ((_FP8[1:] + _FP8[:-1]) / 2).astype(np.float32)
_FP8_CODES = np.concatenate([_FP8, [np.nan], -_FP8, [np.nan]]).astype(np.float32)
"""Number of each byte; the highest bit is the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Says where some elements lie in a fragment, and where their bytes lie in a file."""

    elements: slice
    bytes: slice
    is_encoded: bool
    matrix: tuple[int, int] = (0, 0)
    """Rows and columns of what `powersgd` encodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundWire:
    """Encodes the elements of one fragment."""

    format: str
    """One of `WIRES`, `topk:SHARE` or `powersgd:RANK`; fp32: all elements are sent as they are."""
    shape: FragmentShape
    contributions: int = 1
    """Number of contributions whose mean is sent."""

    def of_mean(self, contributions: int) -> RoundWire:
        """Returns how the mean of so many contributions is sent."""
        return replace(self, contributions=contributions)

    @property
    def is_lossy(self) -> bool:
        return self.format != "fp32"

    @property
    def nbytes(self) -> int:
        """Returns the size of a file."""
        return max((piece.bytes.stop for piece in self.pieces()), default=0)

    def pieces(self) -> Iterator[Piece]:
        """Yields the pieces of the fragment, in the order of its elements and of the file."""
        wire, at = parse_wire(self.format), 0
        encoded = self.shape.elements - self.shape.exact if self.is_lossy else 0
        for place, matrix in self._places(wire, encoded):
            count = place.stop - place.start
            as_it_is = count * self._item
            may_be = place.start < encoded
            size = self._encoded_bytes(wire, count, matrix) if may_be else as_it_is
            yield Piece(
                elements=place,
                bytes=slice(at, at + min(size, as_it_is)),
                is_encoded=may_be and size < as_it_is,
                matrix=matrix,
            )
            at += min(size, as_it_is)

    def _places(self, wire: Wire, encoded: int) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Yields where each piece lies, and the matrix that it is.

        Args:
            wire: The format.
            encoded: Number of the first elements, which may be encoded.
        """
        first = 0
        for matrix in self.shape.matrices if wire.format == "powersgd" else ():
            yield slice(first, first + prod(matrix)), matrix
            first += prod(matrix)
        for start, last in ((first, encoded), (encoded, self.shape.elements)):
            for at in range(start, last, PIECE):
                yield slice(at, min(at + PIECE, last)), (0, 0)

    @property
    def _item(self) -> int:
        return np.dtype(self.shape.dtype).itemsize

    def _encoded_bytes(self, wire: Wire, count: int, matrix: tuple[int, int]) -> int:
        if wire.format == "powersgd":
            return sum(matrix) * wire.rank * self.contributions * VALUE_BYTES
        if wire.format == "topk":
            return self._largest(wire, count) * (PLACE_BYTES + self._item)
        if wire.format == "bf16":
            return 2 * count
        bits = BLOCK // 2 if wire.format == "int4" else BLOCK
        return -(-count // BLOCK) * (SCALE_BYTES + bits)

    def _largest(self, wire: Wire, count: int) -> int:
        """Returns how many of some elements `topk` sends."""
        return min(count, ceil(wire.share * count) * self.contributions)

    def encode(self, values_P: Elements, piece: Piece) -> Bytes:
        """Returns the bytes of a piece's elements.

        Args:
            values_P: The elements.
            piece: The piece.
        """
        if not piece.is_encoded:
            return np.ascontiguousarray(values_P).view(np.uint8)
        wire = parse_wire(self.format)
        if wire.format == "powersgd":
            values_NM = values_P.reshape(piece.matrix).astype(np.float32, copy=False)
            return np.concatenate([f.reshape(-1) for f in factors_of(values_NM, wire.rank)]).view(
                np.uint8
            )
        if wire.format == "topk":
            places_K = _largest_of(values_P, self._largest(wire, len(values_P)))
            parts = [places_K.view(np.uint8), values_P[places_K].view(np.uint8)]
            return np.concatenate(parts)
        values_P = np.ascontiguousarray(values_P, np.float32)
        if self.format == "bf16":
            return _to_bf16(values_P).view(np.uint8)
        blocks = -(-len(values_P) // BLOCK)
        padded_BK = np.zeros((blocks, BLOCK), np.float32)
        padded_BK.reshape(-1)[: len(values_P)] = values_P
        scales_B = np.abs(padded_BK).max(axis=1) / np.float32(_LEVELS[self.format])
        with np.errstate(invalid="ignore", divide="ignore"):
            scaled_BK = padded_BK / scales_B[:, None]
        scaled_BK = np.nan_to_num(scaled_BK, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        if self.format == "fp8":
            sizes_BK = np.abs(scaled_BK)
            codes_BK = np.searchsorted(_FP8_MIDDLES, sizes_BK).astype(np.uint8)
            is_middle = sizes_BK == _FP8_MIDDLES[np.minimum(codes_BK, len(_FP8_MIDDLES) - 1)]
            codes_BK += is_middle & (codes_BK & 1 > 0)  # of two equally near ones the even one
            codes_BK |= (scaled_BK < 0).astype(np.uint8) << np.uint8(7)
        else:
            codes_BK = np.rint(scaled_BK).astype(np.int8).view(np.uint8)
        if self.format == "int4":
            codes_BK = codes_BK[:, 0::2] & 15 | codes_BK[:, 1::2] << 4
        return np.concatenate([scales_B.view(np.uint8), codes_BK.reshape(-1)])

    def decode(self, data: Bytes, piece: Piece) -> Elements:
        """Returns a piece's elements from their bytes, of the fragment's dtype; NaN for a block
        that had an element that is not finite.

        Args:
            data: The bytes.
            piece: The piece.
        """
        dtype = np.dtype(self.shape.dtype)
        if not piece.is_encoded:
            return data.view(dtype)
        count = piece.elements.stop - piece.elements.start
        wire = parse_wire(self.format)
        if wire.format == "powersgd":
            return product_of(*self._factors_in(data, piece)).reshape(-1).astype(dtype, copy=False)
        if wire.format == "topk":
            number = self._largest(wire, count)
            values_P = np.zeros(count, dtype)
            places_K = data[: number * PLACE_BYTES].view(np.uint32)
            values_P[places_K] = data[number * PLACE_BYTES :].view(dtype)
            return values_P
        if self.format == "bf16":
            wide_P = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return wide_P.view(np.float32).astype(dtype)
        blocks = -(-count // BLOCK)
        scales_B = data[: blocks * SCALE_BYTES].view(np.float32)
        codes = data[blocks * SCALE_BYTES :].view(np.int8).reshape(blocks, -1)
        if self.format == "int4":
            low_BK, high_BK = (codes << 4) >> 4, codes >> 4
            codes = np.stack([low_BK, high_BK], axis=2).reshape(blocks, BLOCK)
        is_fp8 = self.format == "fp8"
        values_BK = _FP8_CODES[codes.view(np.uint8)] if is_fp8 else codes.astype(np.float32)
        with np.errstate(invalid="ignore"):
            values_BK *= scales_B[:, None]
        return values_BK.reshape(-1)[:count].astype(dtype)

    def joins(self, into: Piece) -> bool:
        """Returns whether the mean of contributions is made of their bytes."""
        return into.is_encoded and parse_wire(self.format).format == "powersgd"

    def joined(self, parts: Sequence[tuple[int, Bytes]], piece: Piece) -> Bytes:
        """Returns the bytes of the mean of contributions, weighted by samples.

        Args:
            parts: The number of samples of each, and its bytes of the piece.
            piece: The piece.
        """
        samples = sum(count for count, _ in parts)
        factors = [(count, *self._factors_in(data, piece)) for count, data in parts]
        left_NR = [left * np.float32(count / samples) for count, left, _ in factors]
        whole = [np.concatenate(left_NR, axis=1), np.concatenate([r for *_, r in factors], axis=1)]
        return np.concatenate([factor.reshape(-1) for factor in whole]).view(np.uint8)

    def _factors_in(self, data: Bytes, piece: Piece) -> tuple[Singles, Singles]:
        """Returns the left (N, R) and the right (M, R) factor of a matrix from its bytes."""
        rows, columns = piece.matrix
        values, rank = data.view(np.float32), len(data) // VALUE_BYTES // (rows + columns)
        return values[: rows * rank].reshape(rows, rank), values[rows * rank :].reshape(-1, rank)


def _largest_of(values_P: Elements, count: int) -> npt.NDArray[np.uint32]:
    """Returns the places of so many of the largest elements, in order: of equal ones the first, so
    that all nodes that have the same elements take the same."""
    sizes_P = np.abs(values_P)
    sizes_P[np.isnan(sizes_P)] = np.inf
    least = np.partition(sizes_P, len(sizes_P) - count)[len(sizes_P) - count]
    larger_K, equal_K = np.flatnonzero(sizes_P > least), np.flatnonzero(sizes_P == least)
    places_K = np.concatenate([larger_K, equal_K[: count - len(larger_K)]])
    return np.sort(places_K).astype(np.uint32)


def _to_bf16(values_P: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Returns the nearest numbers of 16 bits, of two equally near ones the even one."""
    bits_P = values_P.view(np.uint32)
    rounded_P = (bits_P + np.uint32(0x7FFF) + ((bits_P >> np.uint32(16)) & np.uint32(1))) >> 16
    return np.where(np.isnan(values_P), 0x7FC0, rounded_P).astype(np.uint16)
