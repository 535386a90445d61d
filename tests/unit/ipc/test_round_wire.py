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

LOSSY = WIRES[1:]


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
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("elements", "exact"), [(1, 0), (256, 0), (1537, 300), (700, 700)])
def test_elements_come_as_near_as_the_format_has_it(
    name: str, dtype: Literal["float32", "float64"], elements: int, exact: int
) -> None:
    values_E = np.random.default_rng(elements).normal(size=elements).astype(dtype)
    came_E = through(wire(name, elements, exact, dtype), values_E)
    assert came_E.dtype == dtype
    encoded = 0 if name == "fp32" else elements - exact
    assert np.array_equal(came_E[encoded:], values_E[encoded:])
    off_E = np.abs(came_E - values_E)[:encoded]
    most = np.abs(values_E[:encoded]).max(initial=0.0)
    bound = {"fp32": 0.0, "bf16": most / 256, "int8": most / 253, "int4": most / 13}[name]
    assert (off_E <= bound).all()


@pytest.mark.parametrize("name", LOSSY)
def test_a_file_has_few_bytes(name: str) -> None:
    share = wire(name, 1 << 21).nbytes / (4 << 21)
    assert share == {"bf16": 0.5, "int8": 65 / 256, "int4": 33 / 256}[name]
    assert wire(name, 0).nbytes == 0


def test_bf16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32)
    values_E = bits.view(np.float32)
    came_E = through(wire("bf16", len(values_E)), values_E)
    expected = torch.from_numpy(values_E).bfloat16().float().numpy()
    assert np.array_equal(came_E, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["int8", "int4"])
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
