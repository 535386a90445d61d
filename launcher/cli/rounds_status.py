"""Shows how the rounds of a job's islands stand, from the documents in its store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elasticzero.launcher.islands.documents import PREFIX, REPORTS, STATE
from elasticzero.launcher.protocol.rounds.documents import IslandReport, Rounds
from elasticzero.launcher.protocol.rounds.summary import IslandSummary, summary_of
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.decoding import document
from elasticzero.serialization import RecordError, encode
from elasticzero.text import count_text, table_text

HEAD = ("ISLAND", "ROUND", "SAMPLES IN IT", "WAITING", "ON HAND", "ADDRESS")


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
    summary = summary_of(rounds, reports)
    of_all, share = "", ""
    if summary.total is not None:
        of_all = f" of {summary.total:,}"
        share = f" ({summary.samples / max(1, summary.total):.1%})"
    state = "done" if summary.is_over else f"round {summary.round}"
    lines = [
        f"job {job}: {count_text(len(reports), 'island')}, {state}, {summary.samples:,}{of_all} "
        f"samples are in committed rounds{share}",
        table_text(HEAD, list(map(_row, summary.islands))).rstrip("\n"),
    ]
    if summary.given_back:
        lines.append(f"given back by islands: {count_text(summary.given_back, 'sample')}")
    if reports and not summary.is_over:
        lines.append(f"of one island: elasticzero status --job {job}/islands/{next(iter(reports))}")
    return "\n".join(lines)


def _row(island: IslandSummary) -> tuple[str, ...]:
    return (
        island.island,
        _number(island.round),
        _number(island.samples) + (f", {island.staleness} late" if island.staleness else ""),
        _number(island.waiting),
        _number(island.on_hand),
        island.address,
    )


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def rounds_json(job: str, rounds: Rounds, reports: Mapping[str, IslandReport]) -> Mapping[str, Any]:
    """Returns the state of the rounds as JSON.

    Args:
        job: The job's name.
        rounds: The rounds.
        reports: Reports of the islands that live.
    """
    islands = {island: encode(report) for island, report in reports.items()}
    return {"job": job, "rounds": encode(rounds), "islands": islands}
