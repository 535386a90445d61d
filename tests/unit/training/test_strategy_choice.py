"""The choice of `--strategy auto`: sizes of a model, free memory, and the sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elasticzero.comm.control_tree import MaxTree
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.memory_estimate import StateSize
from elasticzero.parallel import OptimizerFactory
from elasticzero.parallel.optimizers.groups import MadeOptimizers
from elasticzero.processes import Ram
from elasticzero.state.model import NamedModel
from elasticzero.training import strategy_choice
from elasticzero.training.strategy_choice import (
    choice_text,
    choose_strategy,
    line_up_of,
    model_size,
    state_size,
)
from tests.support.fake_groups import fake_group
from tests.support.packing import LargePacking


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.layers[2] = nn.Linear(4, 5, bias=False)
        self.base = nn.Parameter(torch.zeros(7), requires_grad=False)


def test_layers_are_the_entries_of_lists() -> None:
    size = model_size(NamedModel(Model()))
    assert (size.elements, size.element_bytes) == (40 + 16 + 16 + 20, 4)
    assert (size.layer, size.outer, size.largest) == (20, 40, 40)
    assert size.frozen_bytes == 28


def test_what_is_packed_is_counted_by_its_bytes() -> None:
    """LargePacking packs the embedding and two layers, with a scale for four elements."""
    named = NamedModel(Model())
    parameters = list(named.parameters.values())
    assert state_size(named, torch.optim.AdamW(parameters)) == StateSize(numbers=2)
    size = state_size(named, LargePacking(parameters))
    elements = 40 + 16 + 16 + 20 + 7
    packed = elements - 7
    assert size == StateSize(packed_bytes=(packed * 2 + 7 * 4) / elements)
    assert size.strategies == ["ddp", "zero1", "zero2"]


def test_the_sentence_names_what_is_too_large() -> None:
    needs = {"ddp": 4 << 20, "zero1": 2 << 20, "zero2": 1 << 20, "zero3": 1 << 10}
    text = choice_text("zero2", needs, 1 << 20, cuda=True)
    assert text == (
        "--strategy auto takes zero2, which needs 1.0 MiB a rank for training state; the rank with "
        "the least memory has 1.0 MiB (ddp 4.0 MiB, zero1 2.0 MiB would not fit)"
    )
    assert choice_text("ddp", needs, 1 << 30, cuda=False).endswith("the least memory has 1.0 GiB")
    assert "takes zero3" in choice_text(None, needs, 1, cuda=True)
    assert "no strategy fits" in choice_text(None, needs, 1, cuda=True)


class Peer(MaxTree):
    """The tree of two ranks, of which the other has given this number."""

    def __init__(self, number: int) -> None:
        super().__init__(None, [])
        self.number = number

    def allreduce_max(self, number: int) -> int:
        return max(number, self.number)


def chosen(
    factory: OptimizerFactory,
    *,
    room: int,
    check: Callable[[str], None],
    groups: ProcessGroups | None = None,
    **options: Any,
) -> str:
    assignment = replace(STANDALONE, world_size=2, nodes=2, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy_choice, "ram", lambda: Ram(room, room))
        named = NamedModel(Model())
        return choose_strategy(named, factory, torch.device("cpu"), assignment, groups, check)


def takes_any(strategy: str) -> None:
    pass


def takes_no_zero3(strategy: str) -> None:
    if strategy == "zero3":
        raise UserError("zero3 sums no sparse gradients")


def matrices(parameters: Any) -> MadeOptimizers:
    two_d = [p for p in parameters if p.ndim == 2]
    return {
        "muon": torch.optim.Muon(two_d),
        "sgd": torch.optim.SGD([p for p in parameters if p.ndim != 2]),
    }


def test_what_a_strategy_refuses_is_not_chosen() -> None:
    """Without room for any, the last is taken of those that can train the model at all."""
    assert chosen(torch.optim.AdamW, room=0, check=takes_any) == "zero3"
    assert chosen(matrices, room=0, check=takes_any) == "zero2"
    assert chosen(torch.optim.AdamW, room=0, check=takes_no_zero3) == "zero2"
    fixed: dict[str, Any] = {"deterministic": True}
    assert chosen(torch.optim.AdamW, room=0, check=takes_any, **fixed) == "zero2"
    assert chosen(torch.optim.AdamW, room=0, check=takes_any, mirrored_by=1, **fixed) == "ddp"


@pytest.mark.parametrize(
    ("room", "other", "strategy"),
    [(1 << 40, 1 << 40, "ddp"), (1 << 40, 0, "zero3"), (0, 1 << 40, "zero3")],
)
def test_the_rank_with_the_least_memory_decides(room: int, other: int, strategy: str) -> None:
    place = RankInfo(rank=0, world_size=2, token="t")
    groups = ProcessGroups(place, torch.device("cpu"), Peer(-other), fake_group(2))
    assert chosen(torch.optim.AdamW, room=room, check=takes_any, groups=groups) == strategy


def test_a_model_that_all_refuse_is_refused() -> None:
    def takes_none(strategy: str) -> None:
        raise UserError(f"{strategy} cannot have it")

    with pytest.raises(UserError, match="ddp cannot have it"):
        chosen(torch.optim.AdamW, room=1 << 30, check=takes_none)


def test_a_rank_that_keeps_no_mirror_chooses_as_those_that_do() -> None:
    """A node with more workers than the one whose parts it keeps has such ranks."""
    for mirrors in ((), (1,), (1, 2)):
        assignment = replace(STANDALONE, world_size=3, nodes=3, mirrors=mirrors, mirrored_by=1)
        assert line_up_of(assignment, direct=True).mirrored
