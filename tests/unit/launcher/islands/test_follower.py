"""A node that follows the head of its island: its workers are told what they can read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticzero.errors import StorageError
from elasticzero.ipc.round_wire import RoundWire
from elasticzero.ipc.rounds import (
    NONE,
    PARTS,
    FragmentNews,
    FragmentProgress,
    FragmentShape,
    IslandAt,
    IslandProgress,
    JoinRounds,
    RoundNews,
    SamplesLeft,
    Sent,
    encoded_name,
    outer_name,
    sent_name,
)
from elasticzero.launcher.islands.files import RoundFiles, size_of
from elasticzero.launcher.islands.follower import IslandFollower
from elasticzero.launcher.islands.news_board import IslandNews
from elasticzero.launcher.islands.node import NodeOutlets
from elasticzero.options.diloco import DiLoCo
from tests.support.deadlines import wait_until
from tests.unit.launcher.islands.test_exchange import OtherNode

SHAPE = FragmentShape(elements=3000, averaged=0, dtype="float32")


class Head(OtherNode):
    """The files of the head, as its agent serves them."""

    def __init__(self, folder: Path) -> None:
        super().__init__("head", RoundFiles(folder))
        self.is_away = False
        self.reads: list[str] = []

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        self.reads.append(name)
        if self.is_away:
            raise StorageError("the head is away")
        return super().read_into(name, start, *buffers)

    def make(self, name: str, seed: int) -> np.ndarray:
        values = np.random.default_rng(seed).standard_normal(SHAPE.elements).astype("float32")
        with self.files.making(name, size_of(SHAPE)) as data:
            data[:] = values.view(np.uint8)
        return values

    def outer(self, round: int) -> FragmentNews:
        """A round's outer state, which it has from now on."""
        for part in PARTS:
            self.make(f"made.{part}", 10 * round + len(part))
        digest = self.files.digest(*(f"made.{part}" for part in PARTS))
        for part in PARTS:
            name = outer_name(0, round, digest, part)
            self.files.path(f"made.{part}").rename(self.files.path(name))
        return FragmentNews(round=round, digest=digest, called=False, settled=0)


class Node:
    """A node with workers that follows."""

    def __init__(self, folder: Path, *, workers: int = 1, wire: str = "fp32") -> None:
        self.head, self.files = Head(folder / "head"), RoundFiles(folder / "node")
        self.told: list[RoundNews] = []
        self.lines: list[str] = []
        self.fetched: list[int] = []
        self.workers, self.settings, self.now_s = workers, DiLoCo(wire=wire), 0.0
        outlets = NodeOutlets(
            tell=self.told.append,
            wake=lambda: None,
            log_line=self.lines.append,
            count_bytes=self.fetched.append,
        )
        self.follower = IslandFollower(workers, self.files, outlets)
        self.follower.generation_begins((1, 1))

    def joins(self, progress: IslandProgress = NONE) -> None:
        for rank in range(self.workers):
            self.joins_as(rank, progress)

    def joins_as(self, rank: int, progress: IslandProgress = NONE) -> None:
        message = JoinRounds(
            settings=self.settings,
            section=100,
            total=100,
            global_batch=10,
            digest="d",
            fragments=(SHAPE,),
            progress=progress,
        )
        self.follower.received(rank, message)

    def turn(self, doc: IslandNews | None) -> None:
        self.follower.turn(self.now_s, doc, self.head)  # type: ignore[arg-type]

    def turn_until(self, doc: IslandNews, so: Callable[[], bool]) -> None:
        def is_so() -> bool:
            self.now_s += 1.0
            self.turn(doc)
            return so()

        wait_until(is_so, "what the turns lead to")

    def turn_until_told(self, doc: IslandNews) -> None:
        self.turn_until(doc, lambda: self.told[-1:] == [*doc.recent])

    def rest(self, doc: IslandNews | None) -> None:
        """Turn for a while, in which nothing more is to happen."""
        for _ in range(20):
            self.turn(doc)
            time.sleep(0.005)


def doc_of(version: int, *fragments: FragmentNews, generation: int = 1) -> IslandNews:
    news = RoundNews(
        version=version,
        incarnation="i",
        fragments=fragments,
        claims=(),
        left=SamplesLeft(),
        none_left=False,
        done=False,
    )
    return IslandNews(run=1, generation=generation, recent=(news,))


def at(base: FragmentNews, number: int = 0, *, waits: bool = False) -> IslandProgress:
    """The progress of workers that have taken a round, and have contributed so many times."""
    sent = Sent(number=number, base=base.round, samples=1, steps=1, claim=1, upto=1)
    part = FragmentProgress(
        base=base.round, digest=base.digest, number=number, sent=sent if waits else None
    )
    return IslandProgress(fragments=(part,), incarnation="i", claim=1, upto=1)


def test_workers_are_told_once_all_have_their_state_and_the_files_are_there(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, workers=2)
    first = node.head.outer(3)
    doc = doc_of(5, first)
    node.joins_as(0)
    node.rest(doc)
    assert not node.told and not node.head.reads
    node.joins_as(1)
    node.turn_until(doc, lambda: bool(node.told))
    for part in PARTS:
        name = outer_name(0, 3, first.digest, part)
        assert node.files.path(name).read_bytes() == node.head.files.path(name).read_bytes()
    assert sum(node.fetched) == 2 * size_of(SHAPE)
    node.rest(doc)
    assert node.told == [*doc.recent], "once"


def test_news_of_another_generation_counts_not(tmp_path: Path) -> None:
    node = Node(tmp_path)
    doc = doc_of(1, node.head.outer(0))
    node.joins()
    node.rest(replace(doc, generation=2))
    assert not node.told
    node.follower.generation_begins((1, 2))
    node.rest(replace(doc, generation=2))
    assert not node.told, "its workers have not joined"
    node.joins()
    node.turn_until(replace(doc, generation=2), lambda: bool(node.told))


def test_it_tries_again_where_the_head_does_not_answer(tmp_path: Path) -> None:
    node = Node(tmp_path)
    doc = doc_of(1, node.head.outer(0))
    node.head.is_away = True
    node.joins()
    node.turn_until(doc, lambda: len(node.head.reads) > 2)
    assert not node.told
    assert "the head is away" in node.lines[0] and len(node.lines) == 1
    node.head.is_away = False
    node.turn_until(doc, lambda: bool(node.told))


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_node_that_comes_later_gets_what_waits(wire: str, tmp_path: Path) -> None:
    """The workers come from a state in which a contribution was not settled, and a round that is
    not the newest was taken last."""
    node = Node(tmp_path, wire=wire)
    before, after = node.head.outer(3), node.head.outer(4)
    name = sent_name(0, "i", 2)
    values = node.head.make(name, 7)
    if wire != "fp32":
        format = RoundWire(format=wire, shape=SHAPE)
        with node.head.files.making(encoded_name(name), format.nbytes) as data:
            for piece in format.pieces():
                data[piece.bytes] = format.encode(values[piece.elements], piece)
                values[piece.elements] = format.decode(data[piece.bytes], piece)
    node.joins(at(before, 2, waits=True))
    doc = doc_of(1, after)
    node.turn_until(doc, lambda: bool(node.told))
    assert node.files.path(outer_name(0, 3, before.digest)).exists()
    kept = node.files.data(name, size_of(SHAPE)).view(np.float32)
    assert kept.tolist() == values.tolist()


def test_contributions_are_rounded_before_the_news(tmp_path: Path) -> None:
    node = Node(tmp_path, wire="int8")
    base, after = node.head.outer(0), node.head.outer(1)
    node.joins()
    node.turn_until(doc_of(1, base), lambda: bool(node.told))
    name = sent_name(0, "i", 1)
    values = np.random.default_rng(1).standard_normal(SHAPE.elements).astype("float32")
    with node.files.making(name, size_of(SHAPE)) as data:
        data[:] = values.view(np.uint8)
    node.follower.received(0, IslandAt(progress=at(base, 1, waits=True), waits=False))
    node.turn_until(doc_of(2, after), lambda: len(node.told) == 2)
    kept = node.files.data(name, size_of(SHAPE)).view(np.float32)
    assert node.files.path(encoded_name(name)).exists()
    assert kept.tolist() != values.tolist()
    assert np.allclose(kept, values, atol=0.05)


def test_news_waits_for_a_contribution_that_it_settles(tmp_path: Path) -> None:
    """The head's workers are faster: this node's are about to write theirs, which is rounded."""
    node = Node(tmp_path, workers=2)
    base = node.head.outer(0)
    after = replace(node.head.outer(1), settled=1)
    node.joins(at(base))
    node.turn_until_told(doc_of(1, base))
    later = doc_of(2, after)
    node.rest(later)
    node.follower.received(0, IslandAt(progress=at(base, 1, waits=True), waits=False))
    node.rest(later)
    assert len(node.told) == 1
    with node.files.making(sent_name(0, "i", 1), size_of(SHAPE)):
        pass
    node.follower.received(1, IslandAt(progress=at(base, 1, waits=True), waits=False))
    node.turn_until_told(later)


def test_what_workers_of_before_have_left_is_fetched_anew(tmp_path: Path) -> None:
    """One may have died while it wrote."""
    node = Node(tmp_path)
    base = node.head.outer(0)
    name = sent_name(0, "i", 1)
    values = node.head.make(name, 5)
    with node.files.making(name, size_of(SHAPE)):
        pass  # zeros
    node.joins(at(base, 1, waits=True))
    node.turn_until_told(doc_of(1, base))
    kept = node.files.data(name, size_of(SHAPE)).view(np.float32)
    assert kept.tolist() == values.tolist()


def test_all_news_that_can_be_told_is(tmp_path: Path) -> None:
    """Ranks agree on a version that all have, which is easier where none passes over many."""
    node = Node(tmp_path)
    outer, gone = node.head.outer(0), FragmentNews(round=9, digest="gone", called=False, settled=0)
    docs = [doc_of(1, outer), doc_of(2, gone), doc_of(3, outer)]
    node.joins()
    recent = tuple(news for doc in docs for news in doc.recent)
    node.turn_until(replace(docs[0], recent=recent), lambda: bool(node.told))
    assert [news.version for news in node.told] in ([1, 3], [3])
    again = tuple(replace(news, version=news.version + 3) for news in (*recent[:1], *recent[2:]))
    node.turn_until(replace(docs[0], recent=again), lambda: node.told[-1].version == 6)
    assert [news.version for news in node.told[-2:]] == [4, 6]


def test_a_file_with_other_bytes_is_not_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    outer = node.head.outer(0)
    name = outer_name(0, 0, outer.digest)
    whole = node.head.files.path(name).read_bytes()
    node.head.files.path(name).write_bytes(bytes(len(whole)))
    node.joins()
    node.turn_until(doc_of(1, outer), lambda: bool(node.lines))
    node.rest(doc_of(1, outer))
    assert not node.told and not node.files.path(name).exists()
    node.head.files.path(name).write_bytes(whole)
    node.turn_until_told(doc_of(1, outer))


def test_files_stay_while_workers_read_them(tmp_path: Path) -> None:
    node = Node(tmp_path)
    outers = [node.head.outer(number) for number in range(4)]
    node.joins()
    for version, outer in enumerate(outers[:3], 1):
        node.turn_until_told(doc_of(version, outer))
    name = [outer_name(0, outer.round, outer.digest) for outer in outers]
    assert all(node.files.path(n).exists() for n in name[:3]), "workers have said nothing yet"
    node.follower.received(0, IslandAt(progress=at(outers[1]), waits=False))
    node.turn_until(doc_of(4, outers[3]), lambda: len(node.told) == 4)
    assert [node.files.path(n).exists() for n in name] == [False, True, True, True]


def test_a_refusal_needs_no_files(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.joins()
    doc = doc_of(1)
    refused = replace(doc, recent=(replace(doc.recent[0], refused="it has other samples"),))
    node.turn_until(refused, lambda: bool(node.told))
    assert node.told[0].refused == "it has other samples"


def test_a_failure_ends_the_workers_by_the_news_that_they_have(tmp_path: Path) -> None:
    node = Node(tmp_path)
    doc = doc_of(6, node.head.outer(0))
    node.joins()
    node.turn_until(doc, lambda: bool(node.told))
    node.follower.fail(ValueError("odd"))
    assert node.told[-1].version == 6
    assert "the agent of this node has failed (ValueError)" in node.told[-1].refused
