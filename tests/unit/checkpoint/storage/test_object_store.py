"""Which errors of object stores pass, and files that appear whole at their close or not at all."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import botocore.exceptions as botocore
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from tenacity import stop_after_attempt, wait_none

from elasticzero.checkpoint.storage import multipart, object_store
from elasticzero.checkpoint.storage.object_store import RETRY, ObjectStorage, Remote, is_transient
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import StorageError

FAST = RETRY.copy(wait=wait_none(), stop=stop_after_attempt(3))


def answered(status: int) -> Exception:
    error = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    raised: Exception = botocore.ClientError(error, "PutObject")
    return raised


class Translated(OSError):
    """As s3fs raises: the answer is its cause."""

    def __init__(self, status: int) -> None:
        super().__init__(errno.EIO, "translated")
        self.__cause__ = answered(status)


class Coded(Exception):
    """As gcsfs raises."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{code}")
        self.code = code


PASSING = [
    TimeoutError(),
    ConnectionResetError(),
    botocore.EndpointConnectionError(endpoint_url="http://x"),
    botocore.ReadTimeoutError(endpoint_url="http://x"),
    botocore.HTTPClientError(error="cut"),
    *(kind(status) for kind in (answered, Translated, Coded) for status in (409, 429, 500, 503)),
]
LASTING = [
    FileNotFoundError(),
    PermissionError(),
    OSError(errno.EINVAL, "no"),
    ValueError(),
    botocore.NoCredentialsError(),
    *(kind(status) for kind in (answered, Translated, Coded) for status in (400, 403, 404, 412)),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_passes_is_tried_again(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_lasts_is_not(error: Exception) -> None:
    assert not is_transient(error)


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """A store like Google's: a file that is opened to be written appears when it is closed."""

    protocol = "gs"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.failures: list[Exception] = []

    def _open(self, path: str, mode: str = "rb", **options: Any) -> AbstractBufferedFile:
        return _Upload(self, path, mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return self.objects[path][start:end]


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True


def test_a_file_appears_when_it_is_whole() -> None:
    bucket = Bucket()
    storage = ObjectStorage(Remote(bucket), "run", "gs://run")
    chunks = [b"x" * (9 << 20), b"y" * (9 << 20)]
    storage.write("file", iter(chunks))
    assert bucket.objects == {"run/file": b"".join(chunks)}


@pytest.mark.parametrize("before", [1, 40 << 20])
def test_a_file_that_broke_off_never_appears(before: int) -> None:
    def breaks() -> Iterator[bytes]:
        yield bytes(before)
        raise ZeroDivisionError

    bucket = Bucket()
    with pytest.raises(ZeroDivisionError):
        ObjectStorage(Remote(bucket), "run", "gs://run").write("file", breaks())
    assert bucket.objects == {}


def test_reads_fail_after_some_tries_and_name_the_place() -> None:
    bucket = Bucket()
    bucket.objects["run/file"] = b"abc"
    storage = ObjectStorage(Remote(bucket, FAST), "run", "gs://run")
    data = memoryview(bytearray(3))
    bucket.failures = [Coded(503), TimeoutError()]
    assert storage.read_into("file", 0, data) == 3
    bucket.failures = [Coded(503)] * 3
    with pytest.raises(StorageError, match="cannot read file in gs://run: 503"):
        storage.read_into("file", 0, data)
    bucket.failures = [Coded(503), Coded(403)]
    with pytest.raises(StorageError, match="cannot read file in gs://run: 403"):
        storage.read_into("file", 0, data)
    assert len(bucket.failures) == 1


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Accepts connections and never answers; a tenth of a second is long here."""
    monkeypatch.setattr(object_store, "_ANSWER_S", 0.1)
    monkeypatch.setattr(object_store, "_SILENT_S", 0.15)
    monkeypatch.setattr(object_store, "_REQUEST_S", 0.2)
    monkeypatch.setattr(multipart, "PART_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield server


def test_a_server_that_never_answers_is_soon_given_up(silent_server: socket.socket) -> None:
    directory = open_directory("s3://silent-bucket/run")
    uses: list[Callable[[], object]] = [
        directory.names,
        directory.check_writable,
        lambda: directory.step("s").write("file", [b"x"]),
        lambda: directory.step("s").write("file", [bytes(17 << 20)]),
    ]
    for use in uses:
        began_s = time.monotonic()
        with pytest.raises(StorageError, match=r"s3://silent-bucket/run.*[Tt]ime"):
            use()
        assert time.monotonic() - began_s < 30.0
