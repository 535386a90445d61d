"""Draws the pictures of the status page and of `elasticzero top` anew: `make pictures`.

They show a made-up job: `sample_job` says which. It needs Chromium, and the packages of
`make integrations`.
"""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

from PIL import Image
from rich.console import Console

from elasticzero.ops.dashboard.screen import job_screen
from tools.browser import browser, find_browser
from tools.sample_job import document, served_page
from tools.source import ROOT

FOLDER = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 100, 30
COLOURS = 200
"""Number of colours of a picture, which make it half as large."""


def draw_page(running: Any, address: str, name: str, *, width: int, dark: bool) -> None:
    """Draws the whole status page, in a window of `width` pixels."""
    context = running.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if dark else "light",
        timezone_id="UTC",
        locale="en-GB",
        reduced_motion="reduce",
    )
    try:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#loss svg")
        image = page.screenshot(full_page=True, animations="disabled")
    finally:
        context.close()
    with Image.open(io.BytesIO(image)) as drawn:
        few = drawn.convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
        few.save(FOLDER / name, optimize=True)


def draw_top(job: dict[str, Any]) -> None:
    """Draws the screen of `elasticzero top` as SVG, in a font of the reader's machine."""
    console = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO())
    screen = job_screen(
        job,
        width=COLUMNS,
        height=ROWS,
        clock=lambda at: time.strftime("%H:%M:%S", time.gmtime(at)),
    )
    console.print(screen)
    image = console.export_svg(title=f"elasticzero top --job {job['job']}", unique_id="top")
    image = re.sub(r"\s*@font-face \{.*?\}", "", image, flags=re.DOTALL)
    lines = [line.rstrip() for line in image.splitlines()]
    (FOLDER / "top.svg").write_text("\n".join(lines) + "\n")


def main() -> int:
    path = find_browser()
    if path is None:
        print("error: no Chromium: apt-get install chromium, or google-chrome", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    job = document(waiting=["node-6"])
    draw_top(job)
    with served_page(job) as address, browser(path) as running:
        draw_page(running, address, "status-page.png", width=1180, dark=False)
        draw_page(running, address, "status-page-dark.png", width=1180, dark=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
