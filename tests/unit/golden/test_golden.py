"""What is stored, sent and shown is, byte for byte, what `tests/fixtures/golden` holds.

A difference is a change of a format that other releases, other nodes or people's programs read.
`pytest tests/unit/golden --update` writes the files anew: do so only for a change that is meant.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from elasticzero.checkpoint.format import finite, layout, manifest
from elasticzero.checkpoint.steps import tag_files
from elasticzero.data import position, sampling, tag_requests
from elasticzero.ipc import assignment, messages
from elasticzero.launcher.observability.events import EventName
from elasticzero.launcher.protocol import documents
from elasticzero.launcher.store import job_token
from elasticzero.launcher.store.decoding import document
from elasticzero.parallel.buckets import plan
from elasticzero.serialization import decode
from tests.conftest import ROOT
from tests.unit.golden import sent, shown, stored
from tests.unit.golden.records import data_in, full, reachable, records_of

FOLDER = ROOT / "tests" / "fixtures" / "golden"
FAMILIES: dict[str, Callable[[Path], dict[str, str]]] = {
    "etcd": lambda folder: stored.etcd(),
    "checkpoints": stored.checkpoints,
    "state": stored.state,
    "messages": lambda folder: sent.messages(),
    "numbers": sent.numbers,
    "http": sent.http,
    "events": shown.events,
    "command-line": lambda folder: shown.command_line(),
    "simulator": lambda folder: shown.simulator(),
}
RECORD_MODULES = (
    assignment,
    documents,
    finite,
    job_token,
    layout,
    manifest,
    messages,
    plan,
    position,
    sampling,
    tag_files,
    tag_requests,
)
"""Modules whose records are stored or sent."""
NOT_STORED = frozenset(
    {
        "Agreed",
        "BatchPlan",
        "EpochEnd",
        "ExchangeCost",
        "GlobalBatch",
        "MicroBatch",
        "NodePlace",
        "SampleOrder",
        "_Place",
    }
)
"""Records of these modules that stay in their process."""
WRITTEN_ELSEWHERE = frozenset({"serving", "tracker", "averaged", "events_lost"})
"""Events that something else than the reporter writes; `test_events.py` has their fields."""
SEPARATOR = " = "


@pytest.fixture
def stopped_clocks() -> Iterator[None]:
    with patch("time.time", lambda: sent.NOW_S), patch("time.monotonic", lambda: sent.NOW_S):
        yield


def compare(path: Path, text: str, update: bool) -> None:
    if update:
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines()


def held(family: str) -> dict[str, str]:
    """The lines of a golden file by name."""
    rows = (FOLDER / f"{family}.txt").read_text().splitlines()
    return {name: text for name, _, text in (row.partition(SEPARATOR) for row in rows)}


@pytest.mark.usefixtures("stopped_clocks")
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes(family: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    made = FAMILIES[family](tmp_path)
    rows = (f"{name}{SEPARATOR}{text}\n" for name, text in made.items())
    text = "".join(rows).replace(str(tmp_path), "/folder")
    compare(FOLDER / f"{family}.txt", text, pytestconfig.getoption("--update"))


@pytest.mark.usefixtures("stopped_clocks")
def test_expositions(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    text = shown.metrics(tmp_path)
    compare(FOLDER / "metrics.txt", text, pytestconfig.getoption("--update"))


def test_documents_are_read_as_what_they_were() -> None:
    lines = held("etcd")
    for key, kind in stored.DOCUMENTS.items():
        name = f"/elasticzero/job/{key}"
        data = data_in(lines[name if name in lines else f"{name} full"])
        assert document(kind, data) == full(kind), key


def test_messages_are_read_as_what_they_were() -> None:
    lines = held("messages")
    for kind in sent.MESSAGES:
        name = kind.__name__ if kind.__name__ in lines else f"{kind.__name__} full"
        value = json.loads(data_in(lines[name]))
        assert value.pop("kind") == kind.__name__
        assert decode(kind, value) == full(kind, **sent.CHOSEN.get(kind, {}))


def test_positions_are_read_as_what_they_were() -> None:
    for name, expected in stored.POSITIONS.items():
        stated = json.loads(held("state")[f"position {name}"])
        assert decode(position.DataPosition, stated) == expected


def test_each_record_is_covered() -> None:
    """A new kind of document or message needs a line in the golden files."""
    covered = reachable([*stored.DOCUMENTS.values(), *stored.RECORDS, *sent.MESSAGES])
    records = {kind for module in RECORD_MODULES for kind in records_of(module)}
    assert {kind.__name__ for kind in records - covered} == NOT_STORED


def test_each_event_is_covered() -> None:
    names = {name.partition(" ")[0] for name in held("events")}
    assert names == set(typing.get_args(EventName)) - WRITTEN_ELSEWHERE


def test_two_records_of_a_kind_differ_in_every_value() -> None:
    """Fields that are swapped, and rows in another order, must show."""
    first, second = full(documents.World).members
    pairs = zip(*(vars_of(member) for member in (first, second)), strict=True)
    assert all(one != other for one, other in pairs)


def vars_of(member: documents.Member) -> list[object]:
    return [getattr(member, name) for name in member.__dataclass_fields__]
