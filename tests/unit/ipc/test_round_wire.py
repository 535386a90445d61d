"""What islands send of a round: sizes, rounding, and elements that are sent as they are."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from elasticzero.ipc import round_wire
from elasticzero.ipc.round_wire import BLOCK, Elements, RoundWire
from elasticzero.ipc.rounds import FragmentShape
from elasticzero.options.diloco import WIRES

FORMATS = [*WIRES[:-2], "topk:0.25"]
LOSSY = FORMATS[1:]


def wire(
    name: str, elements: int, exact: int = 0, dtype: Literal["float32", "float64"] = "float32"
) -> RoundWire:
    shape = FragmentShape(elements=elements, averaged=0, dtype=dtype, exact=exact)
    return RoundWire(format=name, shape=shape)


def through(one: RoundWire, values_E: Elements) -> Elements:
    """The elements as another island has them, from one file."""
    data = np.zeros(one.nbytes, np.uint8)
    for piece in one.pieces():
        data[piece.bytes] = one.encode(values_E[piece.elements], piece)
    return np.concatenate([one.decode(data[p.bytes], p) for p in one.pieces()])


@pytest.fixture(params=[1 << 20, 2 * BLOCK])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_wire, "PIECE", request.param)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("elements", "exact"), [(1, 0), (256, 0), (1537, 300), (700, 700)])
def test_elements_come_as_near_as_the_format_has_it(
    name: str, dtype: Literal["float32", "float64"], elements: int, exact: int
) -> None:
    values_E = np.random.default_rng(elements).normal(size=elements).astype(dtype)
    came_E = through(wire(name, elements, exact, dtype), values_E)
    assert came_E.dtype == dtype
    encoded = 0 if name == "fp32" else elements - exact
    if name == "topk:0.25":
        check_largest(values_E[:encoded], came_E[:encoded])
        return
    assert np.array_equal(came_E[encoded:], values_E[encoded:])
    off_E = np.abs(came_E - values_E)[:encoded]
    most = np.abs(values_E[:encoded]).max(initial=0.0)
    bounds = {"fp32": 0, "bf16": 1 / 256, "fp8": 1 / 27, "int8": 1 / 253, "int4": 1 / 13}
    assert (off_E <= most * bounds[name]).all()


def check_largest(values_E: Elements, came_E: Elements) -> None:
    """Each piece has a quarter of its elements, the largest of them, as they were."""
    for start in range(0, len(values_E), round_wire.PIECE):
        piece = slice(start, start + round_wire.PIECE)
        values_P, came_P = values_E[piece], came_E[piece]
        sent_P = came_P != 0
        assert sent_P.sum() == -(-len(values_P) // 4)
        assert np.array_equal(came_P[sent_P], values_P[sent_P])
        assert np.abs(values_P[~sent_P]).max(initial=0) <= np.abs(values_P[sent_P]).min()


@pytest.mark.parametrize("name", LOSSY)
def test_a_file_has_few_bytes(name: str) -> None:
    share = wire(name, 1 << 21).nbytes / (4 << 21)
    shares = {"bf16": 0.5, "fp8": 65 / 256, "int8": 65 / 256, "int4": 33 / 256, "topk:0.25": 0.5}
    assert share == shares[name]
    assert wire(name, 0).nbytes == 0


def test_bf16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32)
    values_E = bits.view(np.float32)
    came_E = through(wire("bf16", len(values_E)), values_E)
    expected = torch.from_numpy(values_E).bfloat16().float().numpy()
    assert np.array_equal(came_E, expected, equal_nan=True)


def test_fp8_rounds_as_torch_does() -> None:
    values_E = np.random.default_rng(0).normal(size=100 * BLOCK).astype(np.float32)
    values_E[1::BLOCK] = np.arange(100) / 64  # in the middle between two, some of them
    values_E[::BLOCK] = 448  # so that a block's scale is 1
    came_E = through(wire("fp8", len(values_E)), values_E)
    expected = torch.from_numpy(values_E).to(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(came_E, expected)


@pytest.mark.parametrize("contributions", [1, 2, 3, 4])
def test_a_mean_has_all_that_the_contributions_have(contributions: int) -> None:
    one, size = wire("topk:0.1", 4000, exact=100), 3900
    sent = [
        through(one, np.random.default_rng(n).normal(size=4000).astype(np.float32))
        for n in range(contributions)
    ]
    mean_E: Elements = np.asarray(np.mean(sent, axis=0, dtype=np.float32))
    of_mean = one.of_mean(contributions)
    assert of_mean.nbytes == min(contributions * 390 * 8, size * 4) + 100 * 4
    assert np.array_equal(through(of_mean, mean_E), mean_E)
    assert through(wire("topk:0.6", 64), np.ones(64, np.float32)).all(), "all are sent as they are"


def test_of_equal_elements_the_first_are_sent() -> None:
    came_E = through(wire("topk:0.1", 1000), np.full(1000, -2.0, np.float32))
    assert np.array_equal(np.flatnonzero(came_E), np.arange(100))
    values_E = np.zeros(1000, np.float32)
    values_E[500], values_E[7] = np.nan, np.inf
    came_E = through(wire("topk:0.002", 1000), values_E)
    assert np.isnan(came_E[500]) and np.isinf(came_E[7])


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    values_E = np.ones(2 * BLOCK, np.float32)
    values_E[3] = bad
    came_E = through(wire(name, len(values_E)), values_E)
    assert not np.isfinite(came_E[:BLOCK]).any()
    assert np.allclose(came_E[BLOCK:], 1.0, atol=0.01)


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_are_zeros(name: str) -> None:
    assert not through(wire(name, 1000), np.zeros(1000, np.float32)).any()


def low_rank(rank: int, *matrices: tuple[int, int], exact: int = 3) -> RoundWire:
    elements = sum(rows * columns for rows, columns in matrices) + exact
    shape = FragmentShape(
        elements=elements, averaged=0, dtype="float32", exact=exact, matrices=matrices
    )
    return RoundWire(format=f"powersgd:{rank}", shape=shape)


@pytest.mark.parametrize("at_once", [1 << 20, 200])
def test_powersgd_sends_the_strongest_part_of_each_matrix(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticzero.ipc.low_rank.AT_ONCE", at_once)
    dice = np.random.default_rng(3)
    one = low_rank(2, (60, 40), (50, 70), (4, 3))
    strong = (dice.normal(size=(60, 2)) @ dice.normal(size=(2, 40))).astype(np.float32)
    other = dice.normal(size=(50, 70)).astype(np.float32) * 0.99 ** np.arange(70)
    rest = dice.normal(size=15).astype(np.float32)
    values_E = np.concatenate([strong.reshape(-1), other.reshape(-1), rest]).astype(np.float32)
    came_E = through(one, values_E)
    assert one.nbytes == 4 * (2 * (60 + 40) + 2 * (50 + 70) + 12 + 3)
    assert np.allclose(came_E[:2400].reshape(60, 40), strong, atol=1e-4)
    assert np.array_equal(came_E[5900:], rest)  # a small matrix comes as it is, and a vector
    off = np.linalg.norm(came_E[2400:5900].reshape(50, 70) - other)
    best = np.linalg.svd(other, compute_uv=False)
    assert np.sqrt((best[2:] ** 2).sum()) <= off < np.linalg.norm(other)


def test_the_mean_of_low_ranks_has_all_their_columns() -> None:
    dice = np.random.default_rng(4)
    one = low_rank(3, (64, 48), (6, 5))
    both = [dice.normal(size=one.shape.elements).astype(np.float32) for _ in range(2)]
    files = []
    for values_E in both:
        files.append(np.zeros(one.nbytes, np.uint8))
        for piece in one.pieces():
            files[-1][piece.bytes] = one.encode(values_E[piece.elements], piece)
    of_mean = one.of_mean(2)
    pairs = [*zip(one.pieces(), of_mean.pieces(), strict=True)]
    assert [of_mean.joins(into) for _, into in pairs] == [True, False, False]
    (piece, into), *_ = pairs
    sent = [(samples, file[piece.bytes]) for samples, file in zip((1, 3), files, strict=True)]
    mean = of_mean.decode(of_mean.joined(sent, piece), into)
    came = [one.decode(data, piece) for _, data in sent]
    assert np.allclose(mean, came[0] / 4 + came[1] * 3 / 4, atol=1e-5)


def test_a_matrix_of_nothing_or_of_what_is_not_finite_stays_so() -> None:
    one = low_rank(4, (64, 48), exact=0)
    assert not through(one, np.zeros(64 * 48, np.float32)).any()
    values_E = np.ones(64 * 48, np.float32)
    assert np.allclose(through(one, values_E), 1, atol=1e-6)  # of one column alone
    values_E[7] = np.nan
    assert np.isnan(through(one, values_E)).any()
