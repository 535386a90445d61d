"""The head of an island writes news, and its other nodes read them."""

from __future__ import annotations

import pytest

from elasticzero.ipc.rounds import RoundNews, SamplesLeft
from elasticzero.launcher.islands.news_board import NEWS, RECENT, IslandNews, NewsBoard
from tests.support.deadlines import wait_until
from tests.support.memory_store import MemoryServer, MemoryStore


def news(version: int) -> RoundNews:
    return RoundNews(
        version=version,
        incarnation="i",
        fragments=(),
        claims=(),
        left=SamplesLeft(),
        none_left=False,
        done=False,
    )


def doc(generation: int, *versions: int, run: int = 1) -> IslandNews:
    return IslandNews(run=run, generation=generation, recent=tuple(map(news, versions)))


class Boards:
    """Two nodes' boards on one store."""

    def __init__(self) -> None:
        self.server = MemoryServer(lambda: 0.0)
        self.lines: list[str] = []
        self.stores = [MemoryStore(self.server) for _ in range(2)]
        self.boards = [NewsBoard(store, lambda: None, self.lines.append) for store in self.stores]

    def keep(self, board: NewsBoard, kept: IslandNews, expected: IslandNews | None = None) -> None:
        """Keep a document until a board sees it, or the other one that is expected."""

        def is_there() -> bool:
            board.keep(kept)
            return board.read() == (expected or kept)

        wait_until(is_there, "the board has it")


def test_a_node_reads_what_another_one_has_written() -> None:
    two = Boards()
    first, second = two.boards
    for written in (doc(3, 1), doc(3, 1, 2)):
        two.keep(first, written)
    wait_until(lambda: second.read() == written, "the other node has the newest")


def test_the_last_news_are_kept() -> None:
    kept = doc(3)
    for version in range(1, 9):
        kept = kept.followed_by(news(version))
    assert kept == doc(3, *range(9 - RECENT, 9))


@pytest.mark.parametrize("later", [doc(4, 1), doc(1, 1, run=2)])
def test_a_head_of_before_writes_over_nothing_of_a_later_one(later: IslandNews) -> None:
    two = Boards()
    before, after = two.boards
    two.keep(before, doc(3, 7))
    two.keep(after, later)
    two.keep(before, doc(3, 7, 8), expected=later)
    assert after.read() == later


def test_what_is_lost_is_written_again() -> None:
    two = Boards()
    board, other = two.boards
    two.keep(board, doc(1, 1))
    two.stores[1].write({}, deletes=[NEWS])
    wait_until(lambda: board.read() is None, "it is gone")
    two.keep(board, doc(1, 1))
    wait_until(lambda: other.read() == doc(1, 1), "the other node has it again")


def test_what_cannot_be_read_counts_as_absent_and_is_said_once() -> None:
    two = Boards()
    board = two.boards[0]
    two.stores[1].write({NEWS: b"{"})
    wait_until(lambda: board.read() is None and two.lines, "it is said")
    assert board.read() is None
    assert len(two.lines) == 1 and NEWS in two.lines[0]
    two.keep(board, doc(1, 1))
