"""An island that comes has the newest snapshot that another one lends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.ram.slots import HEADROOM_BYTES
from elasticzero.checkpoint.ram.store import HeldSnapshot, SnapshotStore
from elasticzero.checkpoint.steps.catalog import read_manifest
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.islands.documents import REPORTS
from elasticzero.launcher.islands.newcomers import from_memory
from elasticzero.launcher.islands.newcomers.beginning import (
    LOCK,
    Newcomer,
    Places,
    begin_as_others,
    one_node_at_a_time,
)
from elasticzero.launcher.islands.newcomers.from_memory import Brought, Reach
from elasticzero.launcher.islands.newcomers.lending import (
    LENT,
    SILENCE_S,
    SnapshotLender,
    asked_in,
    query_of,
)
from elasticzero.launcher.protocol.documents import Holding, Member, World, to_bytes
from elasticzero.launcher.store.api import Entry
from tests.support.deadlines import wait_until
from tests.support.memory_store import MemoryServer, MemoryStore
from tests.unit.checkpoint.cases import draft_of, write_step
from tests.unit.checkpoint.ram.test_store import CONTENTS, LAYOUT, hold, snapshot

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

    def __init__(self, lender: SnapshotLender) -> None:
        super().__init__(Path("/nowhere"), durable=False)
        self._lender = lender

    def size(self, name: str) -> int:
        with self._lender.open_file(name) as file:
            return file.seek(0, 2)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        with self._lender.open_file(name) as file:
            file.seek(start)
            return sum(file.readinto(buffer) for buffer in buffers)  # type: ignore[attr-defined]

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
        self.alive: set[str] = set()
        self.leaves = False

    def add(self, island: str, *nodes: SnapshotLender) -> None:
        names = [f"{island}.{n}" for n in range(len(nodes))]
        self.agents |= dict(zip(names, nodes, strict=True))
        members = tuple(Member(name, "i", name, 1, 2, 1) for name in names)
        world = World(
            generation=4,
            token="t",
            members=members,
            strategy="zero2",
            resume=Resume(tier="fresh"),
            reason="test",
        )
        self.store.write({f"islands/{island}/world": to_bytes(world)})
        self.store.write({REPORTS + island: b"{}"})

    def ask(self, member: Member, path: str, timeout_s: float) -> Mapping[str, Any] | None:
        self.asked(f"{member.node}{path}")
        agent = self.agents.get(member.node)
        return None if agent is None else agent.answer(asked_in(path.partition("?")[2]))

    def come(self, *, saves: Path | None = None) -> Brought | None:
        of = Newcomer(
            node="new.0",
            island="new",
            workers=1,
            job_saves=None if saves is None else str(saves),
            saves=None if saves is None else f"{saves}/islands/new",
        )
        reach = Reach(
            ask=self.ask,
            open=lambda address, run, folder: Files(self.agents[address.removesuffix(":1")]),
            answers=lambda member: member.node in self.alive,
            cancelled=lambda: self.leaves,
        )
        places = Places(
            job=lambda key: self.store.read(key).entries,
            island=self.of_island,
            reach=reach,
            snapshots=self.snapshots,
        )
        return begin_as_others(of, places, self.lines.append)

    def of_island(self, key: str) -> Mapping[str, Entry]:
        entries = self.store.read(f"islands/new/{key}").entries
        named = ((key.removeprefix("islands/new/"), entry) for key, entry in entries.items())
        return {name: replace(entry, key=name) for name, entry in named}

    @property
    def snapshots(self) -> SnapshotStore:
        return SnapshotStore(self.root / "new")


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
    assert islands.lines[-1] == "begins with what a had at step 20"
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


def test_all_nodes_lend_before_any_is_read(islands: Islands, tmp_path: Path) -> None:
    """So that none replaces its part meanwhile."""
    first = donor_of(tmp_path / "a", 10, ranks={10: range(1)})
    second = donor_of(tmp_path / "b", 10, ranks={10: range(1, 3)})
    islands.add("a", first, second)
    asked: list[str] = []
    islands.asked = asked.append
    assert islands.come() == Brought(island="a", step=10, shards=3)
    assert [path.rpartition("&")[2] for path in asked[2:]] == ["ranks=0", "ranks=1,2"]
    assert [path.partition("/")[0] for path in asked] == ["a.0", "a.1"] * 2


def test_what_another_island_reads_is_read_too(islands: Islands, tmp_path: Path) -> None:
    lender = donor_of(tmp_path / "a", 10)
    islands.add("a", lender)
    assert islands.come() == Brought(island="a", step=10, shards=3)
    islands.snapshots.clear()
    for rank in RANKS:
        hold(lender._snapshots, rank, snapshot(4, 20))
    lender._snapshots.keep_only({(4, 20)})
    assert islands.come() == Brought(island="a", step=10, shards=3), "one at a time"


def test_what_is_damaged_is_not_kept(islands: Islands, tmp_path: Path) -> None:
    lender = donor_of(tmp_path / "a", 10)
    islands.add("a", lender)
    for path in (tmp_path / "a").rglob("rank-00002*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert islands.come() is None
    assert islands.lines[-1].startswith("a cannot lend its state: ")
    assert not islands.snapshots.held()


def test_an_agent_that_answers_oddly_is_passed_over(islands: Islands, tmp_path: Path) -> None:
    islands.add("a", donor_of(tmp_path / "a", 10))
    lender = islands.agents["a.0"]
    for odd in (
        {"held": 3},
        {"held": [{"generation": 4}]},
        {"held": [{"generation": 4, "step": 9, "world_size": 0, "ranks": []}]},
        {"held": [{"generation": 4, "step": 9, "world_size": 1, "ranks": [-1]}]},
        {"held": [{"generation": 4, "step": 9, "world_size": 1, "ranks": [0]}], "lent": {}},
    ):
        lender.answer = lambda asked, odd=odd: odd  # type: ignore[method-assign,misc]
        assert islands.come() is None
    assert not islands.snapshots.held()


def test_another_node_of_the_island_has_its_state(islands: Islands, tmp_path: Path) -> None:
    """Unless it is dead, and its registration has not lapsed yet."""
    islands.add("a", donor_of(tmp_path / "a", 10))
    for node in ("new.0", "new.1"):
        member = to_bytes(Member(node, "i", node, 1, 2, 1))
        islands.store.write({f"islands/new/members/{node}": member})
    assert islands.come() is not None
    islands.alive.add("new.1")
    assert islands.come() is None


def test_a_node_that_is_to_leave_gives_up(islands: Islands, tmp_path: Path) -> None:
    islands.add("a", donor_of(tmp_path / "a", 10))
    saved(tmp_path / "saves" / "islands" / "b", 90)

    def leaves(path: str) -> None:
        islands.leaves = "step" in path

    islands.asked = leaves
    assert islands.come(saves=tmp_path / "saves") is None
    assert not islands.snapshots.held()
    assert not (tmp_path / "saves" / "islands" / "new").exists()


@pytest.mark.parametrize(("committed", "step"), [(99, 10), (100, 10), (101, None)])
def test_its_own_checkpoint_comes_first_where_it_is_of_a_later_round(
    committed: int, step: int | None, islands: Islands, tmp_path: Path
) -> None:
    """Whatever the steps of the two are."""
    lender, draft = SnapshotLender(SnapshotStore(tmp_path / "a")), at_samples(100)
    for rank in RANKS:
        hold(lender._snapshots, rank, replace(draft, generation=4, step=10))
    islands.add("a", lender)
    write_step(tmp_path / "saves" / "islands" / "new", at_samples(committed), CONTENTS)
    brought = islands.come(saves=tmp_path / "saves")
    assert (None if brought is None else brought.step) == step


def at_samples(committed: int) -> Manifest:
    island = {"left": {"committed": committed}}
    return draft_of(LAYOUT, step=5000, state={"position": {"island": island}})


def saved(folder: Path, step: int) -> None:
    write_step(folder, draft_of(LAYOUT, step=step), CONTENTS)


def whole(step: int) -> Holding:
    return Holding(generation=4, step=step, world_size=3, ranks=(0, 1, 2))


def test_what_is_lent_stays_while_it_is_read(tmp_path: Path) -> None:
    lender = donor_of(tmp_path, 10, 20)
    name = snapshot(4, 10).file_name(0)

    def opened() -> BinaryIO:
        return lender.open_file(name)

    with pytest.raises(FileNotFoundError):
        opened()
    assert lender.answer(whole(11))["lent"] == []
    lent = lender.answer(whole(10))
    of = {"generation": 4, "step": 10, "world_size": 3, "ranks": [0, 1, 2]}
    assert lent["lent"] == [of]
    assert [held["step"] for held in lent["held"]] == [10, 20]
    lender._snapshots.keep_only({(4, 20)})
    with opened() as file:
        assert file.read(1)
    assert lender.answer(whole(20))["lent"] == lent["lent"], "one at a time"
    lender.turn(lender._read_s + SILENCE_S - 1)
    with pytest.raises(FileNotFoundError):
        lender.open_file("other")
    with opened():
        lender.turn(lender._read_s + SILENCE_S + 1)
    with pytest.raises(FileNotFoundError):
        opened()
    assert lender.answer(whole(20))["lent"] == [of | {"step": 20}]
    wait_until(lambda: len([*(tmp_path / LENT).iterdir()]) == 1, "the first copy is gone", 60)
    lender.close()
    wait_until(lambda: not [*(tmp_path / LENT).iterdir()], "the second copy is gone", 60)


def test_nothing_is_lent_where_that_leaves_too_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = donor_of(tmp_path, 10)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    for free, is_lent in ((3 * size, False), (3 * size + HEADROOM_BYTES, True)):
        monkeypatch.setattr("elasticzero.checkpoint.ram.store.free_bytes", lambda root, n=free: n)
        assert bool(lender.answer(whole(10))["lent"]) == is_lent


def test_a_node_without_room_says_so(
    islands: Islands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_memory, "SPARE", 1 << 60)
    islands.add("a", donor_of(tmp_path / "a", 10))
    assert islands.come() is None
    (line,) = islands.lines
    assert "cannot lend its state: " in line and "has no room for" in line


@pytest.mark.parametrize(
    "query", ["", "generation=4", "generation=-1&step=1&world_size=1&ranks=0", "ranks=0&step=1"]
)
def test_other_requests_ask_for_nothing(query: str) -> None:
    assert asked_in(query) is None
    assert asked_in(query_of(whole(10))) == whole(10)


def test_nodes_of_an_island_look_one_after_the_other() -> None:
    store = MemoryStore(MemoryServer(lambda: 0.0))
    with one_node_at_a_time(store, "a", 5, lambda: False):
        assert store.read(LOCK).entries[LOCK].value == b"a"
        with one_node_at_a_time(store, "leaves", 5, lambda: True):
            assert store.read(LOCK).entries[LOCK].value == b"a"
    with one_node_at_a_time(store, "b", 5, lambda: False):
        assert store.read(LOCK).entries[LOCK].value == b"b"
    assert not store.read(LOCK).entries
