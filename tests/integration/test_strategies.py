"""Every strategy computes what one plain process computes, and loads what any other wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.ipc.assignment import Resume
from elasticzero.spans import STRATEGIES
from tests.integration.training_exact import SAMPLES, Model, Samples, groups, squares
from tests.integration.training_harness import Pool
from tests.support.cases import slow

HERE = Path(__file__).parent
STEPS = (9, 20, 31)
"""Where the world changes, and the end; an epoch is 7 steps of 8 samples, the last one of 5."""


def plain(steps: int, *, weighted: bool) -> dict[str, Tensor]:
    """The weights and optimizer state of a loop without any of this project's training code."""
    torch.manual_seed(1)
    model = Model().double()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    samples, order = Samples(), SampleOrder(samples=SAMPLES)
    plan, position = BatchPlan(order=order, global_batch=8, steps=steps), DataPosition()
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        chosen = [samples[i] for i in order.indices(batch.epoch, batch.start, batch.stop).tolist()]
        data = {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}
        loss = squares(model, data)
        tokens = data["tokens"].double()
        (loss * tokens / tokens.sum()).sum().backward() if weighted else loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    plain_state = {f"model/{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            plain_state[f"optimizer/{name}/{key}"] = value
    return plain_state


def assert_close(directory: Path, expected: dict[str, Tensor]) -> None:
    state = ez_checkpoint.load(directory)
    names = {n for n in state if n.startswith(("model/", "optimizer/"))} - {"model/seen"}
    assert names == set(expected)
    for name, tensor in expected.items():
        difference = (state[name].double() - tensor.double()).abs().max().item()
        assert difference < 1e-9, (name, difference)


@pytest.mark.parametrize(
    ("weighted", "strategy"),
    [
        *((True, "ddp"), (False, "zero1"), (True, "zero2"), (False, "zero3")),
        *(slow(strategy in ("zero1", "zero3"), strategy) for strategy in STRATEGIES),
    ],
)
def test_weights_are_those_of_one_plain_process(
    pool: Pool, tmp_path: Path, strategy: str, weighted: bool
) -> None:
    """Worlds of 3, 2 and 1 one after the other, uneven shares, accumulation, clipping."""
    told: dict[str, Any] = {"strategy": strategy, "micro": 2, "clip": 0.5, "weighted": weighted}
    told["out"] = str(tmp_path / "out")
    resume = Resume(tier="fresh")
    losses = []
    for generation, (steps, world_size) in enumerate(zip(STEPS, (3, 2, 1), strict=True), 1):
        running = pool.start(
            HERE / "training_exact.py",
            [json.dumps(told | {"steps": steps})],
            world_size,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        assert running.finish() == steps
        losses.append(json.loads((tmp_path / "out").read_text())["loss"])
        resume = Resume(tier="storage", step=steps)
    assert_close(tmp_path / "checkpoints", plain(STEPS[-1], weighted=weighted))
    assert losses[0] != losses[1] != losses[2]


@pytest.mark.parametrize("first", [0, slow(1), slow(2)])
def test_state_divided_within_nodes_gives_the_same_weights(
    pool: Pool, tmp_path: Path, first: int
) -> None:
    """Nodes times workers 3 x 2, 2 x 1, 1 x 2 over the world, and 2 x 2, each with another strategy
    from the file of the one before."""
    told: dict[str, Any] = {"micro": 1, "clip": 0.5, "weighted": True}
    told["state"] = str(tmp_path / "state")
    resume = Resume(tier="fresh")
    worlds = ((6, 2, "node"), (2, 1, "node"), (2, 2, "world"), (4, 2, "node"))
    steps = (9, 15, 20, 31)
    for generation, (last, (ranks, row, shard)) in enumerate(zip(steps, worlds, strict=True), 1):
        running = pool.start(
            HERE / "training_exact.py",
            [json.dumps(told | {"steps": last, "strategy": f"zero{(first + generation) % 3 + 1}"})],
            ranks,
            row=row,
            shard=shard,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        assert running.finish() == last
        resume = Resume(tier="storage", step=last)
    expected = plain(steps[-1], weighted=True)
    assert_close(tmp_path / "checkpoints", expected)
    gathered = json.loads((tmp_path / "state").read_text())
    for name, value in gathered.items():
        if f"model/{name}" in expected:
            reference = expected[f"model/{name}"]
            assert (torch.tensor(value, dtype=reference.dtype) - reference).abs().max() < 1e-9, name


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.chaos), "zero3"])
def test_nodes_sum_their_gradients_once_in_a_global_batch(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Two micro-batches on each rank, of which only the last is summed over the nodes."""
    told: dict[str, Any] = {"strategy": strategy, "count": str(tmp_path / "count")}
    counts = []
    for micro in (1, 2):
        arguments = [json.dumps(told | {"steps": 3, "micro": micro})]
        running = pool.start(HERE / "training_rows.py", arguments, 4, row=2, shard="node")
        assert running.finish() == 3
        counts.append(int((tmp_path / "count").read_text()))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("first", "reached"), [(0, 8), (1, 7)])
@pytest.mark.parametrize("strategy", ["zero2", pytest.param("zero3", marks=pytest.mark.chaos)])
def test_the_ranks_of_a_node_stay_at_one_step_when_another_dies(
    pool: Pool, tmp_path: Path, strategy: str, first: int, reached: int
) -> None:
    """Of two nodes one dies in the last collective of step 8, which only rank 0 of the other has.
    If rank 0 goes on first, both its ranks apply the step; if rank 1 does, neither."""
    told: dict[str, Any] = {"strategy": strategy, "micro": 1, "clip": 0.5, "weighted": False}
    told["lose"] = {"step": 7, "ranks": [2, 3], "without": 1, "first": first}
    options: dict[str, Any] = {"row": 2, "shard": "node", "checkpoint_dir": str(tmp_path / "c")}
    script, arguments = HERE / "training_rows.py", [json.dumps(told | {"steps": STEPS[0]})]
    running = pool.start(script, arguments, 4, generation=1, **options)
    running.until(running.ended)
    resume = running.resume()
    assert {(source.rank, source.node) for source in resume.sources} == {(0, "node0"), (1, "node0")}
    assert resume.step == reached, running.logs()
    again = pool.start(script, arguments, 2, generation=2, resume=resume, **options)
    assert again.finish() == STEPS[0]
    assert_close(tmp_path / "c", plain(STEPS[0], weighted=False))


@pytest.mark.parametrize(("dtype", "worlds"), [("float64", [1, 2, 3]), slow("bfloat16", [1, 3])])
def test_any_checkpoint_loads_into_any_strategy_at_any_world_size(
    pool: Pool, tmp_path: Path, dtype: str, worlds: list[int]
) -> None:
    """{ddp, zero1, zero2, zero3} × worlds → the same set: 144 loads for three, bit by bit."""
    told = {"directory": str(tmp_path), "dtype": dtype, "worlds": worlds}
    lines = [json.dumps(told | {"rank": rank}) for rank in range(3)]
    for running in [pool.start(HERE / "training_matrix.py", [line], 1) for line in lines]:
        running.until(running.ended, 100)
        assert running.workers[0].exit_code == 0, running.logs()
    compared = [int((tmp_path / f"compared-{rank}").read_text()) for rank in range(3)]
    elements = [
        sum(t.numel() for n, t in ez_checkpoint.load(path).items() if n[:4] != "rng/")
        for path in (tmp_path / f"{strategy}-1" for strategy in STRATEGIES)
    ]
    assert sum(compared) == 4 * len(worlds) ** 2 * sum(elements)
    masters = [n for n in ez_checkpoint.load(tmp_path / "zero3-3") if n.endswith("/master")]
    assert bool(masters) == (dtype == "bfloat16")
