"""The state of pieces moves to the ranks that have them in the next world, whoever leaves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticzero.parallel.buckets.layout import DealtNames
from elasticzero.parallel.optimizers import moves
from elasticzero.parallel.optimizers.moves import (
    CPU,
    Division,
    Move,
    PieceState,
    bring,
    lack_of_memory,
    plan,
)
from elasticzero.parallel.optimizers.piece_entries import KeptEntry
from elasticzero.spans import EMPTY, Span, intersect
from elasticzero.state.model import Spec


@dataclass(frozen=True)
class Change:
    """Parameters by their sizes, how ranks divide them in two worlds, and which ranks stay."""

    numels: dict[str, int]
    present: Division
    ranks: int
    following: Division
    stay: list[int]
    """In any order."""

    def spans(self, rank: int) -> dict[str, Span]:
        """What a rank of the present world is to have."""
        return self.following.spans(self.stay.index(rank)) if rank in self.stay else {}


@st.composite
def changes(draw: st.DrawFn) -> Change:
    numels = {f"p{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 20), max_size=6)))}
    ranks = draw(st.integers(1, 5))
    stay = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
    present, following = division(draw, numels, ranks), division(draw, numels, len(stay))
    return Change(numels, present, ranks, following, stay)


def division(draw: st.DrawFn, numels: Mapping[str, int], ranks: int) -> Division:
    """Chunks of equal size, or whole parameters."""
    names = list(numels)
    if not draw(st.booleans()):
        return Division(DealtNames(names=names).places([*numels.values()], ranks))
    owners = sorted(draw(st.lists(st.integers(0, ranks - 1), min_size=len(names))))[: len(names)]
    return Division(DealtNames(names=names, owners=owners).places([*numels.values()], ranks))


@given(changes())
def test_each_rank_gets_what_it_is_to_have_once_and_keeps_what_it_has(change: Change) -> None:
    """And both ends of each message plan the same, in the same order."""
    plans = [
        plan(rank, change.present, change.following, change.stay) for rank in range(change.ranks)
    ]
    for target, planned in enumerate(plans):
        for name, span in change.spans(target).items():
            moved = [m for m in planned if (m.target, m.name) == (target, name)]
            elements = [e for m in moved for e in range(m.span.start, m.span.stop)]
            assert sorted(elements) == list(range(span.start, span.stop))
            (whole,) = (m.source for m in moved if m.whole)
            kept = change.present.span(target, name)
            assert whole == target or not kept
            for move in moved:
                has = change.present.span(move.source, name)
                assert not move.span or intersect(move.span, has) == move.span
                assert move.source == target or not intersect(move.span, kept)
        for source, other in enumerate(plans):
            assert between(planned, source, target) == between(other, source, target)


def between(planned: list[Move], source: int, target: int) -> list[Move]:
    return [move for move in planned if (move.source, move.target) == (source, target)]


class Mailboxes:
    """Stands for the messages between ranks that are threads here."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], SimpleQueue[Tensor]] = {}
        self.rank = threading.local()

    def box(self, source: int, target: int) -> SimpleQueue[Tensor]:
        return self.boxes.setdefault((source, target), SimpleQueue())

    def begin(self, messages: Sequence[dist.P2POp]) -> list[Any]:
        return [self._begin(message) for message in messages]

    def _begin(self, message: dist.P2POp) -> Any:
        tensor, other = message.tensor, message.peer
        if message.op is dist.isend:
            self.box(self.rank.number, other).put(tensor.clone())
            return SimpleNamespace(wait=lambda: None)
        box = self.box(other, self.rank.number)
        return SimpleNamespace(wait=lambda: tensor.copy_(box.get(timeout=10)))


def message_between(op: Any, tensor: Tensor, peer: int, group: Any, tag: int) -> Any:
    """torch's own asks for a group with connections."""
    return SimpleNamespace(op=op, tensor=tensor, peer=peer)


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


@given(changes())
def test_what_comes_is_what_the_others_have(change: Change) -> None:
    numels, mail = change.numels, Mailboxes()
    for source in range(change.ranks):
        for target in range(change.ranks):
            mail.box(source, target)
    room = [
        {n: PieceState.empty(span, entries_of(numels[n])) for n, span in change.spans(rank).items()}
        for rank in range(change.ranks)
    ]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        mail.rank.number = rank
        try:
            pieces = change.present.spans(rank)
            held = {n: state_of(n, numels[n], span) for n, span in pieces.items()}
            group: Any = None
            planned = plan(rank, change.present, change.following, change.stay)
            bring(planned, rank, held.__getitem__, room[rank], group)
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", message_between)
        patch.setattr(dist, "batch_isend_irecv", mail.begin)
        patch.setattr(moves, "message_device", lambda group: CPU)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(change.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert all(box.empty() for box in mail.boxes.values())
    for rank in range(change.ranks):
        for name, span in change.spans(rank).items():
            expected = state_of(name, numels[name], span)
            for key in ENTRIES:
                assert torch.equal(room[rank][name].tensors[key], expected.tensors[key]), name


EIGHT = DealtNames(names=["p"])
"""One parameter of eight elements."""


def of_eight(ranks: int) -> Division:
    return Division(EIGHT.places([8], ranks))


def test_an_optimizer_that_keeps_nothing_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "message_device", lambda group: CPU)
    group: Any = None
    for rank in (0, 1):
        room = {"p": PieceState.empty(Span(0, 8), {})} if rank == 0 else {}
        held = {"p": PieceState.empty(Span(4 * rank, 4 * rank + 4), {})}
        planned = plan(rank, of_eight(2), of_eight(1), [0])
        bring(planned, rank, held.__getitem__, room, group)


@pytest.mark.parametrize(("free", "cached", "lacks"), [(39, 0, True), (10, 30, False)])
def test_state_moves_where_a_gpu_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch, free: int, cached: int, lacks: bool
) -> None:
    assert lack_of_memory(10, 1.5, CPU) == ""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 + cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    why = lack_of_memory(10, 1.5, torch.device("cuda", 0))
    assert why == ("its GPU has 39 B left, and state of 10 B has to move" if lacks else "")


def owned_by(owner: int) -> Division:
    """One of two ranks has all of it."""
    return Division(DealtNames(names=["p"], owners=[owner]).places([8], 2))


def test_a_number_comes_with_the_first_part_to_a_rank_that_had_nothing() -> None:
    assert plan(0, of_eight(2), owned_by(1), [1, 0]) == [
        Move(name="p", span=EMPTY, source=0, target=0, whole=True),
        Move(name="p", span=Span(0, 4), source=0, target=0, whole=False),
        Move(name="p", span=Span(4, 8), source=1, target=0, whole=False),
    ]
    assert plan(1, owned_by(0), of_eight(2), [0, 1]) == [
        Move(name="p", span=Span(4, 8), source=0, target=1, whole=True)
    ]


def test_each_rank_looks_at_its_own_pieces_alone() -> None:
    """Among ten thousand ranks too."""
    names = [f"p{number}" for number in range(50)]
    many, fewer = (
        Division(DealtNames(names=names).places([1_000] * 50, ranks)) for ranks in (10_000, 9_999)
    )
    planned = plan(5_000, many, fewer, [*range(17), *range(18, 10_000)])
    assert 0 < len(planned) < 20
