"""Sums of gradients that are encoded between ranks: right, and equal on all ranks to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel.buckets.all_reduce import AllReduce
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.strategies import check_options
from elasticzero.parallel.wire.codecs import LEAST_ELEMENTS, Cast, codec_of
from elasticzero.parallel.wire.sums import ChunkSum, CompressedSum, Peers
from tests.support.fake_groups import fake_group

BF16 = Cast(torch.bfloat16)


class FakeNetwork:
    """Ranks that are threads, with a queue from each to each."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.local = threading.local()
        ways = product(range(ranks), range(ranks))
        self.queues: dict[tuple[int, int], Queue[Tensor]] = {way: Queue() for way in ways}
        self.sent_bytes = 0

    def begin(self, operations: list[dist.P2POp]) -> list[Any]:
        rank, works = self.local.rank, []
        for operation in operations:
            tensor, peer = operation.tensor, operation.peer
            if operation.op is dist.isend:
                self.sent_bytes += tensor.nbytes
                self.queues[rank, peer].put(tensor.clone())
                works.append(SimpleNamespace(wait=lambda: None))
            else:
                works.append(SimpleNamespace(wait=self._receiver(tensor, (peer, rank))))
        return works

    def _receiver(self, tensor: Tensor, way: tuple[int, int]) -> Callable[[], None]:
        def wait() -> None:
            tensor.copy_(self.queues[way].get(timeout=20))

        return wait

    def run(self, body: Callable[[Peers], Tensor]) -> list[Tensor]:
        """Returns what `body` returns on each rank."""
        results: list[Any] = [None] * self.ranks

        def on(rank: int) -> None:
            self.local.rank = rank
            results[rank] = body(Peers(index=rank, group=fake_group(self.ranks)))

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def fake_network(ranks: int, patch: pytest.MonkeyPatch) -> FakeNetwork:
    network = FakeNetwork(ranks)
    patch.setattr(dist, "batch_isend_irecv", network.begin)
    patch.setattr(dist, "P2POp", fake_operation)
    return network


def summed(peers: Peers, flat: Tensor) -> Tensor:
    sums = CompressedSum(flat, BF16, peers)
    sums.add_up()
    sums.finish()
    return flat


def fake_operation(op: Any, tensor: Tensor, peer: int, group: Any, tag: int) -> Any:
    return SimpleNamespace(op=op, tensor=tensor, peer=peer)


def rounded(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


@st.composite
def parts(draw: st.DrawFn) -> list[Tensor]:
    """The tensor of each rank."""
    ranks, numel = draw(st.integers(1, 4)), draw(st.sampled_from([1, 255, 256, 257, 1030, 2048]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(ranks)]


@settings(deadline=None, max_examples=40)
@given(parts())
def test_all_ranks_have_the_same_sum(parts: list[Tensor]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        network = fake_network(len(parts), patch)
        results = network.run(lambda peers: summed(peers, parts[peers.index].clone()))
    assert all(torch.equal(result, results[0]) for result in results)
    exact = torch.stack(parts).sum(0)
    error = (results[0] - exact).abs()
    limit = 2.0**-8 * (torch.stack(parts).abs().sum(0) + exact.abs())
    assert bool((error <= limit).all())
    assert torch.equal(rounded(results[0]), results[0])


@settings(deadline=None, max_examples=40)
@given(parts(), st.data())
def test_a_rank_has_the_sum_of_its_chunk(parts: list[Tensor], data: st.DataObject) -> None:
    """Chunks may be of any size, also empty. Its own part is never rounded."""
    ranks, numel = len(parts), parts[0].numel()
    cuts = sorted(
        data.draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1))
    )
    bounds = list(zip([0, *cuts], [*cuts, numel], strict=True))
    with pytest.MonkeyPatch.context() as patch:
        network = fake_network(ranks, patch)

        def body(peers: Peers) -> Tensor:
            flat = parts[peers.index].clone()
            chunks = [flat[start:stop] for start, stop in bounds]
            ChunkSum(chunks, BF16, peers).finish()
            return chunks[peers.index]

        results = network.run(body)
    for rank, (start, stop) in enumerate(bounds):
        expected = parts[rank][start:stop].clone()
        for source in range(rank - 1, rank - ranks, -1):
            expected += rounded(parts[source % ranks][start:stop])
        assert torch.equal(results[rank], expected)


def test_half_of_the_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    network = fake_network(4, monkeypatch)
    network.run(lambda peers: summed(peers, torch.ones(4 * 1024)))
    assert network.sent_bytes == 4 * (2 * 3 * 1024) * 2  # by rank: two halves, to three others


def test_ddp_begins_each_bucket_once_its_last_gradient_is_there() -> None:
    """A few vectors, the first of which comes first and the last one last, hold up no matrix."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    parameters = dict(model.named_parameters())
    peers = Peers(index=0, group=fake_group(2), wire="bf16")
    plan = BucketPlan(size_bytes=2 * 64 * 64 * 4, order=())
    sums = AllReduce(parameters, {}, plan, LossCheck(), peers)
    place = {name: index for index, name in enumerate(plan.filling_order(list(parameters)))}
    last = [place[bucket.names[-1]] for bucket in sums.buckets]
    assert len(last) == 4 and last == sorted(last)
    assert sums.buckets[-2].names == [f"{i}.bias" for i in range(5, -1, -1)]


def test_a_world_of_one_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is entered inside the loop of a larger one."""
    parameters = {"w": nn.Parameter(torch.ones(64, 64))}
    peers = Peers(index=0, group=fake_group(2), wire="bf16")
    sums = AllReduce(parameters, {}, BucketPlan(size_bytes=100, order=()), LossCheck(), peers)
    sums.enter_world(Mesh.of_world(0, 1, fake_group(1)))
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: done)
    (bucket,) = sums.buckets
    sums.lend(bucket)
    gradients = torch.randn(64 * 64)
    bucket.gradients_E.copy_(gradients)
    bucket.used_N = [True]
    sums.begin(bucket, complete=True)
    sums.finish()
    assert torch.equal(bucket.gradients_E, gradients)


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    message = torch.zeros(BF16.message_bytes(4), dtype=torch.uint8)
    BF16.encode(values, message)
    decoded = torch.zeros(4)
    BF16.decode(message, decoded)
    assert torch.equal(decoded.nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("shape", "dtype", "encoded"),
    [
        ((32, 32), torch.float32, True),
        ((32, 32), torch.float64, True),
        ((2, 8, 8, 8), torch.float32, True),
        ((32, 31), torch.float32, False),
        ((LEAST_ELEMENTS,), torch.float32, False),
        ((32, 32), torch.bfloat16, False),
        ((32, 32), torch.float16, False),
    ],
)
def test_vectors_and_small_matrices_are_sent_as_they_are(
    shape: tuple[int, ...], dtype: torch.dtype, encoded: bool
) -> None:
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    assert (codec_of("bf16", parameter) is not None) == encoded
    assert codec_of("fp32", parameter) is None


@pytest.mark.parametrize(
    ("strategy", "deterministic", "error"),
    [
        ("zero3", False, "--wire bf16 cannot be had with strategy zero3"),
        ("ddp", True, "--wire bf16 cannot be had with --deterministic"),
        ("zero1", True, "--wire bf16 cannot be had with --deterministic"),
    ],
)
def test_a_wire_that_rounds_is_refused_where_it_cannot_be_had(
    strategy: str, deterministic: bool, error: str
) -> None:
    options = TrainingSettings(wire="bf16", deterministic=deterministic)
    with pytest.raises(UserError, match=error):
        check_options(strategy, options, mirrored=False)
    for name in ("ddp", "zero1", "zero2"):
        check_options(name, TrainingSettings(wire="bf16"), mirrored=False)
