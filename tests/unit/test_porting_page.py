"""The differences in docs/porting.md are those of the scripts that the tests run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.port_diffs import FOLDER, with_differences

PORTS = ("nanogpt", "classifier", "lora")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "porting.md").read_text()


def test_each_port_is_on_the_page(page: str) -> None:
    files = sorted(path.name for path in FOLDER.glob("*.py"))
    assert files == sorted(f"{name}_{when}.py" for name in PORTS for when in ("before", "after"))
    assert re.findall(r"^<!-- What changes in (\w+)\.py", page, re.MULTILINE) == list(PORTS)


def test_the_page_is_not_stale(page: str) -> None:
    assert with_differences(page) == page


@pytest.mark.parametrize("name", PORTS)
def test_the_difference_on_the_page_makes_one_script_of_the_other(
    name: str, page: str, tmp_path: Path
) -> None:
    """A reader may do so by `git apply`."""
    [text] = re.findall(rf"<!-- What changes in {name}\.py.*?```diff\n(.*?)```", page, re.DOTALL)
    script = tmp_path / f"{name}.py"
    script.write_text((FOLDER / f"{name}_before.py").read_text())
    subprocess.run(["git", "apply"], cwd=tmp_path, input=text, text=True, check=True)
    assert script.read_text() == (FOLDER / f"{name}_after.py").read_text()
