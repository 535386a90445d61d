"""Training in slices draws the same random numbers in every world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.data.sampling import BatchPlan, DataPosition, SampleOrder
from elasticzero.data.seeding import seed_generators
from elasticzero.data.slices import dealt, slice_seed, slices_of
from elasticzero.ipc.assignment import Resume
from tests.integration.training_harness import Pool, Running
from tests.integration.training_slices import OPTIMIZERS, SAMPLES, Model, Samples, loss_of

HERE = Path(__file__).parent
BATCH, SLICE, SEED = 12, 3, 5


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


def start(pool: Pool, world_size: int, told: dict[str, Any], **given: Any) -> Running:
    return pool.start(HERE / "training_slices.py", [json.dumps(told)], world_size, **given)


def plain(steps: int, *, weighted: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each step's slices, and the final state, of a loop in plain torch."""
    torch.manual_seed(1)
    model = Model().double()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    samples, order = Samples(torch.float64), SampleOrder(samples=SAMPLES, seed=SEED)
    plan, position = BatchPlan(order=order, global_batch=BATCH, steps=steps), DataPosition()
    losses: list[list[float]] = []
    while (found := plan.next(position)) is not None:
        batch, position = found
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
    found: dict[int, dict[int, list[float]]] = {}
    worlds: dict[int, int] = {}
    for line in log.read_text().splitlines():
        world_size, rank, step, losses = json.loads(line)
        if worlds.get(step) != world_size:
            found[step], worlds[step] = {}, world_size
        found[step][rank] = losses
    result: dict[int, list[float]] = {}
    for step, by_rank in found.items():
        start = (step - 1) * BATCH % (-(-SAMPLES // BATCH) * BATCH)
        count = -(-min(BATCH, SAMPLES - start) // SLICE)
        own = [by_rank[r][: len(dealt(count, r, worlds[step]))] for r in range(worlds[step])]
        result[step] = [loss for losses in own for loss in losses]
    return result


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.chaos), "zero2", "zero3"]
)
def test_losses_with_dropout_are_those_of_one_plain_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """A world of 3 whose rank 1 is killed, then worlds of 2 and 1, or 6 (more ranks than slices);
    batch statistics, random samples, parameters that some slices leave unused."""
    weighted = strategy in ("ddp", "zero2")
    told: dict[str, Any] = {"strategy": strategy, "dtype": "float64", "clip": 0.5}
    told |= {"weighted": weighted, "log": str(tmp_path / "log")}
    saves = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": 5}
    first = start(pool, 3, told | {"steps": 30, "die": [1, 8]}, generation=1, **saves)
    first.until(first.ended)
    step = 5
    worlds = [(11, 2), (17, 1)] if strategy != "ddp" else [(11, 2), (14, 6), (17, 1)]
    for generation, (until, world_size) in enumerate(worlds, 2):
        resume = Resume(tier="storage", step=step)
        out = {"steps": until, "out": str(tmp_path / "out"), "workers": int(world_size == 1)}
        running = start(pool, world_size, told | out, generation=generation, resume=resume, **saves)
        assert running.finish() == until
        step = until
    losses, state = plain(17, weighted=weighted)
    found = losses_in(tmp_path / "log")
    assert sorted(found) == list(range(1, 18))
    for index, expected in enumerate(losses, 1):
        assert found[index] == pytest.approx(expected, abs=1e-9), index
    stored = json.loads((tmp_path / "out").read_text())["state"]
    assert stored.keys() == state.keys()
    for name, tensor in state.items():
        got = torch.frombuffer(bytearray.fromhex(stored[name]), dtype=tensor.dtype)
        assert torch.allclose(got.view(tensor.shape), tensor, rtol=0, atol=1e-9), name
