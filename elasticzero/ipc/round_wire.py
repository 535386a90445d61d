"""Encodes what islands send each other of a round in fewer bytes. Pure.

A file of a contribution, or of a mean, has the elements of a fragment piece by piece: first those
that are encoded, then those that are sent as they are, of vectors, small parameters and buffers.
Blocks of 256 elements share a scale of 4 bytes: `int8` and `int4` have so many bits for each
element of a block, `bf16` needs no scale.
Shapes: E elements of a fragment, P of a piece, B blocks of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticzero.ipc.rounds import FragmentShape

Elements = npt.NDArray[np.floating[Any]]
Bytes = npt.NDArray[np.uint8]

BLOCK = 256
"""Elements that have one scale."""
PIECE = 1 << 20
"""Elements that are encoded at a time, a multiple of `BLOCK`."""
SMALL = 1024
"""Parameters of fewer elements are sent as they are, as vectors are."""
_LEVELS = {"int8": 127, "int4": 7}
"""Largest whole number that stands for an element."""
_SCALE = 4
"""Bytes of a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Says where some elements lie in a fragment, and where their bytes lie in a file."""

    elements: slice
    bytes: slice
    is_encoded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundWire:
    """Encodes the elements of one fragment."""

    format: str
    """One of `WIRES`; fp32: all elements are sent as they are."""
    shape: FragmentShape

    @property
    def is_lossy(self) -> bool:
        return self.format != "fp32"

    @property
    def nbytes(self) -> int:
        """Returns the size of a file."""
        return max((piece.bytes.stop for piece in self.pieces()), default=0)

    def pieces(self) -> Iterator[Piece]:
        """Yields the pieces of the fragment, in the order of its elements and of the file."""
        encoded = self.shape.elements - self.shape.exact if self.is_lossy else 0
        item, at = np.dtype(self.shape.dtype).itemsize, 0
        for first, last, is_encoded in ((0, encoded, True), (encoded, self.shape.elements, False)):
            for start in range(first, last, PIECE):
                stop = min(start + PIECE, last)
                size = self._encoded_bytes(stop - start) if is_encoded else (stop - start) * item
                yield Piece(
                    elements=slice(start, stop),
                    bytes=slice(at, at + size),
                    is_encoded=is_encoded,
                )
                at += size

    def _encoded_bytes(self, count: int) -> int:
        if self.format == "bf16":
            return 2 * count
        blocks = -(-count // BLOCK)
        return blocks * (_SCALE + (BLOCK if self.format == "int8" else BLOCK // 2))

    def encode(self, values_P: Elements, piece: Piece) -> Bytes:
        """Returns the bytes of a piece's elements.

        Args:
            values_P: The elements.
            piece: The piece.
        """
        if not piece.is_encoded:
            return np.ascontiguousarray(values_P).view(np.uint8)
        values_P = np.ascontiguousarray(values_P, np.float32)
        if self.format == "bf16":
            return _to_bf16(values_P).view(np.uint8)
        blocks = -(-len(values_P) // BLOCK)
        padded_BK = np.zeros((blocks, BLOCK), np.float32)
        padded_BK.reshape(-1)[: len(values_P)] = values_P
        scales_B = np.abs(padded_BK).max(axis=1) / np.float32(_LEVELS[self.format])
        with np.errstate(invalid="ignore", divide="ignore"):
            codes_BK = np.rint(padded_BK / scales_B[:, None])
        codes_BK = np.nan_to_num(codes_BK, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int8)
        if self.format == "int4":
            low_BK, high_BK = codes_BK[:, 0::2] & 15, codes_BK[:, 1::2] << 4
            codes_BK = low_BK | high_BK
        parts = [scales_B.view(np.uint8), codes_BK.reshape(-1).view(np.uint8)]
        return np.concatenate(parts)

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
        if self.format == "bf16":
            wide_P = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return wide_P.view(np.float32).astype(dtype)
        blocks = -(-count // BLOCK)
        scales_B = data[: blocks * _SCALE].view(np.float32)
        codes = data[blocks * _SCALE :].view(np.int8).reshape(blocks, -1)
        if self.format == "int4":
            low_BK, high_BK = (codes << 4) >> 4, codes >> 4
            codes = np.stack([low_BK, high_BK], axis=2).reshape(blocks, BLOCK)
        with np.errstate(invalid="ignore"):
            values_BK = codes.astype(np.float32) * scales_B[:, None]
        return values_BK.reshape(-1)[:count].astype(dtype)


def _to_bf16(values_P: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Returns the nearest numbers of 16 bits, of two equally near ones the even one."""
    bits_P = values_P.view(np.uint32)
    rounded_P = (bits_P + np.uint32(0x7FFF) + ((bits_P >> np.uint32(16)) & np.uint32(1))) >> 16
    return np.where(np.isnan(values_P), 0x7FC0, rounded_P).astype(np.uint16)
