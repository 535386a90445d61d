"""Harm to requests on their way to an S3 server: throttled, cut, unanswered; a writer killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from tenacity import stop_after_attempt, wait_none

from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.steps import catalog, commit, verify
from elasticzero.checkpoint.storage import multipart
from elasticzero.checkpoint.storage.base import Directory, Storage
from elasticzero.checkpoint.storage.object_store import RETRY, ObjectDirectory, file_system
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import StorageError
from tests.contract.s3_server import COMPLETE, PUT, UPLOAD_PART, Harm, Proxy
from tests.support.cases import slow
from tests.support.deadlines import patience
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks

URL = "s3://bucket/run"
CONTENT = bytes(range(251)) * (11 << 12)
"""Three parts of an upload."""
FIRST_RANGE = re.compile(r"GET .*/file")


@pytest.fixture
def directory(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> Directory:
    """Gives up after three tries, without waiting."""
    monkeypatch.setattr(multipart, "UPLOAD_PART_BYTES", 5 << 20)
    retry = RETRY.copy(wait=wait_none(), stop=stop_after_attempt(3))
    return ObjectDirectory(*file_system(URL, retry), URL)


@pytest.fixture
def storage(directory: Directory) -> Storage:
    return directory.step("step")


def first(harm: Harm, pattern: re.Pattern[str], times: int = 1) -> Callable[[str], Harm]:
    """Harm the first requests of a kind."""
    left = [times]

    def choose(line: str) -> Harm:
        if not pattern.match(line) or not left[0]:
            return None
        left[0] -= 1
        return harm

    return choose


def always(harm: Harm, pattern: re.Pattern[str]) -> Callable[[str], Harm]:
    return lambda line: harm if pattern.match(line) else None


def dangling() -> list[Any]:
    """Uploads that were begun and neither completed nor aborted."""
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    return list(fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []))


def read(storage: Storage, name: str = "file") -> bytes:
    data = bytearray(storage.size(name))
    return bytes(data[: storage.read_into(name, 0, memoryview(data))])


@pytest.mark.parametrize("harm", ["busy", "cut", "silent"])
@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_that_fails_once_is_sent_again(
    s3: Proxy, storage: Storage, harm: Harm, part: int
) -> None:
    s3.harm = first(harm, re.compile(rf"PUT .*partNumber={part}\b"))
    storage.write("file", [CONTENT])
    assert s3.count(UPLOAD_PART) == 4
    assert read(storage) == CONTENT
    assert not dangling()


@pytest.mark.parametrize("harm", ["busy", "cut", "silent", "forbidden"])
def test_a_part_that_always_fails_ends_the_upload_cleanly(
    s3: Proxy, storage: Storage, harm: Harm
) -> None:
    storage.write("file", [b"old"])
    s3.harm = always(harm, re.compile(r"PUT .*partNumber=2\b"))
    with pytest.raises(StorageError, match=f"cannot write file in {URL}/step: "):
        storage.write("file", [CONTENT])
    tries = {"busy": 3, "forbidden": 1}.get(harm or "", 6)  # aiohttp repeats what was cut itself
    assert s3.count(re.compile(r"PUT .*partNumber=2\b")) in range(tries // 2, tries + 1)
    assert read(storage) == b"old"
    assert storage.names() == ["file"]
    assert not dangling()


def test_chunks_that_end_in_an_error_abort_the_upload(s3: Proxy, storage: Storage) -> None:
    def breaks() -> Iterator[bytes]:
        yield CONTENT
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.write("file", breaks())
    assert s3.count(UPLOAD_PART) == 2
    assert storage.names() == []
    assert not dangling()


@pytest.mark.parametrize("harm", ["busy", "silent"])
def test_the_end_of_an_upload_may_be_said_twice(s3: Proxy, storage: Storage, harm: Harm) -> None:
    s3.harm = first(harm, COMPLETE)
    storage.write("file", [CONTENT])
    assert s3.count(COMPLETE) == 2
    assert read(storage) == CONTENT


@pytest.mark.parametrize("harm", ["busy", "cut", "silent"])
def test_who_creates_knows_it_though_the_answer_was_lost(
    s3: Proxy, storage: Storage, harm: Harm
) -> None:
    s3.harm = first(harm, PUT)
    assert storage.create_exclusive("file", b"mine")
    assert not storage.create_exclusive("file", b"another's")
    assert read(storage) == b"mine"


@pytest.mark.parametrize("harm", ["busy", "cut", "silent"])
def test_a_read_is_repeated(s3: Proxy, storage: Storage, harm: Harm) -> None:
    storage.write("file", [b"x" * 100])
    s3.harm = first(harm, FIRST_RANGE, times=2)
    assert read(storage) == b"x" * 100
    assert s3.count(FIRST_RANGE) == 3


def test_what_helps_nothing_is_not_repeated(s3: Proxy, storage: Storage) -> None:
    storage.write("file", [b"x"])
    s3.harm = always("forbidden", FIRST_RANGE)
    with pytest.raises(StorageError, match=f"cannot read file in {URL}/step: AccessDenied"):
        read(storage)
    assert s3.count(FIRST_RANGE) == 1
    s3.reset()
    with pytest.raises(FileNotFoundError):
        storage.read_into("missing", 0, memoryview(bytearray(5)))
    assert s3.count(re.compile("GET .*missing")) == 1


def test_a_bucket_that_does_not_exist_is_named(s3: Proxy) -> None:
    with pytest.raises(StorageError, match=r"s3://nowhere/run cannot be written: .*not exist"):
        open_directory("s3://nowhere/run").check_writable()


def test_the_tools_take_urls(s3: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    whole_step(open_directory(URL), 7)
    assert main(["verify", URL]) == 0
    assert f"{URL}/step-000000000007: good" in capsys.readouterr().out
    assert main(["inspect", f"{URL}/step-000000000007"]) == 0
    assert "model/w" in capsys.readouterr().out


def whole_step(directory: Directory, step: int) -> None:
    layout = simple_layout()
    draft = draft_of(layout, step=step)
    storage = commit.prepare(directory, step)
    write_ranks(storage, draft, elements(layout.tensors))
    assert commit.commit(storage, draft, wait_s=0.0)


WRITER = """
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.storage import multipart
from elasticzero.checkpoint.storage.urls import open_directory
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_ranks

multipart.UPLOAD_PART_BYTES = 5 << 20
layout = simple_layout(numel=2_000_000)
draft = draft_of(layout, step=8)
storage = commit.prepare(open_directory("s3://bucket/run"), 8)
write_ranks(storage, draft, elements(layout.tensors))
commit.commit(storage, draft, wait_s=0.0)
"""


@pytest.mark.parametrize("at", [slow(UPLOAD_PART), COMPLETE, re.compile("PUT .*sums$"), slow(PUT)])
def test_a_writer_killed_in_the_middle_leaves_the_step_before(
    s3: Proxy, at: re.Pattern[str]
) -> None:
    directory = open_directory(URL)
    whole_step(directory, 7)
    s3.seen.clear()
    s3.harm = always("cut", at)
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + patience(60)
    while not s3.count(at):
        assert writer.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    s3.harm = lambda _: None
    assert catalog.newest_good(directory) == 7
    assert list(verify.find_corruption(catalog.resolve(URL))) == []
    whole_step(directory, 8)
    assert catalog.newest_good(directory) == 8
    assert list(verify.find_corruption(catalog.resolve(URL))) == []
