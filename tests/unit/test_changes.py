"""Changes are files until a release puts them into the changelog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import changes

CHANGELOG = """\
# Changes

## Unreleased

### Added
- One.

### Changed
- Two.

## 0.1.0 (2025-01-01)

### Added
- Old.
"""


def test_each_text_goes_to_the_end_of_its_heading() -> None:
    texts = {"added": ["Three.\n"], "changed": ["A text\nof lines.\n", "Five."], "fixed": []}
    made = changes.with_fragments(CHANGELOG, texts)
    assert made == CHANGELOG.replace("- One.\n", "- One.\n- Three.\n").replace(
        "- Two.\n", "- Two.\n- A text of lines.\n- Five.\n"
    )


def test_a_heading_that_is_missing_is_made() -> None:
    made = changes.with_fragments(CHANGELOG, {"fixed": ["Three."]})
    assert made == CHANGELOG.replace("- Two.\n", "- Two.\n\n### Fixed\n- Three.\n")


def test_long_texts_are_folded() -> None:
    made = changes.with_fragments(CHANGELOG, {"added": ["word " * 60]})
    rows = made.splitlines()
    assert max(map(len, rows)) <= changes.WIDTH
    assert sum(row.startswith("  word") for row in rows) == 2


def test_a_release_has_what_was_not_released() -> None:
    made = changes.as_release(CHANGELOG, "0.2.0", "2026-01-02")
    assert "## Unreleased\n\n## 0.2.0 (2026-01-02)\n\n### Added\n- One." in made
    assert changes.with_fragments(made, {"added": ["New."]}).startswith(
        "# Changes\n\n## Unreleased\n\n### Added\n- New.\n\n## 0.2.0 (2026-01-02)\n"
    )


def test_a_name_without_a_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some-change.md").write_text("Text.")
    with pytest.raises(ValueError, match=r"some-change.md: NAME.KIND.md with one of added, fixed"):
        changes.read_fragments(tmp_path)


def test_the_files_of_the_repository_are_put_in(root: Path) -> None:
    texts = changes.read_fragments(root / "changes")
    command = [sys.executable, "-m", "tools.changes"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    before = (root / "CHANGELOG.md").read_text()
    items = [sum(row.startswith("- ") for row in text.splitlines()) for text in (before, printed)]
    assert items[1] - items[0] == sum(map(len, texts.values()))
