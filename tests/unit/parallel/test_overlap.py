"""Sums of gradients begin while the backward that makes them still runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.parallel import Setting, Strategy, create
from elasticzero.parallel.buckets import gather, reduce_scatter
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.mesh import Mesh
from elasticzero.spans import Span
from elasticzero.state.model import NamedModel
from tests.support.fake_groups import fake_group

LAYERS = 4


class Work:
    """An exchange that is over at once, and has brought nothing."""

    def wait(self) -> None:
        pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records what happens in a step of a world of two ranks, which give the same."""
    told: list[str] = []

    def all_reduce(tensor: Tensor, *op: Any, group: Any, async_op: bool = False) -> Work:
        if async_op:
            told.append("exchange")
        tensor.mul_(2)
        return Work()

    def begin_reduce_scatter(
        flat_E: Tensor, chunks: Any, received: Tensor | None, mesh: Any
    ) -> list[Work]:
        told.append("exchange")
        if received is not None:
            received.zero_()
        return [Work()]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(reduce_scatter, "begin_reduce_scatter", begin_reduce_scatter)
    monkeypatch.setattr(gather, "begin_all_gather", lambda *arguments: [Work()])
    return told


def tell(told: list[str], event: str) -> Callable[[Tensor], None]:
    return lambda gradient: told.append(event)


class Chain(nn.Module):
    """Layers that tell when a backward has passed them."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x.register_hook(tell(self.told, f"into {index}"))
        return x


def built(name: str, told: list[str]) -> Strategy:
    """Each layer's gradients are a bucket."""
    model = Chain(told)
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        mesh=Mesh.of_world(0, 2, fake_group(2)),
        bucket_plan=BucketPlan(size_bytes=4 * (64 + 8), order=()),
    )
    return create(name, setting)


def step(strategy: Strategy, told: list[str], micro_batches: int = 1) -> list[str]:
    told.clear()
    for index in range(micro_batches):
        last = index == micro_batches - 1
        strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=last))
        loss = strategy.model(torch.ones(2, 8)).sum()
        strategy.backward(loss, 1 / micro_batches)
        told.append("end")
    recorded = list(told)
    strategy.finish(1.0, None)
    strategy.apply()
    strategy.settle()
    return recorded


BACKWARD = [f"into {index}" for index in reversed(range(LAYERS))]
AT_ONCE = [event for into in BACKWARD for event in (into, "exchange")]
"""A layer's bucket is on its way before the backward comes to the layer before it."""


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_a_bucket_is_on_its_way_while_the_backward_runs(events: list[str], name: str) -> None:
    strategy = built(name, events)
    first = step(strategy, events)
    if name != "zero2":  # the first global batch shows which gradients come in several parts
        assert first == [*BACKWARD, *["exchange"] * LAYERS, "end"]
    for recorded in (step(strategy, events), step(strategy, events)):
        assert recorded == [*AT_ONCE, "end"]


@pytest.mark.parametrize(
    ("name", "earlier"),
    [
        ("ddp", [*BACKWARD, "end"]),
        ("zero1", [*BACKWARD, "end"]),
        ("zero2", [*AT_ONCE, "end"]),
    ],
)
def test_which_micro_batches_are_exchanged(
    events: list[str], name: str, earlier: list[str]
) -> None:
    """zero2 gives each micro-batch's gradients back at once; the others sum the last one's."""
    strategy = built(name, events)
    step(strategy, events)
    assert step(strategy, events, 3) == [*earlier, *earlier, *AT_ONCE, "end"]
