"""Makes one run of a rehearsal: a cluster on this machine, a fault, and what the workers recorded.

The workers wait at a boundary for the fault (`rehearsal/plan.py`), so that it always comes after
the same step. All of them end one step after they have asked for it, by an operator's stop.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticzero.errors import ExitCode
from elasticzero.launcher.cli.control import open_job_store, update_control
from elasticzero.launcher.local.cluster import POLL_S, Cluster, Placement
from elasticzero.launcher.observability.job_status import Job
from elasticzero.launcher.options.validation import count_gpus
from elasticzero.launcher.protocol.documents import Control
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.ops.rehearse.runs import AGREED, JOIN, KILL_NODE, Run
from elasticzero.options.wire import EXACT
from elasticzero.rehearsal.plan import VARIABLE, Plan
from elasticzero.rehearsal.records import Header, RunResult, StepRecord, parse_lines

OPTION_PREFIXES = ("ELASTICZERO_", "PET_")
"""Beginnings of variables by which the user's environment gives options; an empty one gives none.
"""
ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "COMET_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
}
"""Variables of every worker: one thread, whose sums have one order, and nothing sent to others."""
LINE_CHARACTERS = 200
"""Most characters of a worker's line in a message."""
NEVER_RUN = (
    "the script trains without calling elasticzero.run, so that none of its steps is seen, and it "
    "resumes by itself, if at all: docs/porting.md has the lines that it needs"
)


class NeverAttached(Exception):
    """The script does not call `elasticzero.run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Holds what all runs have in common."""

    script: str
    arguments: tuple[str, ...]
    endpoint: str
    """The member of etcd that all jobs use."""
    directory: Path
    """Each run has a directory of its own in it."""
    job: str
    """What the names of all jobs begin with."""
    is_foreign: bool
    """True: neither the script nor a module beside it imports this package."""
    silence_s: float
    """Seconds after which a run without a new record has failed."""
    wire: str = str(EXACT)
    """The format of gradients between ranks."""


@dataclass(slots=True)
class Account:
    """Holds what the agents have told of a run, and of its end."""

    errors: dict[str, str] = field(default_factory=dict)
    """The error with which each node's agent has ended."""
    refusals: list[str] = field(default_factory=list)
    """The errors that are the user's, of workers."""
    members: list[str] = field(default_factory=list)
    """The nodes of the first generation, in the order of their ranks."""
    is_plain: bool = False
    """True: the script trains without calling `elasticzero.run`."""

    def take(self, node: str, event: Mapping[str, Any]) -> None:
        """Takes an event of a node's log."""
        match event["event"]:
            case "world" if event["generation"] == 1:
                self.members = event["members"]
            case "plain":
                self.is_plain = True
            case "failed" if event["blame"] == "user":
                self.refusals.append(event["message"])
            case "error":
                self.errors[node] = event["message"]


class FaultedJob:
    """Holds one job on this machine, and does to it what its run says."""

    def __init__(self, stage: Stage, run: Run, number: int) -> None:
        """Prepares the job; `start` starts it.

        Args:
            stage: What all runs have in common.
            run: The run.
            number: Its number among all runs.
        """
        self._run, self._stage = run, stage
        self._directory = stage.directory / f"{number:02}-{run.strategy}-{run.fault}-{run.world}"
        self._directory = Path(str(self._directory).replace(" ", "-"))
        records = self._directory / "records"
        records.mkdir(parents=True)
        self._plan: Plan = run.plan(str(records))
        path = self._directory / "plan.json"
        self._plan.write(path)
        self._job = f"{stage.job}-{number}"
        gpus = visible_gpus()
        most = run.world + (run.fault == JOIN)
        environment = {**worker_environment(os.environ, self._directory), VARIABLE: str(path)}
        if gpus and gpus < most:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._cluster = Cluster(
            self._words(),
            self._job,
            self._directory / "logs",
            environment,
            place=_on_own_gpu if gpus >= most else lambda node: Placement(),
        )
        self._account = Account()
        self._struck: str | None = None
        """The node that the fault has hit, once it has come; empty: none is lost."""
        self._is_stopped = False

    def _words(self) -> list[str]:
        """Returns what every agent gets after `run`."""
        run, stage = self._run, self._stage
        options = [
            "--config=",
            "--etcd",
            stage.endpoint,
            "--http-port",
            "0",
            "--preemption",
            "none",
            "--standby",
            "off",
        ]
        options += ["--nnodes", f"{run.world}:{run.world}", "--nproc-per-node", "1"]
        options += ["--strategy", run.strategy, "--snapshot-every", "1", "--wire", stage.wire]
        return [*options, stage.script, *stage.arguments]

    def carry_out(self) -> RunResult:
        """Runs the job to its end.

        Raises:
            NeverAttached: The script does not call `elasticzero.run`.
        """
        with self._started() as store:
            silent = self._watch(store)
        self._take_events()
        if not self._files() and (self._stage.is_foreign or self._exit_code() == ExitCode.DONE):
            raise NeverAttached(NEVER_RUN)
        header, records = self._records()
        exit_code = 1 if silent else self._exit_code()
        refusal, failure = self._why(exit_code, records, silent=silent)
        run = self._run
        return RunResult(
            strategy=run.strategy,
            fault=run.fault,
            world=run.world,
            fault_step=run.fault_step,
            records=tuple(records),
            exit_code=exit_code,
            refusal=refusal,
            failure=failure,
            virtual_batch=header.virtual_batch,
            batch_norm=header.batch_norm,
            half_parameters=header.half_parameters,
            wire=self._stage.wire,
        )

    @contextmanager
    def _started(self) -> Iterator[Store]:
        """Starts the nodes, and ends them all at the end of the block."""
        try:
            for _ in range(self._run.world):
                self._cluster.start_node()
            with open_job_store(self._job, [self._stage.endpoint], Access()) as store:
                yield store
        finally:
            self._cluster.stop()

    def _watch(self, store: Store) -> bool:
        """Follows the job to its end; returns whether it has been silent for too long."""
        size, changed_s = -1, time.monotonic()
        while self._cluster.running():
            self._take_events()
            if self._is_foreign():
                return False
            self._act(store)
            written = sum(path.stat().st_size for path in self._files())
            if written != size:
                size, changed_s = written, time.monotonic()
            elif time.monotonic() - changed_s > self._stage.silence_s:
                return True
            time.sleep(POLL_S)
        return False

    def _take_events(self) -> None:
        for node, event in self._cluster.events():
            self._account.take(node, event)

    def _act(self, store: Store) -> None:
        """Does what is due: the fault, the permission to go on after it, the end."""
        plan = self._plan
        ranks = range(self._run.world)
        if self._run.fault in (KILL_NODE, *AGREED):
            if self._struck is None and all(plan.held(rank).exists() for rank in ranks):
                self._struck = self._strike(store)
            elif self._struck is not None and any(plan.asked(rank).exists() for rank in ranks):
                plan.go.touch()
        if not self._is_stopped and any(plan.ending(r).exists() for r in range(len(ranks) + 1)):
            self._is_stopped = True
            self._control(store, stop=True)

    def _strike(self, store: Store) -> str:
        """Brings the fault about; returns the name of the node that it takes away."""
        self._control(store, nnodes=(1, self._run.world + (self._run.fault == JOIN)))
        if self._run.fault == JOIN:
            self._cluster.start_node()
            return ""
        node = self._cluster.nodes[self._account.members[-1]]  # so that rank 0 goes on
        if self._run.fault == KILL_NODE:
            self._cluster.kill_node(node)
        else:
            self._cluster.drain(node)
        return node.name

    def _control(self, store: Store, **changes: Any) -> None:
        """Changes what is asked of the job, unless it is over."""

        def change(job: Job) -> Control:
            return job.control if job.done is not None else replace(job.control, **changes)

        update_control(store, self._job, change)

    def _files(self) -> list[Path]:
        return sorted(Path(self._plan.directory).glob("*.jsonl"))

    def unkept(self) -> list[str]:
        """Returns the names of the script's tensors that change and that nothing keeps, if the run
        has looked for them."""
        try:
            return list(json.loads(self._plan.unkept.read_text()))
        except (OSError, ValueError):
            return []

    def _records(self) -> tuple[Header, list[StepRecord]]:
        """Returns what holds for the script, and the records of all ranks."""
        header, records = Header(), list[StepRecord]()
        for path in self._files():
            with path.open() as file:
                of_rank, lines = parse_lines(file)
            records += lines
            header = Header(
                virtual_batch=header.virtual_batch or of_rank.virtual_batch,
                batch_norm=header.batch_norm or of_rank.batch_norm,
                half_parameters=header.half_parameters or of_rank.half_parameters,
            )
        return header, records

    def _exit_code(self) -> int:
        """Returns the job's exit code, from its nodes' codes."""
        codes = [
            node.process.returncode
            for name, node in self._cluster.nodes.items()
            if name != self._struck
        ]
        if ExitCode.DONE in codes:
            return int(ExitCode.DONE)
        for code in (ExitCode.USAGE, ExitCode.FAILED, ExitCode.DEFECT, ExitCode.UNAVAILABLE):
            if code in codes:
                return int(code)
        return next(iter(codes), int(ExitCode.FAILED))

    def _is_foreign(self) -> bool:
        """Tells whether the script trains by itself, and shows no sign that it will not."""
        return self._account.is_plain and self._stage.is_foreign

    def _why(self, code: int, records: list[StepRecord], *, silent: bool) -> tuple[str, str]:
        """Returns why the run was refused, and why it failed; empty texts: it did not.

        Args:
            code: The exit code.
            records: What was recorded.
            silent: Whether nothing was recorded for too long.
        """
        if silent:
            limit = f"{self._stage.silence_s:g} s (--timeout)"
            return "", f"no step, and no other record, came for {limit}; logs in {self._directory}"
        if code == ExitCode.DONE:
            return "", ""
        errors = [*self._account.refusals, *self._account.errors.values()]
        text = errors[0] if errors else f"the job ended with exit code {code}"
        if "exited with status" in text and (line := last_line(self._directory / "logs")):
            text = f"{text}; the last line that it printed is: {line}"
        is_early = all(record.generation == 1 and record.step <= 1 for record in records)
        return (text, "") if code == ExitCode.USAGE and is_early else ("", text)


def last_line(logs: Path) -> str:
    """Returns the last line that the newest worker with output has printed, shortened; empty: none
    has printed any.

    Args:
        logs: The directory of the logs of a job's nodes.
    """
    files = [path for path in logs.glob("*/*/*.log") if path.stem.isdigit()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        lines = path.read_text(errors="replace").splitlines()
        printed = [line for line in lines if line.strip()]
        if printed:
            return textwrap.shorten(printed[-1], LINE_CHARACTERS, placeholder=" …")
    return ""


def worker_environment(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Returns the variables of every agent and worker, besides those of the environment.

    Args:
        environment: The user's environment, whose options for jobs do not count here.
        directory: The run's directory, where trackers that are offline write.
    """
    options = {name: "" for name in environment if name.startswith(OPTION_PREFIXES)}
    return {
        **options,
        **ENVIRONMENT,
        "WANDB_DIR": str(directory),
        "MLFLOW_TRACKING_URI": (directory / "mlruns").as_uri(),
        "COMET_OFFLINE_DIRECTORY": str(directory),
    }


def visible_gpus() -> int:
    """Returns the number of GPUs that a process here can use."""
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return count_gpus(len(devices), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _on_own_gpu(node: str) -> Placement:
    """Returns a placement whose workers see the GPU that has the node's number."""
    return Placement(environment={"CUDA_VISIBLE_DEVICES": node.rpartition("-")[2]})
