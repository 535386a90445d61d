"""The words that ranks exchange, and what is known of them before the optimizer's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.comm.barriers import Call, marks
from elasticzero.comm.control import ControlExchange, ControlWord, decode_word, encode_word
from elasticzero.comm.control_tree import WIDTH
from elasticzero.errors import UserError
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_STOP

numbers = st.integers(-1, 1 << 40)
words = st.builds(
    ControlWord,
    flags=st.sampled_from([0, FLAG_STOP, FLAG_FINISH, FLAG_STOP | FLAG_FINISH]),
    ready=st.booleans(),
    held=numbers,
    saved=numbers,
    not_held=numbers,
    unsaved=numbers,
    asks=st.booleans(),
)


@given(given=st.lists(words, min_size=1, max_size=5))
def test_all_ranks_decide_by_the_same_word(given: list[ControlWord]) -> None:
    encoded = [encode_word(word, rank) for rank, word in enumerate(given)]
    assert {len(each) for each in encoded} == {WIDTH}
    found = decode_word([max(column) for column in zip(*encoded, strict=True)])
    flags = 0
    for word in given:
        flags |= word.flags
    assert found.flags == flags
    assert found.asks == any(word.asks for word in given)
    assert found.ready == (all(word.ready for word in given) and not found.asks)
    assert (found.held, found.saved) == (
        min(word.held for word in given),
        min(word.saved for word in given),
    )
    assert (found.not_held, found.unsaved) == (
        max(word.not_held for word in given),
        max(word.unsaved for word in given),
    )


class Tree:
    """Two ranks, of which the other's numbers are given."""

    def __init__(self, theirs: list[int] | Exception) -> None:
        self.theirs = theirs
        self.own: list[int] = []
        self.collected = 0

    def submit(self, own: list[int]) -> None:
        self.own = own

    def collect(self) -> tuple[int, ...]:
        self.collected += 1
        if isinstance(self.theirs, Exception):
            raise self.theirs
        return tuple(map(max, self.own, self.theirs))


def exchange(theirs: list[int] | Exception) -> tuple[ControlExchange, Tree]:
    tree = Tree(theirs)
    groups: Any = SimpleNamespace(
        rank_info=SimpleNamespace(world_size=2, rank=0), control_tree=tree
    )
    return ControlExchange(groups), tree


@pytest.mark.parametrize("asks", [False, True])
def test_what_another_rank_asks_is_known_before_the_boundary(asks: bool) -> None:
    found, tree = exchange(encode_word(ControlWord(asks=asks, held=7), 1))
    assert not found.asks() and tree.collected == 0, "no word is submitted yet"
    found.submit(ControlWord(held=9))
    assert found.asks() == asks
    assert found.asks() == asks
    word = found.collect(ControlWord())
    assert word is not None and word.held == 7 and tree.collected == 1
    assert not found.asks() and tree.collected == 1


def test_a_lost_peer_is_an_error_at_the_boundary_and_not_before_the_step() -> None:
    """The gradient is whole by then, so the step is applied."""
    found, _ = exchange(dist.DistNetworkError("gone"))
    found.submit(ControlWord(asks=True))
    assert not found.asks()
    with pytest.raises(dist.DistNetworkError):
        found.collect(ControlWord())


def test_a_rank_that_is_elsewhere_is_an_error_at_the_boundary() -> None:
    theirs = [*[-(1 << 63)] * (WIDTH - 2), *marks(Call.FINISH, 1)]
    found, _ = exchange(theirs)
    found.submit(ControlWord(asks=True))
    assert not found.asks()
    with pytest.raises(Exception, match="rank 1 has come to the end"):
        found.collect(ControlWord())


def test_one_rank_has_its_own_word() -> None:
    found = ControlExchange(None)
    found.submit(ControlWord(asks=True))
    assert found.alone and not found.asks()
    assert found.collect(ControlWord(held=3)) == ControlWord(held=3)


def test_a_rank_that_has_left_its_loop_is_at_fault_at_a_capture() -> None:
    """Where one rank comes to a step whose state is captured and another to its loop's end."""
    from elasticzero.comm.barriers import check

    given = [marks(Call.CHECKPOINT, 0), marks(Call.VERIFY, 1)]
    found = max(a for a, _ in given), max(b for _, b in given)
    with pytest.raises(UserError, match="rank 1 is at the end of its loop"):
        check(found, Call.VERIFY, 1, "")
