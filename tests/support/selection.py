"""Says in which order tests run, which of them run, and what they took.

With `-n`, whole files go to the next runner that is free, those that take longest first; the table
`durations.json` has the seconds of each file that takes more than two. `--share` plays a part of
the tests, which `--seed` draws.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.json")
UNKNOWN_S = {"tests/integration": 15.0, "tests/chaos": 60.0}
"""Seconds that a file takes that is not in the table, by the beginning of its path."""
LISTED = 20
"""Number of the longest tests that are listed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("elasticzero")
    group.addoption("--share", type=float, default=1.0, help="play this share of the tests")
    group.addoption("--seed", default="", help="text that draws the tests of --share")
    group.addoption("--keep-durations", action="store_true", help="write durations.json anew")


def seconds_of(file: str, table: Mapping[str, float]) -> float:
    """Returns the seconds that the tests of a file take together."""
    unknown = next((s for start, s in UNKNOWN_S.items() if file.startswith(start)), 0.0)
    return table.get(file, unknown)


def is_drawn(test: str, share: float, seed: str) -> bool:
    """Returns whether a test is among the share that a seed draws; of each test by itself."""
    digest = hashlib.sha256(f"{seed}\n{test}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def read_table() -> dict[str, float]:
    table: dict[str, float] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return table


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, seed = config.getoption("share"), config.getoption("seed")
    if share < 1.0:
        left_out = [item for item in items if not is_drawn(item.nodeid, share, seed)]
        items[:] = [item for item in items if is_drawn(item.nodeid, share, seed)]
        config.hook.pytest_deselected(items=left_out)
    table = read_table()
    items.sort(key=lambda item: -seconds_of(item.nodeid.partition("::")[0], table))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the longest tests, the sum of all, and how a share is drawn again."""
    config = terminalreporter.config
    tests: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tests[report.nodeid] += report.duration
    total_s = sum(tests.values())
    if config.getoption("keep_durations"):
        _write_table(tests)
    share, seed = config.getoption("share"), config.getoption("seed")
    if share < 1.0:
        terminalreporter.section(f"tests drawn: --share {share:g} --seed {seed}")
        for test in sorted(tests):
            terminalreporter.line(test)
    if config.getoption("numprocesses", None) and tests:
        terminalreporter.section(f"{total_s:.0f} job-seconds; the {LISTED} longest tests")
        for test in sorted(tests, key=lambda test: -tests[test])[:LISTED]:
            terminalreporter.line(f"{tests[test]:7.1f} s  {test}")


def _write_table(tests: Mapping[str, float]) -> None:
    files: defaultdict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    kept = read_table() | {file: round(seconds) for file, seconds in files.items()}
    named = {file: seconds for file, seconds in sorted(kept.items()) if seconds >= 2}
    TABLE.write_text(json.dumps(named, indent=1) + "\n")
