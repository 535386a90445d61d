"""What the head of an island writes for its other nodes."""

from __future__ import annotations

from elasticzero.ipc.rounds import RoundNews, SamplesLeft
from elasticzero.launcher.islands.news_board import NEWS, IslandNews, NewsBoard
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


class Boards:
    """Two nodes' boards on one store."""

    def __init__(self) -> None:
        self.server = MemoryServer(lambda: 0.0)
        self.lines: list[str] = []
        self.stores = [MemoryStore(self.server) for _ in range(2)]
        self.boards = [NewsBoard(store, lambda: None, self.lines.append) for store in self.stores]

    def write(self, board: NewsBoard, doc: IslandNews) -> None:
        wait_until(lambda: board.put(doc), "the news is written")


def test_a_node_reads_what_another_one_has_written() -> None:
    two = Boards()
    first, second = two.boards
    docs = [IslandNews(generation=3, news=news(version)) for version in (1, 2)]
    for doc in docs:
        two.write(first, doc)
    wait_until(lambda: second.read() == docs[-1], "the other node has the newest")


def test_a_head_of_before_writes_over_nothing_of_a_later_one() -> None:
    two = Boards()
    before, after = two.boards
    two.write(before, IslandNews(generation=3, news=news(7)))
    later = IslandNews(generation=4, news=news(1))
    two.write(after, later)
    old = IslandNews(generation=3, news=news(8))
    wait_until(lambda: before.put(old), "it is done with its own")
    assert after.read() == later
    wait_until(lambda: before.read() == later, "it sees the later one")


def test_what_cannot_be_read_counts_as_absent_and_is_said_once() -> None:
    two = Boards()
    board = two.boards[0]
    two.stores[1].write({NEWS: b"{"})
    wait_until(lambda: board.read() is None and two.lines, "it is said")
    assert board.read() is None
    assert len(two.lines) == 1 and NEWS in two.lines[0]
    two.write(board, IslandNews(generation=1, news=news(1)))
    wait_until(lambda: board.read() is not None, "it is written over")
