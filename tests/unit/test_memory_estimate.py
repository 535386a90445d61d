"""The arithmetic of the memory that a rank needs, on the numbers of the ZeRO paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticzero.memory_estimate import (
    STATE_SIZES,
    LineUp,
    ModelSize,
    checkpoint_bytes,
    first_that_fits,
    node_snapshot_bytes,
    rank_memory,
    room_for_state,
    snapshot_bytes,
    state_bytes,
)
from elasticzero.spans import STRATEGIES

MODEL = ModelSize(elements=7_500_000_000, element_bytes=2, largest=10**8, layer=2 * 10**8)
RANKS = LineUp(nodes=8, ranks_per_node=8)
GB = 10**9
ADAMW = STATE_SIZES["adamw"]


def without_buffers(strategy: str) -> float:
    memory = rank_memory(strategy, MODEL, ADAMW, RANKS)
    return (memory.total - memory.buffers) / GB


def test_the_state_is_that_of_the_paper() -> None:
    """Table 1 of "ZeRO" (2020), 7.5 B parameters on 64 GPUs: 31.4, 16.6 and 1.9 GB."""
    assert without_buffers("zero1") == pytest.approx(31.4, abs=0.05)
    assert without_buffers("zero2") == pytest.approx(16.6, abs=0.05)
    assert without_buffers("zero3") == pytest.approx(1.88, abs=0.05)


def test_ddp_keeps_all_in_the_dtype_of_the_parameters() -> None:
    assert without_buffers("ddp") == 7.5 * (2 + 2 + 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_holds_the_whole_state(strategy: str) -> None:
    memory = rank_memory(
        strategy,
        ModelSize(elements=1000, element_bytes=4, largest=100, layer=100),
        ADAMW,
        LineUp(nodes=1, ranks_per_node=1),
    )
    assert memory.total - memory.buffers == 16 * 1000


def test_the_pool_is_no_larger_than_what_passes_through_it() -> None:
    small = ModelSize(elements=1000, element_bytes=4, largest=10, layer=10)
    line_up = LineUp(nodes=2, ranks_per_node=1, direct=True)
    transient = 40
    assert rank_memory("zero1", small, ADAMW, line_up).buffers == 2000 + transient
    assert rank_memory("zero2", small, ADAMW, line_up).buffers == 6000 + transient


def test_encoded_gradients_need_memory_for_their_messages() -> None:
    """A rank sends three quarters of it to the others and gets as much, 2 bytes each."""
    model = ModelSize(elements=1000, element_bytes=4, largest=10, layer=10)
    plain = LineUp(nodes=4, ranks_per_node=1)
    encoded = replace(plain, sent_bytes=2)
    for strategy in STRATEGIES:
        before, after = (rank_memory(strategy, model, ADAMW, a) for a in (plain, encoded))
        taken = strategy != "zero3"
        assert after.buffers - before.buffers == 3000 * taken
        assert after.residual == 2 * 4000 * taken and before.residual == 0
        assert after.total - before.total == 11000 * taken
        stored = [checkpoint_bytes(strategy, model, ADAMW, a) for a in (plain, encoded)]
        assert stored[1] - stored[0] == 4 * 4000 * taken
    in_memory = [snapshot_bytes("zero1", model, ADAMW, a) for a in (plain, encoded)]
    assert in_memory[1] - in_memory[0] == 5 * 4000  # two captures and two replicas, and at a stop
    in_memory = [snapshot_bytes("ddp", model, ADAMW, a) for a in (plain, encoded)]
    assert in_memory[1] - in_memory[0] == (2 + 2) * 4000  # at a stop it is kept twice
    halves = replace(model, element_bytes=2)
    assert rank_memory("ddp", halves, ADAMW, encoded) == rank_memory("ddp", halves, ADAMW, plain)
    rows = replace(encoded, ranks_per_node=2, shard="node")
    messages = rank_memory("zero1", model, ADAMW, rows).buffers
    messages -= rank_memory("zero1", model, ADAMW, replace(rows, sent_bytes=0)).buffers
    assert messages == 2 * 500 * 2 * 3 // 4  # of its half, between four nodes


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_state_divided_within_a_node_is_that_of_one_node(strategy: str) -> None:
    one = LineUp(nodes=1, ranks_per_node=8)
    divided = LineUp(nodes=8, ranks_per_node=8, shard="node")
    assert rank_memory(strategy, MODEL, ADAMW, divided) == rank_memory(strategy, MODEL, ADAMW, one)
    whole = state_bytes(strategy, MODEL, ADAMW)
    assert snapshot_bytes(strategy, MODEL, ADAMW, divided) == 2 * -(-whole // 64) * 8 + whole


def test_zero3_alone_can_keep_its_state_in_host_memory() -> None:
    for strategy in ("ddp", "zero1", "zero2"):
        memory = rank_memory(strategy, MODEL, ADAMW, RANKS, offloaded=True)
        assert memory == rank_memory(strategy, MODEL, ADAMW, RANKS)
    inside = rank_memory("zero3", MODEL, ADAMW, RANKS)
    outside = rank_memory("zero3", MODEL, ADAMW, RANKS, offloaded=True)
    assert outside.total + outside.host == inside.total
    assert outside.total == outside.buffers == 2 * 2 * MODEL.layer * MODEL.element_bytes


def test_frozen_parameters_have_weights_only() -> None:
    frozen = ModelSize(elements=0, element_bytes=2, largest=0, layer=0, frozen_bytes=640)
    for strategy in ("ddp", "zero1", "zero2"):
        assert rank_memory(strategy, frozen, ADAMW, RANKS).total == 640
    assert rank_memory("zero3", frozen, ADAMW, RANKS).total == 10
    assert state_bytes("zero1", frozen, ADAMW) == 640


def test_a_checkpoint_holds_each_number_once() -> None:
    assert state_bytes("ddp", MODEL, ADAMW) == 7_500_000_000 * 6
    assert state_bytes("zero3", MODEL, ADAMW) == 7_500_000_000 * 14


def test_packed_state_is_the_same_in_every_dtype_and_strategy() -> None:
    packed = STATE_SIZES["adamw8bit"]
    chunk = -(-MODEL.elements // RANKS.ranks)
    assert rank_memory("ddp", MODEL, packed, RANKS).optimizer == 7.5 * GB * 2.03125
    for strategy in ("zero1", "zero2"):
        assert rank_memory(strategy, MODEL, packed, RANKS).optimizer == round(chunk * 2.03125)
        assert state_bytes(strategy, MODEL, packed) == 7.5 * GB * (2 + 4 + 2.03125)
    assert packed.strategies == ["ddp", "zero1", "zero2"]
    assert ADAMW.strategies == list(STRATEGIES)


def test_replicas_double_what_a_node_keeps_while_training() -> None:
    def needed(whole: int, captures: bool, replicas: bool, mirrors: bool) -> int:
        return node_snapshot_bytes(
            10, whole, workers=8, captures=captures, replicas=replicas, mirrors=mirrors
        )

    assert needed(0, True, False, False) == 240
    assert needed(0, True, True, False) == 400
    assert needed(0, True, True, True) == 480
    assert needed(80, False, False, False) == 80
    alone = LineUp(nodes=1, ranks_per_node=8)
    assert snapshot_bytes("zero1", MODEL, ADAMW, alone) == 3 * state_bytes("zero1", MODEL, ADAMW)


def test_the_first_strategy_that_fits_is_taken() -> None:
    needs = {"zero2": 20, "ddp": 40, "zero1": 30, "zero3": 10}
    assert [first_that_fits(needs, room) for room in (50, 30, 10, 9)] == [
        "ddp",
        "zero1",
        "zero3",
        None,
    ]


def test_room_is_left_for_activations() -> None:
    assert room_for_state(100, None, cuda=False) == 80
    assert room_for_state(100, 30, cuda=False) == 70
    assert room_for_state(10 << 30, 0, cuda=True) == 9 << 30


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="zero9"):
        rank_memory("zero9", MODEL, ADAMW, RANKS)
