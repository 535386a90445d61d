"""Carries out `elasticzero rehearse`: makes the runs, one after the other, and prints the verdicts.

Everything that is started ends with the command, also at Ctrl-C and at SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.options.parser import Parser, add_command
from elasticzero.launcher.options.validation import check_script
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.ops.rehearse.cluster_run import FaultedJob, NeverAttached, Stage, visible_gpus
from elasticzero.ops.rehearse.comparison import compare
from elasticzero.ops.rehearse.document import document
from elasticzero.ops.rehearse.left_files import FileTimes, changed_files, file_times
from elasticzero.ops.rehearse.results import Facts, Outcome, is_passed, is_refused
from elasticzero.ops.rehearse.runs import (
    FAULTS,
    JOIN,
    MIN_STEPS,
    Run,
    can_happen,
    following,
    most_runs,
    undisturbed,
)
from elasticzero.ops.rehearse.script_imports import imports_elasticzero
from elasticzero.ops.rehearse.table import render
from elasticzero.options.diloco import NAME as DILOCO
from elasticzero.options.option import Option, grouped
from elasticzero.options.values import Number, expanded_path
from elasticzero.options.wire import EXACT, wire_of
from elasticzero.rehearsal.records import RunResult
from elasticzero.spans import STRATEGIES
from elasticzero.text import (
    count_text,
    list_text,
    nearest_text,
    print_foreign,
    print_result,
    span_text,
)

END_OF_OWN = "--"
"""Word behind which all words are the script's."""
FILES_SHOWN = 3
NAMES_SHOWN = 4
NOTHING_REHEARSED = "Every strategy refuses the script, so that no fault was rehearsed."
_STEPS = Number(unit="steps", least=MIN_STEPS, expected=f"{MIN_STEPS} steps or more are expected")
_RANKS = Number(unit="ranks", least=1, expected="numbers of ranks from 1 on are expected")
_SECONDS = Number(
    unit="seconds",
    includes_least=False,
    convert=float,
    expected="more than 0 seconds are expected",
)

OPTIONS = grouped(
    "the rehearsal",
    Option(
        ("--strategies",),
        "The script is trained by these strategies, separated by commas; one that refuses it has "
        "no further run.",
        ",".join(STRATEGIES),
        metavar="NAMES",
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--worlds",),
        "Runs begin with these numbers of ranks, separated by commas. A node that is killed or "
        "drained leaves one fewer, and one that joins makes one more.",
        "2",
        metavar="NUMBERS",
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--faults",),
        f"These faults come, separated by commas, each in a run of its own: {', '.join(FAULTS)}.",
        ",".join(FAULTS),
        metavar="NAMES",
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--steps",),
        "Each run ends after N steps; the fault comes in the middle.",
        12,
        int,
        metavar="N",
        parse=_STEPS,
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--wire",),
        "Ranks send gradients in this format, as in `elasticzero run`. Of what follows a fault "
        "numbers are compared only where they are those of the same ranks.",
        str(EXACT),
        metavar="FORMAT",
        parse=wire_of,
        has_variable=False,
    ),
    Option(
        ("--timeout",),
        "A run has failed if it makes no step for S seconds.",
        300.0,
        float,
        metavar="S",
        parse=_SECONDS,
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--log-dir",),
        "Logs and records of all runs are kept in this directory. (default: they are removed)",
        metavar="DIR",
        expand=expanded_path,
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--json",),
        "The verdicts are printed as JSON, for scripts.",
        False,
        is_switch=True,
        has_variable=False,
        is_listed=True,
    ),
)


def add_rehearse_options(parser: Parser) -> None:
    """Adds the options of `rehearse`, and sets its `run_command`."""
    add_command(parser, OPTIONS)
    parser.prepare = own_options_first
    parser.set_defaults(run_command=rehearse)


def own_options_first(line: Sequence[str]) -> list[str]:
    """Returns the words of the command line with this command's options before the script.

    They may stand behind it too. Behind `--` all words are the script's. Raises `UserError` for an
    option without its value.
    """
    switches = {flag for option in OPTIONS if option.is_switch for flag in option.flags}
    valued = {flag for option in OPTIONS for flag in option.flags} - switches
    stop = line.index(END_OF_OWN) if END_OF_OWN in line else len(line)
    options: list[str] = []
    rest: list[str] = []
    left = list(reversed(line[:stop]))
    while left:
        word = left.pop()
        if word in valued:
            if not left:
                raise UserError(f"{word}: a value is expected")
            options += [word, left.pop()]
        elif word in switches or word.partition("=")[0] in valued or word in ("-h", "--help"):
            options.append(word)
        else:
            rest.append(word)
    return [*options, *rest, *line[stop + 1 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Holds what the user has chosen."""

    script: str
    arguments: tuple[str, ...]
    strategies: tuple[str, ...]
    worlds: tuple[int, ...]
    faults: tuple[str, ...]
    steps: int
    silence_s: float
    wire: str


def chosen(args: argparse.Namespace) -> Choice:
    """Returns what the parsed options say; raises `UserError` for one that is not valid."""
    worlds = tuple(int(_RANKS("--worlds", text)) for text in _listed("--worlds", args.worlds))
    if DILOCO in _listed("--strategies", args.strategies):
        raise UserError(
            f"--strategies {DILOCO}: within an island a script is trained by the inner strategy, "
            f"and begins again with it after a fault: name that ({', '.join(STRATEGIES)})"
        )
    choice = Choice(
        script=check_script(args.script, is_module=False),
        arguments=tuple(args.arguments),
        strategies=_named("--strategies", args.strategies, STRATEGIES),
        worlds=worlds,
        faults=_named("--faults", args.faults, FAULTS),
        steps=_STEPS("--steps", args.steps),
        silence_s=_SECONDS("--timeout", args.timeout),
        wire=str(wire_of("--wire", args.wire)),
    )
    for fault in choice.faults:
        if not any(can_happen(fault, world) for world in worlds):
            raise UserError(f"--faults {fault}: a world of 2 ranks is expected in --worlds")
    return choice


def _listed(flag: str, text: str) -> tuple[str, ...]:
    """Returns the words that commas separate; raises `UserError` where there are none, or one is
    given twice."""
    listed = tuple(word.strip() for word in text.split(",") if word.strip())
    if not listed or len(set(listed)) < len(listed):
        raise UserError(f"{flag} {text}: words with commas between them are expected, each once")
    return listed


def _named(flag: str, text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the names that are listed.

    Args:
        flag: The option, for the error.
        text: Its value.
        names: All names.

    Raises:
        UserError: The text lists another name.
    """
    listed = _listed(flag, text)
    for name in listed:
        if name not in names:
            expected = f"one of {', '.join(names)} is expected{nearest_text(name, names)}"
            raise UserError(f"{flag} {name}: {expected}")
    return listed


@dataclass(slots=True)
class Progress:
    """Says on stderr which run is made, and how long all of them will take."""

    most: int
    """Number of runs, if no strategy is refused."""
    done: int = 0
    _run_began_s: float = 0.0
    unkept: dict[str, None] = field(default_factory=dict)
    """Names of tensors of the script that change and that nothing keeps."""
    _has_told: bool = False
    """True once it has said how long all runs will take."""

    def begin(self, run: Run) -> None:
        """Says which run begins."""
        self._run_began_s = time.monotonic()
        _print_progress(f"run {self.done + 1} of {self.most}: {run.text}")

    def end(self, result: RunResult) -> None:
        """Says what became of a run, and after the first that has ended well how long the others
        will take."""
        self.done += 1
        if result.refusal or result.failure:
            _print_progress(f"  {'refused' if result.refusal else 'FAILED'}: {_why(result)}")
        elif not self._has_told:
            self._has_told = True
            left, took_s = self.most - self.done, time.monotonic() - self._run_began_s
            runs = count_text(left, "further run")
            _print_progress(f"  {runs} will take about {span_text(took_s * left)}")


def _print_progress(text: str) -> None:
    print_foreign(text)


def _why(result: RunResult) -> str:
    return " ".join((result.refusal or result.failure).split())


def rehearse(args: argparse.Namespace) -> int:
    """Runs the command; returns 0 where a strategy trains the script and no run differs or fails,
    else 1."""
    choice = chosen(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = Progress(most_runs(choice.strategies, choice.worlds, choice.faults))
    began_s, before = time.monotonic(), file_times(Path.cwd())
    with _stage(choice, args.log_dir) as stage:
        try:
            results = list(_results(choice, stage, progress))
        except NeverAttached as error:
            raise UserError(f"{choice.script}: {error}") from None
    verdicts = compare(results)
    differs = any(verdict.outcome is Outcome.DIFFERS for verdict in verdicts.values())
    unkept = list(progress.unkept) if differs else []
    facts = Facts(
        script=args.script,
        steps=choice.steps,
        wall_s=time.monotonic() - began_s,
        remarks=(
            *([NOTHING_REHEARSED] if is_refused(verdicts) else []),
            *_unkept_remark(unkept),
            *cpu_remark(choice, visible_gpus()),
            *_remarks(before, args.log_dir),
        ),
    )
    if args.json:
        print_result(json.dumps(document(verdicts, results, facts), indent=2))
    else:
        print_result(render(verdicts, results, facts), end="")
    return int(ExitCode.DONE) if is_passed(verdicts) else 1


@contextmanager
def _stage(choice: Choice, log_dir: str | None) -> Iterator[Stage]:
    """Starts what all runs share, and ends it at the end of the block.

    Args:
        choice: What the user has chosen.
        log_dir: Where logs and records are kept; None: they are removed.
    """
    job = f"rehearsal-{uuid.uuid4().hex[:6]}"
    with ExitStack() as stack:
        if log_dir is None:
            directory = Path(tempfile.mkdtemp(prefix="elasticzero-rehearsal-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        else:
            directory = Path(log_dir).absolute() / job
            directory.mkdir(parents=True)
        yield Stage(
            script=choice.script,
            arguments=choice.arguments,
            endpoint=stack.enter_context(EtcdServer()).endpoint,
            directory=directory,
            job=job,
            is_foreign=not imports_elasticzero(Path(choice.script)),
            silence_s=choice.silence_s,
            wire=choice.wire,
        )


def _results(choice: Choice, stage: Stage, progress: Progress) -> Iterator[RunResult]:
    """Makes the runs, and yields what each gives.

    Args:
        choice: What the user has chosen.
        stage: What all runs have in common.
        progress: Says which run is made.
    """
    for world in choice.worlds:
        is_first = True
        for strategy in choice.strategies:
            first = undisturbed(strategy, world, choice.steps)
            result = _made(first, stage, progress)
            yield result
            accepted = not (result.refusal or result.failure)
            if not accepted:
                progress.most -= sum(can_happen(fault, world) for fault in choice.faults)
                continue
            half = result.half_parameters
            progress.most += half and not is_first  # one more with a nudged gradient
            for run in following(first, choice.faults, is_first=is_first, half_parameters=half):
                yield _made(run, stage, progress)
            is_first = False
        progress.most -= 2 * is_first


def _made(run: Run, stage: Stage, progress: Progress) -> RunResult:
    progress.begin(run)
    job = FaultedJob(stage, run, progress.done + 1)
    result = job.carry_out()
    progress.unkept.update(dict.fromkeys(job.unkept()))
    progress.end(result)
    return result


def _unkept_remark(names: Sequence[str]) -> Iterator[str]:
    """Yields a sentence on tensors of the script that change and that nothing keeps, if any do."""
    if names:
        verb = "changes" if len(names) == 1 else "change"
        yield (
            f"{list_text(names, NAMES_SHOWN)} {verb} from step to step, and nothing keeps that: "
            "give session.track what has it, if training depends on it."
        )


def cpu_remark(choice: Choice, gpus: int) -> Iterator[str]:
    """Yields a sentence on runs that have more ranks than this machine has GPUs, if any have.

    Args:
        choice: What the user has chosen.
        gpus: The GPUs of this machine; without any it is no surprise that runs use the CPU.
    """
    joined = int(JOIN in choice.faults)
    if 0 < gpus < max(choice.worlds) + joined:
        yield (
            f"Runs of more than {count_text(gpus, 'rank')} were on the CPU, since this machine has "
            f"{count_text(gpus, 'GPU')}: give smaller --worlds to rehearse on GPUs."
        )


def _remarks(before: FileTimes, log_dir: str | None) -> Iterator[str]:
    """Yields what is told besides the verdicts.

    Args:
        before: The files of the working directory before the first run.
        log_dir: Where logs and records are kept; None: they are removed.
    """
    logs = "" if log_dir is None else os.path.join(os.path.relpath(log_dir), "")
    changed = changed_files(before, file_times(Path.cwd()))
    if paths := [path for path in changed if not logs or not path.startswith(logs)]:
        yield (
            f"Changed in this directory meanwhile: {list_text(paths, FILES_SHOWN)}. Where the "
            "script has written them, each run has found what the one before it had left there."
        )
    if log_dir is not None:
        yield f"Logs and records of all runs are in {os.path.relpath(log_dir)}."
