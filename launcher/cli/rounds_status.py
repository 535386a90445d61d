"""Shows how the rounds of a job's islands stand, from the documents in its store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elasticzero.launcher.islands.documents import PREFIX, REPORTS, STATE
from elasticzero.launcher.protocol.rounds.documents import IslandReport, Rounds
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.decoding import document
from elasticzero.serialization import RecordError, encode
from elasticzero.text import count_text, table_text

HEAD = ("ISLAND", "ROUND", "CONTRIBUTION", "SAMPLES", "ADDRESS")


def read_rounds(store: Store) -> tuple[Rounds, dict[str, IslandReport]] | None:
    """Returns the rounds of a job's islands, and the reports of those that live; None: the job has
    no islands, or they have not begun.

    Args:
        store: The job's store.
    """
    entries = store.read(PREFIX).entries
    if STATE not in entries:
        return None
    reports = {}
    for key, entry in entries.items():
        if key.startswith(REPORTS):
            with suppress(RecordError):  # an odd report counts as none
                reports[key.removeprefix(REPORTS)] = document(IslandReport, entry.value)
    try:
        return document(Rounds, entries[STATE].value), reports
    except RecordError:
        return None


def rounds_text(job: str, rounds: Rounds, reports: Mapping[str, IslandReport]) -> str:
    """Returns the state of the rounds as lines for people.

    Args:
        job: The job's name.
        rounds: The rounds.
        reports: Reports of the islands that live.
    """
    newest = max(fragment.outer.round for fragment in rounds.fragments)
    share = rounds.samples / max(1, rounds.order.total)
    state = "done" if rounds.done else f"round {newest}"
    lines = [
        f"job {job}: {count_text(len(reports), 'island')}, {state}, {rounds.samples:,} of "
        f"{rounds.order.total:,} samples are in committed rounds ({share:.1%})"
    ]
    rows = [_row(island, report, rounds) for island, report in reports.items()]
    lines.append(table_text(HEAD, rows).rstrip("\n"))
    last = rounds.fragments[-1].recent[-1]
    if last.contributors:
        parts = [
            f"{c.island} {c.samples} samples" + (f", {c.staleness} late" if c.staleness else "")
            for c in last.contributors
        ]
        lines.append(f"last round: {'; '.join(parts)}")
    free = sum(map(len, rounds.free))
    if free:
        lines.append(f"given back by islands: {count_text(free, 'sample')}")
    if reports and not rounds.done:
        lines.append(f"of one island: elasticzero status --job {job}/islands/{next(iter(reports))}")
    return "\n".join(lines)


def _row(island: str, report: IslandReport, rounds: Rounds) -> tuple[str, ...]:
    seat = rounds.seat(island, report.incarnation)
    held = [part.outer.round for part in report.fragments if part.outer is not None]
    contributions = [part.contribution for part in report.fragments]
    waiting = [c.samples for c in contributions if c is not None]
    samples = sum(len(claim.samples) for claim in seat.claims) if seat is not None else 0
    return (
        island,
        str(max(held)) if held else "-",
        f"{max(waiting)} samples" if waiting else "-",
        f"{samples} given",
        report.address,
    )


def rounds_json(job: str, rounds: Rounds, reports: Mapping[str, IslandReport]) -> Mapping[str, Any]:
    """Returns the state of the rounds as JSON.

    Args:
        job: The job's name.
        rounds: The rounds.
        reports: Reports of the islands that live.
    """
    islands = {island: encode(report) for island, report in reports.items()}
    return {"job": job, "rounds": encode(rounds), "islands": islands}
