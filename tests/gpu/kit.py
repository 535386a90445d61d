"""Runs the tests that need a GPU within a time, and keeps what became of each as JSON.

    python -m tests.gpu.kit [--all] [--seconds 200] [--jobs 8] [--device cpu] [--out FILE]

The essential tests are those of the table in README.md beside this file. pytest loads the three
plugins that are named here and no other, whatever is installed. A run ends in time with a list of
the tests that had no turn, which count as failures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from elasticzero.processes import descendants
from tests.gpu import wheels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = HERE / "README.md"
ROW = re.compile(r"^\| `(tests/\S.*?)` \| (.+) \|$", re.MULTILINE)
PLUGINS = ("xdist", "timeout", "tests.gpu.outcomes")
INTEGRATION = "tests/integration/test_"
WHOLE = (
    "tests/gpu",
    *(
        f"{INTEGRATION}{name}.py"
        for name in (
            *("strategies", "worker_process", "elastic_training", "worker_reuse", "wire"),
            *("changes_inside", "joins_inside"),
        )
    ),
    f"{INTEGRATION}memory_tier.py",
    f"{INTEGRATION}one_process.py",
    f"{INTEGRATION}optimizers.py::test_two_networks_in_turn_are_as_in_one_process",
    f"{INTEGRATION}plain_scripts.py"
    "::test_a_torchrun_script_survives_a_killed_worker_and_a_killed_node",
    f"{INTEGRATION}torchrun_plugin.py::test_a_script_survives_a_killed_worker_and_a_killed_node",
)
"""What `--all` runs, the essential tests among it."""
OUT = ROOT / "build" / "gpu" / "tests.json"
SPARE_S = 15.0
"""Seconds before the end at which the running tests are interrupted."""
KILL_S = 5.0
"""Seconds before the end at which every process is killed."""
LAST_TURN_S = 45.0
"""Seconds before the end from which no test begins."""
UNFINISHED = "no end"
NO_TURN = "no turn"


def essential(page: str) -> dict[str, str]:
    """Returns what each essential test protects, from the page's table."""
    return dict(ROW.findall(page))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test."""

    outcome: str
    """passed, failed, skipped, `no end` or `no turn`."""
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_good(self) -> bool:
        return self.outcome in ("passed", "skipped")


def outcomes(named: Iterable[str], events: Iterable[dict[str, Any]]) -> dict[str, Outcome]:
    """Returns what became of each test that was named, or collected, from the events of a run."""
    results = {test: Outcome(NO_TURN) for test in named}
    for event in events:
        if event["event"] == "collected":
            results = {test: Outcome(NO_TURN) for test in event["tests"]} | results
            continue
        test = event["test"]
        before = results.get(test, Outcome(NO_TURN))
        if event["event"] == "began":
            results[test] = Outcome(UNFINISHED)
            continue
        seconds = round(before.seconds + event["seconds"], 2)
        outcome, reason = before.outcome, before.reason
        if event["outcome"] != "passed":
            outcome, reason = event["outcome"], event["reason"]
        elif event["event"] == "call":
            outcome = "passed"
        results[test] = Outcome(outcome, seconds, reason)
    return results


def report(results: dict[str, Outcome]) -> str:
    """Returns the tests that did not pass, each with its reason, under the numbers of all."""
    counts = dict.fromkeys(("passed", "failed", "skipped", UNFINISHED, NO_TURN), 0)
    for result in results.values():
        counts[result.outcome] += 1
    lines = [", ".join(f"{count} {key}" for key, count in counts.items() if count)]
    for test, result in results.items():
        if result.outcome != "passed":
            lines.append(f"{result.outcome}: {test}" + (f": {result.reason}" * bool(result.reason)))
    return "\n".join(lines)


def command(tests: Sequence[str], jobs: int, seconds: float, notes: Path) -> list[str]:
    """Returns the command that runs tests with the kit's own plugins alone."""
    options = ["-m", "not chaos and not integrations", "-p", "no:cacheprovider"]
    options += [word for plugin in PLUGINS for word in ("-p", plugin)]
    options += ["-n", str(jobs), "--dist", "worksteal", "--outcomes", str(notes)]
    options += ["--session-timeout", f"{max(1.0, seconds - LAST_TURN_S):.0f}"]
    return [sys.executable, "-m", "pytest", "-ra", "-q", *options, *tests]


def environment(on_gpu: bool) -> dict[str, str]:
    """Returns the variables of the tests' processes: ranks may share a GPU, and no plugin of the
    machine is loaded."""
    variables = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    variables |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": wheels.search_path(HERE)}
    variables |= {"ELASTICZERO_CHANGES_INSIDE": "on"}
    variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    return variables if on_gpu else variables | {"CUDA_VISIBLE_DEVICES": ""}


FOREIGN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
"""Variables with which a machine adds options and plugins to every run of pytest."""


def run_until(arguments: Sequence[str], variables: dict[str, str], deadline_s: float) -> int | None:
    """Runs a command, which is interrupted and then killed before a deadline.

    Args:
        arguments: Program and arguments.
        variables: Its environment.
        deadline_s: When nothing of it runs any more, by `time.monotonic`.

    Returns:
        Its exit status, or None if it was interrupted.
    """
    process = subprocess.Popen(arguments, env=variables, cwd=ROOT)
    for margin_s, end in ((SPARE_S, process.send_signal), (KILL_S, kill_all(process.pid))):
        try:
            status = process.wait(max(0.1, deadline_s - margin_s - time.monotonic()))
            return status if margin_s == SPARE_S else None
        except subprocess.TimeoutExpired:
            end(signal.SIGINT)
    process.wait()
    return None


def kill_all(pid: int) -> Any:
    """Returns a function that kills a process and all that descend from it."""

    def kill(_: int) -> None:
        for victim in [*descendants(pid), pid]:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue

    return kill


def device_facts(on_gpu: bool) -> dict[str, Any]:
    """Returns the facts of the machine that a result hangs on."""
    code = (
        "import json, torch; gpu = torch.cuda.is_available(); print(json.dumps({'torch': "
        "torch.__version__, 'gpu': torch.cuda.get_device_name() if gpu else None, 'nccl': "
        "'.'.join(map(str, torch.cuda.nccl.version())) if gpu else None}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(on_gpu), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"error: {sys.executable} has no torch that can be imported")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts | {"cores": os.cpu_count(), "python": sys.version.split()[0]}


def commit() -> str:
    """Returns the checkout's commit; a copy without git names it by the variable COMMIT."""
    git = shutil.which("git")
    arguments = [git or "git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(arguments, capture_output=True, text=True) if git else None
    return (done.stdout.strip() if done else "") or os.environ.get("COMMIT", "unknown")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="run every test that can use a GPU")
    parser.add_argument("--seconds", type=float, default=200.0, help="end within these seconds")
    parser.add_argument("--jobs", type=int, default=8, help="run so many tests at a time")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse")
    parser.add_argument("--out", type=Path, default=OUT, help="write the results to this file")
    parser.add_argument("tests", nargs="*", help="run these instead of the essential tests")
    return parser.parse_args()


def main() -> None:
    began_s = time.monotonic()
    options = parsed()
    wheels.install()
    facts = device_facts(options.device == "cuda")
    if options.device == "cuda" and not facts["gpu"]:
        raise SystemExit(
            f"error: {sys.executable} has no torch that sees a GPU; name one with "
            "make gpu RUN=/path/to/python, or rehearse on the CPU: python -m tests.gpu.kit "
            "--device cpu"
        )
    named = [] if options.tests else list(essential(PAGE.read_text()))
    tests = options.tests or (WHOLE if options.all else named)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    notes = options.out.with_suffix(".events")
    notes.write_text("")
    arguments = command(tests, options.jobs, began_s + options.seconds - time.monotonic(), notes)
    variables = environment(options.device == "cuda")
    status = run_until(arguments, variables, began_s + options.seconds)
    results = outcomes(named, map(json.loads, notes.read_text().splitlines()))
    seconds = round(time.monotonic() - began_s, 1)
    document = {"schema": 1, "date": str(date.today()), "commit": commit()}
    document |= {"device": options.device, "machine": facts}
    document |= {"command": arguments[1:], "limit_s": options.seconds, "seconds": seconds}
    document |= {"tests": {test: asdict(result) for test, result in results.items()}}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    notes.unlink()
    print(f"\n{report(results)}\nin {seconds:.0f} s of {options.seconds:.0f}; {options.out}")
    sys.exit(0 if status == 0 and all(result.is_good for result in results.values()) else 1)


if __name__ == "__main__":
    main()
