"""Opens pages in the system's Chromium without a window, by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The path of a browser; None: there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@contextmanager
def browser(path: str) -> Iterator[Any]:
    """A browser that runs; `new_context` gives it a window's size and its colours."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path)
        try:
            yield running
        finally:
            running.close()
