"""What parses a checkpoint's files, given files that nobody wrote: the value that stood there, or
`CheckpointDamaged`; never another error, a long wait or much memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from elasticzero.checkpoint.format.checksums import BlockSums, parse_sums
from elasticzero.checkpoint.format.manifest import ShardFile, from_json, to_json
from elasticzero.checkpoint.format.shards import parse_header, shard_header
from elasticzero.errors import CheckpointDamaged, UserError
from tests.support.mutations import mutated
from tests.unit.checkpoint.cases import draft_of, simple_layout
from tests.unit.checkpoint.damage_cases import sign

LONGEST_S = 10.0
"""Maximum CPU time of one reading, in seconds; it takes milliseconds."""
MOST_BYTES = 100_000_000

DRAFT = draft_of(simple_layout(), state={"lr": 0.1, "names": ["a", {"b": None}]})
MANIFEST = to_json(
    replace(DRAFT, files=tuple(ShardFile(DRAFT.file_name(r), 1 << 20, "0" * 32) for r in (0, 1)))
)
HEADER, FILE_BYTES = shard_header(DRAFT, 0)
HEADER = HEADER[8:]


def sums_file() -> bytes:
    sums = BlockSums()
    for _ in sums.watch([bytes(3 << 20), b"end"]):
        pass
    return sums.finish("a", "0" * 32)[0]


SUMS = sums_file()
TEXTS = (MANIFEST, HEADER, SUMS)


def outcome(parse: Callable[[], Any]) -> Any:
    """What `parse` gives; None where it says in one printable line that the file is damaged, or
    that it has a dtype that no checkpoint can hold."""
    tracemalloc.start()
    began_s = time.thread_time()
    try:
        return parse()
    except (CheckpointDamaged, UserError) as error:
        text = str(error)
        assert text.startswith(("/c/file:", "/c/file ")), text
        assert "\n" not in text and len(text) < 1000
        text.encode()
        return None
    finally:
        took_s = time.thread_time() - began_s
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert took_s < LONGEST_S and most < MOST_BYTES, (took_s, most)


fuzz = settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(mutated(MANIFEST, TEXTS))
@example(MANIFEST.replace(b"zero2", b"zero3"))
def test_a_changed_manifest_is_never_taken_for_one(data: bytes) -> None:
    parsed = outcome(lambda: from_json(data, "/c/file"))
    assert parsed is None or data == MANIFEST


@fuzz
@given(mutated(MANIFEST[: MANIFEST.rindex(b',"digest"')] + b"}", TEXTS))
def test_a_changed_manifest_whose_digest_is_right(data: bytes) -> None:
    """What is taken for a manifest can be written and read again, dealt out and looked through."""
    parsed = outcome(lambda: from_json(sign(data), "/c/file"))
    if parsed is not None:
        assert from_json(to_json(parsed), "/c/file") == parsed or "NaN" in repr(parsed)
        assert parsed.layout.world_size == len(parsed.files) <= len(data)
        for name in parsed.layout.tensors:
            assert outcome(partial(parsed.layout.holders, name))


@fuzz
@given(mutated(HEADER, TEXTS))
@example(HEADER.replace(b'"F64"', b'"G64"'))
def test_a_changed_header(data: bytes) -> None:
    """A changed dtype may be one that safetensors could have, and that this format has not."""
    base = 8 + len(data)
    file_bytes = FILE_BYTES - len(HEADER) + len(data)
    try:
        parsed = outcome(lambda: parse_header(data, file_bytes, "/c/file"))
    except UserError as error:
        assert "has the dtype" in str(error)
        return
    if parsed is not None:
        _, entries = parsed
        ends = base
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
            assert entry.start == ends <= entry.stop
            ends = entry.stop
        assert ends == file_bytes
        assert len(entries) == len([name for name in json.loads(data) if name[:2] != "__"])


@fuzz
@given(mutated(SUMS, TEXTS))
def test_changed_checksums(data: bytes) -> None:
    parsed = outcome(lambda: parse_sums(data, "/c/file"))
    if parsed is not None:
        assert len(parsed.blocks) == -(-parsed.size // parsed.block_bytes)
        assert (parsed.digest == parse_sums(SUMS, "").digest) == (data == SUMS)


@pytest.mark.parametrize(
    "data", [b"", *(whole[:7] * count for whole in TEXTS for count in (1, 999))]
)
def test_files_of_noise(data: bytes) -> None:
    assert outcome(lambda: from_json(data, "/c/file")) is None
    assert outcome(lambda: parse_header(data, len(data) + 8, "/c/file")) is None
    assert outcome(lambda: parse_sums(data, "/c/file")) is None
