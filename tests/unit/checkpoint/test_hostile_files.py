"""Files that were made to hang their reader or to fill its memory."""

from __future__ import annotations

import itertools
import os
import pickle  # noqa: TID251
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticzero import checkpoint
from elasticzero.checkpoint.convert.dcp_metadata import METADATA_NAME, read_contents
from elasticzero.checkpoint.convert.pickle_reader import (
    InertRecord,
    Mapped,
    Size,
    StandIn,
    read_pickle,
)
from elasticzero.checkpoint.format.coverage import check_cover
from elasticzero.checkpoint.format.manifest import from_json
from elasticzero.checkpoint.format.strict_json import MAX_JSON_DEPTH
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointDamaged
from tests.unit.checkpoint.damage_cases import sign

LONGEST_S = 20.0
"""What is wanted takes under a second; what was found took minutes or had no end."""


@contextmanager
def bounded(most_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    began_s = time.thread_time()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
        assert most < most_bytes, most
        assert time.thread_time() - began_s < LONGEST_S
    finally:
        tracemalloc.stop()


def twice_within(count: int) -> bytes:
    """A tuple of two tuples of two tuples …, each of one and the same, as the key of a dict."""
    code = b"\x80\x02}K\x01q\x00"
    for number in range(count):
        code += b"0h%c" % number + b"h%c" % number + b"\x86q%c" % (number + 1)
    return code + b"Ns."


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x04Nr\xff\xff\xff\x1f.", id="an index of 2^29: 8.5 GB"),
        pytest.param(b"\x80\x04\x96" + b"\xff" * 5 + b"\0\0\0.", id="an array of 2^40 bytes"),
        pytest.param(b"\x80\x04\x8e" + b"\xff" * 5 + b"\0\0\0.", id="bytes of 2^40"),
        pytest.param(b"\x80\x04X\xff\xff\xff\x7f.", id="a text of 2^31"),
        pytest.param(twice_within(60), id="a key of 2^60 parts"),
        pytest.param(b"\x80\x04" + b"(" * 100_000 + b".", id="marks"),
        pytest.param(b"\x80\x04\x8b\xff\xff\xff\x7f.", id="an integer of 2^31 bytes"),
        pytest.param(b"\x80\x04)" + b"\x85" * 100_000 + b".", id="tuples within each other"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_metadata_takes_no_more_than_its_size_allows(tmp_path: Path, data: bytes) -> None:
    (tmp_path / METADATA_NAME).write_bytes(data)
    with bounded(100_000_000), pytest.raises(CheckpointDamaged, match="makes no sense"):
        read_contents(DiskStorage(tmp_path))


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
leaves = scalars | st.text()
keys = scalars | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=30,
)


@given(values, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    assert repr(read_pickle(pickle.dumps(value, protocol), no_names)) == repr(value)


def no_names(module: str, name: str) -> StandIn:
    stands: dict[str, StandIn] = {"Size": Size, "dict": Mapped, "Record": InertRecord}
    return stands[name]


def test_columns_take_no_longer_than_rows() -> None:
    """20,000 of them were compared pair by pair."""
    count = 20_000
    with bounded(200_000_000):
        check_cover("w", (2, count), [((0, i), (2, 1)) for i in range(count)])
        check_cover("w", (count, 2), [((i, 0), (1, 2)) for i in range(count)])
        tiles = [((i, j), (2, 3)) for i in range(0, 200, 2) for j in range(0, 600, 3)]
        check_cover("w", (200, 600), tiles[::-1])
        with pytest.raises(ValueError, match="overlap"):
            twice = [((0, i), (2, 1)) for i in range(count - 2)] + [((0, count - 3), (2, 2))]
            check_cover("w", (2, count), twice)
        with pytest.raises(ValueError, match="overlap, or lie without any order"):
            check_cover("w", (2, count), [((0, 0), (2, 1))] * count)


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """A square of 4 by 4, divided by random cuts, with perhaps a part moved."""
    parts = [((0, 0), (4, 4))]
    for _ in range(draw(st.integers(0, 5))):
        start, size = parts.pop(draw(st.integers(0, len(parts) - 1)))
        at = draw(st.integers(0, size[0]))
        if draw(st.booleans()):
            parts += [(start, (at, size[1])), ((start[0] + at, start[1]), (size[0] - at, size[1]))]
        else:
            at = draw(st.integers(0, size[1]))
            parts += [(start, (size[0], at)), ((start[0], start[1] + at), (size[0], size[1] - at))]
    if draw(st.booleans()):
        (row, column), size = parts.pop()
        parts.append(((draw(st.integers(0, row + 1)), draw(st.integers(0, column + 1))), size))
    return parts


@given(boxes())
def test_a_cover_is_one_when_every_element_is_counted_once(
    parts: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    counts = dict.fromkeys(itertools.product(range(4), range(4)), 0)
    inside = True
    for (row, column), (rows, columns) in parts:
        for place in itertools.product(range(row, row + rows), range(column, column + columns)):
            inside = inside and place in counts
            counts[place] = counts.get(place, 0) + 1
        inside = inside and row + rows <= 4 and column + columns <= 4
    try:
        check_cover("w", (4, 4), parts)
    except ValueError:
        assert not inside or set(counts.values()) != {1}
    else:
        assert inside and set(counts.values()) == {1}


def test_a_pinwheel_which_no_straight_cut_divides_is_a_cover() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    check_cover("w", (3, 3), [*pinwheel, ((1, 1), (1, 1))])


def test_a_manifest_of_millions_of_values_is_refused_unparsed() -> None:
    """198 MB of empty lists took 4.9 GB."""
    data = sign(b'{"version":1,"state":{"x":[' + b"[]," * 12_000_000 + b"[]]}}")
    with bounded(200_000_000), pytest.raises(CheckpointDamaged, match="bytes of memory, more than"):
        from_json(data, "m")


def test_state_deeper_than_is_written_is_refused_in_words() -> None:
    nested = b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1)
    with pytest.raises(CheckpointDamaged, match="nested more than 200 deep"):
        from_json(sign(b'{"version":1,"state":{"x":' + nested + b"}}"), "m")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_names_are_printed_escaped_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    """Plain Unicode ended in a UnicodeEncodeError, and escape sequences reached the terminal."""
    name, key = "Gewicht-ä-重\x1b[31m\nstep 9: whole\u202e", "ключ\ud800\x07"
    root = tmp_path / "läufe"
    checkpoint.save(root, {name: torch.ones(2)}, state={key: 1})
    checkpoint.save(tmp_path / "other", {name: torch.zeros(2)})
    step = root / "step-000000000000"
    for arguments in (
        ["inspect", root],
        ["inspect", "--json", root],
        ["list", root],
        ["verify", root],
        ["diff", "-q", root, tmp_path / "other"],
        ["export", "-q", root, tmp_path / "hf"],
        ["import", "-q", "--format", "hf", tmp_path / "hf", tmp_path / "new"],
        ["export", "-q", tmp_path / "\x1b]0;title\x07", tmp_path / "hf2"],
        ["inspect", root / "\udcff"],
    ):
        completed = subprocess.run(
            [sys.executable, "-m", "elasticzero.checkpoint.cli", *map(str, arguments)],
            env=os.environ
            | {"PYTHONIOENCODING": f"{encoding}:strict", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
            capture_output=True,
            timeout=120,
            check=False,
        )
        text = (completed.stdout + completed.stderr).decode(encoding)
        assert "Traceback" not in text, text
        assert completed.returncode in (0, 1, 64), text
        assert text.replace("\n", "").isprintable(), text
        assert not any(line.startswith("step 9: whole") for line in text.splitlines())
    assert step.is_dir()
