"""What islands make of contributions: the same bits on all, whatever the format on the way is."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from elasticzero.errors import StorageError
from elasticzero.ipc.round_wire import Elements, RoundWire
from elasticzero.ipc.rounds import PARTS, FragmentShape, outer_name, own_name, sent_name
from elasticzero.launcher.islands.exchange import (
    Agreed,
    Exchange,
    Exchanged,
    PrepareSent,
    ToDo,
)
from elasticzero.launcher.islands.files import RoundFiles, size_of
from elasticzero.launcher.islands.outer import OuterOptimizer
from elasticzero.launcher.protocol.rounds.documents import Contributor, Outer, Sum, Unreachable
from elasticzero.launcher.protocol.rounds.island import SumUp, TakeOuter, TakeSum
from elasticzero.options.diloco import WIRES

SHAPE = FragmentShape(
    elements=5000, averaged=100, dtype="float32", exact=900, matrices=((50, 70), (30, 20))
)
NAMES = ("a", "b", "c")
DEADLINE_S = 60.0


@dataclass
class OtherNode:
    """Reads another island's files, as its agent serves them."""

    where: str
    files: RoundFiles

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        try:
            with self.files.open_file(name) as file:
                file.seek(start)
                return sum(file.readinto(buffer) for buffer in buffers)  # type: ignore[attr-defined]
        except OSError as error:
            raise StorageError(str(error)) from None


class Islands:
    """Three islands in folders of their own, with one outer state."""

    def __init__(self, folder: Path, wire: str) -> None:
        self.wire = wire
        self.files = {name: RoundFiles(folder / name) for name in NAMES}
        self.ended = queue.SimpleQueue[Exchanged]()
        self.fetched: list[int] = []
        self.gone: set[str] = set()
        agreed = Agreed(
            wires=[RoundWire(format=wire, shape=SHAPE)], optimizer=OuterOptimizer(lr=0.5)
        )
        self.exchanges = {name: self._exchange(name, agreed) for name in NAMES}
        first_E = random(0)
        for files in self.files.values():
            for part, values_E in zip(PARTS, (first_E, np.zeros_like(first_E)), strict=True):
                self.write(files, own_name(0, part), values_E)
            digest = files.digest(*(own_name(0, part) for part in PARTS))
            self.outer = Outer(round=0, digest=digest)
            for part in PARTS:
                files.path(own_name(0, part)).rename(files.path(outer_name(0, 0, digest, part)))
        self.sent = {name: random(1 + place) for place, name in enumerate(NAMES)}
        for name, values_E in self.sent.items():
            self.write(self.files[name], sent_name(0, name, 1), values_E)

    def _exchange(self, name: str, agreed: Agreed) -> Exchange:
        def source(other: str) -> OtherNode | None:
            there = other != name and other not in self.gone
            return OtherNode(other, self.files[other]) if there else None

        return Exchange(self.files[name], agreed, source, self.ended.put, self.fetched.append)

    @staticmethod
    def write(files: RoundFiles, name: str, values_E: Elements) -> None:
        with files.making(name, size_of(SHAPE)) as data:
            data[:] = values_E.view(np.uint8)

    def do(self, name: str, task: ToDo, **digests: str) -> Exchanged:
        self.exchanges[name].begin(task, digests)
        return self.ended.get(timeout=DEADLINE_S)

    def digests(self) -> dict[str, str]:
        tasks = {name: PrepareSent(fragment=0, incarnation=name, number=1) for name in NAMES}
        return {name: str(self.do(name, task).result) for name, task in tasks.items()}

    def sum_up(self, **digests: str) -> Exchanged:
        return self.do(
            "a", SumUp(fragment=0, attempt=1, base=self.outer, contributors=PARTS_OF), **digests
        )

    def outer_of(self, name: str, digest: str, part: str = "parameters") -> Elements:
        return np.fromfile(self.files[name].path(outer_name(0, 1, digest, part)), np.float32)

    def close(self) -> None:
        for exchange in self.exchanges.values():
            exchange.close()


PARTS_OF = tuple(
    Contributor(
        island=name, incarnation=name, number=1, samples=8 * place, staleness=0, claim=1, upto=1
    )
    for place, name in enumerate(NAMES, 1)
)


def random(seed: int) -> Elements:
    return np.random.default_rng(seed).normal(size=SHAPE.elements).astype(np.float32)


@pytest.fixture(params=[*WIRES[:-2], "topk:0.2", "powersgd:3"])
def islands(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Islands]:
    three = Islands(tmp_path, request.param)
    yield three
    three.close()


def test_all_have_the_same_bits_of_a_round(islands: Islands) -> None:
    before = {name: values_E.copy() for name, values_E in islands.sent.items()}
    summed = islands.sum_up(**islands.digests())
    assert isinstance(summed.result, Sum), summed.error
    task = TakeSum(
        fragment=0, base=islands.outer, sum=summed.result, contributions=3, sources=("a",)
    )
    assert islands.do("b", task).result == summed.result
    digest = summed.result.outer
    outer = Outer(round=1, digest=digest)
    assert not islands.do("c", TakeOuter(fragment=0, outer=outer, sources=("b", "a"))).error
    for part in PARTS:
        first, *others = (islands.outer_of(name, digest, part) for name in NAMES)
        assert all(np.array_equal(first, other) for other in others)
    mean_E = np.average([before[n] for n in NAMES], axis=0, weights=[8, 16, 24])
    moved_E = random(0) - islands.outer_of("a", digest)
    if ":" in islands.wire:  # what an island has left out counts nothing
        kept = [np.fromfile(islands.files[n].path(sent_name(0, n, 1)), np.float32) for n in NAMES]
        mean_E = np.average(kept, axis=0, weights=[8, 16, 24])
        if islands.wire == "topk:0.2":
            assert 0.2 * 4100 <= np.count_nonzero(mean_E[:4100]) <= 0.6 * 4100
        assert np.abs(moved_E[:4900] - 0.5 * 1.9 * mean_E[:4900]).max() < 1e-5
    assert np.abs(moved_E[:4900] - 0.5 * 1.9 * mean_E[:4900]).max() < 0.6
    assert np.abs(moved_E[4900:] - mean_E[4900:]).max() < 1e-5  # buffers, which are averaged


def test_what_an_island_keeps_is_what_others_have_read(islands: Islands) -> None:
    """So what the format leaves out stays in its parameters, and comes with the next one."""
    islands.digests()
    kept_E = np.fromfile(islands.files["b"].path(sent_name(0, "b", 1)), np.float32)
    wire = islands.exchanges["b"]._wires[0]
    name = sent_name(0, "b", 1) + (".wire" if wire.is_lossy else "")
    data = np.fromfile(islands.files["b"].path(name), np.uint8)
    assert len(data) == wire.nbytes
    read_E = np.concatenate([wire.decode(data[p.bytes], p) for p in wire.pieces()])
    assert np.array_equal(kept_E, read_E)
    assert np.array_equal(kept_E[-900:], islands.sent["b"][-900:])


def test_other_bytes_than_an_island_has_told_of_count_as_none(islands: Islands) -> None:
    digests = islands.digests()
    result = islands.sum_up(**{**digests, "b": digests["c"]}).result
    assert result == Unreachable(attempt=1, islands=("b",))
    islands.gone.add("c")
    result = islands.sum_up(**digests).result
    assert result == Unreachable(attempt=1, islands=("c",))


def test_what_is_fetched_is_counted(islands: Islands) -> None:
    digests = islands.digests()
    assert not islands.fetched
    islands.sum_up(**digests)
    assert sum(islands.fetched) == 2 * islands.exchanges["a"]._wires[0].nbytes
