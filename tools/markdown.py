"""Sentences and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tools import prose


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """With a capital letter and a full stop; a name at the front stays as it is."""
    first = text.split(maxsplit=1)[0] if text else ""
    if re.fullmatch(r"[a-z]+('s?|,|;)?", first) and first.rstrip(",;") not in prose.NAMES:
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "…")) else f"{text}."


def first_sentence(text: str) -> str:
    """Returns what stands before the first full stop that ends a sentence."""
    return sentence(re.split(r"(?<=\.)\s+(?=[A-Z`])", text, maxsplit=1)[0])


def marked(text: str) -> str:
    """With options and environment variables set as code."""
    parts = text.split("`")
    name = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|(?:ELASTICZERO|PET)_[A-Z_]+)")
    parts[::2] = [name.sub(r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)
