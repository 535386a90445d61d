"""Rank 0's tensors come to all ranks, however their layouts differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticzero.comm.rank_zero import RankZeroTensors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class Ranks:
    """Process groups of ranks that are played one after the other, rank 0 first."""

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank_info: Any = type("RankInfo", (), {"rank": rank})
        self.device = torch.device("cpu")
        self._sent = sent
        self._received: Iterator[Tensor] = iter(())

    def begin(self) -> None:
        self._received = iter(self._sent)

    def broadcast_bytes(self, values: Tensor) -> Tensor:
        if self.rank_info.rank == 0:
            self._sent.append(values.clone())
            return values
        message = next(self._received)
        assert message.shape == values.shape, "ranks expect messages of the same size"
        return message.clone()


def drawn(draw: Any) -> dict[str, Tensor]:
    names = draw(st.lists(st.sampled_from("abc"), unique=True))
    tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) + draw(st.integers(0, 9))
        tensors[name] = numbers.to(draw(st.sampled_from(DTYPES)))
    return tensors


@st.composite
def turns(draw: Any) -> list[list[Mapping[str, Tensor]]]:
    """What two ranks have at each of some turns; often the same as at the turn before."""
    made: list[list[Mapping[str, Tensor]]] = []
    for _ in range(draw(st.integers(1, 5))):
        again = draw(st.booleans()) and made
        made.append(made[-1] if again else [drawn(draw), drawn(draw)])
    return made


@given(turns())
def test_all_ranks_get_what_rank_zero_has(turns: list[list[Mapping[str, Tensor]]]) -> None:
    sent: list[Tensor] = []
    groups: Any = [Ranks(rank, sent) for rank in range(2)]
    channels = [RankZeroTensors(group) for group in groups]
    for first, second in turns:
        sent.clear()
        assert channels[0].share(first) is first
        groups[1].begin()
        received = channels[1].share(second)
        assert list(received) == list(first)
        for name, tensor in first.items():
            assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


def test_a_layout_is_told_once() -> None:
    sent: list[Tensor] = []
    channel = RankZeroTensors(Ranks(0, sent))  # type: ignore[arg-type]
    for messages in (3, 1, 1):
        sent.clear()
        channel.share({"a": torch.zeros(4)})
        assert len(sent) == messages
