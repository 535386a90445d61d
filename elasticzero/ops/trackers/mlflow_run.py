"""Writes to a run of MLflow.

The run has the job's name in a tag, by which it is found again, and in another one the last step
that it was written to. That tag is set before the step is written: a process that dies in between
leaves a step out, and no step is written twice. MLflow's own variables choose the experiment and
more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from elasticzero.ops.trackers.averages import Row
from elasticzero.ops.trackers.tracker import NOTHING

EXPERIMENT = "elasticzero"
"""Name of the experiment, where `MLFLOW_EXPERIMENT_NAME` gives none."""
JOB_TAG, STEP_TAG = "elasticzero.job", "elasticzero.last_step"
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""MLflow's status of a run, by the outcome of a job."""
MOST_METRICS = 1000
"""Maximum number of metrics in one request."""


class MlflowRun:
    """Logs steps to a run, each once."""

    def __init__(self, client: Any, run: Any) -> None:
        self._client = client
        self._id = run.info.run_id
        self.where = f"run {self._id} of experiment {run.info.experiment_id}"
        self.last_step = int(run.data.tags.get(STEP_TAG, NOTHING))

    def write(self, rows: Sequence[Row]) -> None:
        """Notes the last step in the run's tag, and logs all."""
        from mlflow.entities import Metric

        self._client.set_tag(self._id, STEP_TAG, str(rows[-1].step))
        metrics = [
            Metric(name, value, int(row.at * 1000), row.step)
            for row in rows
            for name, value in row.scalars.items()
        ]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + MOST_METRICS])

    def close(self, outcome: str | None) -> None:
        """Gives the run the status of a job that has ended."""
        if outcome is not None:
            self._client.set_terminated(self._id, STATUSES.get(outcome, "KILLED"))


def open_mlflow_run(place: str, job: str, *, begins: bool) -> MlflowRun:
    """Opens the newest run of a job, or a new one.

    Args:
        place: a tracking URI; empty: the one that MLflow chooses.
        job: the job's name.
        begins: whether the job begins anew, from its first step, so that it has a new run, unless
            the newest one holds nothing yet.
    """
    import mlflow

    if place:
        mlflow.set_tracking_uri(place)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    experiment = mlflow.set_experiment(name).experiment_id
    client = mlflow.MlflowClient()
    runs = client.search_runs(
        [experiment],
        filter_string=f"tags.`{JOB_TAG}` = '{job}'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    if not runs or (begins and STEP_TAG in runs[0].data.tags):
        run = client.create_run(experiment, run_name=job, tags={JOB_TAG: job})
    else:
        run = runs[0]
        client.update_run(run.info.run_id, status="RUNNING")
    return MlflowRun(client, run)
