"""Trains parameters of a few elements on threaded ranks, by any strategy with buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elasticzero.data.position import MicroBatch
from elasticzero.options.wire import EXACT, Wire
from elasticzero.parallel.buckets.all_reduce import AllReduce
from elasticzero.parallel.buckets.layout import DealtNames, FlatBucket
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.buckets.queue import BucketQueue, Intake
from elasticzero.parallel.buckets.reduce_scatter import ReduceScatter
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.sums import Peers
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.spans import Span
from tests.support.fake_groups import fake_group

RANKS = 2
Kind = Literal["ddp", "zero1", "zero2", "zero1 in rows", "zero2 in rows"]
KINDS: tuple[Kind, ...] = ("ddp", "zero1", "zero2", "zero1 in rows", "zero2 in rows")


@dataclass
class Part:
    """What one rank does in one micro-batch."""

    order: list[int]
    """The parameters that it uses, in the order in which the loss uses them."""
    counts: bool


@dataclass
class Case:
    """A training of a few global batches."""

    sizes: list[int]
    bucket_of: list[int]
    """By parameter, as its optimizer is: that of bucket 0 is another one than that of the rest."""
    twice: set[int]
    """Parameters whose gradient autograd gives in two parts."""
    steps: list[list[list[Part]]]
    """By global batch, rank and micro-batch."""
    only: list[bool]
    """Whether a global batch is for the parameters of bucket 0 alone."""

    def names(self, bucket: int) -> list[str]:
        return [str(i) for i, of in enumerate(self.bucket_of) if of == bucket]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    everything = list(range(len(sizes)))
    bucket_of = [draw(st.integers(0, 2)) for _ in sizes]
    twice = draw(st.sets(st.sampled_from(everything), max_size=2))
    only = [not twice and 0 in bucket_of and draw(st.booleans()) for _ in range(3)]
    steps = []
    for number in range(3):
        micro_batches = draw(st.integers(1, 3))
        ranks: list[list[Part]] = []
        for _ in range(RANKS):
            parts = []
            for index in range(micro_batches):
                order = draw(st.permutations(everything))
                used = draw(st.sets(st.sampled_from(everything)))
                if number == 0 and index == micro_batches - 1:
                    used |= twice  # F4: the first global batch shows which these are
                parts.append(Part([i for i in order if i in used], draw(st.booleans())))
            ranks.append(parts)
        steps.append(ranks)
    return Case(sizes, bucket_of, twice, steps, only)


def gradient_of(case: Case, step: int, rank: int, index: int, parameter: int) -> Tensor:
    """Returns whole numbers, whose sums are exact in any order, also in eight bits."""
    seed = (((step * 5 + rank) * 5 + index) * 11 + parameter) * 2 + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 20, (case.sizes[parameter],), generator=generator).double()


def loss_of(case: Case, parameters: list[nn.Parameter], at: tuple[int, int, int]) -> Tensor:
    step, rank, index = at
    through = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = 0 * through  # a loss that uses no parameter has a backward too
    for number in case.steps[step][rank][index].order:
        weights = gradient_of(case, step, rank, index, number)
        if number not in case.twice:
            loss = loss + (weights * parameters[number]).sum()
            continue
        for share in (0.25, 0.75):

            def run(x: Tensor, number: int = number, scaled: Tensor = weights * share) -> Tensor:
                return (scaled * parameters[number]).sum() * x

            # torch reads its generator's state under a lock that it may give the interpreter away
            # in, where a collection of garbage begins: two threads that do so wait for ever
            loss = loss + checkpoint(run, through, use_reentrant=True, preserve_rng_state=False)
    return loss


def plain_sums(case: Case, step: int) -> dict[str, Tensor | None]:
    """What each parameter's gradient must be; None: no rank has used it."""
    sums: dict[str, Tensor | None] = {}
    for number, size in enumerate(case.sizes):
        total, used = torch.zeros(size, dtype=torch.float64), False
        for rank, parts in enumerate(case.steps[step]):
            for index, part in enumerate(parts):
                if part.counts and number in part.order:
                    total, used = total + gradient_of(case, step, rank, index, number), True
        sums[str(number)] = total if used else None
    return sums


def mesh_of(kind: Kind, rank: int) -> Mesh:
    if kind.endswith("rows"):
        replicas, world = fake_group(RANKS, "replicas"), fake_group(RANKS)
        return Mesh(
            shard=0,
            shards=1,
            replica=rank,
            replicas=RANKS,
            world_group=world,
            replica_group=replicas,
        )
    return Mesh.of_world(rank, RANKS, fake_group(RANKS))


class Trainer:
    """One rank with its queue."""

    def __init__(self, case: Case, kind: Kind, rank: int, wire: Wire = EXACT) -> None:
        self.case, self.rank = case, rank
        self.is_applied = True
        """Whether the next steps are applied."""
        self.parameters = []
        for number, size in enumerate(case.sizes):  # ddp sends vectors as they are
            shape = (size,) if kind == "ddp" and number % 3 == 2 else (1, size)
            self.parameters.append(nn.Parameter(torch.ones(shape, dtype=torch.float64)))
        self.exchange: AllReduce | ReduceScatter
        self.queue: BucketQueue[Any]
        by_name = {str(i): p for i, p in enumerate(self.parameters)}
        self.residual = Residual(wire, mesh_of(kind, rank), None)
        if kind == "ddp":
            optimizer_of = {name: str(case.bucket_of[int(name)] > 0) for name in by_name}
            plan = BucketPlan(size_bytes=24, order=())
            peers = Peers(index=rank, group=fake_group(RANKS), wire=wire)
            self.exchange = AllReduce(
                by_name, optimizer_of, plan, LossCheck(), peers, self.residual
            )
        else:
            filled = [names for bucket in range(3) if (names := case.names(bucket))]
            mesh = mesh_of(kind, rank)
            buckets = [
                FlatBucket(DealtNames(names=n), [by_name[i] for i in n], mesh.shard, mesh.shards)
                for n in filled
            ]
            self.exchange = ReduceScatter(
                buckets, int(kind[4]), mesh, wire, self.residual, Traffic()
            )
        self.queue = BucketQueue(self.exchange)

    def step(self, step: int) -> dict[str, Tensor | None]:
        """Returns the sums that this rank has: whole ones, or its chunk of each bucket."""
        parts, inputs = self.case.steps[step][self.rank], None
        if self.case.only[step]:
            inputs = [self.parameters[int(name)] for name in self.case.names(0)]
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            loss = loss_of(self.case, self.parameters, (step, self.rank, index))
            if inputs is not None:  # autograd refuses a loss that uses none of them
                loss = loss + sum(0 * p.sum() for p in inputs)
            micro_batch = MicroBatch(positions=Span(0, 1), weight=1, last=last)
            if not part.counts:  # it leaves nothing, whatever its gradient is
                loss = loss * torch.nan
            self.queue.backward(loss, float(part.counts), micro_batch, inputs)
        return self.sums(step)

    def sums(self, step: int) -> dict[str, Tensor | None]:
        sums_by_name: dict[str, Tensor | None] = {}
        if isinstance(self.exchange, AllReduce):
            self.exchange.finish()
            for number, p in enumerate(self.parameters):
                sums_by_name[str(number)] = None if p.grad is None else p.grad.flatten().clone()
        else:
            for bucket, chunk_C in zip(self.exchange.buckets, self.exchange.reduced(), strict=True):
                sums_by_name[f"bucket {bucket.names}"] = chunk_C.clone()
            sums_by_name |= dict.fromkeys(self.queue.used)
        if not isinstance(self.exchange, AllReduce):
            self.residual.keep(
                {n for n, total in as_used(self.case, step).items() if total is None}
            )
        self.residual.end_step(applied=self.is_applied)
        self.queue.clear()
        assert all(p.grad is None for p in self.parameters)
        assert all(b.intake is Intake.OPEN for b in self.exchange.buckets)
        return sums_by_name


def as_used(case: Case, step: int) -> dict[str, Tensor | None]:
    """The plain sums of the parameters that the global batch is for."""
    sums = plain_sums(case, step)
    if case.only[step]:
        inside = set(case.names(0))
        # the loss touches all of them; a micro-batch that counts uses what its loss touches
        counted = any(part.counts for parts in case.steps[step] for part in parts)
        for name, total in sums.items():
            zeros = torch.zeros(case.sizes[int(name)], dtype=torch.float64)
            if name not in inside:
                sums[name] = None
            elif total is None and counted:
                sums[name] = zeros
    return sums
