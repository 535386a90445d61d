"""An island that comes has the newest snapshot that another one lends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.ram.store import HeldSnapshot, SnapshotStore
from elasticzero.checkpoint.steps.catalog import read_manifest
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.islands.documents import REPORTS
from elasticzero.launcher.islands.newcomers.beginning import (
    LOCK,
    Newcomer,
    begin_as_others,
    one_node_at_a_time,
)
from elasticzero.launcher.islands.newcomers.from_memory import Brought, Reach
from elasticzero.launcher.islands.newcomers.lending import (
    LENT,
    SILENCE_S,
    SnapshotLender,
    wanted_in,
)
from elasticzero.launcher.protocol.documents import Member, World, to_bytes
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.unit.checkpoint.ram.test_store import hold, snapshot

RANKS = range(3)


def donor_of(root: Path, *steps: int, ranks: Mapping[int, range] | None = None) -> SnapshotLender:
    """A node that holds whole snapshots of these steps of generation 4."""
    store = SnapshotStore(root)
    for step in steps:
        for rank in RANKS if ranks is None else ranks[step]:
            hold(store, rank, snapshot(4, step))
    return SnapshotLender(store)


class Files(DiskStorage):
    """What an agent serves, which may end with any reading."""

    def close(self) -> None:
        pass


class Islands:
    """Islands in etcd, and their agents."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = MemoryStore(MemoryServer(lambda: 0.0))
        self.agents: dict[str, SnapshotLender] = {}
        self.lines: list[str] = []
        self.asked: Callable[[str], None] = lambda path: None

    def add(self, island: str, *nodes: SnapshotLender, generation: int = 4) -> None:
        names = [f"{island}.{n}" for n in range(len(nodes))]
        self.agents |= dict(zip(names, nodes, strict=True))
        members = tuple(Member(name, "i", name, 1, 2, 1) for name in names)
        world = World(
            generation=generation,
            token="t",
            members=members,
            strategy="zero2",
            resume=Resume(tier="fresh"),
            reason="test",
        )
        self.store.write({f"islands/{island}/world": to_bytes(world)})
        self.store.write({REPORTS + island: b"{}"})

    def ask(self, member: Member, path: str, timeout_s: float) -> Mapping[str, Any] | None:
        self.asked(path)
        agent = self.agents.get(member.node)
        return None if agent is None else agent.answer(wanted_in(path.partition("?")[2]))

    def open(self, address: str, run: int, folder: str) -> Files:
        agent = self.agents[address.removesuffix(":1")]
        return Files(agent._snapshots.root / folder, durable=False)

    def come(self, *, saves: Path | None = None, cancelled: bool = False) -> Brought | None:
        of = Newcomer(
            node="new.0", island="new", workers=1, job_saves=None if saves is None else str(saves)
        )
        reach = Reach(ask=self.ask, open=self.open, cancelled=lambda: cancelled)
        store: Any = _Part(self.store, "islands/new/")
        return begin_as_others(of, self.store, store, reach, self.snapshots, self.lines.append)

    @property
    def snapshots(self) -> SnapshotStore:
        return SnapshotStore(self.root / "new")


class _Part:
    """A part of the store."""

    def __init__(self, store: MemoryStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def read(self, prefix: str) -> Any:
        state = self._store.read(self._prefix + prefix)
        entries = {k.removeprefix(self._prefix): e for k, e in state.entries.items()}
        return replace(state, entries=entries)


@pytest.fixture
def islands(tmp_path: Path) -> Islands:
    (tmp_path / "new").mkdir()
    return Islands(tmp_path)


def brought(islands: Islands, step: int) -> list[HeldSnapshot]:
    return [HeldSnapshot(generation=0, step=step, ranks=(0, 1, 2), world_size=3)]


def test_it_has_the_newest_whole_snapshot(islands: Islands, tmp_path: Path) -> None:
    """Bit for bit, as one of generation 0, with shards from several nodes."""
    first = donor_of(tmp_path / "a", 10, 20, ranks={10: RANKS, 20: range(2)})
    second = donor_of(tmp_path / "b", 20, 30, ranks={20: range(1, 3), 30: range(1)})
    islands.add("a", first, second)
    assert islands.come() == Brought(island="a", step=20, shards=3)
    assert islands.snapshots.held() == brought(islands, 20)
    assert islands.lines == ["begins with what a had at step 20"]
    for rank in RANKS:
        name = snapshot(4, 20).file_name(rank)
        origin = tmp_path / ("a" if rank < 2 else "b") / "gen-4"
        (original,) = origin.rglob(f"step-*20/{name}")
        (copy,) = (tmp_path / "new" / "gen-0").rglob(name)
        assert copy.read_bytes() == original.read_bytes()
        assert manifest_of(copy, rank).generation == 0


def manifest_of(shard: Path, rank: int) -> Manifest:
    (name,) = (
        p.name for p in shard.parent.iterdir() if p.name.startswith(f"manifest-rank-{rank:05}")
    )
    return read_manifest(DiskStorage(shard.parent, durable=False), name)


def test_another_island_is_read_where_one_has_nothing(islands: Islands, tmp_path: Path) -> None:
    islands.add("a", donor_of(tmp_path / "a"))
    islands.add("b", donor_of(tmp_path / "b", 50, ranks={50: range(2)}))
    islands.add("c", donor_of(tmp_path / "c", 40))
    islands.add("new", donor_of(tmp_path / "d", 90))  # its own, of before
    islands.store.write({REPORTS + "gone": b"{}"})
    assert islands.come() == Brought(island="c", step=40, shards=3)


def test_nothing_is_found_where_nobody_has_anything(islands: Islands, tmp_path: Path) -> None:
    assert islands.come() is None
    islands.add("a", donor_of(tmp_path / "a"))
    assert islands.come() is None
    assert not islands.lines


def test_a_snapshot_that_is_replaced_meanwhile_is_asked_for_anew(
    islands: Islands, tmp_path: Path
) -> None:
    lender = donor_of(tmp_path / "a", 10)
    islands.add("a", lender)

    def replaced(path: str) -> None:
        if "step=10" in path:
            for rank in RANKS:
                hold(lender._snapshots, rank, snapshot(4, 20))
            lender._snapshots.keep_only({(4, 20)})

    islands.asked = replaced
    assert islands.come() == Brought(island="a", step=20, shards=3)
    assert islands.snapshots.held() == brought(islands, 20)


def test_what_is_damaged_is_not_kept(islands: Islands, tmp_path: Path) -> None:
    lender = donor_of(tmp_path / "a", 10)
    islands.add("a", lender)
    for path in (tmp_path / "a").rglob("rank-00002*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert islands.come() is None
    (line,) = islands.lines
    assert line.startswith("no island lends this one its newest state (a: ")
    assert not islands.snapshots.held()


def test_another_node_of_the_island_has_its_state(islands: Islands, tmp_path: Path) -> None:
    islands.add("a", donor_of(tmp_path / "a", 10))
    islands.store.write({"islands/new/members/new.0": b"{}"})  # its own registration of before
    assert islands.come() is not None
    islands.store.write({"islands/new/members/new.1": b"{}"})
    assert islands.come() is None


def test_a_node_that_is_to_leave_gives_up(islands: Islands, tmp_path: Path) -> None:
    islands.add("a", donor_of(tmp_path / "a", 10))
    assert islands.come(cancelled=True) is None
    assert not islands.snapshots.held()


def test_what_is_lent_stays_while_it_is_read(tmp_path: Path) -> None:
    lender = donor_of(tmp_path, 10, 20)
    name = snapshot(4, 10).file_name(0)

    def opened() -> BinaryIO:
        return lender.open_file(name)

    with pytest.raises(FileNotFoundError):
        opened()
    assert lender.answer(wanted_in("generation=4&step=11"))["lent"] is None
    lent = lender.answer(wanted_in("generation=4&step=10"))
    assert lent["lent"] == {"generation": 4, "step": 10, "ranks": [0, 1, 2], "world_size": 3}
    assert [held["step"] for held in lent["held"]] == [10, 20]
    lender._snapshots.keep_only({(4, 20)})
    with opened() as file:
        assert file.read(1)
    other = lender.answer(wanted_in("generation=4&step=20"))
    assert other["lent"] == lent["lent"], "one at a time"
    lender.turn(lender._read_s + SILENCE_S - 1)
    with opened():
        lender.turn(lender._read_s + SILENCE_S + 1)
    with pytest.raises(FileNotFoundError):
        opened()
    assert not (tmp_path / LENT).exists()
    assert lender.answer(wanted_in("generation=4&step=20"))["lent"]["step"] == 20


def test_nothing_is_lent_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lender = donor_of(tmp_path, 10)
    monkeypatch.setattr("elasticzero.checkpoint.ram.store.free_bytes", lambda root: 1000)
    assert lender.answer((4, 10))["lent"] is None
    assert not (tmp_path / LENT).exists()


@pytest.mark.parametrize(
    "query", ["", "generation=4", "generation=-1&step=1", "step=1&generation=2"]
)
def test_other_requests_ask_for_nothing(query: str) -> None:
    assert wanted_in(query) is None


def test_nodes_of_an_island_look_one_after_the_other() -> None:
    store = MemoryStore(MemoryServer(lambda: 0.0))
    with one_node_at_a_time(store, "a", 5):
        assert store.read(LOCK).entries[LOCK].value == b"a"
    with one_node_at_a_time(store, "b", 5):
        assert store.read(LOCK).entries[LOCK].value == b"b"
    assert not store.read(LOCK).entries
