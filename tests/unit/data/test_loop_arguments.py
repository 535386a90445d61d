"""What `session.batches` takes over from a DataLoader, and the order that a sampler gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elasticzero.data.loop_arguments import LoopArguments
from elasticzero.data.position import DataPosition
from elasticzero.data.sampler_order import order_by
from elasticzero.data.sampling import BatchPlan
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.errors import UserError

DATA = TensorDataset(torch.arange(20.0))
NONE: dict[str, Any] = {
    "global_batch": None,
    "epochs": 1,
    "steps": None,
    "micro_batch": None,
    "virtual_batch": None,
    "shuffle": True,
    "seed": 0,
    "sampler": None,
    "collate_fn": None,
    "num_workers": 0,
    "drop_last": False,
}


def resolved(dataset: Any, first_world: int = 3, **options: Any) -> LoopArguments:
    return LoopArguments(**{**NONE, "dataset": dataset, **options}).resolved(lambda: first_world)


def indices(loop: LoopArguments, epoch: int = 0) -> list[int]:
    plan = loop.schedule(0, 1, None).plan
    assert isinstance(plan, BatchPlan)
    return [int(index) for index in plan.order.indices(epoch, 0, plan.order.samples)]


def test_a_loader_is_taken_over() -> None:
    loader = DataLoader(DATA, 4, shuffle=True, num_workers=2, collate_fn=len, drop_last=True)
    loop = resolved(loader)
    assert (loop.dataset, loop.global_batch, loop.micro_batch) == (DATA, 12, 4)
    assert (loop.num_workers, loop.collate_fn, loop.drop_last, loop.shuffle) == (2, len, True, True)
    assert loop.sampler is None


def test_what_is_given_beside_a_loader_counts() -> None:
    loop = resolved(DataLoader(DATA, 4), global_batch=16, micro_batch=2, num_workers=1)
    assert (loop.global_batch, loop.micro_batch, loop.num_workers) == (16, 2, 1)
    assert not loop.shuffle
    assert loop.collate_fn is None  # the default, of which parts can be joined
    assert resolved(DataLoader(DATA, 4), virtual_batch=4).micro_batch is None


@pytest.mark.parametrize(
    ("sampler", "shuffle", "seed"),
    [
        (RandomSampler(DATA), True, 0),
        (SequentialSampler(DATA), False, 0),
        (DistributedSampler(DATA, 2, 1, seed=7), True, 7),
        (DistributedSampler(DATA, 2, 1, shuffle=False), False, 0),
    ],
)
def test_torchs_samplers_become_the_sessions_order(sampler: Any, shuffle: bool, seed: int) -> None:
    loop = resolved(DataLoader(DATA, 4, sampler=sampler))
    assert (loop.sampler, loop.shuffle, loop.seed) == (None, shuffle, seed)
    assert sorted(indices(loop)) == list(range(20))


def test_a_weighted_sampler_gives_the_same_order_to_all_ranks() -> None:
    weights = [0.0] * 10 + [1.0] * 10
    loops = [
        resolved(DataLoader(DATA, 4, sampler=WeightedRandomSampler(weights, 50))) for _ in range(2)
    ]
    torch.rand(3)  # the script draws between; each epoch is keyed
    first, other = (indices(loop) for loop in loops)
    assert first == other
    assert len(first) == 50
    assert min(first) >= 10
    assert indices(loops[0], 1) != first
    assert indices(loops[0], 0) == first


def test_a_sampler_leaves_the_generators_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    indices(resolved(DATA, global_batch=4, sampler=RandomSampler(DATA, replacement=True)))
    assert torch.equal(torch.rand(2), expected)


def test_another_sampler_in_mid_epoch_is_refused() -> None:
    def plan(weights: list[float]) -> BatchPlan:
        return BatchPlan(
            order=order_by(WeightedRandomSampler(weights, 50), 0), global_batch=4, steps=9
        )

    before = plan([1.0] * 20)
    position = before.start(DataPosition(), 0)
    next_batch = before.next(position)
    assert next_batch is not None
    assert plan([1.0] * 20).start(next_batch[1], 0) == next_batch[1]
    with pytest.raises(UserError, match="in the middle of an epoch"):
        plan([1.0] * 19 + [9.0]).start(next_batch[1], 0)


class Row(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_a_loader_of_a_stream_is_taken_over() -> None:
    loop = resolved(DataLoader(Row(), 4))
    assert isinstance(loop.schedule(0, 1, None).plan, StreamPlan)
    assert loop.global_batch == 12


class Lying:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (DATA, {}, "needs global_batch="),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(range(20), 2, False)),
            {},
            "makes its batches by batch_sampler=",
        ),
        (DataLoader(DATA, batch_size=None), {}, "makes its batches by batch_sampler="),
        (DataLoader(DATA, 4, worker_init_fn=print), {}, "worker_init_fn="),
        (DATA, {"global_batch": 4, "sampler": iter([1])}, "without a length"),
        (Row(), {"global_batch": 4, "sampler": [1]}, "a stream and sampler="),
        (DATA, {"global_batch": 4, "sampler": Lying()}, "has 5 indices and gave 3"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan = resolved(dataset, **options).schedule(0, 1, None).plan
        plan.start(DataPosition(), 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 7}, {"epochs": 3, "steps": 7}])
@pytest.mark.parametrize("sampler", [None, RandomSampler(DATA, num_samples=17)])
@pytest.mark.parametrize("loader", [False, True])
def test_the_steps_of_a_loop_are_those_that_it_makes(
    drop_last: bool, length: dict[str, int], sampler: Any, loader: bool
) -> None:
    """Whatever the world is, and also where the loop is cut into several."""
    arguments: dict[str, Any] = {
        "global_batch": 6,
        "drop_last": drop_last,
        "epochs": None,
        **length,
    }
    dataset: Any = DataLoader(DATA, 4, sampler=sampler) if loader else DATA
    if not loader:
        arguments["sampler"] = sampler
    loop = resolved(dataset, **arguments)
    for world in (1, 2, 5):
        schedule = loop.schedule(0, world, None)
        made = sum(1 for _ in schedule.steps(schedule.plan.start(DataPosition(), 0)))
        assert made == loop.steps_in_all()


def test_the_steps_of_a_stream_are_known_only_if_given() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    assert resolved(Endless(), global_batch=2, epochs=None, steps=5).steps_in_all() == 5
    for length in ({"epochs": 1}, {"epochs": 1, "steps": 5}):
        with pytest.raises(UserError, match="give steps= alone"):
            resolved(Endless(), global_batch=2, **length).steps_in_all()
