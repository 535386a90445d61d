"""Plays Slurm for array jobs on this machine: `sbatch` and the like on PATH, and real
processes.

Follows https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/preempt.html and
https://slurm.schedmd.com/job_array.html. Each task of an array has a node of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from elasticzero.processes import bound_to_this_process, descendants

State = Literal["PENDING", "RUNNING", "COMPLETING", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"]
FIRST_JOB = 41
_OPTION = re.compile(r"--([\w-]+)(?:=(.*))?")
SBATCH = """#!{python}
import json, os, sys, uuid
words = sys.argv[1:]
at = next(i for i, word in enumerate(words) if not word.startswith("--"))
wanted = dict(options=words[:at], script=words[at], arguments=words[at + 1:])
wanted["environment"] = dict(os.environ)
path = os.path.join({folder!r}, "submitted", uuid.uuid4().hex)
with open(path + ".new", "w") as file:
    json.dump(wanted, file)
os.rename(path + ".new", path + ".json")
print("Submitted batch job {job}")
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
echo $$ > "{folder}/steps/$SLURM_ARRAY_TASK_ID"
exec "$@"
"""
SCONTROL = """#!/bin/bash
[ "$1" = requeue ] || { echo "scontrol $1 is not played" >&2; exit 1; }
touch "{folder}/requeued/$SLURM_ARRAY_TASK_ID"
"""
SQUEUE = """#!/bin/bash
cat "{folder}/states/$SLURM_ARRAY_TASK_ID"
"""


@dataclass(slots=True)
class Task:
    """One task of an array."""

    index: int
    output: Path
    state: State = "PENDING"
    restarts: int = 0
    code: int | None = None
    process: subprocess.Popen[bytes] | None = None
    kill_at_s: float | None = None
    """Time of SIGKILL to all of it; None: none is due."""
    requeues: bool = False
    """True: it waits in the queue again once it has ended."""
    preempted: bool = False
    """True: it waits in the queue again if it is killed, and not if it ends before that."""


@dataclass(slots=True)
class Slurm:
    """An array job of one script; `turn` must be called again and again."""

    folder: Path
    tasks: dict[int, Task] = field(default_factory=dict)
    _command: list[str] = field(default_factory=list)
    _environment: dict[str, str] = field(default_factory=dict)
    _options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bin", "submitted", "steps", "states", "requeued"):
            (self.folder / name).mkdir(parents=True)
        settings = {"python": sys.executable, "folder": str(self.folder), "job": str(FIRST_JOB)}
        programs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}
        for name, text in programs.items():
            program = self.folder / "bin" / name
            for key, value in settings.items():
                text = text.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", value)
            program.write_text(text)
            program.chmod(0o755)

    @property
    def path(self) -> str:
        """The PATH on which its programs come first."""
        return os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])

    def turn(self) -> None:
        """Takes in what was submitted and asked for, starts what waits, notes what has ended."""
        for path in (self.folder / "submitted").glob("*.json"):
            self._submit(json.loads(path.read_text()))
            path.unlink()
        for path in (self.folder / "requeued").iterdir():
            self.requeue(self.tasks[int(path.name)])
            path.unlink()
        for task in self.tasks.values():
            if task.state == "PENDING":
                self._start(task)
            elif task.state in ("RUNNING", "COMPLETING"):
                self._watch(task)

    def requeue(self, task: Task) -> None:
        """As `scontrol requeue`: a task that runs is killed, and waits in the queue again."""
        task.requeues = True
        self._kill(task)

    def preempt(self, task: Task, grace_s: float) -> None:
        """With PreemptMode=REQUEUE and GraceTime: SIGTERM to its steps, then SIGKILL to all of it.

        It is requeued if it still runs then; otherwise it has ended by itself.
        """
        self._announce(task, grace_s)
        task.preempted = True

    def reach_time_limit(self, task: Task, left_s: float) -> None:
        """With --signal: SIGTERM to its steps `left_s` before its time limit."""
        self._announce(task, left_s)

    def cancel(self, task: Task, kill_wait_s: float) -> None:
        """As `scancel`: SIGTERM to its steps, and SIGKILL after KillWait; it is not requeued."""
        self._set_state(task, "COMPLETING")
        self._announce(task, kill_wait_s)

    def lose_node(self, task: Task) -> None:
        """Its node fails: with --requeue it waits in the queue again."""
        task.requeues = "requeue" in self._options
        self._kill(task)

    def close(self) -> None:
        for task in self.tasks.values():
            self._kill(task)

    def pids(self) -> Iterator[int]:
        """Every process of its tasks."""
        for task in self.tasks.values():
            if task.process is not None and task.process.poll() is None:
                yield from (task.process.pid, *descendants(task.process.pid))

    def _submit(self, submission: Mapping[str, object]) -> None:
        text = Path(str(submission["script"])).read_text()
        lines = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
        options = [*lines, *[str(word) for word in _list(submission["options"])]]
        matches = [_OPTION.fullmatch(word) for word in options]
        self._options = {match[1]: match[2] or "" for match in matches if match}
        self._command = [
            "bash",
            str(submission["script"]),
            *map(str, _list(submission["arguments"])),
        ]
        environment = submission["environment"]
        assert isinstance(environment, dict)
        self._environment = environment
        first, _, last = self._options["array"].partition("-")
        for index in range(int(first), int(last or first) + 1):
            self.tasks[index] = Task(index, self.folder / f"{FIRST_JOB}_{index}.log")

    def _start(self, task: Task) -> None:
        (self.folder / "steps" / str(task.index)).unlink(missing_ok=True)
        restarts = {"SLURM_RESTART_COUNT": str(task.restarts)} if task.restarts else {}
        environment = {
            **self._environment,
            "SLURM_JOB_ID": str(FIRST_JOB + task.index),
            "SLURM_JOB_NAME": self._options["job-name"],
            "SLURM_ARRAY_JOB_ID": str(FIRST_JOB),
            "SLURM_ARRAY_TASK_ID": str(task.index),
            "SLURM_ARRAY_TASK_COUNT": str(len(self.tasks)),
            **restarts,
        }
        with task.output.open("ab") as file:
            task.process = subprocess.Popen(
                bound_to_this_process(self._command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        task.code, task.kill_at_s = None, None
        self._set_state(task, "RUNNING")
        task.requeues = task.preempted = False

    def _watch(self, task: Task) -> None:
        assert task.process is not None
        late = task.kill_at_s is not None and time.monotonic() >= task.kill_at_s
        if late:
            self._kill(task)
        code = task.process.poll()
        if code is None:
            return
        task.code = code
        if task.requeues or (late and task.preempted):
            task.restarts += 1
            self._set_state(task, "PENDING")
        elif task.state == "COMPLETING":
            self._set_state(task, "CANCELLED")
        elif late:
            self._set_state(task, "TIMEOUT")
        else:
            self._set_state(task, "FAILED" if code else "COMPLETED")

    def _set_state(self, task: Task, state: State) -> None:
        task.state = state
        (self.folder / "states" / str(task.index)).write_text(f"{state}\n")

    def _announce(self, task: Task, left_s: float) -> None:
        task.kill_at_s = time.monotonic() + left_s
        step = self.folder / "steps" / str(task.index)
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(step.read_text()), signal.SIGTERM)

    def _kill(self, task: Task) -> None:
        if task.process is None or task.process.poll() is not None:
            return
        for pid in (task.process.pid, *descendants(task.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        task.process.wait()


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
