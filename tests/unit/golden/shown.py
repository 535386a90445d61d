"""Makes what people and their programs read: events, metrics, options, variables, exit codes, and
what the simulator's agents do."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from elasticzero import __version__, errors
from elasticzero.cli.main import build_parser
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    Attached,
    Captured,
    DataChanged,
    Finished,
    Logged,
    MemoryShort,
    NetworkTaken,
    ResidualLost,
    Restored,
    SharesChanged,
    SnapshotHeld,
    SnapshotInterval,
    Stepped,
    Stopping,
    Switched,
    Tagged,
)
from elasticzero.launcher.agent.reporter import AgentReporter
from elasticzero.launcher.observability.event_log import EVENTS_FILE, EventLog
from elasticzero.launcher.observability.job_counts import JobCounts
from elasticzero.launcher.observability.job_metrics import JobState, job_exposition
from elasticzero.launcher.observability.metrics import Metrics
from elasticzero.launcher.options.parser import Parser
from elasticzero.launcher.protocol.actions import (
    Decision,
    PrepareWorkers,
    WithdrawPreparation,
    WriteWorld,
)
from elasticzero.launcher.protocol.documents import Alarm, Done, Failure, Proposal, Report
from elasticzero.launcher.protocol.view import GroupStage, PreemptionNotice, WorkerGroupState
from elasticzero.launcher.snapshots.save_events import SaveFailed, SaveFinished
from elasticzero.launcher.workers.group import Ended, WorkerGroup
from elasticzero.launcher.workers.lifecycle import Event
from elasticzero.launcher.workers.process import Worker
from elasticzero.launcher.workers.reserve.standbys import Standing
from tests.conftest import ROOT
from tests.simulation.running import trace
from tests.unit.golden.records import full, line
from tests.unit.golden.sent import JOB_VIEW, JOB_WORLD, NOW_S, agent_options

SEEDS = range(1, 31)
VARIABLE = re.compile(r"(?:ELASTICZERO|PET|TORCHELASTIC|TORCH_NCCL)_[A-Z0-9_]*[A-Z0-9]")


def events(folder: Path) -> dict[str, str]:
    """Returns each kind of event that a reporter writes into an agent's log. The clocks stand."""
    _report(folder, Metrics())
    written = (folder / EVENTS_FILE).read_bytes().splitlines(keepends=True)
    seen: Counter[str] = Counter()
    made = {}
    for data in written:
        name = json.loads(data)["event"]
        seen[name] += 1
        made[f"{name} {seen[name]}"] = line(data)
    return made


def metrics(folder: Path) -> str:
    """Returns the expositions of a node and of a job, of which all is known."""
    of_node = Metrics()
    _report(folder, of_node)
    of_node.observe_etcd("read", 0.25, None)
    of_node.observe_etcd("write", 0.25, "UNAVAILABLE")
    counts = JobCounts()
    counts.world(None, JOB_WORLD)
    counts.world(JOB_WORLD, replace(JOB_WORLD, generation=4, members=JOB_WORLD.members[:1]))
    counts.reports(4, {"b": full(Report, leave_reason="AWS spot interruption")})
    state = full(JobState, compute_ratios={("a", 0): 1.5}, counts=counts)
    text = (of_node.text() + job_exposition(state)).decode()
    shown = (row for row in text.splitlines() if "_created" not in row)
    return "".join(f"{row}\n" for row in shown).replace(__version__, "VERSION")


def _report(folder: Path, of_node: Metrics) -> None:
    """Has a reporter record everything that may happen to an agent."""
    reporter = AgentReporter(agent_options(folder), EventLog(folder), of_node)
    worker = Worker(0, 0, 123, cast(Any, None), folder / "0.log", 0)
    group = WorkerGroup(cast(Any, None), 3, 0, workers=[worker])
    reporter.registered("incarnation", 1)
    waiting = replace(JOB_VIEW, world=None, workers=WorkerGroupState())
    reporter.decided(waiting, Decision((WriteWorld(JOB_WORLD),), "waiting for nodes"))
    plain = replace(JOB_VIEW.workers, stage=GroupStage.PLAIN)
    reporter.decided(replace(JOB_VIEW, workers=plain), Decision((), "starting"))
    changes = (PrepareWorkers(full(Proposal)), WithdrawPreparation("a worker cannot be prepared"))
    reporter.decided(JOB_VIEW, Decision(changes, "a planned change"))
    reporter.starting(JOB_WORLD, 1, NOW_S)
    reporter.started(group)
    for message in (
        Attached(pid=123),
        full(NetworkTaken),
        full(Restored),
        full(DataChanged),
        full(SharesChanged),
        full(ResidualLost),
        full(Stepped),
        full(Logged, scalars={"loss": 1.5, "tokens": 8.0}),
        full(Captured),
        full(SnapshotInterval),
        full(MemoryShort),
        full(Switched),
        full(Stopping),
        full(Failed, blame="killed"),
        Finished(step=5),
        Ended(-9),
    ):
        reporter.received(group, [(worker, message)], NOW_S)
    worker.record(Event.FINISHED)
    worker.ended_s = 1.0
    reporter.outlasted(group, NOW_S)
    notice = PreemptionNotice(reason="AWS spot interruption", received_s=NOW_S, by_s=NOW_S + 118)
    reporter.snapshot_held(full(SnapshotHeld))
    reporter.snapshot_held(SnapshotHeld(step=3, generation=3))
    reporter.saved(full(SaveFinished, error=None))
    reporter.save_failed(full(SaveFailed))
    reporter.tagged(full(Tagged))
    reporter.examined(group, full(Failure))
    reporter.stuck_at_exit(worker, 30.0)
    reporter.standing([full(Standing, refused=""), Standing(refused="it reads RANK")], 5 << 20)
    reporter.store_recovery("etcd has lost its data")
    reporter.store_failed(errors.StoreUnavailable("etcd does not answer"))
    reporter.turn_failed(KeyError("generation"), 1)
    reporter.decided(replace(JOB_VIEW, notice=notice), Decision((), "leaving"))
    opened = replace(JOB_VIEW, alarm=full(Alarm), alarm_s=NOW_S, round_s=NOW_S)
    reporter.decided(replace(opened, done=full(Done, outcome="failed")), Decision((), "failed"))
    reporter.starting(replace(JOB_WORLD, generation=4), 0, NOW_S)
    for message in (Attached(pid=123), full(Restored), full(Stepped)):
        reporter.received(group, [(worker, message)], NOW_S)
    reporter.close(errors.ExitCode.FAILED)


def command_line() -> dict[str, str]:
    """Returns every option of every command with its default and its variables, the variables that
    the product's code names, and the exit codes of errors."""
    made = {f"exit {code.name}": str(int(code)) for code in errors.ExitCode}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.ElasticZeroError):
            made[f"error {name}"] = kind.exit_code.name
    made |= {f"variable {name}": "read or set" for name in _variables()}
    for command, parser in _parsers(build_parser(), "elasticzero"):
        made |= {f"{command} {name}": text for name, text in _options(parser)}
    return made


def _variables() -> list[str]:
    """Returns the environment variables whose whole names are in the product's code."""
    folders = (ROOT / name for name in ("elasticzero", "launcher", "checkpoint"))
    texts = {p.resolve(): p.read_text() for folder in folders for p in folder.rglob("*.py")}
    return sorted({name for text in texts.values() for name in VARIABLE.findall(text)})


def _parsers(parser: Any, command: str) -> Iterator[tuple[str, Any]]:
    yield command, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _parsers(child, f"{command} {name}")


def _options(parser: Any) -> Iterator[tuple[str, str]]:
    """Yields each option of a parser by its first flag, and each argument by its name."""
    table = {o.name: o for o in parser.options} if isinstance(parser, Parser) else {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        option = table.get(action.dest)
        described = {
            "flags": [flag for flag in action.option_strings if "_" not in flag],
            "default": action.default if option is None else option.default,
            "nargs": action.nargs,
            "choices": list(action.choices) if action.choices is not None else None,
            "type": getattr(action.type if option is None else option.type, "__name__", None),
            "required": action.required,
            "metavar": action.metavar,
            "variables": list(option.variables) if option is not None else [],
            "in_file": option is not None and option.in_file,
        }
        shown = {key: value for key, value in described.items() if value not in (None, [], False)}
        yield (action.option_strings or [action.dest])[0], json.dumps(shown, default=str)


def simulator() -> dict[str, str]:
    """Returns a digest of all that happens in each of some schedules, and how each of them ends."""
    made = {}
    for seed in SEEDS:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert trace(seed, None, aloud=True) == 0
        _, *happened, end = text.getvalue().splitlines()
        digest = hashlib.sha256("\n".join(happened).encode()).hexdigest()[:32]
        made[f"seed-{seed}"] = f"{digest} {end}"
    return made
