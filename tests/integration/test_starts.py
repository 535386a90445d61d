"""The nodes of `elasticzero local` begin together, also where others keep the machine busy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.clusters import events_in
from tests.integration.test_local import local

STARTS, PIECES = 100, 20
LOOPS = 2
"""Number of processes that take the cores for themselves, beside the cluster."""
TRAINS = """
import torch
import elasticzero as ez
def train(session):
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
    for x, y in session.batches(data, global_batch=6, epochs=1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        session.backward(loss)
        session.step()
ez.run(train)
"""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that compute without end meanwhile."""
    loops = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
@pytest.mark.parametrize("piece", range(PIECES))
def test_nodes_that_start_on_a_busy_machine_need_one_generation(
    piece: int, tmp_path: Path, job: str
) -> None:
    """Once in a dozen starts ranks gave up one another, and others came too late for the first
    generation."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    with busy_loops(LOOPS):
        for number in range(STARTS // PIECES):
            name = f"{job}-{piece}-{number}"
            output = local(name, tmp_path / "logs", "--nodes", "3", str(script))
            worlds = [e for e in events_in(tmp_path / "logs" / name) if e["event"] == "world"]
            assert {(e["generation"], len(e["members"])) for e in worlds} == {(1, 3)}, output
            assert "done: 2 steps, 1 generation, 0 steps recomputed" in output
