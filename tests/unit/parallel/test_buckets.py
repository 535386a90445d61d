"""Flat buckets: how parameters are dealt to them, what their memory costs, and reads that wait."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.options.wire import EXACT
from elasticzero.parallel import Setting, create
from elasticzero.parallel.buckets import gather
from elasticzero.parallel.buckets.all_reduce import AllReduce
from elasticzero.parallel.buckets.gather import ParameterGather, PendingParameter
from elasticzero.parallel.buckets.layout import DealtNames, FlatBucket, deal
from elasticzero.parallel.buckets.plan import DEFAULT_PLAN
from elasticzero.parallel.buckets.reduce_scatter import BufferPool
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.groups import OptimizerGroup
from elasticzero.parallel.optimizers.moves import Division
from elasticzero.parallel.optimizers.probe import GroupNature
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.sums import Peers
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.state.model import NamedModel, spec_of
from tests.support.fake_groups import fake_group


def groups(
    parameters: dict[str, nn.Parameter], works_on: Literal["elements", "parameters"] = "elements"
) -> dict[str, OptimizerGroup]:
    """One group of an optimizer that keeps nothing."""
    nature = GroupNature(works_on=works_on, schemas={}, makes_state_at_once=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    specs = {name: spec_of(parameter) for name, parameter in parameters.items()}
    group = OptimizerGroup("", optimizer, {}, list(parameters), nature, specs)
    return dict.fromkeys(parameters, group)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 6),
    st.sampled_from(["elements", "parameters"]),
)
def test_each_rank_knows_the_pieces_of_all(
    numels: list[int], ranks: int, works_on: Literal["elements", "parameters"]
) -> None:
    """Before any bucket is made: chunks that have no element of a parameter name it not."""
    parameters = {f"p{i}": nn.Parameter(torch.zeros(n)) for i, n in enumerate(numels)}
    for contents in deal(parameters, groups(parameters, works_on), ranks, 200):
        numels = [parameters[name].numel() for name in contents.names]
        division = Division(contents.places(numels, ranks))
        for rank in range(ranks):
            bucket = FlatBucket(contents, [parameters[n] for n in contents.names], rank, ranks)
            assert {piece.name: piece.span for piece in bucket.pieces()} == division.spans(rank)


@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([torch.float32, torch.float64]))),
    st.integers(1, 400),
)
def test_each_parameter_is_in_one_bucket_of_its_kind(
    drawn: list[tuple[int, torch.dtype]], limit: int
) -> None:
    parameters = {
        str(i): nn.Parameter(torch.empty(n, dtype=dtype)) for i, (n, dtype) in enumerate(drawn)
    }
    buckets = [bucket.names for bucket in deal(parameters, groups(parameters), 2, limit)]
    assert sorted(name for names in buckets for name in names) == sorted(parameters)
    for names in buckets:
        of = [parameters[name] for name in names]
        assert len({p.dtype for p in of}) == 1
        assert len(names) == 1 or sum(p.numel() * p.element_size() for p in of) <= limit
        assert [int(n) for n in names] == sorted(int(n) for n in names)


@given(st.lists(st.integers(1, 20), min_size=1), st.integers(1, 5))
def test_the_chunks_of_all_ranks_are_the_parameters(sizes: list[int], ranks: int) -> None:
    values = [torch.randn(n) for n in sizes]
    names = [str(i) for i in range(len(sizes))]
    elements: dict[str, dict[int, float]] = {name: {} for name in names}
    for rank in range(ranks):
        parameters = [nn.Parameter(value.clone()) for value in values]
        bucket = FlatBucket(DealtNames(names=names), parameters, rank, ranks)
        assert all(torch.equal(p.data, value) for p, value in zip(parameters, values, strict=True))
        for piece in bucket.pieces():
            for index, element in enumerate(piece.parameter.tolist(), piece.start):
                assert index not in elements[piece.name]
                elements[piece.name][index] = element
    for name, value in zip(names, values, strict=True):
        assert [elements[name][i] for i in range(len(value))] == value.tolist()


@given(st.lists(st.integers(1, 20), min_size=1), st.integers(1, 5), st.integers(1, 200))
def test_whole_parameters_are_dealt_evenly_and_never_cut(
    sizes: list[int], ranks: int, limit: int
) -> None:
    """No rank has more than a mean rank and the largest parameter."""
    parameters = {str(i): nn.Parameter(torch.randn(n, 2)) for i, n in enumerate(sizes)}
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    bucket_plans = list(deal(parameters, groups(parameters, "parameters"), ranks, limit))
    names_by_rank: list[set[str]] = [set() for _ in range(ranks)]
    for bucket_plan in bucket_plans:
        for rank in range(ranks):
            bucket_parameters = [parameters[name] for name in bucket_plan.names]
            bucket = FlatBucket(bucket_plan, bucket_parameters, rank, ranks)
            assert sum(chunk.numel() for chunk in bucket.chunks(bucket.flat_E)) == bucket.numel
            for piece in bucket.pieces():
                assert torch.equal(piece.parameter, values[piece.name])
                assert bucket_plan.owners is not None
                assert bucket_plan.owners[bucket_plan.names.index(piece.name)] == rank
                names_by_rank[rank].add(piece.name)
    assert sorted(name for names in names_by_rank for name in names) == sorted(parameters)
    loads = [sum(values[name].numel() for name in names) for names in names_by_rank]
    assert max(loads) <= sum(loads) / ranks + 2 * max(sizes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=60))
def test_a_pool_lends_and_keeps_no_more_than_its_capacity(calls: list[tuple[bool, int]]) -> None:
    pool, lent = BufferPool(torch.empty(0), 150), list[Tensor]()
    for takes, numel in calls:
        if takes and (buffer := pool.take(numel, even_if_over=False)) is not None:
            assert buffer.numel() >= numel
            assert all(buffer is not other for other in lent)
            lent.append(buffer)
        elif not takes and lent:
            pool.give(lent.pop(numel % len(lent)))
        idle = sum(buffer.numel() for buffer in pool._free)
        assert sum(buffer.numel() for buffer in lent) + idle <= 150


def test_a_pool_lends_more_where_it_must() -> None:
    pool = BufferPool(torch.empty(0), 100)
    first = pool.take(90, even_if_over=False)
    assert pool.take(90, even_if_over=False) is None
    second = pool.take(90, even_if_over=True)
    assert first is not None
    assert second is not None
    pool.give(second)
    pool.give(first)
    assert pool.take(90, even_if_over=False) in (first, second)


class Work:
    """A gather that has its elements once it is waited for."""

    def __init__(self, flat_E: Tensor) -> None:
        self.flat_E = flat_E
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self.flat_E.fill_(7.0)


@pytest.fixture
def compiler() -> None:
    """What every optimizer has torch import when it is built."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert "torch._dynamo" in sys.modules


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Linear, list[Work], ParameterGather]:
    """A model whose bucket is being gathered, in a world of two."""
    works: list[Work] = []

    def begin(flat_E: Tensor, chunks: list[Tensor], mesh: Mesh) -> list[Work]:
        works.append(Work(flat_E))
        return [works[-1]]

    monkeypatch.setattr(gather, "begin_all_gather", begin)
    model = nn.Linear(3, 2)
    bucket = FlatBucket(DealtNames(names=["weight", "bias"]), list(model.parameters()), 0, 2)
    parameter_gather = ParameterGather(model, [bucket], Mesh.of_world(0, 2), Traffic())
    parameter_gather.begin(bucket)
    parameter_gather.leave_pending()
    return model, works, parameter_gather


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda model: model(torch.ones(1, 3)),
    "norm": lambda model: model.weight.norm(),
    "data": lambda model: model.weight.data + 0,
    "detach": lambda model: model.bias.detach().clone(),
    "numpy": lambda model: model.weight.detach().numpy(),
    "a list": lambda model: torch.stack([p.sum() for p in model.parameters()]),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": lambda model: copy.deepcopy(model).weight.sum(),
    "in place": lambda model: model.weight.data.mul_(1.0),
    "keyword": lambda model: nn.functional.linear(torch.ones(1, 3), weight=model.weight),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_read_of_a_pending_parameter_waits(
    pending: tuple[nn.Linear, list[Work], ParameterGather], read: Callable[[nn.Linear], Any]
) -> None:
    model, works, _ = pending
    assert {type(p) for p in model.parameters()} == {PendingParameter}
    assert isinstance(model.weight, nn.Parameter)
    assert works[0].waits == 0
    read(model)
    assert works[0].waits == 1
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert model.weight.tolist() == [[7.0] * 3] * 2
    read(model)
    assert works[0].waits == 1


def test_a_copy_of_a_pending_parameter_becomes_a_plain_one(
    pending: tuple[nn.Linear, list[Work], ParameterGather],
) -> None:
    model, _, _ = pending
    copied = copy.deepcopy(model)
    assert copied(torch.ones(1, 3)).tolist() == [[28.0, 28.0]]
    assert {type(p) for p in copied.parameters()} == {nn.Parameter}


def test_nothing_stays_pending_once_something_is_compiled(
    compiler: None, pending: tuple[nn.Linear, list[Work], ParameterGather]
) -> None:
    model, works, parameter_gather = pending
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1, 3)).tolist() == [[28.0, 28.0]]
    assert works[0].waits == 1
    parameter_gather.begin(parameter_gather.buckets[0])
    parameter_gather.leave_pending()
    assert works[1].waits == 1
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_capture_does_not_wait_for_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(gather, "begin_all_gather", lambda flat_E, chunks, rank: [Lost()])
    model = nn.Linear(3, 2)
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=torch.optim.AdamW,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
    )
    strategy = create("zero2", setting)
    strategy.apply()
    share = strategy.rank_state()
    assert {type(p) for p in model.parameters()} == {PendingParameter}
    assert share.held["model/weight"].tensor.shape == (2, 3)
    with pytest.raises(RuntimeError, match="closed by peer"):
        strategy.settle()


@pytest.mark.parametrize(("one_release", "messages"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_has_no_message_of_its_own_where_the_release_before_sends_none(
    dtype: torch.dtype, one_release: bool, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks took the next bucket for it. In 16 bits a large loss must not overflow."""
    sent: list[Tensor] = []

    def all_reduce(tensor: Tensor, **_: Any) -> Any:
        sent.append(tensor)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    losses = LossCheck(has_own_message=one_release)
    losses.add(torch.tensor(1e6), 1.0)
    parameters = {"w": nn.Parameter(torch.ones(3, dtype=dtype))}
    peers = Peers(index=0, group=fake_group(2))
    residual = Residual(EXACT, Mesh.of_world(0, 1), None)
    sums = AllReduce(parameters, {}, DEFAULT_PLAN, losses, peers, residual)
    (bucket,) = sums.buckets
    sums.lend(bucket)
    bucket.used_N = [True]
    sums.begin(bucket, complete=True)
    sums.finish()
    assert len(sent) == messages
    assert sums.loss == 1e6 if one_release else math.isfinite(sums.loss)
