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
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_LEAVE, FLAG_STOP

numbers = st.integers(-1, 1 << 40)
control_words = st.builds(
    ControlWord,
    flags=st.sampled_from([0, FLAG_STOP, FLAG_FINISH, FLAG_STOP | FLAG_FINISH, FLAG_LEAVE]),
    ready=st.booleans(),
    held=numbers,
    saved=numbers,
    not_held=numbers,
    unsaved=numbers,
    asks=st.booleans(),
    prepared=st.booleans(),
)


@given(rank_words=st.lists(control_words, min_size=1, max_size=5))
def test_all_ranks_decide_by_the_same_word(rank_words: list[ControlWord]) -> None:
    encoded = [encode_word(word, rank) for rank, word in enumerate(rank_words)]
    assert {len(encoded_word) for encoded_word in encoded} == {WIDTH}
    combined = decode_word([max(column) for column in zip(*encoded, strict=True)])
    flags = 0
    for word in rank_words:
        flags |= word.flags
    assert combined.flags == flags
    leaves = bool(combined.flags & FLAG_LEAVE)
    assert combined.prepared == (all(word.prepared for word in rank_words) and not leaves)
    assert combined.asks == any(word.asks for word in rank_words)
    assert combined.ready == (all(word.ready for word in rank_words) and not combined.asks)
    assert (combined.held, combined.saved) == (
        min(word.held for word in rank_words),
        min(word.saved for word in rank_words),
    )
    assert (combined.not_held, combined.unsaved) == (
        max(word.not_held for word in rank_words),
        max(word.unsaved for word in rank_words),
    )


class Tree:
    """Two ranks, of which the other's numbers are given."""

    def __init__(self, theirs: list[int] | Exception) -> None:
        self.theirs = theirs
        self.submitted: list[int] = []
        self.collected = 0

    def submit(self, encoded_word: list[int]) -> None:
        self.submitted = encoded_word

    def collect(self) -> tuple[int, ...]:
        self.collected += 1
        if isinstance(self.theirs, Exception):
            raise self.theirs
        return tuple(map(max, self.submitted, self.theirs))


def exchange(theirs: list[int] | Exception) -> tuple[ControlExchange, Tree]:
    tree = Tree(theirs)
    groups: Any = SimpleNamespace(
        rank_info=SimpleNamespace(world_size=2, rank=0), control_tree=tree
    )
    return ControlExchange(groups), tree


@pytest.mark.parametrize("asks", [False, True])
def test_what_another_rank_asks_is_known_before_the_boundary(asks: bool) -> None:
    control_exchange, tree = exchange(encode_word(ControlWord(asks=asks, held=7), 1))
    assert not control_exchange.asks() and tree.collected == 0, "no word is submitted yet"
    control_exchange.submit(ControlWord(held=9))
    assert control_exchange.asks() == asks
    assert control_exchange.asks() == asks
    word = control_exchange.collect(ControlWord())
    assert word is not None and word.held == 7 and tree.collected == 1
    assert not control_exchange.asks() and tree.collected == 1


def test_a_lost_peer_is_an_error_at_the_boundary_and_not_before_the_step() -> None:
    """The gradient is whole by then, so the step is applied."""
    control_exchange, _ = exchange(dist.DistNetworkError("gone"))
    control_exchange.submit(ControlWord(asks=True))
    assert not control_exchange.asks()
    with pytest.raises(dist.DistNetworkError):
        control_exchange.collect(ControlWord())


def test_a_rank_that_is_elsewhere_is_an_error_at_the_boundary() -> None:
    theirs = [*[-(1 << 63)] * (WIDTH - 2), *marks(Call.FINISH, 1)]
    control_exchange, _ = exchange(theirs)
    control_exchange.submit(ControlWord(asks=True))
    assert not control_exchange.asks()
    with pytest.raises(Exception, match="rank 1 has come to the end"):
        control_exchange.collect(ControlWord())


def test_one_rank_has_its_own_word() -> None:
    control_exchange = ControlExchange(None)
    control_exchange.submit(ControlWord(asks=True))
    assert control_exchange.alone and not control_exchange.asks()
    assert control_exchange.collect(ControlWord(held=3)) == ControlWord(held=3)


def test_a_rank_that_has_left_its_loop_is_at_fault_at_a_capture() -> None:
    """Where one rank comes to a step whose state is captured and another to its loop's end."""
    from elasticzero.comm.barriers import check

    rank_marks = [marks(Call.CHECKPOINT, 0), marks(Call.VERIFY, 1)]
    greatest = max(a for a, _ in rank_marks), max(b for _, b in rank_marks)
    with pytest.raises(UserError, match="rank 1 is at the end of its loop"):
        check(greatest, Call.VERIFY, 1, "")
