"""Training in slices draws the same random numbers in every world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.seeding import seed_generators
from elasticzero.data.slices import run_of, slice_seed, slices_of
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from tests.integration.clusters import elasticzero, events_in
from tests.integration.training_harness import Pool, Running
from tests.integration.training_slices import OPTIMIZERS, SAMPLES, Model, Samples, loss_of
from tests.support.cases import slow

HERE = Path(__file__).parent
BATCH, SLICE, SEED = 12, 3, 5


def start(pool: Pool, world_size: int, told: dict[str, Any], **options: Any) -> Running:
    return pool.start(HERE / "training_slices.py", [json.dumps(told)], world_size, **options)


def plain(steps: int, *, weighted: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each step's slices, and the final state, of a loop in plain torch."""
    torch.manual_seed(1)
    model = Model().double()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    samples, order = Samples(torch.float64), SampleOrder(samples=SAMPLES, seed=SEED)
    plan, position = BatchPlan(order=order, global_batch=BATCH, steps=steps), DataPosition()
    losses: list[list[float]] = []
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        kept: dict[str, Tensor] = {}
        parts, weights = list[float](), list[float]()
        for part in slices_of(batch, 0, 1, SLICE):
            at = part.positions
            seed_generators(slice_seed(SEED, 0, batch.epoch, at.start, "read"))
            chosen = [samples[i] for i in order.indices(batch.epoch, at.start, at.stop).tolist()]
            data = {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}
            seed_generators(slice_seed(SEED, 0, batch.epoch, at.start, "compute"))
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            loss, weight = loss_of(model, data, weighted)
            kept = kept or {name: buffer.clone() for name, buffer in model.named_buffers()}
            (loss * weight).backward()
            parts.append(loss.item())
            weights.append(weight)
        losses.append(parts)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= sum(weights)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def losses_in(log: Path) -> dict[int, list[float]]:
    """The losses of each step's slices; a step that was done again is the later one."""
    by_step: dict[int, dict[int, list[float]]] = {}
    worlds: dict[int, int] = {}
    for line in log.read_text().splitlines():
        world_size, rank, step, losses = json.loads(line)
        if worlds.get(step) != world_size:
            by_step[step], worlds[step] = {}, world_size
        by_step[step][rank] = losses
    result: dict[int, list[float]] = {}
    for step, by_rank in by_step.items():
        start = (step - 1) * BATCH % (-(-SAMPLES // BATCH) * BATCH)
        count = -(-min(BATCH, SAMPLES - start) // SLICE)
        by_part = [by_rank[r][: len(run_of(count, r, worlds[step]))] for r in range(worlds[step])]
        result[step] = [loss for losses in by_part for loss in losses]
    return result


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("zero1", marks=pytest.mark.chaos),
        pytest.param("zero2", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.slow),
    ],
)
def test_losses_with_dropout_are_those_of_one_plain_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """A world of 3 whose rank 1 is killed, then worlds of 2, of two nodes with 2 workers that hold
    the whole state each, or 6 (more ranks than slices), and of 1; batch statistics, random samples,
    parameters that some slices leave unused."""
    weighted = strategy in ("ddp", "zero2")
    told: dict[str, Any] = {"strategy": strategy, "dtype": "float64", "clip": 0.5}
    told |= {"weighted": weighted, "log": str(tmp_path / "log")}
    saves = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": 5}
    doomed = told | {"steps": 30, "die": [1, 8], "saved": saves["checkpoint_dir"]}
    first = start(pool, 3, doomed, generation=1, **saves)
    first.until(first.ended)
    step = 5
    nodes: dict[str, Any] = {"row": 2, "shard": "node"}
    between: tuple[int, int, Any] = (14, 6, {}) if strategy == "ddp" else (14, 4, nodes)
    worlds = [(11, 2, {}), between, (17, 1, {})]
    for generation, (until, world_size, rows) in enumerate(worlds, 2):
        resume = Resume(tier="storage", step=step)
        out = {"steps": until, "out": str(tmp_path / "out"), "workers": int(world_size == 1)}
        options = {"generation": generation, "resume": resume, **saves, **rows}
        running = start(pool, world_size, told | out, **options)
        assert running.finish() == until
        step = until
    losses, state = plain(17, weighted=weighted)
    measured = losses_in(tmp_path / "log")
    assert sorted(measured) == list(range(1, 18))
    for index, expected in enumerate(losses, 1):
        assert measured[index] == pytest.approx(expected, abs=1e-9), index
    stored = json.loads((tmp_path / "out").read_text())["state"]
    assert stored.keys() == state.keys()
    for name, tensor in state.items():
        got = torch.frombuffer(bytearray.fromhex(stored[name]), dtype=tensor.dtype)
        assert torch.allclose(got.view(tensor.shape), tensor, rtol=0, atol=1e-9), name


def bits(path: Path) -> dict[str, str]:
    digests: dict[str, str] = json.loads(path.read_text())
    return digests


def in_one_process(
    pool: Pool, folder: Path, told: dict[str, Any], **options: Any
) -> dict[str, str]:
    """What a world of 1 gives under ddp that nothing disturbs."""
    alone = told | {"strategy": "ddp", "out": str(folder / "alone"), "workers": 0}
    assert start(pool, 1, alone, generation=1, **options).finish() == told["steps"]
    return bits(folder / "alone")


@pytest.mark.parametrize(
    ("strategies", "optimizer", "stream"),
    [
        slow(("ddp", "zero1", "ddp"), "fused", False),
        slow(("zero2", "ddp", "zero1"), "adamw", False),
        (("zero2", "ddp", "zero1"), "adamw", True),
    ],
)
def test_deterministic_weights_are_the_same_bits_after_a_kill(
    pool: Pool, tmp_path: Path, strategies: tuple[str, str, str], optimizer: str, stream: bool
) -> None:
    """A world of 3 whose rank 1 is killed, then worlds of 2 and 4 with other strategies, the last
    one with state divided within its two nodes, from checkpoints; float32, dropout, clipping,
    slices of which some leave parameters unused."""
    told: dict[str, Any] = {"dtype": "float32", "clip": 0.5, "optimizer": optimizer}
    told |= {"batch": 21, "virtual": 3, "weighted": optimizer == "adamw", "stream": stream}
    told |= {"workers": 2 if stream else 0}
    expected = in_one_process(pool, tmp_path, told | {"steps": 14}, deterministic=True)
    options: dict[str, Any] = {
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "deterministic": True,
    }
    options |= {"checkpoint_every": 5}
    doomed = told | {"strategy": strategies[0], "steps": 30, "die": [1, 7]}
    doomed["saved"] = options["checkpoint_dir"]
    first = start(pool, 3, doomed, generation=1, **options)
    first.until(first.ended)
    step = 5
    for generation, (until, world_size) in enumerate([(10, 2), (14, 4)], 2):
        rest = told | {"strategy": strategies[generation - 1], "steps": until}
        rest["out"] = str(tmp_path / "out")
        resume = Resume(tier="storage", step=step)
        options |= {"row": 2, "shard": "node"} if world_size == 4 else {}
        running = start(pool, world_size, rest, generation=generation, resume=resume, **options)
        assert running.finish() == until
        step = until
    assert bits(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_killed_node_changes_no_bit(tmp_path: Path, job: str) -> None:
    """Agents, etcd and SIGKILL on one side, `python train.py` on the other."""
    told = {"strategy": "zero1", "dtype": "float32", "clip": 0.5, "batch": 21, "steps": 30}
    script = str(HERE / "training_slices.py")
    alone = json.dumps(told | {"strategy": "ddp", "out": str(tmp_path / "alone")})
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["ELASTICZERO_DETERMINISTIC"] = "1"
    command = [sys.executable, script, alone]
    subprocess.run(command, env=environment, timeout=100, check=True, capture_output=True)
    arguments = ["local", "--nodes", "3", "--strategy", "zero1", "--deterministic", "--job", job]
    arguments += ["--fault", "kill-node@9", "--log-dir", str(tmp_path / "logs"), script]
    arguments.append(json.dumps(told | {"pause": 0.03, "out": str(tmp_path / "out")}))
    completed = subprocess.run(
        elasticzero(*arguments),
        env=environment,
        timeout=150,
        check=False,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    worlds = [event for event in events_in(tmp_path / "logs" / job) if event["event"] == "world"]
    assert {event["generation"] for event in worlds} == {1, 2}
    assert bits(tmp_path / "out") == bits(tmp_path / "alone")


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_deterministic_weights_are_the_same_bits_in_every_world(
    pool: Pool, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    told: dict[str, Any] = {"dtype": "float32", "optimizer": optimizer, "steps": 12, "batch": 21}
    expected = in_one_process(pool, tmp_path, told, deterministic=True)
    plain_sums = in_one_process(pool, tmp_path, told)
    assert plain_sums != expected  # the order of additions does make a difference here
    told |= {"strategy": strategy, "out": str(tmp_path / "out")}
    for world_size in (1, 2, 3, 4):
        assert start(pool, world_size, told, deterministic=True).finish() == 12
        assert bits(tmp_path / "out") == expected, world_size


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"strategy": "zero3"}, "--deterministic cannot be had with strategy zero3"),
        ({"virtual": None}, "--deterministic sums gradients slice by slice: give session.batches"),
    ],
)
def test_what_deterministic_cannot_do_is_refused(
    pool: Pool, tmp_path: Path, changed: dict[str, Any], text: str
) -> None:
    told: dict[str, Any] = {"strategy": "ddp", "dtype": "float32", "steps": 2} | changed
    running = start(pool, 1, told, deterministic=True)
    running.until(running.ended)
    assert text in running.workers[0].last(Failed).message
