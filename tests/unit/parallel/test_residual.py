"""What messages leave out of gradients comes in later steps: of their sum nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.options.wire import Wire, wire_of
from elasticzero.parallel.buckets.reduce_scatter import ReduceScatter
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire import codecs
from elasticzero.parallel.wire.residual import BucketResidual, Residual
from elasticzero.state.model import RESIDUAL, RankState, Spec
from tests.support.bucket_training import (
    KINDS,
    RANKS,
    Case,
    Kind,
    Trainer,
    as_used,
    cases,
)
from tests.support.fake_groups import fake_group
from tests.support.threaded_ranks import FakeGroup, patched

LOSSY = [wire_of("--wire", text) for text in ("bf16", "fp8", "int8", "int4", "topk:0.4")]
INT8 = Wire(format="int8")


@dataclass
class Trained:
    """What one rank has after a few steps."""

    applied: dict[str, Tensor]
    """Sums that were applied, by parameter; of a rank that has chunks, zeros for the rest."""
    left: dict[str, Tensor]
    """Its residual."""


def train(case: Case, kind: Kind, wire: Wire, rank: int, is_applied: list[bool]) -> Trained:
    trainer = Trainer(case, kind, rank, wire)
    zeros = {str(n): torch.zeros(size).double() for n, size in enumerate(case.sizes)}
    applied = {name: zero.clone() for name, zero in zeros.items()}
    for step, applies in enumerate(is_applied):
        trainer.is_applied = applies
        sums = trainer.step(step)
        for name, expected in as_used(case, step).items():
            if applies and expected is not None:
                applied[name] += whole(trainer, sums, name, zeros[name])
    left = {n: part.flatten().clone() for n, part in trainer.residual.present().items()}
    return Trained(applied, {**zeros, **left})


def whole(trainer: Trainer, sums: dict[str, Tensor | None], name: str, zero: Tensor) -> Tensor:
    """A parameter's gradient, as far as this rank has it."""
    if not isinstance(trainer.exchange, ReduceScatter):
        gradient = sums[name]
        assert gradient is not None
        return gradient
    for scattered in trainer.exchange.buckets:
        bucket = scattered.bucket
        if name in bucket.names:
            flat_E = torch.zeros(bucket.bounds[-1]).double()
            chunk_C = sums[f"bucket {bucket.names}"]
            assert chunk_C is not None
            bucket.own_part(flat_E).copy_(chunk_C)
            return bucket.views(flat_E)[bucket.names.index(name)].flatten()
    return zero


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", LOSSY, ids=str)
@settings(max_examples=15, deadline=None)
@given(case=cases(), is_applied=st.lists(st.booleans(), min_size=3, max_size=3))
def test_nothing_of_the_steps_that_are_applied_is_lost(
    wire: Wire, kind: Kind, case: Case, is_applied: list[bool]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "LEAST_ELEMENTS", 1)
        ranks = patched(FakeGroup(RANKS), patch)
        told = ranks.run(lambda rank: train(case, kind, wire, rank, is_applied))
    for number, size in enumerate(case.sizes):
        name = str(number)
        exact = torch.zeros(size).double()
        for step, applies in enumerate(is_applied):
            if applies and (total := as_used(case, step)[name]) is not None:
                exact += total
        applied = told[0].applied[name]
        if kind in ("zero1", "zero2"):
            applied = applied + told[1].applied[name]
        else:
            assert torch.equal(applied, told[1].applied[name])
        left = told[0].left[name] + told[1].left[name]
        assert torch.allclose(applied + left, exact, rtol=0, atol=1e-9), name


def residual_of(rank: int, world_size: int, values: Tensor) -> Residual:
    """A residual of one parameter."""
    mesh = Mesh.of_world(rank, world_size, fake_group(world_size))
    residual = Residual(INT8, mesh, mesh.world_group)
    bucket = BucketResidual(["w"], values.flatten(), lambda flat_E: [flat_E.view(values.shape)])
    residual.lay([bucket])
    bucket.present_E.copy_(values.flatten())
    return residual


def parts_of(ranks: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (3, 4), generator=generator).float() for _ in range(ranks)]


@settings(max_examples=40, deadline=None)
@given(before=st.integers(1, 5), after=st.integers(1, 5))
def test_another_world_loads_the_sum(before: int, after: int) -> None:
    """Each rank has stored its row; whichever ranks load them, they have all of them together."""
    parts = parts_of(before)
    stored = torch.empty(0)
    for rank, part in enumerate(parts):
        share = RankState()
        share.add_residual({"w": part}, rank, before, 1)
        spec, held = share.specs[RESIDUAL + "w"], share.held[RESIDUAL + "w"]
        assert spec.shape == (before, 3, 4) and held.start == rank * 12
        stored = torch.cat([stored, held.tensor.flatten()])
    total = torch.zeros(3, 4)
    for rank in range(after):
        residual = residual_of(rank, after, torch.ones(3, 4))
        for targets in residual.loading({RESIDUAL + "w": spec}):
            for target in targets:
                span = target.span
                target.tensor.copy_(stored[span.start : span.stop].view(target.tensor.shape))
        total += residual.present()["w"]
        assert not residual.leaves_out({RESIDUAL + "w": spec})
    assert torch.equal(total, torch.stack(parts).sum(0))


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 12)])
def test_a_residual_of_another_parameter_is_left_out(shape: tuple[int, ...]) -> None:
    residual = residual_of(0, 2, torch.ones(3, 4))
    stored = {RESIDUAL + "w": Spec(dtype=torch.float32, shape=shape)}
    assert [*residual.loading(stored)] == []
    assert residual.leaves_out(stored)
    assert torch.equal(residual.present()["w"], torch.ones(3, 4))


def test_a_rank_that_comes_in_loads_none() -> None:
    residual = residual_of(1, 2, torch.zeros(3, 4))
    residual.begin_as_newcomer()
    stored = {RESIDUAL + "w": Spec(dtype=torch.float32, shape=(2, 3, 4))}
    assert [*residual.loading(stored)] == []


@pytest.mark.parametrize(
    "ranks",
    [
        [0, 1],
        [1, 2],
        [2],
        [2, 1, 0],
        [0, None, 2],
        [None, 1],
    ],
)
def test_ranks_that_leave_hand_theirs_over(ranks: list[int | None]) -> None:
    """The sum over the ranks of the next world is that of this one."""
    parts, before = parts_of(3), 3

    def body(rank: int) -> Tensor:
        residual = residual_of(rank, before, parts[rank])
        residual.hand_over(ranks)
        assert torch.equal(residual.present()["w"], parts[rank])  # nothing has changed yet
        if rank not in ranks:
            return torch.zeros(3, 4)
        mesh = Mesh.of_world(ranks.index(rank), len(ranks), fake_group(len(ranks)))
        residual.enter_world(mesh, mesh.world_group)
        return residual.present()["w"].clone()

    with pytest.MonkeyPatch.context() as patch:
        made = patched(FakeGroup(before), patch)
        told = made.run(body)
    assert torch.equal(torch.stack(told).sum(0), torch.stack(parts).sum(0))


def test_what_was_handed_over_for_a_change_that_was_given_up_is_forgotten() -> None:
    parts = parts_of(2)

    def body(rank: int) -> Tensor:
        residual = residual_of(rank, 2, parts[rank])
        residual.hand_over([0])
        residual.hand_over([0, 1])
        mesh = Mesh.of_world(rank, 2, fake_group(2))
        residual.enter_world(mesh, mesh.world_group)
        return residual.present()["w"].clone()

    with pytest.MonkeyPatch.context() as patch:
        told = patched(FakeGroup(2), patch).run(body)
    assert all(torch.equal(*pair) for pair in zip(told, parts, strict=True))


def test_ranks_that_agree_to_leave_store_the_sum() -> None:
    parts = parts_of(3)

    def body(rank: int) -> Tensor:
        residual = residual_of(rank, 3, parts[rank])
        residual.sum_up()
        assert torch.equal(residual.present()["w"], parts[rank])
        return residual.summed["w"]

    with pytest.MonkeyPatch.context() as patch:
        told = patched(FakeGroup(3), patch).run(body)
    assert all(torch.equal(total, torch.stack(parts).sum(0)) for total in told)


def test_other_buckets_keep_the_residual_of_each_parameter() -> None:
    residual = Residual(INT8, Mesh.of_world(0, 1), None)

    def bucket(names: list[str]) -> BucketResidual:
        flat_E = torch.empty(2 * len(names))
        return BucketResidual(names, flat_E, lambda flat_E: list(flat_E.view(-1, 2)))

    first = bucket(["a", "b", "c"])
    residual.lay([first])
    first.present_E.copy_(torch.arange(6.0))
    residual.lay([bucket(["c"]), bucket(["b", "a"])])
    present = {name: part.tolist() for name, part in residual.present().items()}
    assert present == {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


@pytest.mark.parametrize("scales", [(1.0, 1.0), (8.0, 8.0), (8.0, 4.0), (1.0, 1024.0)])
def test_a_loss_scale_multiplies_gradients_and_not_what_is_left(
    scales: tuple[float, float],
) -> None:
    """Two steps, between which the scale may change: what was left counts as it was."""
    residual = residual_of(0, 1, torch.ones(3, 4))
    (bucket,) = residual._buckets
    expected = torch.ones(12)
    for scale in scales:
        residual.scale = scale
        gradients = torch.zeros(12)
        errors = bucket.add_to(gradients, scale)
        assert torch.equal(gradients, expected * scale)
        errors.copy_(gradients / 2)  # a half is sent
        residual.completed()
        assert torch.equal(residual.following()["w"].flatten(), expected / 2)
        residual.end_step(applied=True)
        expected = expected / 2
        assert torch.equal(residual.present()["w"].flatten(), expected)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_parameter_that_no_rank_has_used_keeps_its_own(scale: float) -> None:
    residual = residual_of(0, 1, torch.ones(3, 4))
    (bucket,) = residual._buckets
    residual.scale = scale
    bucket.add_to(torch.zeros(12), scale).fill_(7.0)
    residual.keep({"w"})
    residual.end_step(applied=True)
    assert torch.equal(residual.present()["w"], torch.ones(3, 4))


def test_squares_are_those_of_the_boundary_before_the_step() -> None:
    parts = parts_of(2)

    def body(rank: int) -> tuple[float, float]:
        residual = residual_of(rank, 2, parts[rank])
        assert residual.squares() is None
        residual.begin_squares()
        residual.begin_squares()  # of a bucket that follows
        residual.completed()
        residual.end_step(applied=True)
        squares = residual.squares()
        assert squares is not None
        return squares.of_rank, squares.of_all

    with pytest.MonkeyPatch.context() as patch:
        told = patched(FakeGroup(2), patch).run(body)
    squares = [float(part.double().square().sum()) for part in parts]
    assert [pair[0] for pair in told] == pytest.approx(squares)
    assert [pair[1] for pair in told] == pytest.approx([sum(squares)] * 2)


def test_a_parameter_of_a_strange_layout_is_by_its_own_elements() -> None:
    """ddp's buckets have a parameter's elements as they lie in memory."""
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    values = parameter.detach().clone()
    bucket = BucketResidual(
        ["w"], values.flatten(), lambda flat_E: [flat_E.as_strided(values.shape, values.stride())]
    )
    residual = Residual(INT8, Mesh.of_world(0, 1), None)
    residual.lay([bucket])
    spec = Spec(dtype=torch.float32, shape=(1, *values.shape))
    for (target,) in residual.loading({RESIDUAL + "w": spec}):
        target.tensor.copy_(values)
    assert torch.equal(residual.present()["w"], values)
