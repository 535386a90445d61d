"""The error file of torch's `record`: what it writes is read, and what is written it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record

from elasticzero.launcher.workers.error_file import (
    MAX_BYTES,
    Recorded,
    error_file,
    parse,
    read,
    write,
)


def test_what_record_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = error_file(tmp_path, 3)
    assert path == tmp_path / "3.error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    @record
    def fails() -> None:
        raise ValueError("no such colour: octarine\nsecond line")

    with pytest.raises(ValueError, match="octarine"):
        fails()
    recorded = read(path)
    assert recorded is not None
    assert recorded.message == "ValueError: no such colour: octarine"
    assert "in fails" in recorded.traceback


def test_what_is_written_torch_reads(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    write(str(path), "rank 1 failed", "its stack", 70)
    assert read(path) == Recorded("rank 1 failed", "its stack")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=70, error_file=str(path))
    message: Any = failure.message
    assert message["message"] == "rank 1 failed"
    write(str(tmp_path / "nowhere" / "log"), "is passed over", "", 70)


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ('{"message": "short"}', Recorded("short", "")),
        ('{"message": {"message": "m", "extraInfo": null}}', Recorded("m", "")),
        ('{"message": {"message": ""}}', Recorded("an error without a message", "")),
        ("[]", None),
        ("7", None),
        ('{"message": {"message": 7}}', None),
        ('{"other": 1}', None),
    ],
)
def test_other_forms(text: str, recorded: Recorded | None) -> None:
    assert parse(text.encode()) == recorded


def test_a_file_that_is_none_of_its(tmp_path: Path) -> None:
    path = tmp_path / "0.error.json"
    assert read(path) is None
    for data in (b"", b"\xff\xfe", b"{", b"[" * 100_000):
        path.write_bytes(data)
        assert read(path) is None
    path.write_text(json.dumps({"message": "x" * MAX_BYTES}))
    assert read(path) is None
    assert read(tmp_path) is None
