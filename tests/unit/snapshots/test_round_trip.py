"""A restored state that is not what was read stops the job, with the name of what differs."""

from __future__ import annotations

import pytest
import torch

from elasticzero.errors import CheckpointMismatch
from elasticzero.snapshots.round_trip import check_shares
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget, LocalTensor, RankState, spec_of

NAME = "optimizer/w/exp_avg"


def state(tensor: torch.Tensor, start: int = 0) -> RankState:
    return RankState(specs={NAME: spec_of(tensor)}, held={NAME: LocalTensor(tensor, start)})


def test_equal_values_pass_wherever_they_lie() -> None:
    read = torch.arange(6.0)
    check_shares([LoadTarget(NAME, Span(0, 6), read)], state(read.clone().view(2, 3)), "it")
    check_shares([LoadTarget(NAME, Span(4, 10), read)], state(read.clone(), 4), "it")
    check_shares([LoadTarget(NAME, Span(0, 6), read)], state(torch.zeros(6), 6), "it")
    elsewhere = RankState(specs={NAME: spec_of(read)})
    check_shares([LoadTarget(NAME, Span(0, 6), read)], elsewhere, "it")
    nan = torch.tensor([float("nan")])
    check_shares([LoadTarget(NAME, Span(0, 1), nan)], state(nan.clone()), "it")


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (torch.ones(3), "has other values of 'optimizer/w/exp_avg'"),
        (torch.arange(3).bfloat16(), "as torch.float32 of shape .*is torch.bfloat16"),
        (torch.tensor([0.0, 1.0, -2.0]), "other values"),
    ],
)
def test_a_difference_is_named(present: torch.Tensor, message: str) -> None:
    target = LoadTarget(NAME, Span(0, 3), torch.arange(3.0))
    with pytest.raises(CheckpointMismatch, match=message):
        check_shares([target], state(present), "the checkpoint of step 3")


def test_what_is_not_kept_is_named_unless_it_was_never_made() -> None:
    check_shares([LoadTarget(NAME, Span(0, 3), torch.zeros(3))], RankState(), "it")
    with pytest.raises(CheckpointMismatch, match="which is not kept once it is read"):
        check_shares([LoadTarget(NAME, Span(0, 3), torch.ones(3))], RankState(), "it")
