"""Records what benchmarks have found: the machine, the commit, and tables on a page of
benchmarks/results."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def machine(*packages: str) -> dict[str, object]:
    """What the figures hang on; packages: whose versions count too."""
    cpu = Path("/proc/cpuinfo").read_text()
    memory = Path("/proc/meminfo").read_text().split()
    return {
        "cores": os.cpu_count(),
        "processor": next(
            (ln.split(":")[1].strip() for ln in cpu.splitlines() if "model name" in ln),
            platform.machine(),
        ),
        "memory_bytes": int(memory[memory.index("MemTotal:") + 1]) << 10,
        "gpu": gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def gpu() -> str | None:
    """The first GPU that programs started here see."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0] or None


def about_in_words(about: Mapping[str, object], commit: str) -> str:
    """Date, commit and machine, as a figure's first line."""
    size = about["memory_bytes"]
    assert isinstance(size, int)
    return (
        f"{date.today()}, commit {commit}: {about['processor']}, {about['cores']} cores, "
        f"{size >> 30} GiB, {about['gpu'] or 'no GPU'}, Linux {about['kernel']}"
    )


def present_commit() -> str:
    """The checkout's commit; a copy without git names it by the variable COMMIT."""
    if not shutil.which("git"):
        return os.environ.get("COMMIT", "unknown")
    done = subprocess.run(
        ["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


def record(name: str, document: Mapping[str, Any]) -> Path:
    """Write a dated result; its path."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"date": str(date.today()), **document}, indent=1) + "\n")
    return path


def publish(name: str, text: str, pages: Path = RESULTS) -> Path:
    """Put text between the marks of that name in its page; returns the page.

    The page of "checkpoint warm" is benchmarks/results/checkpoint.md.
    """
    first, last = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    page = pages / f"{name.partition(' ')[0]}.md"
    before, _, rest = page.read_text().partition(first)
    _, mark, after = rest.partition(last)
    if not mark:
        raise SystemExit(f"error: {page} has no {first} ... {last}")
    page.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}")
    return page


def publish_table(
    name: str, page: str, head: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Any]
) -> None:
    """Writes the table to a page of results, and the figures beside it.

    Args:
        name: What the name of the file of figures begins with.
        page: The marks of the table in its page.
        head: Heads of the table's columns.
        rows: Its rows.
        runs: The figures, dataclasses.
    """
    about = machine("torch")
    command = f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}"
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    text = f"{about_in_words(about, present_commit())}, torch {about['torch']}."
    publish(page, "\n".join([f"```\n{command}\n```", "", text, "", *lines]))
    document = {"machine": about, "command": command, "runs": [asdict(one) for one in runs]}
    print(record(f"{name}-{date.today()}", document))
