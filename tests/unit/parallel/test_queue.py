"""The queue of buckets: whatever ranks use, in any order, sums are those of plain additions."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.settings import Wire
from elasticzero.parallel.buckets import queue, reduce_scatter
from elasticzero.parallel.buckets.all_reduce import AllReduce
from elasticzero.parallel.buckets.layout import DealtNames, FlatBucket
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.buckets.queue import BucketQueue, Intake
from elasticzero.parallel.buckets.reduce_scatter import ReduceScatter
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire import codecs
from elasticzero.parallel.wire.sums import Peers
from elasticzero.spans import Span
from tests.support.fake_groups import fake_group

RANKS = 2
Kind = Literal["ddp", "zero1", "zero2", "zero1 in rows", "zero2 in rows"]
KINDS: tuple[Kind, ...] = ("ddp", "zero1", "zero2", "zero1 in rows", "zero2 in rows")


class FakeGroup:
    """Ranks that are threads. Each collective is checked to be the same one on all of them."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.changed = threading.Condition()
        self.calls: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
        self.messages: dict[Any, deque[Tensor]] = defaultdict(deque)
        self.failed: list[BaseException] = []

    def begin(self, kind: str, tensor: Tensor, done: Callable[[list[Tensor]], None]) -> Call:
        """done: takes the tensors of all ranks once each has begun the collective."""
        rank, began = self.local.rank, self.local.began
        call = Call(self, (kind, began[kind]), tensor, tensor.clone(), done)
        began[kind] += 1
        with self.changed:
            self.calls[call.key][rank] = call
            self.changed.notify_all()
        return call

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Returns what `body` returns on each rank."""
        results: list[Any] = [None] * RANKS

        def on(rank: int) -> None:
            self.local.rank, self.local.began = rank, defaultdict(int)
            try:
                results[rank] = body(rank)
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]
        return results

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Call | None:
        def put(tensors: list[Tensor]) -> None:
            stacked = torch.stack(tensors)
            tensor.copy_(stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.amax(0))

        call = self.begin(f"all-reduce {group}", tensor, put)
        if async_op:
            return call
        call.wait()
        return None

    def begin_messages(self, messages: list[Message]) -> list[Message]:
        for message in messages:
            message.begin(self)
        return messages

    def begin_reduce_scatter(
        self, flat_E: Tensor, chunks: Sequence[Tensor], received: Tensor | None, mesh: Mesh
    ) -> list[Call]:
        assert received is not None
        bounds = [0, *torch.tensor([len(chunk) for chunk in chunks]).cumsum(0).tolist()]
        shard = slice(bounds[mesh.shard], bounds[mesh.shard + 1])

        def put(tensors: list[Tensor]) -> None:
            others = [t[shard] for rank, t in enumerate(tensors) if rank != mesh.shard]
            received.copy_(torch.stack(others))

        return [self.begin("reduce-scatter", flat_E, put)]


@dataclass
class Call:
    """One rank's part in a collective."""

    group: FakeGroup
    key: tuple[str, int]
    tensor: Tensor
    at_begin: Tensor
    done: Callable[[list[Tensor]], None]

    def wait(self) -> None:
        group = self.group
        with group.changed:
            group.changed.wait_for(
                lambda: group.failed or len(group.calls[self.key]) == RANKS, timeout=10
            )
            calls = group.calls[self.key]
        assert len(calls) == RANKS, f"{self.key}: only ranks {list(calls)} have begun it"
        assert torch.equal(self.tensor, self.at_begin), "a bucket under way has changed"
        assert {call.tensor.shape for call in calls.values()} == {self.tensor.shape}
        self.done([calls[rank].at_begin for rank in range(RANKS)])


class Message:
    """One message of a rank to another, at either end."""

    def __init__(self, function: Any, tensor: Tensor, peer: int, group: Any, tag: int) -> None:
        self.is_sent, self.tensor = function is dist.isend, tensor
        self.peer, self.way = peer, (group, tag)
        self.at_begin = tensor.clone()

    def begin(self, group: FakeGroup) -> None:
        self.group, rank = group, group.local.rank
        self.key = (*self.way, rank, self.peer) if self.is_sent else (*self.way, self.peer, rank)
        if self.is_sent:
            with group.changed:
                group.messages[self.key].append(self.at_begin)
                group.changed.notify_all()

    def wait(self) -> None:
        if self.is_sent:
            assert torch.equal(self.tensor, self.at_begin), "a message under way has changed"
            return
        with self.group.changed:
            messages = self.group.messages[self.key]
            self.group.changed.wait_for(lambda: self.group.failed or messages, timeout=10)
            assert messages, f"{self.key}: nothing has come"
            self.tensor.copy_(messages.popleft())


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
        replicas = fake_group(RANKS, "replicas")
        return Mesh(shard=0, shards=1, replica=rank, replicas=RANKS, replica_group=replicas)
    return Mesh.of_world(rank, RANKS, fake_group(RANKS))


class Trainer:
    """One rank with its queue."""

    def __init__(self, case: Case, kind: Kind, rank: int, wire: Wire = "fp32") -> None:
        self.case, self.rank = case, rank
        self.parameters = []
        for number, size in enumerate(case.sizes):  # ddp sends vectors as they are
            shape = (size,) if kind == "ddp" and number % 3 == 2 else (1, size)
            self.parameters.append(nn.Parameter(torch.ones(shape, dtype=torch.float64)))
        self.exchange: AllReduce | ReduceScatter
        self.queue: BucketQueue[Any]
        by_name = {str(i): p for i, p in enumerate(self.parameters)}
        if kind == "ddp":
            optimizer_of = {name: str(case.bucket_of[int(name)] > 0) for name in by_name}
            plan = BucketPlan(size_bytes=24, order=())
            peers = Peers(index=rank, group=fake_group(RANKS), wire=wire)
            self.exchange = AllReduce(by_name, optimizer_of, plan, LossCheck(), peers)
        else:
            filled = [names for bucket in range(3) if (names := case.names(bucket))]
            mesh = mesh_of(kind, rank)
            buckets = [
                FlatBucket(DealtNames(names=n), [by_name[i] for i in n], mesh.shard, mesh.shards)
                for n in filled
            ]
            self.exchange = ReduceScatter(buckets, int(kind[4]), mesh, wire)
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
        self.queue.clear()
        assert all(p.grad is None for p in self.parameters)
        assert all(b.intake is Intake.OPEN for b in self.exchange.buckets)
        return sums_by_name


def patched(made: FakeGroup, patch: pytest.MonkeyPatch) -> FakeGroup:
    patch.setattr(dist, "all_reduce", made.all_reduce)
    patch.setattr(dist, "P2POp", Message)
    patch.setattr(dist, "batch_isend_irecv", made.begin_messages)
    patch.setattr(codecs, "LEAST_ELEMENTS", 1)
    patch.setattr(reduce_scatter, "begin_reduce_scatter", made.begin_reduce_scatter)
    return made


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


@pytest.mark.parametrize("is_launched", [False, True], ids=["at once", "whole buckets"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", get_args(Wire))
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_sums_are_those_of_plain_additions(
    wire: Wire, kind: Kind, is_launched: bool, case: Case
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "is_launched", lambda tensor: is_launched)
        ranks = patched(FakeGroup(), patch)

        def train(rank: int) -> list[dict[str, Tensor | None]]:
            trainer = Trainer(case, kind, rank, wire)
            return [trainer.step(step) for step in range(len(case.steps))]

        told = ranks.run(train)
    for step in range(len(case.steps)):
        expected = as_used(case, step)
        if kind == "ddp":
            check_whole([sums[step] for sums in told], expected)
        else:
            check_chunks(case, kind, [sums[step] for sums in told], expected)


def check_whole(
    sums_of_ranks: list[dict[str, Tensor | None]], expected: dict[str, Tensor | None]
) -> None:
    for sums in sums_of_ranks:
        for name, total in expected.items():
            got = sums[name]
            assert (got is None) == (total is None), name
            assert got is None or total is None or torch.equal(got, total), name


def check_chunks(
    case: Case,
    kind: Kind,
    sums_of_ranks: list[dict[str, Tensor | None]],
    expected: dict[str, Tensor | None],
) -> None:
    used = {name for sums in sums_of_ranks for name, chunk in sums.items() if chunk is None}
    assert used == {name for name, total in expected.items() if total is not None}
    for bucket in range(3):
        names = case.names(bucket)
        if not names or not used & set(names):
            continue
        parts = []
        for name in names:
            total = expected[name]
            parts.append(torch.zeros(case.sizes[int(name)]).double() if total is None else total)
        whole = torch.cat(parts)
        chunks = [chunk for sums in sums_of_ranks if (chunk := sums[f"bucket {names}"]) is not None]
        if kind.endswith("rows"):
            assert all(torch.equal(chunk, whole) for chunk in chunks)
        else:
            got = torch.cat(chunks)
            assert torch.equal(got[: len(whole)], whole)
            assert not got[len(whole) :].any()


def one_bucket(*steps: list[Part], twice: frozenset[int] = frozenset()) -> Case:
    """Two parameters in one bucket; both ranks do the same."""
    each_rank = [[parts] * RANKS for parts in steps]
    return Case([2, 3], [1, 1], set(twice), each_rank, [False] * len(steps))


BOTH = Part([0, 1], counts=True)


def trained(kind: Kind, case: Case, body: Callable[[Trainer], Any]) -> tuple[list[Any], FakeGroup]:
    """Returns what `body` returns on each rank, and the collectives that it has made."""
    with pytest.MonkeyPatch.context() as patch:
        ranks = patched(FakeGroup(), patch)
        return ranks.run(lambda rank: body(Trainer(case, kind, rank))), ranks


@pytest.mark.parametrize(("kind", "exchanges"), [("ddp", 1), ("zero1", 1), ("zero2", 3)])
def test_a_bucket_is_exchanged_once_a_sum(kind: Kind, exchanges: int) -> None:
    """Whatever a rank has used: once in a global batch, under stage 2 once in a micro-batch."""
    case = one_bucket([BOTH], [BOTH, Part([], counts=True), Part([1], counts=False)])

    def body(trainer: Trainer) -> int:
        trainer.step(0)
        trainer.step(1)
        return len(trainer.exchange.buckets)

    (buckets, _), group = trained(kind, case, body)
    table = int(kind == "zero2")  # of what came too late in the first global batch
    assert len(group.calls) == buckets * (1 + exchanges) + table


def test_what_comes_too_late_is_exchanged_again_in_the_first_global_batch() -> None:
    first_0_then_1 = Part([1, 0], counts=True)  # a backward goes from the last to the first
    case = one_bucket([first_0_then_1], [first_0_then_1], twice=frozenset({1}))
    _, group = trained("zero2", case, lambda trainer: [trainer.step(step) for step in range(2)])
    assert sorted(kind for kind, _ in group.calls) == [
        "all-reduce all ranks",
        *["reduce-scatter"] * 3,
    ]


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_micro_batch_of_weight_0_needs_no_graph(kind: Kind) -> None:
    def body(trainer: Trainer) -> dict[str, Tensor | None]:
        loss = loss_of(trainer.case, trainer.parameters, (0, trainer.rank, 0))
        parts = [MicroBatch(positions=Span(0, 1), weight=1, last=last) for last in (False, True)]
        trainer.queue.backward(loss, 1.0, parts[0])
        trainer.queue.backward(torch.tensor(torch.nan), 0.0, parts[1])
        return trainer.sums(0)

    case = one_bucket([BOTH])
    sums, _ = trained(kind, case, body)
    if kind == "ddp":
        check_whole(sums, plain_sums(case, 0))
    else:
        check_chunks(case, kind, sums, plain_sums(case, 0))


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_gradient_after_the_sums_is_refused(kind: Kind) -> None:
    def body(trainer: Trainer) -> None:
        loss = loss_of(trainer.case, trainer.parameters, (0, trainer.rank, 0))
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        trainer.queue.backward(loss, 1.0, part)
        trainer.exchange.finish()
        with pytest.raises(UserError, match="'0' got a gradient after the gradients were summed"):
            trainer.parameters[0].sum().backward()
        trainer.queue.clear()
        trainer.parameters[0].sum().backward()  # of the next global batch

    trained(kind, one_bucket([BOTH]), body)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_gradients_in_parts_that_the_first_batch_has_not_shown(kind: Kind) -> None:
    def body(trainer: Trainer) -> None:
        trainer.step(0)
        trainer.case.twice.add(0)
        with pytest.raises(UserError, match="needs use_reentrant=False"):
            trainer.step(1)

    trained(kind, one_bucket([BOTH], [BOTH]), body)


def failing(value: Tensor) -> Tensor:
    """Returns a copy whose backward raises."""

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("the script's own")

    copied = value.clone()
    copied.register_hook(fail)
    return copied


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_backward_that_failed_after_a_sum_has_begun_is_not_begun_again(kind: Kind) -> None:
    """The sums have what it computed, so that a second one would count twice."""

    def body(trainer: Trainer) -> None:
        trainer.step(0)
        first, last = (bucket.parameters[0] for bucket in trainer.exchange.buckets)
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        with pytest.raises(ArithmeticError, match="the script's own"):
            trainer.queue.backward(failing(last.sum()) + first.sum(), 1.0, part)
        with pytest.raises(UserError, match="got a gradient after the gradients were summed"):
            trainer.queue.backward(last.sum() + first.sum(), 1.0, part)
        trainer.exchange.finish()
        trainer.queue.clear()
        trainer.step(1)

    case = one_bucket([BOTH], [BOTH])
    case.bucket_of = [0, 1]
    trained(kind, case, body)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_global_batch_that_was_not_applied_takes_no_further_backward(kind: Kind) -> None:
    """A script that catches the error of its step goes on with gradients that nobody dropped."""

    def body(trainer: Trainer) -> None:
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        for _ in range(2):
            trainer.queue.backward(
                torch.cat([p.view(-1) for p in trainer.parameters]).sum(), 1.0, part
            )
            trainer.exchange.finish()
            with pytest.raises(UserError, match="got a gradient after the gradients were summed"):
                trainer.queue.backward(torch.ones((), requires_grad=True) * 1, 1.0, part)
            with pytest.raises(UserError, match="got a gradient after the gradients were summed"):
                trainer.queue.backward(trainer.parameters[0].sum(), 1.0, part)
            trainer.queue.clear()

    trained(kind, one_bucket([BOTH]), body)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_backward_that_failed_before_any_sum_is_begun_again(kind: Kind) -> None:
    def body(trainer: Trainer) -> dict[str, Tensor | None]:
        trainer.step(0)
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        with pytest.raises(ArithmeticError, match="the script's own"):
            trainer.queue.backward(failing(trainer.parameters[0].sum()), 1.0, part)
        return trainer.step(1)

    case = one_bucket([BOTH], [BOTH])
    sums, _ = trained(kind, case, body)
    if kind == "ddp":
        check_whole(sums, plain_sums(case, 1))
    else:
        check_chunks(case, kind, sums, plain_sums(case, 1))


@pytest.mark.parametrize(("kind", "is_taken"), [("ddp", True), ("zero1", True), ("zero2", False)])
def test_a_backward_of_the_scripts_own_between_micro_batches(kind: Kind, is_taken: bool) -> None:
    """Kept buckets are still open for it; those of stage 2 have been summed."""

    def body(trainer: Trainer) -> dict[str, Tensor | None]:
        trainer.step(0)
        for last in (False, True):
            loss = loss_of(trainer.case, trainer.parameters, (1, trainer.rank, int(last)))
            part = MicroBatch(positions=Span(0, 1), weight=1, last=last)
            trainer.queue.backward(loss, 1.0, part)
            if not last:
                (trainer.parameters[0] * 64).sum().backward()
        return trainer.sums(1)

    case = one_bucket([BOTH], [BOTH, BOTH])
    if not is_taken:
        with pytest.raises(UserError, match="'0' got a gradient after"):
            trained(kind, case, body)
        return
    sums, _ = trained(kind, case, body)
    expected = plain_sums(case, 1)
    assert expected["0"] is not None
    expected["0"] += 64 * RANKS
    if kind == "ddp":
        check_whole(sums, expected)
    else:
        check_chunks(case, kind, sums, expected)
