"""Names the formats that gradients have between ranks (`--wire`). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from elasticzero.errors import UserError

WireFormat = Literal["fp32", "bf16", "fp8", "int8", "int4", "topk"]
"""Names a format.

fp32: the one that gradients have in memory, whichever that is.
bf16: 16 bits.
fp8, int8, int4: so many bits, where each block of elements has a scale of its own.
topk: a share of the elements, those of the largest values, with their places.
"""

BLOCK_ELEMENTS, SCALE_BYTES = 256, 4
"""Number of elements of a block, and bytes of its scale."""
VALUE_BYTES, PLACE_BYTES = 4, 4
"""Bytes of the value and the place of an element that `topk` sends."""

_SCALE = SCALE_BYTES / BLOCK_ELEMENTS
_ELEMENT_BYTES: Mapping[WireFormat, float] = {
    "fp32": 0,
    "bf16": 2,
    "fp8": 1 + _SCALE,
    "int8": 1 + _SCALE,
    "int4": 0.5 + _SCALE,
    "topk": VALUE_BYTES + PLACE_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Says in which format ranks send gradients."""

    format: WireFormat = "fp32"
    share: float = 1.0
    """Share of the elements that `topk` sends."""

    @property
    def is_lossy(self) -> bool:
        """Returns whether a message has less than the gradients."""
        return self.format != "fp32"

    @property
    def sent_bytes(self) -> float:
        """Returns the bytes of an element of a gradient in a message; 0: it is sent as it is."""
        return _ELEMENT_BYTES[self.format] * self.share

    def __str__(self) -> str:
        return f"topk:{self.share:g}" if self.format == "topk" else self.format


EXACT = Wire()


def parse_wire(text: str) -> Wire:
    """Parses a format; raises `ValueError` that says what is expected."""
    name, colon, share_text = text.partition(":")
    formats: tuple[WireFormat, ...] = get_args(WireFormat)
    chosen = next((format_ for format_ in formats if format_ == name), None)
    try:
        share = float(share_text) if colon else 1.0
    except ValueError:
        share = math.nan
    if chosen is None or (chosen == "topk") != bool(colon) or not 0 < share <= 1:
        raise ValueError(
            f"{', '.join(formats[:-1])} or topk:SHARE is expected, such as topk:0.01 for a "
            "hundredth of the elements"
        )
    return Wire(format=chosen, share=share)


def wire_of(flag: str, text: str) -> Wire:
    """Parses the value of an option; raises `UserError` that names its `flag`."""
    try:
        return parse_wire(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from None
