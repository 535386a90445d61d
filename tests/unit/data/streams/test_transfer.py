"""Tensors from data workers: in messages, in slots of an arena, and never changed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elasticzero.data.loader import RankSchedule, map_each
from elasticzero.data.position import DataPosition
from elasticzero.data.streams import transfer
from elasticzero.data.streams.loader import COMMANDS, StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import Stream, stream_order
from elasticzero.data.streams.transfer import Arena, InArena, InMessage, Sent, forget_arenas
from tests.support.cases import slow

CPU = torch.device("cpu")
SHARDS, SAMPLES = 6, 120
OWNER = "test"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget_arenas(OWNER)


def read(shard: int, start: int) -> Iterator[dict[str, Any]]:
    for number in range(start, SAMPLES):
        key = shard * SAMPLES + number
        yield {
            "key": key,
            "large": torch.full((9000,), key, dtype=torch.int32),
            "pair": (np.full((5000,), key, dtype=np.float64), torch.tensor([key, -key])),
        }


def batches(workers: int, global_batch: int) -> list[Any]:
    """Returns all batches of an epoch, which are held together as a script may."""
    stream = Stream(range(SHARDS), read)
    order = stream_order(stream, 0, True)
    plan = StreamPlan(order=order, global_batch=global_batch, epochs=1)
    schedule = RankSchedule(plan=plan, rank=0, world_size=1)
    at = plan.start(DataPosition(), 0)
    reader = StreamReader(dataset=stream, stream=stream, device=CPU, num_workers=workers)
    data = reader.open(schedule, at)
    taken = []
    for batch, after in schedule.steps(at):
        data.look_ahead(batch, after)
        taken += [next(data) for _ in schedule.parts(batch, 1)]
    data.close()
    return taken


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("workers", "global_batch"), [(1, 12), slow(2, 12), slow(3, 12), (2, 1)])
def test_no_batch_changes_while_later_ones_are_read(workers: int, global_batch: int) -> None:
    expected = batches(0, global_batch)
    received = batches(workers, global_batch)
    assert len(received) == len(expected) > 2 * COMMANDS
    for batch, expected_batch in zip(received, expected, strict=True):
        keys = batch["key"]
        assert sorted(keys.tolist()) == sorted(expected_batch["key"].tolist())
        assert torch.equal(batch["large"], keys.to(torch.int32)[:, None].expand(-1, 9000))
        assert torch.equal(batch["pair"][0], keys.double()[:, None].expand(-1, 5000))
        assert torch.equal(batch["pair"][1], torch.stack([keys, -keys], 1))
    assert transfer._arenas == {}, "the arenas are given back"


def tensors(answer: Any) -> Any:
    return map_each(Sent, lambda sent: sent.tensor(), answer)


def test_a_slot_is_used_again_after_all_others() -> None:
    arena = Arena(OWNER, slots=3)
    parts = [[torch.full((5000,), float(n))] * 2 for n in range(8)]
    answers = [arena.collate(part) for part in parts]
    assert all(isinstance(answer, InArena) for answer in answers)
    for part, answer in zip(parts[-3:], answers[-3:], strict=True):
        assert torch.equal(tensors(answer), torch.stack(part))
    assert torch.equal(tensors(answers[4]), torch.stack(parts[7]))


def test_an_arena_grows_with_its_parts_and_older_ones_stay_readable() -> None:
    arena = Arena(OWNER, slots=4)
    sizes = [5000, 5001, 9000, 40_000]
    parts = [[torch.full((size,), float(size)), torch.full((size,), -1.0)] for size in sizes]
    answers = [arena.collate(part) for part in parts]
    for part, answer in zip(parts, answers, strict=True):
        assert isinstance(answer, InArena)
        assert torch.equal(tensors(answer), torch.stack(part))
    assert len(transfer._arenas[OWNER]) == 3, "5001 still fits into the slots made for 5000"


def test_parts_beyond_the_limit_come_as_torch_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_BYTES", 1 << 20)
    arena = Arena(OWNER, slots=4)
    large = [torch.full((100_000,), 2.0)] * 2
    assert isinstance(collated := arena.collate(large), Tensor)
    assert torch.equal(collated, torch.stack(large))
    small = [torch.full((10_000,), 3.0)] * 2
    assert isinstance(collated := arena.collate(small), InArena)
    assert torch.equal(tensors(collated), torch.stack(small))
    assert torch.equal(arena.collate(large), torch.stack(large))


class Special(Tensor):
    """A subclass, which must stay one."""


def test_small_and_special_tensors_are_not_in_a_slot() -> None:
    arena = Arena(OWNER, slots=3)
    special = torch.zeros(10_000).as_subclass(Special)
    samples = [
        {"large": torch.zeros(10_000), "small": torch.zeros(3), "special": special, "text": "a"}
    ] * 2
    collated = arena.collate(samples)
    assert isinstance(collated["large"], InArena)
    assert type(collated["special"]) is Special
    assert isinstance(collated["small"], Tensor)
    assert isinstance(InMessage.of(collated["small"]), InMessage)
    assert collated["text"] == ["a", "a"]


def test_samples_of_different_shapes_are_an_error_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        Arena(OWNER, slots=3).collate([torch.zeros(10_000), torch.zeros(9_999)])
