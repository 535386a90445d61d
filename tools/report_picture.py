"""Writes the picture of a report for the pages: `python -m tools.report_picture`.

A real job with faults runs on this machine; headless Chromium draws the first part of its report.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.browser import find_browser
from tools.source import ROOT

PICTURE = ROOT / "docs" / "pictures" / "report.png"
JOB = "gpt"
FAULTS = ("kill-worker@50", "kill-node@90", "join@110", "drain:node-0@180")
SIZE = "1120,1180"


def browser() -> str:
    """The path of Chromium."""
    path = find_browser()
    if path is None:
        raise SystemExit("error: there is no Chromium: apt-get install chromium")
    return path


def elasticzero(*arguments: str) -> None:
    command = [sys.executable, "-m", "elasticzero.cli", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def run_job(folder: Path) -> Path:
    """Runs a job; returns the directory of its logs."""
    arguments = ["local", "--nodes", "3", "--job", JOB, "--log-dir", str(folder / "logs")]
    arguments += ["--strategy", "zero2", "--checkpoint-dir", str(folder / "checkpoints")]
    arguments += ["--checkpoint-every", "50"]
    arguments += [word for fault in FAULTS for word in ("--fault", fault)]
    elasticzero(*arguments, str(ROOT / "examples" / "gpt.py"), "--steps", "240")
    return folder / "logs" / JOB


def draw(page: Path, picture: Path) -> None:
    """Draws the first part of a page."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="elasticzero-browser-") as profile:
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={SIZE}"]
        command += [f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    browser()
    with tempfile.TemporaryDirectory(prefix="elasticzero-picture-") as name:
        page = Path(name) / "report.html"
        elasticzero("report", str(run_job(Path(name))), "--output", str(page))
        draw(page, PICTURE)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
