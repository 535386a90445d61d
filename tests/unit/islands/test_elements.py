"""Which elements of a model a rank of an island has, and which it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.islands.elements import Elements, RankPlace, elements_of
from elasticzero.islands.layout import FragmentLayout, fragments_of
from elasticzero.islands.parameters import Reference, take, write_difference
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel.base import Setting, Strategy
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.strategies import create
from elasticzero.rank_groups.group import RankGroup
from elasticzero.spans import STRATEGIES, Span
from elasticzero.state.model import NamedModel


class Network(nn.Module):
    """Has parameters of sizes that no number of ranks divides, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x_B5: Tensor) -> Tensor:
        hidden_B3 = self.first(x_B5 * self.frozen[:5]) + self.get_buffer("mean")
        output_B1: Tensor = self.second(hidden_B3)
        return output_B1


def end_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def without_groups() -> Iterator[None]:
    yield
    end_groups()


def laid(name: str, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float64) -> Strategy:
    torch.manual_seed(0)
    model, mesh = Network().to(dtype), None
    if ranks > 1:
        mesh = Mesh.of_world(rank, ranks, RankGroup("all ranks", range(ranks), dist.group.WORLD))
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=lambda parameters: torch.optim.SGD(parameters, lr=0.25),
        device=torch.device("cpu"),
        rank=rank,
        world_size=ranks,
        alone=ranks == 1,
        mesh=mesh,
        options=TrainingSettings(deterministic="fixed" in name),
    )
    return create(name.split()[0], setting)


def layout_of(strategy: Strategy) -> FragmentLayout:
    model = strategy.model
    (layout,) = fragments_of(dict(model.named_parameters()), dict(model.named_buffers()), 1)
    return layout


@contextmanager
def elements(
    strategy: Strategy, rank: int = 0, ranks: int = 1, on_node: int = 0
) -> Iterator[Elements]:
    with strategy.changing() as state:
        buffers = dict(strategy.model.named_buffers())
        nodes = max(1, ranks // on_node) if on_node else 1
        local = on_node or ranks
        place = RankPlace(
            world_size=ranks,
            rank=rank,
            nodes=nodes,
            local_world_size=local,
            local_rank=rank % local,
        )
        yield elements_of(state, buffers, place)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [*STRATEGIES, "zero2 in a fixed order"])
def test_ranks_write_each_element_once(name: str, ranks: int) -> None:
    written = Counter[int]()
    values: dict[int, float] = {}
    for rank in range(ranks):
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            strategy = laid(name, rank, ranks)
            layout = layout_of(strategy)
            with elements(strategy, rank, ranks) as of_rank:
                for place, flat in layout.places(of_rank.written):
                    numbers = range(place.start, place.stop)
                    written.update(numbers)
                    values |= zip(numbers, flat.tolist(), strict=True)
                held = [place for place, _ in layout.places(of_rank.held)]
                for place, _ in layout.places(of_rank.written):
                    assert any(h.start <= place.start and place.stop <= h.stop for h in held)
        finally:
            end_groups()
    torch.manual_seed(0)
    model = Network().double()
    whole = torch.cat([t.detach().flatten() for t in (*model.parameters(), *model.buffers())])
    assert written == Counter(range(len(whole)))
    assert [values[n] for n in range(len(whole))] == whole.tolist()


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_each_of_several_nodes_writes_all_elements(name: str) -> None:
    """So each has the whole contribution, and the island's head needs nothing of the others."""
    written: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            strategy = laid(name, rank, 4)
            layout = layout_of(strategy)
            with elements(strategy, rank, 4, on_node=2) as of_rank:
                for place, _ in layout.places(of_rank.written):
                    written[rank // 2].update(range(place.start, place.stop))
        finally:
            end_groups()
    assert written[0] == written[1] == Counter(range(layout.offsets[-1]))


@pytest.mark.parametrize(("name", "dtype"), [("zero3", torch.float32), ("zero1", torch.bfloat16)])
def test_several_nodes_need_whole_parameters(name: str, dtype: torch.dtype) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        strategy = laid(name, 0, 4, dtype)
        with (
            pytest.raises(UserError, match="is divided among the ranks of the island"),
            elements(strategy, 0, 4, on_node=2),
        ):
            pass
    finally:
        end_groups()


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_steps_that_16_bits_do_not_show_are_contributed(name: str) -> None:
    """An optimizer steps 32-bit copies of parameters of 16 bits: rounds must have these, for many
    small steps would else be lost in each of them."""
    strategy = laid(name, dtype=torch.bfloat16)
    layout = layout_of(strategy)
    outer_E = torch.zeros(layout.offsets[-1])
    with elements(strategy) as of_rank:
        for place, flat in layout.places(of_rank.held):
            flat.fill_(256.0)  # between which and the next one are 2
            outer_E[place] = 256.0
    for _ in range(6):
        _step(strategy)
        sent_E = torch.zeros_like(outer_E)
        with elements(strategy) as of_rank:
            for place, flat in layout.places(of_rank.written):
                write_difference(outer_E[place], flat, sent_E[place])
        before_E, outer_E = outer_E, outer_E - sent_E
        with elements(strategy) as of_rank:
            for place, flat in layout.places(of_rank.held):
                before, after = (
                    Reference(outer_E=before_E[place]),
                    Reference(outer_E=outer_E[place]),
                )
                take(flat, before, after, alpha=0.0)
    bias = layout.offsets[layout.names.index("second.bias")]
    assert outer_E[bias] == 256.0 + 6 * 0.25
    assert strategy.model.get_parameter("second.bias").float().item() == 258.0


def _step(strategy: Strategy) -> None:
    strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
    loss = -strategy.model(torch.zeros(2, 5, dtype=torch.bfloat16)).float().mean()
    strategy.backward(loss, 1.0)
    strategy.finish(1.0, None)
    assert torch.isfinite(torch.tensor(strategy.norm))
    strategy.apply()
