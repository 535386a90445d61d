"""`elasticzero show`: each file that comes with the package, and the commands of the pages."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from elasticzero.cli.main import main
from elasticzero.errors import ExitCode
from elasticzero.ops.cli.show import SHARED_FILES

FOLDERS = ("examples", "k8s/components")
"""Folders that the build maps into the package, as tests/integration/test_packaging.py checks."""
PAGES = ("README.md", "docs/*.md", "examples/**/*.*")
COMMAND = re.compile(r"elasticzero show ([\w./-]+)(?: +> *([\w.-]+))?")


def commands(root: Path) -> list[tuple[str, str, str]]:
    """What the pages print by `show`: the page, the name, and the file that it is put into."""
    return [
        (str(page.relative_to(root)), name, target)
        for pattern in PAGES
        for page in sorted(root.glob(pattern))
        if page.suffix in (".md", ".py", ".sh", ".sbatch", ".toml")
        for name, target in COMMAND.findall(page.read_text())
    ]


def test_every_file_has_one_name_and_no_other_has(root: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *FOLDERS],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(file.path for file in SHARED_FILES.values()) == sorted(listed.stdout.split())


@pytest.mark.parametrize("name", SHARED_FILES)
def test_a_file_is_printed_byte_for_byte(
    name: str, root: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["show", name]) == ExitCode.DONE
    assert capfdbinary.readouterr().out == (root / SHARED_FILES[name].path).read_bytes()


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == ExitCode.DONE
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SHARED_FILES)
    assert max(map(len, lines)) <= 100
    assert all(file.about in line for file, line in zip(SHARED_FILES.values(), lines, strict=True))


def test_an_unknown_name_is_told_with_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", "rules"])
    assert ended.value.code == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "error: NAME rules: one of dashboard, " in error
    assert all(name in error for name in SHARED_FILES)
    assert error.endswith("see: elasticzero show --help\n")


def test_the_commands_of_the_pages_print_what_they_say(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is put into one of its own name, but for scripts that the pages call train.py."""
    tried = commands(root)
    assert {page for page, _, _ in tried} >= {
        "README.md", "docs/monitoring.md", "docs/slurm.md", "docs/quickstart.md",
    }  # fmt: skip
    for page, name, target in tried:
        assert main(["show", *shlex.split(name)]) == ExitCode.DONE, page
        source = root / SHARED_FILES[name].path
        assert capsys.readouterr().out == source.read_text(), page
        assert target in ("", "train.py", source.name), (page, target)
