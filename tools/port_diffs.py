"""Writes what changes in the ported examples into the page that explains it.

The page has each difference between two markers; `tools.reference` writes it anew from the two
scripts `examples/ports/NAME_before.py` and `NAME_after.py`.
"""

from __future__ import annotations

import difflib
import re

from tools.source import ROOT

FOLDER = ROOT / "examples" / "ports"
CONTEXT_LINES = 2
"""Number of unchanged lines around each change."""
_BLOCK = re.compile(
    r"(<!-- What changes in (?P<name>\w+)\.py, which `make reference` writes\. -->\n)"
    r".*?(<!-- End of the changes\. -->)",
    re.DOTALL,
)


def difference(name: str) -> str:
    """Returns the difference of the two scripts of a port, as `git apply` takes it."""
    before, after = (
        (FOLDER / f"{name}_{when}.py").read_text().splitlines() for when in ("before", "after")
    )
    lines = difflib.unified_diff(
        before, after, f"a/{name}.py", f"b/{name}.py", n=CONTEXT_LINES, lineterm=""
    )
    return "\n".join(lines)


def with_differences(page: str) -> str:
    """Returns a page with each difference between its markers as the scripts have it now."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}```diff\n{difference(match['name'])}\n```\n{match[3]}"

    return _BLOCK.sub(block, page)
