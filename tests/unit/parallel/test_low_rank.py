"""Holds sums of matrices as products of narrow ones against the same in one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.options.wire import Wire
from elasticzero.parallel.buckets.all_reduce import AllReduce
from elasticzero.parallel.buckets.layout import DealtNames, FlatBucket
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.buckets.queue import BucketQueue
from elasticzero.parallel.buckets.reduce_scatter import ReduceScatter
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire import codecs
from elasticzero.parallel.wire.codecs import LowRank, encoding_of
from elasticzero.parallel.wire.low_rank import LowRankSum, RightFactors
from elasticzero.parallel.wire.residual import BucketResidual, Residual
from elasticzero.parallel.wire.sums import Peers
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.spans import Span
from elasticzero.state.model import FACTOR, spec_of
from tests.support.fake_groups import fake_group
from tests.support.threaded_ranks import FakeGroup, patched

SHAPES = {"a": (16, 20), "b": (3,), "c": (12, 4, 5), "d": (2, 2), "e": (40, 12)}
"""Has the shapes of parameters, of which `a`, `c` and `e` are sent as products of rank 1."""


@dataclass(frozen=True)
class Case:
    ranks: int
    rank: int
    """Counts the columns of the narrow matrices."""
    applied: tuple[bool, ...]
    unused: frozenset[tuple[int, str]]
    """Has pairs of a step and a parameter that no rank uses in it."""
    seed: int

    def gradient(self, step: int, rank: int, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(
            crc32(f"{self.seed} {step} {rank} {name}".encode())
        )
        return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    applied = tuple(draw(st.lists(st.booleans(), min_size=2, max_size=4)))
    pairs = st.tuples(st.integers(0, len(applied) - 1), st.sampled_from([*SHAPES]))
    unused = frozenset(draw(st.sets(pairs, max_size=3)))
    return Case(draw(st.integers(2, 3)), 1, applied, unused, draw(st.integers(0, 99)))


class OneRank:
    """Holds one rank's parameters, and sums their gradients."""

    def __init__(self, kind: str, case: Case, rank: int) -> None:
        self.kind, self.case, self.rank = kind, case, rank
        wire = Wire(format="powersgd", rank=case.rank)
        zeros = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in SHAPES.items()}
        self.parameters = {n: nn.Parameter(zero) for n, zero in zeros.items()}
        mesh = Mesh.of_world(rank, case.ranks, fake_group(case.ranks))
        self.residual = Residual(wire, mesh, None)
        self.exchange: AllReduce | ReduceScatter
        self.queue: BucketQueue[Any]
        if kind == "ddp":
            plan, peers = (
                BucketPlan(size_bytes=4000, order=()),
                Peers(index=rank, group=fake_group(case.ranks), wire=wire),
            )
            optimizers = dict.fromkeys(self.parameters, "")
            self.exchange = AllReduce(
                self.parameters, optimizers, plan, LossCheck(), peers, self.residual
            )
        else:
            names = [["e", "c"], ["b", "d"], ["a"]]
            buckets = [
                FlatBucket(
                    DealtNames(names=some), [self.parameters[n] for n in some], rank, case.ranks
                )
                for some in names
            ]
            self.exchange = ReduceScatter(buckets, 1, mesh, wire, self.residual, Traffic())
        self.queue = BucketQueue(self.exchange)

    def step(self, step: int) -> dict[str, Tensor]:
        """Returns the sums that this rank has of gradients that a rank used, and zeros else."""
        case = self.case
        loss = sum(
            (case.gradient(step, self.rank, name) * parameter).sum()
            for name, parameter in self.parameters.items()
            if (step, name) not in case.unused
        )
        loss = loss + torch.zeros((), dtype=torch.float64, requires_grad=True)
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        self.queue.backward(loss, 1.0, part, None)
        sums = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in SHAPES.items()}
        unused = {name for name in SHAPES if (step, name) in case.unused}
        if isinstance(self.exchange, AllReduce):
            self.exchange.finish()
            used = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
            sums |= {n: gradient.clone() for n, gradient in used.items()}
        else:
            for scattered, chunk_C in zip(
                self.exchange.buckets, self.exchange.reduced(), strict=True
            ):
                bucket = scattered.bucket
                flat_E = torch.zeros(bucket.bounds[-1], dtype=torch.float64)
                if scattered.is_exchanged:
                    bucket.own_part(flat_E).copy_(chunk_C)
                sums |= dict(
                    zip(bucket.names, map(Tensor.clone, bucket.views(flat_E)), strict=True)
                )
            self.residual.keep(unused)
            sums |= {n: torch.zeros_like(sums[n]) for n in unused}
        self.residual.end_step(applied=case.applied[step])
        self.queue.clear()
        return sums


def in_one_process(case: Case) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns what each step's sums are to be, and the residual of all ranks: one matrix is
    projected, that of all ranks together."""
    shapes = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in SHAPES.items()}
    low_rank = LowRank(case.rank)
    encoded = {n: z for n, z in shapes.items() if z.dim() > 1 and low_rank.fits(z)}
    right = RightFactors(encoded, case.rank).present
    left_out = {n: torch.zeros_like(z) for n, z in encoded.items()}
    steps = []
    for step, applies in enumerate(case.applied):
        sums, next_right, next_left_out = {}, dict(right), dict(left_out)
        for name, zero in shapes.items():
            total = zero.clone()
            if (step, name) not in case.unused:
                for rank in range(case.ranks):
                    total = total + case.gradient(step, rank, name)
                if name in encoded:
                    matrix = (total + left_out[name]).reshape(len(total), -1)
                    q = torch.linalg.qr(matrix @ right[name]).Q
                    next_right[name] = matrix.T @ q
                    projected = (q @ q.T @ matrix).view(zero.shape)
                    next_left_out[name] = matrix.view(zero.shape) - projected
                    total = projected
            sums[name] = total
        steps.append(sums)
        if applies:
            right, left_out = next_right, next_left_out
    return steps, left_out


@pytest.mark.parametrize("kind", ["ddp", "zero1"])
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_sums_and_what_is_left_out_are_those_of_one_process(kind: str, case: Case) -> None:
    def body(rank: int) -> tuple[list[dict[str, Tensor]], OneRank]:
        one = OneRank(kind, case, rank)
        return [one.step(step) for step in range(len(case.applied))], one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "LEAST_ELEMENTS", 1)
        told = patched(FakeGroup(case.ranks), patch).run(body)
        expected, left_out = in_one_process(case)
    for step, sums in enumerate(expected):
        for name, total in sums.items():
            parts = [ranks[step][name] for ranks, _ in told]
            if kind == "ddp":
                assert all(torch.equal(part, parts[0]) for part in parts)
                parts = parts[:1]
            assert torch.allclose(torch.stack(parts).sum(0), total, rtol=0, atol=1e-9), name
    residuals = [one.residual.present() for _, one in told]
    assert residuals[0].keys() == left_out.keys() == {"a", "c", "e"}
    for name, left in left_out.items():
        parts = [residual[name] for residual in residuals]
        assert torch.allclose(torch.stack(parts).sum(0), left, rtol=0, atol=1e-9), name
    factors = [one.residual.factors() for _, one in told]
    for name, factor in factors[0].items():
        assert all(torch.equal(other[name], factor) for other in factors)


def test_a_message_is_much_smaller_than_what_is_sent_so() -> None:
    wire = Wire(format="powersgd", rank=4)
    for shape in [(64, 64), (31, 64), (1024,), (32, 32), (8, 4096), (64, 3, 3, 3)]:
        parameter = torch.zeros(shape)
        encoding, elements = encoding_of(wire, parameter), parameter.numel()
        columns = math.prod(shape[1:])
        sent = 4 * (shape[0] + columns)
        fits = len(shape) > 1 and elements >= codecs.LEAST_ELEMENTS and 4 * sent <= elements
        assert (encoding is not None) == fits, shape
        if encoding is not None:
            assert sent * 4 <= elements * wire.sent_bytes
    assert encoding_of(wire, torch.zeros(64, 64, dtype=torch.bfloat16)) is None


def test_a_gradient_that_goes_one_way_is_sent_whole() -> None:
    """A matrix of rank 1 is its own projection; from then on nothing is left out."""
    case = Case(2, 1, (True,) * 3, frozenset(), 0)
    ways = torch.outer(torch.arange(16.0), torch.arange(1.0, 21.0)).double()

    def body(rank: int) -> tuple[Tensor, Tensor]:
        one = OneRank("ddp", case, rank)
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        one.queue.backward((ways * (rank + 1) * one.parameters["a"]).sum(), 1.0, part, None)
        assert isinstance(one.exchange, AllReduce)
        one.exchange.finish()
        gradient = one.parameters["a"].grad
        assert gradient is not None
        summed = gradient.clone()
        one.residual.end_step(applied=True)
        return summed, one.residual.present()["a"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "LEAST_ELEMENTS", 1)
        for summed, left in patched(FakeGroup(2), patch).run(body):
            assert torch.allclose(summed, 3 * ways) and left.abs().max() < 1e-9


def sent_of(steps: list[Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns what two ranks with equal gradients send of some steps, and what is left out."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        mesh = Mesh.of_world(rank, 2, fake_group(2))
        bucket = BucketResidual(
            ["w"], torch.zeros(shape).flatten(), lambda f: [f.view(shape)], LowRank(2)
        )
        residual = Residual(Wire(format="powersgd", rank=2), mesh, None)
        residual.lay([bucket])
        peers, total = Peers(index=rank, group=fake_group(2)), torch.zeros(shape)
        for gradient in steps:
            flat = gradient.flatten().clone()
            errors = bucket.add_to(flat, 1.0)
            sums = LowRankSum(bucket.by_name(flat), bucket.factors, peers, bucket.by_name(errors))
            sums.finish()
            residual.end_step(applied=True)
            total += flat.view(shape)
        return total, residual.present()["w"]

    with pytest.MonkeyPatch.context() as patch:
        (total, left), (other, other_left) = patched(FakeGroup(2), patch).run(body)
    assert torch.equal(total, other)
    return total, left + other_left


@pytest.mark.parametrize("size", [1.0, 1e-24])
def test_a_step_without_gradients_does_not_end_the_training_of_a_matrix(size: float) -> None:
    """Nor does one of which few rows have gradients, or numbers of which squares are nothing."""
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.zeros(64, 32)]
    for _ in range(40):
        gradient = torch.randn(64, 32, generator=generator) * size
        gradient[:10] = 0
        gradients.append(gradient)
    total, left = sent_of(gradients, (64, 32))
    exact = 2 * torch.stack(gradients).sum(0)
    assert torch.linalg.vector_norm(total + left - exact) < 1e-4 * torch.linalg.vector_norm(exact)
    assert torch.linalg.vector_norm(left) < 0.9 * torch.linalg.vector_norm(exact)
    steady, left = sent_of([gradients[1]] * 40, (64, 32))
    assert torch.linalg.vector_norm(steady) > 0.5 * 80 * torch.linalg.vector_norm(gradients[1])


def test_autocast_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(64, 32, generator=generator) for _ in range(3)]
    plain = sent_of(gradients, (64, 32))
    with pytest.MonkeyPatch.context() as patch:
        begin = FakeGroup.run

        def within(group: FakeGroup, body: Any) -> list[Any]:
            def run(rank: int) -> Any:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return body(rank)

            return begin(group, run)

        patch.setattr(FakeGroup, "run", within)
        cast = sent_of(gradients, (64, 32))
    assert all(torch.equal(*pair) for pair in zip(plain, cast, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_matrix_that_is_not_finite_or_empty_gives_a_sum_that_says_so(bad: float) -> None:
    gradient = torch.full((8, 9), bad)
    left = torch.linalg.qr(gradient @ torch.randn(9, 2)).Q
    decoded = left @ (gradient.T @ left).T
    assert bool(decoded.isfinite().all()) == (bad == 0.0)
    assert bad != 0.0 or torch.equal(decoded, gradient)


def test_factors_are_part_of_the_state_and_loaded_where_they_fit() -> None:
    def bucket(names: list[str]) -> BucketResidual:
        flat_E = torch.zeros(48 * len(names))
        return BucketResidual(names, flat_E, lambda f: list(f.view(-1, 6, 8)), LowRank(2))

    residual = Residual(Wire(format="powersgd", rank=2), Mesh.of_world(0, 1), None)
    residual.lay([bucket(["w", "v"])])
    first_factors = {name: factor.clone() for name, factor in residual.factors().items()}
    assert first_factors["w"].shape == (8, 2)
    assert not torch.equal(first_factors["w"], first_factors["v"])
    (first,) = residual._buckets
    first.factors.take({"w": torch.ones(8, 2), "v": torch.ones(8, 2)})
    residual.end_step(applied=False)
    assert torch.equal(residual.factors()["w"], first_factors["w"])
    first.factors.take({"w": torch.ones(8, 2), "v": torch.ones(8, 2)})
    residual.end_step(applied=True)
    residual.lay([bucket(["v"]), bucket(["w"])])
    assert all(torch.allclose(f, torch.tensor(8**-0.5)) for f in residual.factors().values())
    stored = {FACTOR + "w": spec_of(torch.zeros(8, 2)), FACTOR + "v": spec_of(torch.zeros(8, 3))}
    for targets in residual.loading(stored):
        assert [target.name for target in targets] == [FACTOR + "w"]
        targets[0].tensor.copy_(torch.full((8, 2), 5.0))
    assert residual.factors()["w"].eq(5).all() and residual.factors()["v"].lt(1).all()
    residual.begin_as_newcomer()
    assert len([*residual.loading(stored)]) == 1
