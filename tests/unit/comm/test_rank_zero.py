"""Rank 0's tensors come to all ranks, however their layouts differ, and where ranks of the release
before expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.comm.rank_zero import RankZeroTensors, SharedState
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.ipc.assignment import Resume
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import NamedModel

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


class Recorder:
    """Process groups of rank 0, which record what it broadcasts."""

    rank_info: Any = type("RankInfo", (), {"rank": 0})
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[list[str]] = []

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        self.sent.append(list(tensors))

    def broadcast_bytes(self, values: Tensor) -> Tensor:
        self.sent.append(["bytes"])
        return values

    def taken(self) -> list[list[str]]:
        taken, self.sent = self.sent, []
        return taken


class Order:
    """The order of buckets, which rank 0 has found."""

    def shared(self) -> dict[str, Tensor]:
        return {"order": torch.zeros(1)}

    @property
    def is_open(self) -> bool:
        return False

    def take_shared(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)


BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


@pytest.mark.parametrize(
    ("one_release", "after_step", "at_boundary", "evaluating"),
    [
        pytest.param(True, [["bytes"]] * 3, [["order"]], [["bytes"]], id="one release"),
        pytest.param(False, [], [[*BUFFERS, "order"]], [BUFFERS], id="the release before"),
    ],
)
def test_messages_are_those_that_the_other_ranks_expect(
    one_release: bool,
    after_step: list[list[str]],
    at_boundary: list[list[str]],
    evaluating: list[list[str]],
) -> None:
    """Ranks of two releases took the one's tensors for the other's: buffers for a size."""
    groups: Any = Recorder()
    auxiliary = AuxiliaryState(groups.device, named=NamedModel(Normed()), buckets=Order())
    link = AgentClient(None, replace(STANDALONE, proofs=one_release))
    shared = SharedState(groups, auxiliary, link)
    shared.share_after_step()
    assert groups.taken() == after_step
    assert shared.share_at_boundary() is None
    assert groups.taken() == at_boundary
    shared.share()
    assert groups.taken() == evaluating


class Filled(nn.Module):
    """Has what a forward fills from a rank's samples, and what it does not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.norm.running_mean = torch.full((1,), value)
        self.register_buffer("bank", torch.full((2,), value))
        self.register_buffer("count", torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({}, True),
        ({"rank": 2}, False),
        ({"resume": Resume(tier="ram", step=3, generation=1)}, False),
    ],
)
def test_a_buffer_of_own_samples_is_told_once(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], is_said: bool
) -> None:
    """A memory bank was rank 0's on all ranks, in silence; of BatchNorm `prepare` tells it."""
    sent: list[Tensor] = []
    for rank in (0, 1):
        groups: Any = Ranks(rank, sent)
        groups.begin()
        model = Filled(float(rank))
        auxiliary = AuxiliaryState(groups.device, named=NamedModel(model))
        assignment = replace(STANDALONE, rank=rank, proofs=True)
        if rank:
            assignment = replace(assignment, **changes)
        shared = SharedState(groups, auxiliary, AgentClient(None, assignment))
        for _ in range(2):
            shared.share_after_step(compares=True)
            assert model.get_buffer("bank").eq(0).all()
            model.bank = torch.full((2,), float(rank))
    notes = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is not")[0] for text in notes] == (
        ["note: after a step, buffer 'bank'"] if is_said else []
    )
