"""MLflow and Weights & Biases get each step of a job at most once, in one run, with real packages.

`make integrations` runs these in an environment that has both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.ops.trackers.wandb_run import records_of
from tests.integration.clusters import REGRESSION, story
from tests.integration.reference import steps_in
from tests.unit.ops.trackers.test_tensorboard_run import points

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
EPOCHS = 4
STEPS = steps_in(10, EPOCHS)

Curve = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb"):
        pytest.importorskip(name, reason="`make integrations` has it")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def mlflow_runs(directory: Path) -> list[tuple[Any, Curve]]:
    """Returns the runs of the experiment, oldest first, each with its curve of the loss."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file:{directory}")
    experiment = client.get_experiment_by_name("elasticzero")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    return [
        (run, [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")])
        for run in runs
    ]


def wandb_runs(directory: Path) -> dict[str, Curve]:
    """Returns the curves of the loss by the id of their run, over all processes that wrote."""
    from wandb.proto import wandb_internal_pb2

    curves: dict[str, Curve] = {}
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        curve = curves.setdefault(path.stem.removeprefix("run-"), [])
        for data in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
                curve.append((values["_step"], values["loss"]))
    return curves


def check_curve(curve: Curve, shown: dict[int, float], same_from: int) -> None:
    """Its steps only grow, a few may be missing; from one on they have TensorBoard's values."""
    steps = [step for step, _ in curve]
    assert steps == sorted(set(steps))
    assert len(steps) >= STEPS - 20
    for step, value in curve:
        if step >= same_from:
            assert value == pytest.approx(shown[step], rel=1e-5)


def test_a_killed_leader_doubles_no_step(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    curves = tmp_path / "curves"
    places = f"mlflow:file:{curves}/mlflow,wandb:{curves}/wandb,tensorboard:{curves}/boards"
    arguments = ["--nnodes", "1:2", "--log-to", places, str(REGRESSION), "--epochs", "4"]
    with story(tmp_path, etcd.endpoint, job, [*arguments, "--pause", "0.2"], nodes=2) as told:
        told.wait_for_step(40)
        leader = told.of("world")[0]["members"][0]
        told.cluster.kill_node(told.cluster.nodes[leader])
        codes = told.wait_for_end()
    assert sorted(codes.values()) == [-9, 0]
    shown = {step: value for _, step, value in points(curves / "boards" / job / "run-1", "loss")}
    assert sorted(shown) == list(range(1, STEPS + 1))
    ((run, curve),) = mlflow_runs(curves / "mlflow")
    assert (run.info.status, run.info.run_name) == ("FINISHED", job)
    check_curve(curve, shown, 1)
    (curve,) = wandb_runs(curves / "wandb").values()
    check_curve(curve, shown, 60)  # what W&B had in memory is replaced by the other node's values


def test_a_job_that_begins_anew_has_runs_of_its_own(tmp_path: Path, job: str) -> None:
    curves = tmp_path / "curves"
    places = f"mlflow:file:{curves}/mlflow,wandb:{curves}/wandb"
    arguments = ["--nnodes", "1", "--log-to", places, str(REGRESSION), "--epochs", "4"]
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
        with (
            EtcdServer() as etcd,
            story(tmp_path / turn, etcd.endpoint, job, arguments, nodes=1) as told,
        ):
            assert set(told.wait_for_end().values()) == {0}
    expected = list(range(1, STEPS + 1))
    assert [[s for s, _ in curve] for _, curve in mlflow_runs(curves / "mlflow")] == [expected] * 2
    assert [[s for s, _ in c] for c in wandb_runs(curves / "wandb").values()] == [expected] * 2
