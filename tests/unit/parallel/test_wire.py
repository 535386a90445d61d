"""Sums of gradients that are encoded between ranks: right, and equal on all ranks to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
from elasticzero.options.wire import EXACT, wire_of
from elasticzero.parallel.buckets.all_reduce import AllReduce
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.strategies import check_options
from elasticzero.parallel.wire.codecs import (
    LEAST_ELEMENTS,
    Cast,
    Codec,
    Largest,
    LowRank,
    ScaledBlocks,
    encoding_of,
)
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.sums import ChunkSum, CompressedSum, Peers
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.spans import STRATEGIES
from tests.support.fake_groups import fake_group
from tests.support.threaded_ranks import FakeGroup, patched

WIRES = [wire_of("--wire", text) for text in ("bf16", "fp8", "int8", "int4", "topk:0.25")]
CODECS = [
    codec
    for wire in WIRES
    if (codec := encoding_of(wire, torch.ones(32, 32))) and not isinstance(codec, LowRank)
]
DENSE = [codec for codec in CODECS if not isinstance(codec, Largest)]
BF16 = WIRES[0]


def run(made: FakeGroup, body: Callable[[Peers], Any]) -> list[Any]:
    """What `body` returns on each rank."""
    group = fake_group(made.ranks)
    with pytest.MonkeyPatch.context() as patch:
        return patched(made, patch).run(lambda rank: body(Peers(index=rank, group=group)))


def decoded(codec: Codec, values: Tensor) -> Tensor:
    message = torch.zeros(codec.message_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, message)
    result = torch.empty_like(values)
    codec.decode(message, result)
    return result


def coarseness(codec: Codec) -> float:
    """The most by which a number is off, in times of the largest of its block."""
    if isinstance(codec, Cast):
        return 2.0**-8
    if isinstance(codec, Largest):
        return 1.0
    assert isinstance(codec, ScaledBlocks)
    return 2.0**-4 if codec.dtype.is_floating_point else 0.501 / codec.most


@st.composite
def parts(draw: st.DrawFn) -> list[Tensor]:
    """The tensor of each rank."""
    ranks, numel = draw(st.integers(1, 4)), draw(st.sampled_from([1, 255, 256, 257, 1030, 2048]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(ranks)]


@settings(deadline=None, max_examples=40)
@given(parts(), st.sampled_from(CODECS))
def test_all_ranks_have_the_same_sum(parts: list[Tensor], codec: Codec) -> None:
    """What it lacks of the exact one is what the ranks have not sent."""

    def body(peers: Peers) -> tuple[Tensor, Tensor]:
        flat = parts[peers.index].clone()
        errors = torch.zeros_like(flat)
        sums = CompressedSum(flat, codec, peers, errors)
        sums.add_up()
        sums.finish()
        return flat, errors

    results = run(FakeGroup(len(parts)), body)
    sums, errors = zip(*results, strict=True)
    assert all(torch.equal(total, sums[0]) for total in sums)
    exact, digits = torch.stack(parts).sum(0), torch.finfo(parts[0].dtype).eps
    missing = torch.stack(errors).sum(0)
    assert torch.allclose(sums[0] + missing, exact, rtol=0, atol=100 * digits)
    largest = sum(float(part.abs().max()) for part in parts) + float(exact.abs().max())
    assert float(missing.abs().max()) <= 1.1 * largest * coarseness(codec)


@settings(deadline=None, max_examples=40)
@given(parts(), st.data(), st.sampled_from(CODECS))
def test_a_rank_has_the_sum_of_its_chunk(
    parts: list[Tensor], data: st.DataObject, codec: Codec
) -> None:
    """Chunks may be of any size, also empty. Its own part is never encoded."""
    ranks, numel = len(parts), parts[0].numel()
    cuts = sorted(
        data.draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1))
    )
    bounds = list(zip([0, *cuts], [*cuts, numel], strict=True))

    def body(peers: Peers) -> tuple[Tensor, Tensor]:
        flat = parts[peers.index].clone()
        errors = torch.zeros_like(flat)
        chunks = [[t[start:stop] for start, stop in bounds] for t in (flat, errors)]
        ChunkSum(chunks[0], codec, peers, chunks[1]).finish()
        return chunks[0][peers.index], errors

    results = run(FakeGroup(ranks), body)
    for rank, (start, stop) in enumerate(bounds):
        expected = parts[rank][start:stop].clone()
        for source in range(rank - 1, rank - ranks, -1):
            part = parts[source % ranks][start:stop]
            expected += decoded(codec, part)
            error = results[source % ranks][1][start:stop]
            assert torch.equal(error, part - decoded(codec, part))
        assert torch.equal(results[rank][0], expected)
        assert not results[rank][1][start:stop].any()


@pytest.mark.parametrize(
    ("text", "sent_bytes"),
    [
        *(("bf16", 2.0), ("fp8", 1.015625), ("int8", 1.015625), ("int4", 0.515625)),
        ("topk:0.0625", 0.5),
    ],
)
def test_fewer_bytes_are_sent(text: str, sent_bytes: float) -> None:
    wire = wire_of("--wire", text)
    made, numel, codec = FakeGroup(4), 4 * 1024, encoding_of(wire, torch.ones(32, 32))
    assert codec is not None and not isinstance(codec, LowRank)
    assert wire.sent_bytes == sent_bytes and str(wire) == text

    def body(peers: Peers) -> None:
        flat = torch.ones(numel)
        sums = CompressedSum(flat, codec, peers, torch.zeros(numel))
        sums.add_up()
        sums.finish()

    run(made, body)
    assert made.sent_bytes == 4 * (2 * 3 * 1024) * sent_bytes  # two halves, to three others


def test_ddp_begins_each_bucket_once_its_last_gradient_is_there() -> None:
    """A few vectors, the first of which comes first and the last one last, hold up no matrix."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    parameters = dict(model.named_parameters())
    peers = Peers(index=0, group=fake_group(2), wire=BF16)
    plan = BucketPlan(size_bytes=2 * 64 * 64 * 4, order=())
    residual = Residual(BF16, Mesh.of_world(0, 2, fake_group(2)), None)
    sums = AllReduce(parameters, {}, plan, LossCheck(), peers, residual)
    place = {name: index for index, name in enumerate(plan.filling_order(list(parameters)))}
    last = [place[bucket.names[-1]] for bucket in sums.buckets]
    assert len(last) == 4 and last == sorted(last)
    assert sums.buckets[-2].names == [f"{i}.bias" for i in range(5, -1, -1)]


def test_a_world_of_one_rounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is entered inside the loop of a larger one."""
    parameters = {"w": nn.Parameter(torch.ones(64, 64))}
    peers = Peers(index=0, group=fake_group(2), wire=BF16)
    residual = Residual(BF16, Mesh.of_world(0, 2, fake_group(2)), None)
    plan = BucketPlan(size_bytes=100, order=())
    sums = AllReduce(parameters, {}, plan, LossCheck(), peers, residual)
    mesh = Mesh.of_world(0, 1, fake_group(1))
    sums.enter_world(mesh)
    residual.enter_world(mesh, None)
    left = torch.randn(64, 64)
    residual.put({"w": left})
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: done)
    (bucket,) = sums.buckets
    sums.lend(bucket)
    gradients = torch.randn(64 * 64)
    bucket.gradients_E.copy_(gradients)
    bucket.used_N = [True]
    sums.begin(bucket, complete=True)
    sums.finish()
    assert torch.equal(bucket.gradients_E, gradients + left.flatten())
    residual.end_step(applied=True)
    assert not residual.present()["w"].any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(codec: Codec, value: float) -> None:
    values = torch.ones(1000)
    values[700] = value
    result = decoded(codec, values)
    assert not bool(torch.isfinite(result[700]))
    if not isinstance(codec, Largest):
        assert torch.equal(result[:512], torch.ones(512))


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None)
@given(numel=st.sampled_from([1, 255, 256, 257, 70_000]), exponent=st.integers(-46, 38))
def test_numbers_of_any_size_come_close(
    codec: Codec, dtype: torch.dtype, numel: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = (2 * torch.rand(numel, generator=generator, dtype=torch.float64) - 1).to(dtype)
    values *= 10.0**exponent
    result = decoded(codec, values)
    smallest = 1e-40  # in bf16, and of a scale
    limit = max(coarseness(codec) * float(values.abs().max()), smallest)
    assert float((values - result).abs().max()) <= limit
    assert not decoded(codec, torch.zeros(numel, dtype=dtype)).any()


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_added_is_what_is_decoded(codec: Codec) -> None:
    values, sums = torch.randn(1000), torch.randn(1000)
    message = torch.zeros(codec.message_bytes(1000), dtype=torch.uint8)
    codec.encode(values, message)
    expected = sums + decoded(codec, values)
    codec.add(message, sums)
    assert torch.equal(sums, expected)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_the_largest_are_sent(values: list[int], share: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    result = decoded(Largest(share), tensor)
    count = min(math.ceil(share * len(values)), len(values))
    kept = result != 0
    assert torch.equal(result[kept], tensor[kept])
    sizes = sorted((abs(value) for value in values), reverse=True)
    assert sorted(result.abs().tolist(), reverse=True)[:count] == sizes[:count]
    assert int(kept.sum()) <= count


@pytest.mark.parametrize(
    "text",
    [
        *("", "int3", "topk", "topk:", "topk:0", "topk:1.1", "topk:nan", "int8:2", "bf16:1"),
        *("powersgd", "powersgd:", "powersgd:0", "powersgd:-1", "powersgd:1.5"),
    ],
)
def test_a_format_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(
        UserError, match=f"--wire {text}: fp32, .*, topk:SHARE or powersgd:RANK is expected"
    ):
        wire_of("--wire", text)


def test_whole_numbers_of_four_bits_come_as_they_are() -> None:
    values = torch.arange(-7.0, 8.0).repeat(300)
    codec = encoding_of(wire_of("--wire", "int4"), torch.ones(32, 32))
    assert codec is not None and not isinstance(codec, LowRank)
    assert torch.equal(decoded(codec, values), values)


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
    assert (encoding_of(BF16, parameter) is not None) == encoded
    assert encoding_of(EXACT, parameter) is None


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
    options = TrainingSettings(wire=BF16, deterministic=deterministic)
    with pytest.raises(UserError, match=error):
        check_options(strategy, options, mirrored=False)
    for name in ("ddp", "zero1", "zero2"):
        check_options(name, TrainingSettings(wire=BF16), mirrored=False)


def test_powersgd_is_refused_where_no_rank_has_whole_matrices() -> None:
    wire = wire_of("--wire", "powersgd:4")
    options = TrainingSettings(wire=wire)
    for by_node in (False, True):
        check_options("ddp", options, mirrored=False, by_node=by_node)
        for name in ("zero2", "zero3"):
            with pytest.raises(UserError, match=f"powersgd:4 cannot be had with strategy {name}"):
                check_options(name, options, mirrored=False, by_node=by_node)
    with pytest.raises(UserError, match="strategy zero1 and --shard node"):
        check_options("zero1", options, mirrored=False, by_node=True)
    check_options("zero1", options, mirrored=False)
    assert [name for name in STRATEGIES if not wire.refusal(name)] == ["ddp", "zero1"]


@pytest.mark.parametrize("text", ["fp32", "int8", "topk:0.25", "powersgd:2"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_are_counted_as_they_are_sent(text: str, ranks: int) -> None:
    """A ring sends as much as messages do: each rank all chunks but its own, and once more."""
    wire, made = wire_of("--wire", text), FakeGroup(ranks)
    parameters = {"w": nn.Parameter(torch.ones(96, 64)), "b": nn.Parameter(torch.ones(7))}
    traffics = [Traffic() for _ in range(ranks)]

    def body(peers: Peers) -> None:
        traffic = traffics[peers.index]
        mesh = Mesh.of_world(peers.index, ranks, peers.group)
        residual = Residual(wire, mesh, None)
        peers = replace(peers, wire=wire, traffic=traffic)
        plan = BucketPlan(size_bytes=100, order=())
        sums = AllReduce(parameters, {}, plan, LossCheck(), peers, residual)
        for bucket in sums.buckets:
            sums.lend(bucket)
            bucket.used_N = [True] * len(bucket.names)
            sums.begin(bucket, complete=True)
        sums.finish()

    run(made, body)
    counts = [traffic.counts for traffic in traffics]
    sent = sum(count["gradients sent"] for count in counts)
    assert sent == sum(count["gradients received"] for count in counts)
    tails = 4 * (len(parameters["b"]) + 2 + 2) if wire.is_lossy else 0
    whole = 4 * (96 * 64 + 7 + 4)
    factors = 4 * wire.rank * (96 + 64 + 96 / 2)  # the left one is given to all besides
    collectives = tails + factors if wire.is_lossy else whole
    expected = made.sent_bytes + ranks * (2 * collectives * (ranks - 1) // ranks)
    assert sent == pytest.approx(expected, abs=8 * ranks)  # shares are whole
    assert (made.sent_bytes > 0) == (wire.is_lossy and not wire.rank and ranks > 1)


def test_a_reduce_scatter_and_an_all_gather_are_halves_of_an_all_reduce() -> None:
    traffic = Traffic()
    traffic.count_halves("gradients", 1000, 4, halves=1)
    traffic.count_halves("parameters", 1000, 4, halves=2)
    assert traffic.counts == {
        "gradients sent": 750,
        "gradients received": 750,
        "parameters sent": 1500,
        "parameters received": 1500,
    }
