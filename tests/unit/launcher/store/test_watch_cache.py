"""What a cache makes of a folder's states, beside a reading of each state by itself."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from elasticzero.launcher.protocol.documents import Member, to_bytes
from elasticzero.launcher.store.api import Entry, PrefixState
from elasticzero.launcher.store.watch_cache import MEMBERS, WatchCache, members_of
from tests.support.memory_store import MemoryServer, MemoryStore

NAMES = [f"node-{number}" for number in range(12)]
CHANGES = 300


def _entry(random: Random, name: str, revision: int, created: int) -> Entry:
    member = Member(name, f"i-{random.randint(0, 3)}", "127.0.0.1", 1, 2, 1)
    value = b"not json" if random.random() < 0.1 else to_bytes(member)
    return Entry(
        key=f"{MEMBERS}{name}", value=value, create_revision=created, mod_revision=revision
    )


@pytest.mark.parametrize("seed", range(10))
def test_registrations_are_those_of_the_state_alone(seed: int) -> None:
    """What is kept of the state before counts only for entries that have not changed."""
    random = Random(seed)
    cache = WatchCache(MemoryStore(MemoryServer(time.monotonic)), lambda: None)
    entries: dict[str, Entry] = {}
    seen = None
    for revision in range(1, CHANGES):
        for name in random.sample(NAMES, random.randint(1, 3)):
            before = entries.get(name)
            if before is not None and random.random() < 0.3:
                del entries[name]
            elif before is not None and random.random() < 0.3:
                entries[name] = replace(before)  # equal, as another read has it
            else:
                created = before.create_revision if before is not None else revision
                entries[name] = _entry(random, name, revision, created)
        by_age = sorted(entries.values(), key=lambda entry: entry.create_revision)
        state = PrefixState(revision=revision, entries={entry.key: entry for entry in by_age})
        cache.put(MEMBERS, state)
        if random.random() < 0.7:  # some states are never looked at
            seen = cache.members()
            assert seen is not None
            assert list(seen.items()) == list(members_of(state).items())
            assert cache.members() is seen
    assert seen
