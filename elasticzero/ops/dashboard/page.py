"""Holds the status page that every agent serves, and the policy that confines it.

The page is one file without other assets. Its policy allows the very script and style that are in
it, by their digests, and requests to the agent that serves it; nothing else. The script alone may
set markup, at the one place that has its policy of trusted types.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from elasticzero.ops.page.style import style_sheet

BODY_POLICY = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
"""Header of the body of the page: by itself, in a browser, it may do nothing."""
TRUSTED_TYPES = "elasticzero"
"""Name of the policy of trusted types in the page's script."""
_FILE = Path(__file__).with_name("page.html")
_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def status_page() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its Content-Security-Policy, as a header."""
    text = _FILE.read_text(encoding="utf-8").replace("<style>", f"<style>{style_sheet('')}", 1)
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _PARTS.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(sources["script"]),
        "style-src": " ".join(sources["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": TRUSTED_TYPES,
    }
    value = "; ".join(f"{name} {allowed}" for name, allowed in policy.items())
    return text.encode(), {"Content-Security-Policy": value}
