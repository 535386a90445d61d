"""The same training in every world that `worlds` lists, with faults and without, gives the weights
of one process.

make chaos                                                   # all cells
python -m pytest -m chaos tests/chaos/test_worlds.py -k 'zero3 and node and faults'
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.ipc.failure import Failed
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.chaos.worlds import DRAWN, FIXED_ORDER, LINE_UPS, SHAPES, Cell, cells_of
from tests.integration.clusters import Story, story
from tests.integration.test_memory_tier import lose, members
from tests.integration.training_harness import Pool
from tests.integration.training_worlds import (
    GLOBAL_BATCH,
    SAMPLES,
    SEED,
    Samples,
    build,
    dtype_of,
    loss_of,
    optimizer_of,
    schedule_of,
)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integration" / "training_worlds.py"
STEPS = 300
STEP_S, LONG_STEP_S = 0.02, 0.8
"""Seconds that a step is slowed by, and by which while a node is started."""
PATIENCE_S = 240.0
"""Four ranks on two cores that others use too take their time for 300 steps."""
pytestmark = pytest.mark.timeout(300)


def of(numbers: str) -> list[Any]:
    """The cells, each with the marker of the target that runs it."""

    def marks(cell: Cell) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow if str(cell) in DRAWN else pytest.mark.chaos]

    return [pytest.param(cell, id=str(cell), marks=marks(cell)) for cell in cells_of(numbers)]


@functools.cache
def plain(numbers: str) -> nn.Module:
    """What one process trains without any of this project's training code, in 64 bits or 32."""
    model = build(numbers)
    optimizer = optimizer_of(model.parameters())
    schedule = schedule_of(optimizer)
    samples, order = Samples(dtype_of(numbers)), SampleOrder(samples=SAMPLES, seed=SEED)
    plan, position = BatchPlan(order=order, global_batch=GLOBAL_BATCH, steps=STEPS), DataPosition()
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        chosen = order.indices(batch.epoch, batch.start, batch.stop).tolist()
        optimizer.zero_grad()
        loss_of(model, {"x": samples.x_NI[chosen], "y": samples.y_NO[chosen]}).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def train(cell: Cell, pool: Pool, folder: Path, job: str, etcd: EtcdServer) -> dict[str, Any]:
    """The loss and the weights that rank 0 of the last generation has."""
    out = folder / "out"
    told = {"numbers": cell.numbers, "strategy": cell.strategy, "steps": STEPS, "out": str(out)}
    nodes, workers = SHAPES[cell.ranks]
    if not cell.faults:
        options = {"row": workers, "shard": cell.shard, "deterministic": cell.numbers == "bits"}
        assert (
            pool.start(SCRIPT, [json.dumps(told)], cell.ranks, **options).finish(PATIENCE_S)
            == STEPS
        )
    else:
        arguments = ["--nnodes", f"1:{nodes}", "--nproc-per-node", str(workers), "--lease-ttl", "2"]
        arguments += ["--shard", cell.shard, "--max-restarts", "9"]
        arguments += ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "25"]
        arguments += ["--deterministic"] if cell.numbers == "bits" else []
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*arguments, str(SCRIPT), json.dumps(told)]
        with story(
            folder, etcd.endpoint, job, command, nodes=nodes, environments=[environment] * nodes
        ) as followed:
            strike(followed, nodes, random.Random(str(cell)))
            codes = followed.wait_for_end()
        assert 0 in codes.values() and set(codes.values()) <= {0, -9, 75}, codes
        assert followed.generation >= 4
    outcome: dict[str, Any] = json.loads(out.read_text())
    return outcome


def strike(told: Story, nodes: int, dice: random.Random) -> None:
    """Kills a worker, and a node, and sends a node away, each at a drawn step. Another node takes
    the place of one that is gone."""
    told.pause(STEP_S)
    told.wait_for_step(dice.randint(20, 80))
    before = told.generation
    told.cluster.kill_worker(told.cluster.nodes[dice.choice(members(told))])
    told.wait_for_first_step(before + 1)
    told.wait_for_step(told.step + dice.randint(5, 40))
    lose(told, dice.randrange(nodes))
    fill_up(told, nodes)
    told.wait_for_step(told.step + dice.randint(5, 40))
    leaver = told.cluster.nodes[dice.choice(members(told))]
    told.cluster.drain(leaver)
    told.wait("the leaver's end", lambda: not leaver.running)
    fill_up(told, nodes)


def fill_up(told: Story, nodes: int) -> None:
    """Starts a node, and waits until all train."""
    told.pause(LONG_STEP_S)
    told.cluster.start_node()
    trains_whole(told, nodes)
    told.pause(STEP_S)


def trains_whole(told: Story, nodes: int) -> None:
    """Waits until so many nodes train, all of which live."""

    def whole() -> bool:
        living = {node.name for node in told.cluster.running()}
        trains = told.generation in told.lineage.reached
        return trains and len(members(told)) == nodes and living.issuperset(members(told))

    told.wait("a world of all nodes", whole)


@pytest.mark.parametrize("cell", of("float64"))
def test_float64_weights_are_those_of_one_process(
    cell: Cell, pool: Pool, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    state = train(cell, pool, tmp_path, job, etcd)["state"]
    expected: dict[str, Tensor] = plain(cell.numbers).state_dict()
    assert state.keys() == expected.keys()
    for name, reference_tensor in expected.items():
        got = torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.float64)
        assert (got.view(reference_tensor.shape) - reference_tensor).abs().max() < 1e-9, name


@pytest.mark.parametrize("cell", of("bf16"))
def test_the_loss_of_bf16_is_that_of_one_process_with_32_bits(
    cell: Cell, pool: Pool, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    loss = train(cell, pool, tmp_path, job, etcd)["loss"]
    samples, model = Samples(torch.float32), plain(cell.numbers)
    with torch.no_grad():
        reference_loss = loss_of(model, {"x": samples.x_NI, "y": samples.y_NO}).item()
    assert loss == pytest.approx(reference_loss, rel=2e-2)


@pytest.fixture(scope="module")
def one_process(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bits of the weights of a world of one rank, which nothing disturbs."""
    out = tmp_path_factory.mktemp("alone") / "out"
    told = {"numbers": "bits", "strategy": "ddp", "steps": STEPS, "out": str(out)}
    assert pool.start(SCRIPT, [json.dumps(told)], 1, deterministic=True).finish(PATIENCE_S) == STEPS
    state: dict[str, str] = json.loads(out.read_text())["state"]
    return state


@pytest.mark.parametrize("cell", of("bits"))
def test_deterministic_weights_have_the_same_bits_with_dropout_on(
    cell: Cell,
    pool: Pool,
    one_process: dict[str, str],
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
) -> None:
    assert train(cell, pool, tmp_path, job, etcd)["state"] == one_process


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("strategy", "shard"), [line_up for line_up in LINE_UPS if line_up not in FIXED_ORDER]
)
def test_deterministic_refuses_what_it_cannot_do(
    pool: Pool, tmp_path: Path, strategy: str, shard: str
) -> None:
    told = {"numbers": "bits", "strategy": strategy, "steps": 2, "out": str(tmp_path / "out")}
    running = pool.start(SCRIPT, [json.dumps(told)], 4, row=2, shard=shard, deterministic=True)
    running.until(running.ended)
    reasons = {worker.last(Failed).message for worker in running.workers if worker.all(Failed)}
    message = "--deterministic cannot be had with strategy zero3"
    assert any(message in reason for reason in reasons)
