"""A loss over the samples of all ranks, and a schedule of the loop's length."""

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

from elasticzero.data.sampling import SampleOrder
from elasticzero.ipc.failure import Failed
from tests.integration.training_gather import (
    BATCH,
    EPOCHS,
    SAMPLES,
    SEED,
    dataset,
    loss_of,
    model,
    rate,
    term_of,
)
from tests.integration.training_harness import Pool
from tests.support.cases import drawn

SCRIPT = Path(__file__).parent / "training_gather.py"
ROOT = SCRIPT.parents[2]
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def plain(*, uneven: bool = False) -> dict[str, Tensor]:
    """The weights of one process in plain torch."""
    network, data, order = model(), dataset(), SampleOrder(samples=SAMPLES, seed=SEED)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(STEPS))
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            indices = order.indices(epoch, start, min(start + BATCH, SAMPLES)).tolist()
            optimizer.zero_grad()
            one, other, scale = network(data[indices][0])
            loss = loss_of(one, other, scale)
            (loss + term_of(network, one) if uneven else loss).backward()
            optimizer.step()
            schedule.step()
    return network.state_dict()


@pytest.mark.parametrize("strategy", drawn("zero3"))
def test_a_loss_over_all_samples_is_that_of_one_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """The last batch of an epoch has two samples, so that ranks of the first world have none."""
    told: dict[str, Any] = {"strategy": strategy, "out": str(tmp_path / "out")}
    worlds = [(3, told | {"steps": 5}), (1, told | {"steps": 6}), (2, told | {"steps": STEPS})]
    made = pool.train_through(SCRIPT, tmp_path / "c", worlds)
    assert not any("steps_in" in running.logs() for running in made)
    weights = torch.load(told["out"])
    for name, tensor in plain().items():
        assert (weights[name] - tensor).abs().max() < 1e-9, name


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.slow), "zero2"]
)
def test_ranks_may_use_different_parameters_after_a_gather(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """The exchange of a bucket begins before the gather's backward on one rank, and after it on the
    other: in one group each would take the other's values."""
    told: dict[str, Any] = {"strategy": strategy, "out": str(tmp_path / "out"), "uneven": True}
    pool.train_through(SCRIPT, tmp_path / "c", [(2, told | {"steps": STEPS})], bucket_bytes=8)
    weights = torch.load(told["out"])
    for name, tensor in plain(uneven=True).items():
        assert (weights[name] - tensor).abs().max() < 1e-9, name


def test_a_schedule_by_the_number_of_ranks_is_said(pool: Pool, tmp_path: Path) -> None:
    told = {"strategy": "ddp", "habit": True}
    worlds = [(2, told | {"steps": 3}), (3, told | {"steps": 5})]
    first, second = pool.train_through(SCRIPT, tmp_path / "c", worlds)
    assert "steps_in" not in first.logs()
    lines = [line for line in second.logs().splitlines() if "session.steps_in" in line]
    assert len(lines) == 1 and "gives a learning rate of 0.3125, and the state" in lines[0], lines
    assert "has 0.375; training goes on with the script's" in lines[0]


@pytest.mark.parametrize("options", [{"micro_batch": 3}, {"virtual_batch": 1}])
def test_several_micro_batches_are_refused_in_every_world(options: dict[str, int]) -> None:
    """One rank would have one micro-batch of three, and a lost node would have ended the job."""
    told = {"strategy": "ddp", "steps": 1, "options": options}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(told)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 64 and "leave out micro_batch= and virtual_batch=" in done.stderr


def test_tensors_that_differ_are_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, elasticzero as ez\n"
        "def train(session):\n"
        "    session.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=1.0))\n"
        "    session.restore()\n"
        "    for x in session.batches(torch.ones(8, 2), global_batch=4, steps=2):\n"
        "        session.gather(x[:, session.rank :])\n"
        "ez.run(train)\n"
    )
    running = pool.start(script, [], 2)
    running.until(running.ended)
    for worker in running.workers:
        failed = worker.last(Failed)
        assert failed.final and "only the first dimension may differ (train.py:6" in failed.message
