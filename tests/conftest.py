"""What every test may use: the programs that it runs besides Python, and the repository's root."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.deadlines import pytest_runtest_protocol
from tests.support.selection import pytest_collection_modifyitems, pytest_terminal_summary

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_protocol", "pytest_terminal_summary"]
ROOT = Path(__file__).resolve().parent.parent

# Tests, and what they start, find the programs that pip and `make tools` put beside Python.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Torch's threads of tests that run at once would spin for the same cores; it reads this as it is
# imported. Tests of how many threads there are leave it out.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="write transcripts and golden files anew"
    )
    selection.pytest_addoption(parser)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """The path of a program by name; without it the test skips, or fails where CI=true."""

    def find(name: str) -> str:
        if path := shutil.which(name):
            return path
        reason = f"{name} is not installed: `make tools` fetches it on Debian"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    return find
