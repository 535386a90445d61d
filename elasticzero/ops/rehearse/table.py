"""Shows what a rehearsal has found: a table of strategies and faults, and numbered notes. Pure.

A number stands for one note, wherever it is the reason. Of equal cells beside each other only the
first has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from elasticzero.ops.rehearse.comparison import samples_text
from elasticzero.ops.rehearse.results import (
    CONTROLS,
    REPEATED,
    UNDISTURBED,
    Facts,
    Key,
    Outcome,
    Verdict,
    Verdicts,
)
from elasticzero.rehearsal.records import RunResult
from elasticzero.text import count_text, shown, span_text

NO_RUN = "-"
"""Text of a cell for which there was no run."""
GAP = "    "
"""What stands between two columns."""
WIDEST_LINE = 120
"""Characters of a line that has both a note and its paragraph of the docs."""
ENDED = frozenset({Outcome.REFUSED, Outcome.FAILED})
"""Outcomes of a run that did not come to its end."""


@dataclass(slots=True)
class Notes:
    """Numbers notes in the order in which they are first asked for."""

    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def number(self, verdict: Verdict) -> int:
        """Returns the number of a verdict's note."""
        return self.numbers.setdefault((verdict.note, verdict.docs), len(self.numbers) + 1)

    def has(self, verdict: Verdict) -> bool:
        """Tells whether a verdict's note has a number."""
        return (verdict.note, verdict.docs) in self.numbers

    def lines(self) -> list[str]:
        """Returns all notes, each with its number and its paragraph of the docs: beside it, or
        below it where the line would be long."""
        texts = [(f"({n}) {shown(note)}", docs) for (note, docs), n in self.numbers.items()]
        short = [text for text, docs in texts if len(text) + 2 + len(docs) <= WIDEST_LINE]
        width = max(map(len, short), default=0)
        lines = []
        for text, docs in texts:
            beside = f"{text.ljust(width)}  {docs}".rstrip()
            lines += [beside] if len(beside) <= WIDEST_LINE else [text, f"    {docs}"]
        return lines


def render(verdicts: Verdicts, results: Sequence[RunResult], facts: Facts) -> str:
    """Returns what a user sees of a rehearsal.

    Args:
        verdicts: The verdict on each run.
        results: The runs, in the order of the rows and columns.
        facts: What is told besides.

    Returns:
        Lines of text, each with its end.
    """
    notes = Notes()
    rows = _rows(verdicts, results)
    steps = {run.fault: run.fault_step for run in results if run.fault not in CONTROLS}
    several_worlds = len({world for _, world in rows}) > 1
    cells = [["", *(f"{fault}@{step}" for fault, step in steps.items())]]
    for strategy, world in rows:
        name = f"{strategy}, {count_text(world, 'rank')}" if several_worlds else strategy
        judged = [_cell_verdict(verdicts, (strategy, fault, world)) for fault in steps]
        cells.append([name, *_cell_texts(judged, notes)])
    lines = _aligned(cells) if steps else []
    lines += _control_lines(verdicts, notes)
    footer = _footer(verdicts, results, facts, notes)
    return "\n".join([*lines, *notes.lines(), *footer]) + "\n"


def _rows(verdicts: Verdicts, results: Sequence[RunResult]) -> list[tuple[str, int]]:
    """Returns the strategy and the number of ranks of each row: those of runs with a fault, and
    those that have none since the undisturbed run was refused or failed."""
    rows: dict[tuple[str, int], None] = {}
    for run in results:
        undisturbed = verdicts.get((run.strategy, UNDISTURBED, run.world))
        was_ended = undisturbed is not None and undisturbed.outcome in ENDED
        if run.fault not in CONTROLS or was_ended:
            rows[run.strategy, run.world] = None
    return list(rows)


def _cell_verdict(verdicts: Verdicts, key: Key) -> Verdict | None:
    """Returns the verdict on the run of a cell. Where there was none since the undisturbed run was
    refused or failed, the verdict is that run's; None: there is none."""
    strategy, _, world = key
    undisturbed = verdicts.get((strategy, UNDISTURBED, world))
    was_ended = undisturbed is not None and undisturbed.outcome in ENDED
    return verdicts.get(key, undisturbed if was_ended else None)


def _cell_texts(judged: Iterable[Verdict | None], notes: Notes) -> Iterator[str]:
    """Yields the texts of a row's cells."""
    previous = None
    for verdict in judged:
        if verdict is None:
            yield NO_RUN
        elif not verdict.note or verdict == previous:
            yield verdict.outcome.value
        else:
            yield f"{verdict.outcome.value} ({notes.number(verdict)})"
        previous = verdict


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _control_lines(verdicts: Verdicts, notes: Notes) -> list[str]:
    """Returns a line for each run without a fault that was refused or failed, and whose reason no
    cell has."""
    lines = []
    for (strategy, fault, world), verdict in verdicts.items():
        if fault in CONTROLS and verdict.outcome in ENDED and not notes.has(verdict):
            run = f"{strategy}, {count_text(world, 'rank')}, {fault}"
            lines.append(f"{run}: {verdict.outcome.value} ({notes.number(verdict)})")
    return lines


def _footer(
    verdicts: Verdicts, results: Sequence[RunResult], facts: Facts, notes: Notes
) -> list[str]:
    """Returns the lines below the notes.

    Args:
        verdicts: The verdict on each run.
        results: The runs.
        facts: What is told besides.
        notes: Takes the note on two undisturbed runs that are equal in most.
    """
    undisturbed = undisturbed_text(verdicts, results)
    if noted := [v for v in verdicts.values() if v.outcome is Outcome.EQUAL and v.note]:
        undisturbed += f" ({notes.number(noted[0])})"
    sentences = (
        f"samples: {samples_text(results)}",
        f"Two undisturbed runs: {undisturbed}",
        f"{count_text(len(results), 'run')}, {span_text(facts.wall_s)}",
    )
    return [" ".join(f"{sentence}." for sentence in sentences), *map(shown, facts.remarks)]


def undisturbed_text(verdicts: Verdicts, results: Sequence[RunResult]) -> str:
    """Returns in a few words whether undisturbed runs are equal."""
    if not any(run.fault == REPEATED for run in results):
        return "not made"
    judged = [verdict for (_, fault, _), verdict in verdicts.items() if fault in CONTROLS]
    if any(verdict.outcome is Outcome.NOT_COMPARABLE for verdict in judged):
        return "DIFFER"
    return "equal" if any(v.outcome is Outcome.EQUAL for v in judged) else "not comparable"
