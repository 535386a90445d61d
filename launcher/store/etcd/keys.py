"""Maps the keys and key-value pairs of etcd to the names and entries of a store."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elasticzero.launcher.store.api import Entry


class Keyspace:
    """Maps the keys under one prefix in etcd to the relative names that the rest of the launcher
    uses."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def span(self, prefix: str) -> tuple[bytes, bytes]:
        """Returns the first key, and the end (excluded), of every key that begins with `prefix`."""
        first = self.key(prefix)
        return first, first[:-1] + bytes([first[-1] + 1])

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
