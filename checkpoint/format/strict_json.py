"""Parses JSON from untrusted files within bounds of memory and depth.

Pure. A text that exceeds a bound is refused with an error that says which.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from elasticzero.serialization import RecordError

MEMORY_LIMIT_BYTES = 1 << 30
"""Maximum memory that the values of one text may take, by an estimate from its punctuation."""
MAX_JSON_DEPTH = 200
"""Maximum number of arrays and objects within each other in a manifest's state."""
_OBJECT_BYTES, _ARRAY_BYTES, _VALUE_BYTES = 240, 64, 48
"""Memory that Python takes for an object with its first key, an array, and each further value."""
_REASON_CHARACTERS = 300


def strict_json(data: bytes) -> Any:
    """Returns the value of a JSON text.

    Raises `ValueError` or `RecursionError` if it is not JSON, if a key appears twice in one object,
    or if its values would take more memory than `MEMORY_LIMIT_BYTES`.
    """
    check_memory(data)
    return json.loads(data.decode(), object_pairs_hook=_without_duplicates)


def check_memory(data: bytes) -> None:
    """Raises `RecordError` if the values of a JSON text could take too much memory."""
    needed = (
        len(data)
        + _OBJECT_BYTES * data.count(b"{")
        + _ARRAY_BYTES * data.count(b"[")
        + _VALUE_BYTES * data.count(b",")
    )
    if needed > MEMORY_LIMIT_BYTES:
        raise RecordError(
            f"its {len(data)} bytes could take {needed} bytes of memory, more than the "
            f"{MEMORY_LIMIT_BYTES} allowed for it"
        )


def check_depth(value: Any) -> None:
    """Raises `RecordError` if arrays and objects are nested deeper than `MAX_JSON_DEPTH`."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list, tuple))
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list, tuple))
        ]
        if not level:
            return
    raise RecordError(f"it is nested more than {MAX_JSON_DEPTH} deep")


def reason(error: BaseException) -> str:
    """Returns the message of a parser's error as one printable line, whatever the file contains."""
    text = re.sub(r"\s+", " ", str(error)[: 2 * _REASON_CHARACTERS]) or type(error).__name__
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _REASON_CHARACTERS else text[:_REASON_CHARACTERS] + "..."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise RecordError(f"the key {twice!r} appears twice in one object")
    return value
