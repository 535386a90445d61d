"""A rank that takes twice as long for each sample: its part of the global batches becomes smaller,
and the result is that of a run with equal parts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from elasticzero.errors import ExitCode
from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.observability.lineage import Lineage
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, events_in, story
from tests.integration.clusters import elasticzero as command
from tests.integration.reference import undisturbed
from tests.integration.test_elastic_training import check_samples, check_weights
from tests.support.cases import slow

BATCH, EPOCHS = 60, 12


def samples_of(directory: Path) -> dict[int, dict[int, list[int]]]:
    """Numbers of samples, by generation and rank, in the order of steps."""
    shares: dict[int, dict[int, list[int]]] = {}
    for path in sorted(directory.glob("*/0.log")):
        for line in path.read_text().splitlines():
            if line.startswith('{"share"'):
                share = json.loads(line)["share"]
                of_generation = shares.setdefault(share["generation"], {})
                of_generation.setdefault(share["rank"], []).append(share["samples"])
    return shares


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["ddp", slow("zero1"), slow("zero2")])  # zero3 tells no waits
def test_a_slow_rank_computes_less_through_a_killed_node(
    strategy: str, tmp_path: Path, job: str
) -> None:
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    arguments = ["local", "--nodes", "3", "--strategy", strategy, "--fault", "kill-node@40"]
    arguments += ["--on-straggler", "balance", "--straggler-steps", "6"]
    arguments += ["--job", job, "--log-dir", str(logs), "--checkpoint-dir", str(checkpoints)]
    arguments += [str(REGRESSION), "--global-batch", str(BATCH), "--epochs", str(EPOCHS)]
    arguments += ["--sample-s", "0.004", "--slow-rank", "0"]
    completed = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=200, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "shares of a global batch follow the ranks' speeds: rank 0 has " in completed.stdout
    lineage = Lineage()
    for event in events_in(logs / job):
        lineage.take(event)
    check_samples(lineage, logs / job, epochs=EPOCHS, global_batch=BATCH)
    check_weights(checkpoints, undisturbed(BATCH, EPOCHS))
    shares = samples_of(logs / job)
    for generation, ranks in {1: 3, 2: 2}.items():
        of_slow = shares[generation][0]
        assert len(shares[generation]) == ranks
        assert of_slow[0] == BATCH // ranks, "a generation begins with equal shares"
        assert min(of_slow) < BATCH // ranks - 3, of_slow


@pytest.mark.timeout(120)
def test_a_rank_without_the_option_is_named(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    """One that tells its speed, and one that does not, would take each other's values."""

    def place(node: str) -> Placement:
        choice = "balance" if node == "node-1" else "report"
        return Placement(environment={"ELASTICZERO_ON_STRAGGLER": choice})

    arguments = ["--nnodes", "2", "--strategy", "ddp", str(REGRESSION)]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2, place=place) as told:
        assert set(told.wait_for_end().values()) == {ExitCode.USAGE}
        failures = [event for event in told.of("failed") if event["blame"] == "user"]
    messages = [event["message"] for event in failures]
    balanced = "balance, every 20 steps, from 1.3 times"
    orders = [f"has --on-straggler {balanced}, rank ", f"nothing, rank 0 on node-1 has {balanced};"]
    assert any(order in text for text in messages for order in orders), messages
