"""Each reason has a sentence, and a paragraph of the docs that exists."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from elasticzero.ops.rehearse import causes
from elasticzero.ops.rehearse.causes import CAUSES, VALUE_KINDS, Paragraph, Reason
from elasticzero.ops.rehearse.results import Outcome
from tests.unit.ops.rehearse.made_up import KINDS

PARAGRAPHS = [value for value in vars(causes).values() if isinstance(value, Paragraph)]


@pytest.mark.parametrize("paragraph", PARAGRAPHS, ids=str)
def test_each_paragraph_is_in_the_docs(root: Path, paragraph: Paragraph) -> None:
    lines = (root / paragraph.page).read_text().splitlines()
    titles = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    assert paragraph.heading in titles


def test_each_reason_has_a_cause_with_a_named_paragraph() -> None:
    assert CAUSES.keys() == set(Reason)
    assert {cause.paragraph for cause in CAUSES.values()} <= set(PARAGRAPHS)
    kinds = VALUE_KINDS.values()
    assert {p for kind in kinds for p in (kind.lost, kind.moved)} <= set(PARAGRAPHS)
    assert set(KINDS) | {"generator"} <= VALUE_KINDS.keys()


@pytest.mark.parametrize("reason", Reason)
def test_each_sentence_can_be_filled_in_and_ends(reason: Reason) -> None:
    sentence = CAUSES[reason].sentence
    fields = [name for _, name, _, _ in string.Formatter().parse(sentence) if name]
    verdict = causes.verdict(reason, **dict.fromkeys(fields, "x"))
    assert verdict.note.endswith("x." if sentence.endswith("}") else ".")
    assert "{" not in verdict.note
    assert verdict.outcome is not Outcome.WITHIN_ROUNDING
    assert (verdict.outcome is Outcome.EQUAL) == (reason is Reason.UNSTEADY_VALUES)


def test_the_docs_explain_each_outcome(root: Path) -> None:
    text = (root / "docs" / "rehearse.md").read_text()
    for outcome in Outcome:
        assert f"| {outcome.value} |" in text or f"| `{outcome.value}` |" in text, outcome
