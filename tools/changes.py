"""Puts changes together: `python -m tools.changes [VERSION]`.

A change that users see is a file `changes/NAME.KIND.md` with a sentence or two, so that two
branches never add to one place. Without a version, this prints the changelog as it is with those
files; with one it writes CHANGELOG.md for that release, and removes them.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from tools.source import ROOT

FOLDER = ROOT / "changes"
CHANGELOG = ROOT / "CHANGELOG.md"
KINDS: Mapping[str, str] = {
    "added": "Added",
    "fixed": "Fixed",
    "changed": "Changed",
    "removed": "Removed",
}
"""Headings in the order of the changelog, by the kind in a file's name."""
UNRELEASED = "## Unreleased\n"
WIDTH = 120


def read_fragments(folder: Path) -> dict[str, list[str]]:
    """The texts of a folder's files by kind; raises `ValueError` for a name without a kind."""
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("*.md")):
        kind = path.stem.rpartition(".")[2]
        if kind not in texts:
            raise ValueError(f"{path.name}: NAME.KIND.md with one of {', '.join(KINDS)} is needed")
        texts[kind].append(path.read_text())
    return texts


def with_fragments(changelog: str, texts: Mapping[str, Sequence[str]]) -> str:
    """The changelog with texts at the end of each heading of what is not released. Pure."""
    head, _, rest = changelog.partition(UNRELEASED)
    section, separator, released = rest.partition("\n## ")
    for kind, title in KINDS.items():
        if not texts.get(kind):
            continue
        rows = "\n".join(_item(text) for text in texts[kind])
        before, heading, after = section.partition(f"### {title}\n")
        if heading:
            items, following, others = after.partition("\n### ")
            section = f"{before}{heading}{items.rstrip()}\n{rows}\n{following}{others}"
        else:
            above = f"\n{section.strip()}\n" if section.strip() else ""
            section = f"{above}\n### {title}\n{rows}\n"
    return f"{head}{UNRELEASED}{section}{separator}{released}"


def _item(text: str) -> str:
    """An item of the list, in lines of the changelog's width."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_release(changelog: str, version: str, day: str) -> str:
    """The changelog in which what was not released is this version. Pure."""
    return changelog.replace(UNRELEASED, f"{UNRELEASED}\n## {version} ({day})\n", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Put the files of changes/ into CHANGELOG.md.")
    parser.add_argument("version", nargs="?", help="of the release that they belong to")
    parser.add_argument("--day", default=date.today().isoformat(), help="of the release")
    args = parser.parse_args()
    text = with_fragments(CHANGELOG.read_text(), read_fragments(FOLDER))
    if args.version is None:
        print(text, end="")
        return 0
    CHANGELOG.write_text(as_release(text, args.version, args.day))
    for path in FOLDER.glob("*.md"):
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
