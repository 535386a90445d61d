"""Names the formats that gradients have between ranks (`--wire`). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from elasticzero.errors import UserError

WireFormat = Literal["fp32", "bf16", "fp8", "int8", "int4", "topk", "powersgd"]
"""Names a format.

fp32: the one that gradients have in memory, whichever that is.
bf16: 16 bits.
fp8, int8, int4: so many bits, where each block of elements has a scale of its own.
topk: a share of the elements, those of the largest values, with their places.
powersgd: two narrow matrices, whose product is close to the matrix of a gradient.
"""

BLOCK_ELEMENTS, SCALE_BYTES = 256, 4
"""Number of elements of a block, and bytes of its scale."""
VALUE_BYTES, PLACE_BYTES = 4, 4
"""Bytes of the value and the place of an element that `topk` sends."""
LEAST_GAIN = 4
"""A matrix is sent as two narrow ones where it has so many times their elements at least."""

_SCALE = SCALE_BYTES / BLOCK_ELEMENTS
_ELEMENT_BYTES: Mapping[WireFormat, float] = {
    "fp32": 0,
    "bf16": 2,
    "fp8": 1 + _SCALE,
    "int8": 1 + _SCALE,
    "int4": 0.5 + _SCALE,
    "topk": VALUE_BYTES + PLACE_BYTES,
    "powersgd": VALUE_BYTES / LEAST_GAIN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Says in which format ranks send gradients."""

    format: WireFormat = "fp32"
    share: float = 1.0
    """Share of the elements that `topk` sends."""
    rank: int = 0
    """Number of columns of the matrices that `powersgd` sends."""

    @property
    def is_lossy(self) -> bool:
        """Returns whether a message has less than the gradients."""
        return self.format != "fp32"

    def refusal(self, strategy: str, *, by_node: bool = False) -> str:
        """Returns the strategy that cannot send gradients so, why, and what can; empty: it can.

        Args:
            strategy: Its name.
            by_node: Whether each node holds the whole state (`--shard node`).
        """
        if self.is_lossy and strategy == "zero3":
            return "strategy zero3, whose gradients torch's FSDP2 sends: use ddp, zero1 or zero2"
        if self.format == "powersgd" and strategy == "zero2":
            return (
                "strategy zero2, which sums the matrices of each micro-batch by themselves: use "
                "ddp or zero1, or another format"
            )
        if self.format == "powersgd" and strategy == "zero1" and by_node:
            return (
                "strategy zero1 and --shard node, where nodes send each other parts of matrices: "
                "use ddp, --shard world or another format"
            )
        return ""

    @property
    def sent_bytes(self) -> float:
        """Returns the bytes of an element of a gradient in a message, with `powersgd` at most; 0:
        it is sent as it is."""
        return _ELEMENT_BYTES[self.format] * self.share

    def __str__(self) -> str:
        number = {"topk": f":{self.share:g}", "powersgd": f":{self.rank}"}
        return self.format + number.get(self.format, "")


EXACT = Wire()


def parse_wire(text: str) -> Wire:
    """Parses a format; raises `ValueError` that says what is expected."""
    name, colon, number_text = text.partition(":")
    formats: tuple[WireFormat, ...] = get_args(WireFormat)
    chosen = next((format_ for format_ in formats if format_ == name), None)
    if chosen is not None and not colon and chosen not in ("topk", "powersgd"):
        return Wire(format=chosen)
    if chosen == "powersgd" and number_text.isdecimal() and int(number_text) > 0:
        return Wire(format=chosen, rank=int(number_text))
    if chosen == "topk" and 0 < (share := _number(number_text)) <= 1:
        return Wire(format=chosen, share=share)
    raise ValueError(
        f"{', '.join(formats[:-2])}, topk:SHARE or powersgd:RANK is expected, such as topk:0.01 "
        "for a hundredth of the elements, or powersgd:4 for matrices of four columns"
    )


def _number(text: str) -> float:
    """Returns the number that a text states; NaN: it states none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def wire_of(flag: str, text: str) -> Wire:
    """Parses the value of an option; raises `UserError` that names its `flag`."""
    try:
        return parse_wire(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from None
