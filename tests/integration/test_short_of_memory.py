"""A rank without memory for its micro-batch halves that of all, and no step is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from elasticzero.checkpoint.steps import catalog
from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import story

SCRIPT = Path(__file__).parent / "scripts" / "short_of_memory.py"
STEPS = 5


def plain(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """The weights of one process that has memory enough."""
    monkeypatch.setattr(sys, "argv", ["", "", "16", str(STEPS)])
    from tests.integration.scripts import short_of_memory as script

    model, samples = script.model(), script.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = BatchPlan(order=SampleOrder(samples=len(samples)), global_batch=16, steps=STEPS)
    position = DataPosition()
    while (next_batch := plan.next(position)) is not None:
        batch, position = next_batch
        indices = plan.order.indices(batch.epoch, batch.start, batch.stop)
        model(samples[torch.from_numpy(indices)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["zero2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_micro_batches_halve_until_memory_suffices(
    etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Parts of 8 samples become 4 and 2, in two further generations, without a restart that
    counts."""
    out = tmp_path / "out"
    arguments = ["--nnodes", "2", "--max-restarts", "0", "--strategy", strategy]
    arguments += ["--checkpoint-dir", str(tmp_path / "checkpoints"), str(SCRIPT)]
    with story(
        tmp_path, etcd.endpoint, job, [*arguments, str(out), "16", str(STEPS)], nodes=2
    ) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        for size in (4, 2):
            assert f"micro-batches have at most {size} samples from now on" in told.logs()
    outcome = json.loads(out.read_text())
    assert outcome["generation"] >= 3
    assert outcome["most"] == 2
    newest = catalog.read_manifest(catalog.find(tmp_path / "checkpoints"))
    assert newest.state["position"]["micro_batch"] == 2, "a run that goes on begins with it"
    for name, values in plain(monkeypatch).items():
        assert outcome["weights"][name] == pytest.approx(values, abs=1e-9)
