"""Which tests run, in which order, and by which deadline."""

from __future__ import annotations

import pytest

from tests.support import deadlines
from tests.support.selection import is_drawn, seconds_of
from tools.touched import (
    ALWAYS,
    BUDGET_S,
    FARTHEST,
    STORY,
    chosen,
    distances,
    imported_by,
    module_of,
)

TESTS = [f"tests/unit/test_a.py::test_b[{number}]" for number in range(2000)]


def test_a_seed_draws_its_share_and_another_seed_others() -> None:
    drawn = {seed: {test for test in TESTS if is_drawn(test, 0.1, seed)} for seed in ("a", "b")}
    assert all(150 < len(tests) < 250 for tests in drawn.values())
    assert len(drawn["a"] & drawn["b"]) < 50
    assert drawn["a"] == {test for test in TESTS if is_drawn(test, 0.1, "a")}


def test_a_whole_share_draws_all_and_none_draws_none() -> None:
    assert all(is_drawn(test, 1.0, "a") and not is_drawn(test, 0.0, "a") for test in TESTS)


def test_a_file_that_is_not_in_the_table_has_the_seconds_of_its_folder() -> None:
    table = {"tests/integration/test_a.py": 30.0}
    assert seconds_of("tests/integration/test_a.py", table) == 30.0
    assert seconds_of("tests/integration/test_new.py", table) == 15.0
    assert seconds_of("tests/unit/test_new.py", table) == 0.0


def test_a_deadline_grows_with_the_machine_and_never_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "_slowness", [0.5])
    assert deadlines.patience(10.0) == 10.0
    monkeypatch.setattr(deadlines, "_slowness", [0.5, 3.0, 1.0])
    assert deadlines.patience(10.0) == 30.0
    monkeypatch.setattr(deadlines, "_slowness", [1000.0])
    assert deadlines.patience(10.0) == 10.0 * deadlines.MOST


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("launcher/agent/core.py", "elasticzero.launcher.agent.core"),
        ("checkpoint/__init__.py", "elasticzero.checkpoint"),
        ("elasticzero/session.py", "elasticzero.session"),
        ("tests/support/warm.py", "tests.support.warm"),
    ],
)
def test_a_file_is_imported_by_its_name_in_the_package(path: str, module: str) -> None:
    assert module_of(path) == module


def test_imports_are_named_wherever_they_stand() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from . import e\n    from ..g import h\n"
    names = imported_by(source, "x.y.z")
    assert {"a.b", "c", "c.d", "x.y", "x.y.e", "x.g", "x.g.h"} == names


def test_tests_that_import_a_changed_module_are_nearer_than_others() -> None:
    chain = {f"launcher/m{i + 1}.py": {f"elasticzero.launcher.m{i}"} for i in range(FARTHEST)}
    imports = chain | {
        "tests/unit/test_a.py": {"elasticzero.launcher.m0"},
        "tests/unit/test_b.py": {"elasticzero.launcher.m1"},
        "tests/unit/test_c.py": {f"elasticzero.launcher.m{FARTHEST}"},
    }
    near = distances({"launcher/m0.py"}, imports)
    assert near["tests/unit/test_a.py"] == 1
    assert near["tests/unit/test_b.py"] == 2
    assert "tests/unit/test_c.py" not in near


def test_the_nearest_tests_are_chosen_for_as_long_as_there_is_time() -> None:
    near = {"tests/unit/test_far.py": 2, "tests/unit/test_near.py": 1, "docs/index.md": 0}
    half_s = BUDGET_S / 2
    seconds = {
        "tests/unit/test_far.py": half_s,
        "tests/unit/test_near.py": half_s + 1,
        ALWAYS: 1,
        STORY: 9,
    }
    assert chosen(near, seconds) == (
        [ALWAYS, "tests/unit/test_near.py"],
        ["tests/unit/test_far.py"],
    )
    kept, left_out = chosen(near | {"launcher/a.py": 0}, seconds)
    assert set(kept[:2]) == {ALWAYS, STORY} and left_out == ["tests/unit/test_far.py"]
