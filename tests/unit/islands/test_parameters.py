"""What an island contributes of its parameters, and what it takes of a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from elasticzero.islands import parameters
from elasticzero.islands.parameters import Reference, take, write_difference
from elasticzero.launcher.islands.outer import OuterOptimizer, write_mean

ELEMENTS = 37
ISLANDS = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "PIECE", 10)


def random(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def difference(outer_E: Tensor, local_E: Tensor) -> Tensor:
    out_E = torch.empty_like(outer_E)
    write_difference(outer_E, local_E, out_E)
    return out_E


def test_a_round_of_one_step_each_is_a_step_of_the_whole_batch() -> None:
    """DiLoCo's limit: SGD without momentum, whose parameters are averaged after each step."""
    features_SE = torch.randn(24, ELEMENTS, dtype=torch.float64)
    targets_S = random(9)[:24]
    shares = [slice(0, 4), slice(4, 12), slice(12, 24)]

    def inner_step(weights_E: Tensor, share: slice) -> Tensor:
        rows = features_SE[share]
        return weights_E - 0.01 * (rows.T @ (rows @ weights_E - targets_S[share])) / len(rows)

    alone, islands = random(0), [random(0) for _ in range(ISLANDS)]
    outer, momentum_E = random(0), np.zeros(ELEMENTS)
    for _ in range(20):
        alone = inner_step(alone, slice(0, 24))
        islands = [inner_step(*both) for both in zip(islands, shares, strict=True)]
        sent = [difference(outer, island) for island in islands]
        sizes = [share.stop - share.start for share in shares]
        mean_E = np.empty(ELEMENTS)
        write_mean([(n, part.numpy()) for n, part in zip(sizes, sent, strict=True)], mean_E)
        before, outer = outer, outer.clone()
        OuterOptimizer(lr=1.0, momentum=0.0).step(outer.numpy(), momentum_E, mean_E)
        for island in islands:
            take(island, Reference(outer_E=before), Reference(outer_E=outer), alpha=0.0)
            assert torch.equal(island, outer)
    assert torch.allclose(outer, alone, rtol=0, atol=1e-9)


def test_a_round_that_comes_late_takes_nothing_away() -> None:
    """What an island has learnt since its contribution stays, through any order of events."""
    outer, progress = random(0), torch.zeros(ELEMENTS, dtype=torch.float64)
    local = outer.clone()
    sent: Tensor | None = None
    for seed in range(1, 40):
        kind = seed % 4
        if kind in (0, 2):  # an inner step
            local += random(seed)
            progress += random(seed)
        elif kind == 1 and sent is None:  # a contribution
            sent = difference(outer, local)
            progress.zero_()
        elif kind == 3:  # a round, with the contribution or without it
            before = Reference(outer_E=outer, sent_E=sent)
            outer = outer + random(100 + seed)
            sent = None if seed % 8 == 3 else sent
            take(local, before, Reference(outer_E=outer, sent_E=sent), alpha=None)
        there = outer if sent is None else outer - sent
        assert torch.allclose(local, there + progress, rtol=0, atol=1e-9)


def test_what_stays_of_an_island_where_a_round_comes_in_time() -> None:
    local, outer, after = random(1), random(2), random(3)
    before = local.clone()
    take(local, Reference(outer_E=outer), Reference(outer_E=after), alpha=0.25)
    assert torch.allclose(local, 0.25 * before + 0.75 * after, rtol=0, atol=1e-12)


def test_parameters_of_16_bits_take_what_is_nearest() -> None:
    local, after = random(1).bfloat16(), random(3, torch.float32)
    take(local, Reference(outer_E=after), Reference(outer_E=after), alpha=0.0)
    assert torch.equal(local, after.bfloat16())
