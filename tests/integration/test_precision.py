"""Models compute in 16 bits or compiled under every strategy, with the same names and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.ipc.failure import Failed
from tests.integration.training_harness import Pool
from tests.integration.training_precision import (
    GLOBAL_BATCH,
    SAMPLES,
    Model,
    Samples,
    optimizer_of,
    squares,
)
from tests.support.cases import drawn

SCRIPT = Path(__file__).parent / "training_precision.py"
STEPS = 30


@pytest.fixture(scope="module")
def expected() -> float:
    """The loss after a plain loop of 32 bits in one process."""
    torch.manual_seed(1)
    model = Model()
    optimizer = optimizer_of(model.parameters())
    samples, order = Samples(), SampleOrder(samples=SAMPLES, shuffle=False)
    plan, position = (
        BatchPlan(order=order, global_batch=GLOBAL_BATCH, steps=STEPS),
        DataPosition(),
    )
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        optimizer.zero_grad()
        squares(model, collated(samples, range(batch.start, batch.stop))).backward()
        optimizer.step()
    return loss_of(model)


def collated(samples: Samples, indices: range) -> dict[str, torch.Tensor]:
    rows = [samples[index] for index in indices]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def loss_of(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(squares(model, collated(Samples(), range(SAMPLES))))


def run(pool: Pool, folder: Path, told: dict[str, Any], world: int = 2) -> list[dict[str, Any]]:
    """What the ranks found."""
    told = {"steps": STEPS, "out": str(folder / "out")} | told
    running = pool.start(SCRIPT, [json.dumps(told)], world, checkpoint_dir=str(folder))
    running.finish(240.0)  # a compiler of C++ takes its time
    return [json.loads((folder / f"out-{rank}").read_text()) for rank in range(world)]


def trained(folder: Path) -> Model:
    """The model of the newest checkpoint, of 32 bits, under the script's own names."""
    stored = ez_checkpoint.load(folder)
    model = Model()
    state = {n.removeprefix("model/"): t for n, t in stored.items() if n.startswith("model/")}
    model.load_state_dict(state)
    assert all(tensor.dtype == torch.float32 for tensor in state.values() if tensor.dim())
    moments = {n for n in stored if n.startswith("optimizer/") and n.endswith("/exp_avg")}
    assert moments == {f"optimizer/{n}/exp_avg" for n, _ in model.named_parameters()}
    return model


@pytest.mark.parametrize("strategy", drawn("zero1", "zero3"))
@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"precision": "bf16"}, id="bf16"),
        pytest.param({"precision": "bf16", "micro": 2}, id="bf16, many micro-batches"),
    ],
)
def test_16_bits_give_the_loss_of_32(
    pool: Pool, tmp_path: Path, expected: float, strategy: str, told: dict[str, Any]
) -> None:
    outcomes = run(pool, tmp_path, told | {"strategy": strategy})
    assert outcomes[0]["dtypes"] == ["torch.bfloat16"]
    assert outcomes[0]["loss"] == pytest.approx(expected, rel=2e-2)
    assert outcomes[0]["names"] == sorted(Model().state_dict())
    assert loss_of(trained(tmp_path)) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("zero2", {}), ("zero3", {}), ("zero3", {"compile": True, "backend": "eager"})],
)
def test_a_part_of_a_model_without_forward_computes_in_16_bits(
    pool: Pool, tmp_path: Path, expected: float, strategy: str, options: dict[str, Any]
) -> None:
    """Under zero3 the blocks of the part are compiled, one by one."""
    told = {"strategy": strategy, "precision": "bf16", "parts": True}
    outcomes = run(pool, tmp_path, told | options)
    assert outcomes[0].get("graphs") != 0
    assert outcomes[0]["dtypes"] == ["torch.bfloat16"]
    assert outcomes[0]["loss"] == pytest.approx(expected, rel=2e-2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        pytest.param("ddp", {"backend": "eager"}, marks=pytest.mark.slow),
        pytest.param("zero2", {"backend": "eager"}, marks=pytest.mark.slow),
        pytest.param("zero3", {"backend": "eager"}),
        pytest.param("zero2", {}, marks=pytest.mark.slow, id="zero2, with a compiler of C++"),
        pytest.param("zero3", {}, marks=pytest.mark.slow, id="zero3, with a compiler of C++"),
    ],
)
def test_compile_keeps_names_and_results(
    pool: Pool, tmp_path: Path, expected: float, strategy: str, told: dict[str, Any]
) -> None:
    outcomes = run(pool, tmp_path, {"strategy": strategy, "compile": True} | told)
    assert outcomes[0]["graphs"] > 0
    assert outcomes[0]["loss"] == pytest.approx(expected, rel=1e-3)
    assert outcomes[0]["names"] == sorted(Model().state_dict())
    assert loss_of(trained(tmp_path)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "other", "complaint"),
    [
        ({"precision": "bf16"}, {}, "has precision fp32, the other ranks have bf16"),
        ({"compile": True}, {}, "has compile False, the other ranks have True"),
        ({"precision": "int8"}, {"precision": "int8"}, "precision='int8'; it must be one of fp32"),
        ({"compile": "fast"}, {"compile": "fast"}, "compile='fast'; it must be False, True or a"),
    ],
)
def test_what_ranks_ask_for_is_checked(
    pool: Pool, tmp_path: Path, options: dict[str, Any], other: dict[str, Any], complaint: str
) -> None:
    told = {"strategy": "ddp", "steps": 1, "out": str(tmp_path / "out"), "odd": other} | options
    running = pool.start(SCRIPT, [json.dumps(told)], 3)
    running.until(lambda: any(worker.all(Failed) for worker in running.workers))
    running.until(running.ended)
    messages = [failed.message for worker in running.workers for failed in worker.all(Failed)]
    assert any(complaint in message for message in messages), messages
