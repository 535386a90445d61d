"""Computes what stands for a value in the records of a rehearsal: digests, and short sums. Pure.

Two values with the same digest have the same bits. How far two others lie from each other is
estimated by projections: sums of all elements, each times a sign that its place and the value's
name fix. The mean square of the differences of such sums is an estimate of the squared distance.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elasticzero.rehearsal.records import LiveValue

PROJECTIONS = 8
"""Number of sums of one value."""
PATTERNS = 1 << PROJECTIONS
"""Number of different rows of signs."""
CHUNK = 1 << 17
"""Elements whose signs are computed at once."""
DIGEST_BYTES = 16
MAX_TEXT = 60
"""Characters of a plain value that a sentence shows."""
MAX_NUMBER = 1e300
"""Numbers from which on a plain one counts as infinite."""
MAX_ITEMS = 16
"""Items of a container of plain values beyond which it counts as one value."""
MAX_DEPTH = 64
"""Containers within each other beyond which nothing is looked at."""
CONTAINERS = (Mapping, list, tuple, deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SIGNS = 1.0 - 2.0 * ((np.arange(PATTERNS) >> np.arange(PROJECTIONS)[:, None]) & 1)
"""The rows of signs, a column for each of their numbers."""


def live_value(kind: str, name: str, value: Any) -> LiveValue:
    """Returns what stands for a leaf of a tree: a tensor or a plain value.

    Args:
        kind: The kind of thing that has the value.
        name: The value's name among those of its kind.
        value: The value; of an object of another class the class counts alone.
    """
    if isinstance(value, Tensor):
        return _of_tensor(kind, name, value)
    text = _plain_text(value)
    short = repr(value) if isinstance(value, PLAIN) else text
    if len(short) > MAX_TEXT:
        short = short[: MAX_TEXT - 3] + "..."
    return LiveValue(kind, name, _digest(text.encode()), short, _of_number(kind, name, value))


def _of_number(kind: str, name: str, value: Any) -> tuple[float, ...]:
    """Returns the sums of a plain number; none of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ()
    number = float(value) if abs(value) < MAX_NUMBER else math.inf
    return projections(f"{kind} {name}", torch.tensor([number], dtype=torch.float64, device="cpu"))


def _of_tensor(kind: str, name: str, tensor: Tensor) -> LiveValue:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if tensor.is_meta:
        return LiveValue(kind, name, _digest(f"meta {dtype} {shape}".encode()), "meta", ())
    flat = _flat(tensor)
    digest = _digest(f"{dtype} {shape} ".encode(), flat.view(torch.uint8).numpy().data)
    text = f"{dtype}{shape}" if tensor.numel() != 1 else str(flat.item())
    return LiveValue(kind, name, digest, text, projections(f"{kind} {name}", flat))


def _flat(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements on the CPU, in their order."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def projections(name: str, flat: Tensor) -> tuple[float, ...]:
    """Returns the sums of a flat tensor on the CPU; none of truth values.

    Args:
        name: What fixes the signs.
        flat: The elements.
    """
    if flat.dtype is torch.bool:
        return ()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    seed = zlib.crc32(name.encode()) << 20
    by_pattern = np.zeros(PATTERNS)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK]
        if values.element_size() == 1 and values.is_floating_point():
            values = values.float()  # torch converts no 8 bits to 64
        patterns = _patterns(seed + start, values.numel())
        weights = values.to(torch.float64).numpy()
        by_pattern += np.bincount(patterns, weights=weights, minlength=PATTERNS)
    return tuple((_SIGNS @ by_pattern).tolist())


def _patterns(first: int, count: int) -> np.ndarray[Any, Any]:
    """Returns the number of a row of signs for each place; that of a place is always the same."""
    mixed = np.arange(first, first + count, dtype=np.uint64)
    for factor in _FACTORS:
        mixed *= factor
        mixed ^= mixed >> np.uint64(30)
    return ((mixed >> np.uint64(20)) % np.uint64(PATTERNS)).astype(np.int64)


def leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and plain values in a value, with their names.

    A long container of plain values is one leaf, and so is an object of any other class. A text
    that is JSON stands for the container that it describes.

    Args:
        name: The name of the value itself.
        value: Containers, nested in any way.
        depth: The number of containers around the value.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, np.generic):
        yield name, value.item()
    elif isinstance(value, str) and (described := _described(value)) is not None:
        yield from leaves(name, described, depth + 1)
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for inner in value.__tensor_flatten__()[0]:
            yield from leaves(f"{name}.{inner}", getattr(value, inner), depth + 1)
    elif (
        depth > MAX_DEPTH or not isinstance(value, (Mapping, list, tuple, deque)) or _is_long(value)
    ):
        yield name, value
    elif not value:
        yield name, f"empty {_kind(value)}"
    else:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from leaves(f"{name}[{key!r}]", item, depth + 1)


def _described(text: str) -> Any:
    """Returns the container that a text describes as JSON; None: it describes none."""
    if text[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_long(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return len(value) > MAX_ITEMS and all(isinstance(item, PLAIN) for item in items)


def _kind(value: Any) -> str:
    return "dict" if isinstance(value, Mapping) else "list"


def _plain_text(value: Any) -> str:
    """Returns a text that is the same for the same value, in any process."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key!r}: {_plain_text(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, (list, tuple, deque)):
        return f"[{', '.join(map(_plain_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"a set of {', '.join(sorted(map(_plain_text, value)))}"
    if isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    return f"a {type(value).__qualname__}"
