"""Gives torch a store that notes at which addresses the ranks of a group listen.

gloo publishes the address of a group's device at the store, and nowhere else. By these addresses a
group's connections can be told from all others, however many groups are made at a time.

Rules:
 AD1  One thread makes a group, and publishes where the group's device listens. So an address that
      a thread sets within `recording` is of the group that it makes there.
 AD2  All ranks of a group publish under one prefix, which no other group has. So each address that
      is read under it, then or later, is one of the group's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

from elasticzero.comm.gloo import published_address
from elasticzero.comm.store.client import RankStore
from elasticzero.rank_groups.connections import Connections
from elasticzero.torch_internals.groups import PythonStore, TorchStore


class AddressedStore(PythonStore):
    """Passes all on to the store of the ranks; any thread may call it."""

    def __init__(self, store: RankStore | TorchStore) -> None:
        """Takes over the store of the ranks, ours or torch's, which have the same methods."""
        super().__init__()
        self._store = cast(RankStore, store)
        self.set_timeout(self._store.default_timeout)
        self._thread = threading.local()
        self._by_prefix: dict[str, Connections] = {}

    @contextmanager
    def recording(self) -> Iterator[Connections]:
        """Yields what the connections of the group are known by that this thread makes meanwhile;
        it is complete once the group's ranks are connected."""
        self._thread.connections = connections = Connections()
        try:
            yield connections
        finally:
            self._thread.connections = None

    def close(self) -> None:
        """Closes the store of the ranks."""
        self._store.close()

    def _note(self, key: str, value: str | bytes) -> None:
        """Notes an address of a group that was made within `recording` (AD2)."""
        connections = self._by_prefix.get(_prefix(key))
        if connections is None or isinstance(value, str):
            return
        if (address := published_address(value)) is not None:
            connections.addresses.add(address)

    # What torch calls

    def set(self, key: str, value: str | bytes) -> None:
        making: Connections | None = getattr(self._thread, "connections", None)
        if making is not None and isinstance(value, bytes) and published_address(value) is not None:
            self._by_prefix[_prefix(key)] = making  # AD1
        self._note(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, self.default_timeout if timeout is None else timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._store.set_timeout(self.default_timeout)
        values = self._store.multi_get(keys)
        for key, value in zip(keys, values, strict=True):
            self._note(key, value)
        return values

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def _prefix(key: str) -> str:
    return key.rpartition("/")[0]
