"""Maps the keys and key-value pairs of etcd to the names and entries of a store."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elasticzero.launcher.store.api import Entry

FEW = ("alarm/", "done")
"""First and last of the names among which a job has few keys; every agent watches several prefixes
there, and reads them together."""
Span = tuple[bytes, bytes]
"""First key, and the end (excluded)."""


class Keyspace:
    """Maps the keys under one prefix in etcd to the relative names that the rest of the launcher
    uses."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def span(self, prefix: str) -> Span:
        """Returns the span of every key that begins with `prefix`."""
        first = self.key(prefix)
        return first, first[:-1] + bytes([first[-1] + 1])

    def span_of_few(self) -> Span:
        """Returns the span of the names in `FEW`."""
        return self.span(FEW[0])[0], self.span(FEW[1])[1]

    def is_among_few(self, prefix: str) -> bool:
        """Returns whether every key that begins with `prefix` is in `span_of_few`."""
        (first, end), (lowest, over) = self.span(prefix), self.span_of_few()
        return lowest <= first and end <= over

    def entry(self, pair: Any) -> Entry:
        return Entry(
            key=self.name(pair),
            value=pair.value,
            create_revision=pair.create_revision,
            mod_revision=pair.mod_revision,
            leased=pair.lease != 0,
        )

    def name(self, pair: Any) -> str:
        """Returns the name of a pair's key; bytes that are no text are escaped in it."""
        name: str = pair.key[len(self._prefix) :].decode(errors="backslashreplace")
        return name


def oldest_first(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Returns a fixed copy in order of creation."""
    order = sorted(entries.values(), key=lambda entry: (entry.create_revision, entry.key))
    return MappingProxyType({entry.key: entry for entry in order})
