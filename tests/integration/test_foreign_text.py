"""What a script says reaches terminals without what these would obey."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import story

ATTACK = """
import torch
from torch.utils.data import TensorDataset

import elasticzero as ez


def train(session):
    model, _ = session.prepare(torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    for (x,) in session.batches(TensorDataset(torch.ones(8, 1)), global_batch=2, epochs=1000):
        if session.rank == 0:
            print("\\x1b]0;a title\\x07 \\x1b[32mgreen", flush=True)
            raise ValueError("\\x1b[2J\\x1b]52;c;Y3VybA==\\x07 cleared")
        session.backward(model(x).sum())
        session.step()


ez.run(train)
"""
OBEYED = ("\x1b]", "\x1b[2J", "\x07")


@pytest.mark.timeout(120)
def test_an_error_of_a_script_moves_no_cursor(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """Escape sequences in one script's exception reached the terminals of all nodes."""
    script = tmp_path / "attack.py"
    script.write_text(ATTACK)
    arguments = ["--nnodes", "2", "--max-restarts", "0", "--tee", str(script)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_end()
        shown = [told.node(index).log.read_text() for index in range(2)]
    assert all("\\x1b[2J" in text and "cleared" in text for text in shown), shown
    assert not [text for text in shown for control in OBEYED if control in text], shown
    assert sum("\x1b[32mgreen\x1b[0m" in text for text in shown) == 1
