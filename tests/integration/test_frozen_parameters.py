"""A capture copies frozen parameters once, and does not miss what a script changes in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import SCRIPTS, story

SCRIPT = SCRIPTS / "frozen_parts.py"
STEPS = 60


def plain(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The sums of one process."""
    monkeypatch.setattr(sys, "argv", ["", "", str(STEPS)])
    from tests.integration.scripts import frozen_parts as script

    model, samples = script.Adapted(), script.data()
    model.freeze()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        at = 8 * step % len(samples)
        model(samples[at : at + 8]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow()
    return {name: value.sum().item() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_frozen_parameters_come_back_as_a_script_left_them(
    etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Snapshots in turn in both slots, of which a killed worker and a lost node's replica are
    read."""
    out = tmp_path / "out"
    arguments = ["--nnodes", "1:2", "--lease-ttl", "2", "--strategy", strategy]
    arguments += ["--snapshot-every", "1"]
    arguments += [str(SCRIPT), str(out), str(STEPS)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(15)
        told.cluster.kill_worker(told.cluster.nodes["node-0"])
        told.wait_for_generation(2)
        told.wait_for_step(told.step + 12)
        told.cluster.kill_node(told.cluster.nodes["node-1"])
        told.wait_for_generation(3)
        told.wait_for_end()
    assert {world["tier"] for world in told.of("world") if world["generation"] > 1} == {"ram"}
    averages = json.loads(out.read_text())
    for name, value in plain(monkeypatch).items():
        assert averages[name] == pytest.approx(value, abs=1e-9), name
