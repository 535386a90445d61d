"""The state of pieces moves to the ranks that have them in the next world, whoever leaves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticzero.parallel.buckets.layout import DealtNames
from elasticzero.parallel.optimizers.moves import Move, PieceState, bring, plan
from elasticzero.parallel.optimizers.piece_entries import KeptEntry
from elasticzero.spans import EMPTY, Span, intersect
from elasticzero.state.model import Spec

Pieces = list[dict[str, Span]]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, int], Pieces, Pieces]:
    """The sizes of parameters, and what each rank has of them in two worlds, in which any ranks
    stay, in any order."""
    numels = {f"p{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 20), max_size=6)))}
    present = dealt(draw, numels, draw(st.integers(1, 5)))
    stay = draw(st.permutations(range(len(present))))[: draw(st.integers(1, len(present)))]
    following: Pieces = [{} for _ in present]
    for rank, spans in zip(stay, dealt(draw, numels, len(stay)), strict=True):
        following[rank] = spans
    return numels, present, following


def dealt(draw: st.DrawFn, numels: Mapping[str, int], ranks: int) -> Pieces:
    """Chunks of equal size, or whole parameters."""
    names = list(numels)
    if not draw(st.booleans()):
        return DealtNames(names=names).spans([*numels.values()], ranks)
    owners = sorted(draw(st.lists(st.integers(0, ranks - 1), min_size=len(names))))[: len(names)]
    return DealtNames(names=names, owners=owners).spans([*numels.values()], ranks)


@given(worlds())
def test_each_rank_gets_what_it_is_to_have_once_and_keeps_what_it_has(
    drawn: tuple[dict[str, int], Pieces, Pieces],
) -> None:
    _, present, following = drawn
    planned = plan(present, following)
    for target, spans in enumerate(following):
        for name, span in spans.items():
            moved = [m for m in planned if (m.target, m.name) == (target, name)]
            elements = [e for m in moved for e in range(m.span.start, m.span.stop)]
            assert sorted(elements) == list(range(span.start, span.stop))
            (whole,) = (m.source for m in moved if m.whole)
            assert whole == target or name not in present[target]
            kept = present[target].get(name, EMPTY)
            for move in moved:
                has = present[move.source][name]
                assert not move.span or intersect(move.span, has) == move.span
                assert move.source == target or not intersect(move.span, kept)


class Mailboxes:
    """Stands for the messages between ranks that are threads here."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], SimpleQueue[Tensor]] = {}
        self.rank = threading.local()

    def box(self, source: int, target: int) -> SimpleQueue[Tensor]:
        return self.boxes.setdefault((source, target), SimpleQueue())

    def isend(self, tensor: Tensor, target: int, group: Any, tag: int) -> Any:
        self.box(self.rank.number, target).put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor: Tensor, source: int, group: Any, tag: int) -> Any:
        box = self.box(source, self.rank.number)
        return SimpleNamespace(wait=lambda: tensor.copy_(box.get(timeout=10)))


ENTRIES = ("exp_avg", "step", "row")


def entries_of(numel: int) -> dict[str, KeptEntry]:
    """An elementwise entry of 16 bits, a number, and one of another shape."""
    return {
        "exp_avg": KeptEntry(spec=Spec(dtype=torch.bfloat16, shape=(numel,)), elementwise=True),
        "step": KeptEntry(spec=Spec(dtype=torch.float32, shape=()), scalar=True),
        "row": KeptEntry(spec=Spec(dtype=torch.float64, shape=(3, 1))),
    }


def state_of(name: str, numel: int, span: Span) -> PieceState:
    number = float(name[1:]) + 1
    tensors = {
        "exp_avg": (100 * number + torch.arange(span.start, span.stop)).to(torch.bfloat16),
        "step": torch.tensor(number),
        "row": torch.full((3, 1), number, dtype=torch.float64),
    }
    return PieceState(start=span.start, tensors=tensors, entries=entries_of(numel))


@given(worlds())
def test_what_comes_is_what_the_others_have(
    drawn: tuple[dict[str, int], Pieces, Pieces],
) -> None:
    numels, present, following = drawn
    mail, planned = Mailboxes(), plan(present, following)
    for source in range(len(present)):
        for target in range(len(present)):
            mail.box(source, target)
    room = [
        {n: PieceState.empty(span, entries_of(numels[n])) for n, span in spans.items()}
        for spans in following
    ]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        mail.rank.number = rank
        try:
            held = {n: state_of(n, numels[n], span) for n, span in present[rank].items()}
            group: Any = None
            bring(planned, rank, held.__getitem__, room[rank], group)
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "isend", mail.isend)
        patch.setattr(torch.distributed, "irecv", mail.irecv)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(present))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert all(box.empty() for box in mail.boxes.values())
    check_room(numels, following, room)


def check_room(
    numels: Mapping[str, int], following: Pieces, room: Sequence[Mapping[str, PieceState]]
) -> None:
    for spans, got in zip(following, room, strict=True):
        for name, span in spans.items():
            expected = state_of(name, numels[name], span)
            for key in ENTRIES:
                assert torch.equal(got[name].tensors[key], expected.tensors[key]), (name, key)


def test_an_optimizer_that_keeps_nothing_sends_nothing() -> None:
    planned = plan([{"p": Span(0, 4)}, {"p": Span(4, 8)}], [{"p": Span(0, 8)}, {}])
    group: Any = None
    for rank in (0, 1):
        room = {"p": PieceState.empty(Span(0, 8), {})} if rank == 0 else {}
        held = {"p": PieceState.empty(Span(4 * rank, 4 * rank + 4), {})}
        bring(planned, rank, held.__getitem__, room, group)


def test_a_number_comes_with_the_first_part_alone() -> None:
    present = [{"p": Span(0, 4)}, {"p": Span(4, 8)}, {}]
    assert plan(present, [{}, {}, {"p": Span(0, 8)}]) == [
        Move(name="p", span=Span(0, 4), source=0, target=2, whole=True),
        Move(name="p", span=Span(4, 8), source=1, target=2, whole=False),
    ]


def test_what_nobody_has_is_no_plan() -> None:
    with pytest.raises(ValueError, match="nobody holds"):
        plan([{"p": Span(0, 4)}], [{"p": Span(0, 5)}])
