"""Stores checkpoints in object stores and other places that fsspec reaches by URL.

Each package behind fsspec finds its credentials and its server as usual: for S3 in the environment
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...), AWS's own files or fsspec's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from elasticzero.checkpoint.storage import multipart
from elasticzero.checkpoint.storage.base import (
    Bytes,
    Views,
    as_storage_error,
    holds,
    partial_name,
)
from elasticzero.checkpoint.storage.multipart import http_status
from elasticzero.errors import StorageError, UserError

_READ_BYTES = 16 << 20
_S3 = frozenset({"s3", "s3a"})
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Protocols in which directories are only parts of names."""
_WHOLE_AT_CLOSE = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
"""Protocols in which a file that is being written appears whole when it is closed."""
_TRANSIENT_NAMES = frozenset(
    {"HTTPClientError", "ConnectionError", "ClientError", "ResponseParserError", "IncompleteRead"}
)
"""Names of exceptions of botocore, aiohttp and http.client that are transient and no `OSError`."""
_UNANSWERED_NAMES = frozenset({"ReadTimeoutError", "ConnectTimeoutError"})
"""Names of botocore's exceptions for a request without an answer."""
_memory_lock = threading.Lock()
"""Held while a file of `memory://` is compared and then replaced or removed."""
_ANSWER_S = 10.0
"""Time limit in seconds for connecting to S3, and for each wait for its answer."""
_REQUEST_S = 30.0
_SILENT_S = 1.5 * _ANSWER_S
"""Time in seconds without an answer after which a server gets no further request."""


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed later: it was throttled, timed out or broken
    off."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    status = http_status(error)
    if status is not None:
        return status in (408, 409, 429) or status >= 500
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


def _is_unanswered(error: BaseException | None) -> bool:
    return isinstance(error, TimeoutError) or type(error).__name__ in _UNANSWERED_NAMES


class _StopWhereSilent(stop_base):
    """Stops after the time limit if the last request got no answer either."""

    def __call__(self, retry_state: RetryCallState) -> bool:
        outcome = retry_state.outcome
        error = outcome.exception() if outcome is not None else None
        return _is_unanswered(error) and (retry_state.seconds_since_start or 0.0) >= _SILENT_S


RETRY = Retrying(
    retry=retry_if_exception(is_transient),
    stop=stop_after_attempt(8) | stop_after_delay(60) | _StopWhereSilent(),
    wait=wait_random_exponential(multiplier=0.2, max=10),
    sleep=time.sleep,
    reraise=True,
)


@dataclass(frozen=True, slots=True)
class Remote:
    """Calls one of fsspec's file systems, and repeats a request that failed for a transient
    reason."""

    fs: Any
    retry: Retrying = RETRY

    def call(self, method: str, *arguments: object, **options: object) -> Any:
        return self.retry(getattr(self.fs, method), *arguments, **self.limit(method), **options)

    def limit(self, method: str) -> dict[str, float]:
        """Returns the time limit of one whole request to S3.

        Data sent to a server that reads nothing has no other limit. Data that is received has its
        own.
        """
        limited = method != "cat_file" and self.speaks(_S3)
        return {"timeout": _REQUEST_S} if limited else {}

    def speaks(self, protocols: frozenset[str]) -> bool:
        protocol = self.fs.protocol
        return not protocols.isdisjoint({protocol} if isinstance(protocol, str) else protocol)


class ObjectStorage:
    """Stores one step's files under a URL."""

    def __init__(self, remote: Remote, root: str, where: str) -> None:
        """Names one step's files; nothing is requested yet.

        Args:
            remote: The file system.
            root: Path of the step in it.
            where: URL of the step, for messages.
        """
        self.where = where
        self._remote = remote
        self._root = root

    def size(self, name: str) -> int:
        with self._as_storage_error("look at", name):
            info = self._remote.call("info", self._path(name))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self.where}/{name}")
        return int(info["size"])

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        done, size, views = 0, sum(map(len, buffers)), Views(buffers)
        while done < size:
            stop = min(size, done + _READ_BYTES)
            data = self._range(name, start + done, start + stop)
            at = 0
            for view in views.take(len(data)):
                view[:] = data[at : at + len(view)]
                at += len(view)
            done += len(data)
            if done < stop:
                break
        return done

    def write(
        self, name: str, chunks: Iterable[Bytes], *, size: int | None = None, cached: bool = True
    ) -> None:
        remote, path = self._remote, self._path(name)
        with self._as_storage_error("write", name, or_missing=True):
            if remote.speaks(_S3):
                multipart.upload(remote.fs, path, chunks, size, remote.retry)
            elif remote.speaks(_WHOLE_AT_CLOSE):
                self._stream(path, chunks)
            else:
                staged = self._path(partial_name(name))
                try:
                    self._stream(staged, chunks)
                    remote.fs.mv(staged, path)
                finally:
                    with suppress(FileNotFoundError):
                        remote.fs.rm_file(staged)

    def create_exclusive(self, name: str, data: bytes, *, instead_of: bytes | None = None) -> bool:
        """Creates the file as the protocol says if the store has a conditional put.

        S3 has one by `If-None-Match`, Google by generation, and `memory://` within its one process.
        Elsewhere this is an existence check and then a write: of two writers that create the same
        file within that moment the later wins, and both get True. A file is replaced by `If-Match`
        on S3, and in `memory://` under a lock. Elsewhere, on Google's and Azure's stores too, this
        is a comparison and then a write.

        Args:
            name: The file's name.
            data: Its bytes.
            instead_of: Bytes of the file that this one replaces; None: there is no such file.
        """
        if instead_of is not None:
            return self._replace(name, data, instead_of)
        path = self._path(name)

        def create() -> None:
            remote = self._remote
            if remote.fs.exists(path, **remote.limit("exists")):
                raise FileExistsError(path)
            remote.fs.pipe_file(path, data, mode="create", **remote.limit("pipe_file"))

        with self._as_storage_error("create", name, or_missing=True):
            try:
                self._remote.retry(create)
                return True
            except FileExistsError:
                pass
            except Exception as error:
                if http_status(error) != 412:
                    raise
        return holds(self, name, data)

    def _replace(self, name: str, data: bytes, expected: bytes) -> bool:
        """Replaces a file that has the expected bytes; False if it has others.

        Args:
            name: The file's name.
            data: Its new bytes.
            expected: The bytes that it must have.
        """
        remote, path = self._remote, self._path(name)
        with self._as_storage_error("replace", name, or_missing=True), self._compared(name) as info:
            if not holds(self, name, expected):
                pass
            elif tag := _tag(info):
                multipart.put_matching(remote.fs, path, data, tag, remote.retry)
            else:
                self.write(name, [data], size=len(data))
        return holds(self, name, data)

    @contextmanager
    def _compared(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Yields what S3 says of a file now, by whose tag a request holds only for these bytes;
        nothing in other stores, or if the file is gone.

        Nothing else compares and changes a file in `memory://` meanwhile.
        """
        if self._remote.speaks(frozenset({"memory"})):
            with _memory_lock:
                yield {}
            return
        info: Mapping[str, Any] = {}
        if self._remote.speaks(_S3):
            with suppress(FileNotFoundError):
                info = self._remote.call("info", self._path(name), refresh=True)
        yield info

    def names(self) -> list[str]:
        with self._as_storage_error("list", "its files"):
            return _listed(self._remote, self._root, ("file",))

    def versions(self) -> dict[str, str]:
        with self._as_storage_error("list", "its files"):
            entries = _entries(self._remote, self._root, ("file",))
            return {name: self._version(entry) for name, entry in entries.items()}

    def _version(self, entry: Mapping[str, Any]) -> str:
        """Returns what tells a file from others of its name: the time of its last write, and on S3
        its tag. Servers of S3 state the time of one file by the second, and list it otherwise. A
        store that states neither has "", and any file is then the expected one."""
        written_s = _written_s(entry)
        if self._remote.speaks(_S3):
            tag = _tag(entry).strip('"')
            return f"{tag} {int(written_s)}"
        return repr(written_s) if written_s else ""

    def remove(
        self, name: str, *, holding: bytes | None = None, version: str | None = None
    ) -> None:
        """Removes the file as the protocol says.

        One that must have certain bytes, or be of a certain version, is compared first. S3 then
        removes it by `If-Match`; elsewhere another writer may replace it between the comparison and
        the removal, and on S3 one that writes the same bytes.

        Args:
            name: The file's name.
            holding: The bytes that it must have; None: it may have any.
            version: The version that it must have; None: it may have any.
        """
        remote, path = self._remote, self._path(name)
        with self._as_storage_error("remove", name), suppress(FileNotFoundError):
            if holding is None and version is None:
                remote.call("rm_file", path)
                return
            with self._compared(name) as info:
                if version is not None:
                    info = info or remote.call("info", path)
                    if self._version(info) not in (version, "") and version:
                        return
                if holding is not None and not holds(self, name, holding):
                    return
                if remote.speaks(_S3) and _tag(info):
                    multipart.remove_matching(remote.fs, path, _tag(info), remote.retry)
                else:
                    remote.call("rm_file", path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _range(self, name: str, start: int, stop: int) -> bytes:
        with self._as_storage_error("read", name):
            try:
                data: bytes = self._remote.call("cat_file", self._path(name), start=start, end=stop)
            except Exception as error:
                if http_status(error) != 416:  # the file ends before `start`
                    raise
                return b""
        return data

    def _stream(self, path: str, chunks: Iterable[Bytes]) -> None:
        file = self._remote.fs.open(path, "wb", block_size=multipart.UPLOAD_PART_BYTES)
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            with suppress(Exception):
                file.discard()
                file.closed = True  # or else fsspec uploads the buffer when the object is destroyed
            raise
        file.close()

    @contextmanager
    def _as_storage_error(
        self, verb: str, name: str, *, or_missing: bool = False
    ) -> Iterator[None]:
        with as_storage_error(
            f"cannot {verb} {name} in {self.where}", or_missing=or_missing, foreign=True
        ):
            yield


class ObjectDirectory:
    """Manages a checkpoint directory under a URL."""

    def __init__(self, remote: Remote, root: str, where: str) -> None:
        """Names a checkpoint directory; nothing is requested yet.

        Args:
            remote: The file system.
            root: Path of the directory in it.
            where: URL of the directory, for messages.
        """
        self.where = where
        self._remote = remote
        self._root = root

    def names(self) -> list[str]:
        with as_storage_error(f"cannot list {self.where}", foreign=True):
            return _listed(self._remote, self._root, ("file", "directory"))

    def files(self) -> dict[str, dict[str, float]]:
        times_of_step: dict[str, dict[str, float]] = {}
        with (
            as_storage_error(f"cannot list {self.where}", foreign=True),
            suppress(FileNotFoundError),
        ):
            for path, entry in self._remote.call("find", self._root, detail=True).items():
                step, slash, name = str(path).removeprefix(self._root).strip("/").partition("/")
                if slash and "/" not in name:
                    times_of_step.setdefault(step, {})[name] = _written_s(entry)
        return times_of_step

    def step(self, name: str) -> ObjectStorage:
        return ObjectStorage(self._remote, f"{self._root}/{name}", f"{self.where}/{name}")

    def make(self, name: str) -> ObjectStorage:
        if not self._remote.speaks(_FLAT):
            with as_storage_error(f"cannot make the directory {self.where}/{name}", foreign=True):
                self._remote.call("makedirs", f"{self._root}/{name}", exist_ok=True)
        return self.step(name)

    def remove(self, name: str) -> None:
        if not self._remote.speaks(_FLAT):
            with suppress(OSError):
                self._remote.fs.rmdir(f"{self._root}/{name}")

    def check_writable(self) -> None:
        probe = f"{self._root}/.writable-{os.getpid()}-{os.urandom(4).hex()}"
        problem = f"the checkpoint directory {self.where} cannot be written"
        with as_storage_error(problem, or_missing=True, foreign=True):
            if not self._remote.speaks(_FLAT):
                self._remote.call("makedirs", self._root, exist_ok=True)
            self._remote.call("pipe_file", probe, b"-")
            self._remote.call("rm_file", probe)


EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extra of this package with which each scheme of a URL can be used."""


def file_system(url: str, retry: Retrying = RETRY) -> tuple[Remote, str]:
    """Returns (fsspec's file system, the path in it) of a URL; raises `UserError` for an invalid
    one."""
    scheme = url.split("://")[0]
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(url, **_options(scheme, fsspec.config.conf))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        how = f": run pip install 'elasticzero[{extra}]'" if extra else ""
        raise UserError(f"{url!r} cannot be used: {error}{how}") from None
    except ValueError as error:
        raise UserError(
            f"{url!r} is no place that fsspec knows ({error}): give a path, file://, s3://, gs://, "
            f"or install the package for {scheme}://"
        ) from None
    except OSError as error:  # ftp, say, connects at once
        raise StorageError(f"{url} cannot be reached: {error}") from None
    if Remote(fs, retry).speaks(frozenset({"file", "local"})):
        raise UserError(f"{url!r} is no URL: give a path, file:///PATH or SCHEME://PLACE")
    if scheme in ("s3", "s3a"):
        fs.retries = 1  # `retry` does that, here and in botocore below
    return Remote(fs, retry), root.rstrip("/")


def refuses_second_put(url: str, name: str) -> bool:
    """Returns whether the store itself refuses to create a file that exists in the directory at
    `url`.

    A store without conditional puts writes the file anew. Raises `StorageError` for other faults.
    """
    remote, root = file_system(url)
    with as_storage_error(f"cannot create {name} in {url}", or_missing=True, foreign=True):
        try:
            remote.call("pipe_file", f"{root}/{name}", b"again", mode="create")
        except FileExistsError:
            return True
        except Exception as error:
            if http_status(error) != 412:
                raise
            return True
    return False


def _options(scheme: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a file system, which also separate this instance from the script's
    own."""
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        configured_s3 = configured.get(scheme, {}).get("config_kwargs", {})
        limits = {"connect_timeout": _ANSWER_S, "read_timeout": _ANSWER_S}
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **limits, **configured_s3}
    return options


def _listed(remote: Remote, root: str, kinds: Iterable[str]) -> list[str]:
    return sorted(_entries(remote, root, kinds))


def _entries(remote: Remote, root: str, kinds: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Returns what a store says of each entry of a directory, by name; nothing if it does not
    exist.

    Args:
        remote: The file system.
        root: Path of the directory in it.
        kinds: Kinds of entries that are returned.
    """
    try:
        entries = remote.call("ls", root, detail=True, refresh=True)
    except FileNotFoundError:
        return {}
    paths = {str(entry["name"]).rstrip("/"): entry for entry in entries if entry["type"] in kinds}
    return {
        path.rsplit("/", 1)[-1]: entry
        for path, entry in paths.items()
        if path.strip("/") != root.strip("/")
    }


def _tag(info: Mapping[str, Any]) -> str:
    """Returns the tag (ETag) that S3 states of a file; "" if it states none."""
    return str(info.get("ETag", ""))


def _written_s(entry: Mapping[str, Any]) -> float:
    """Returns the time of a file's last write, in seconds; packages store it under several names.

    Returns 0 if none is known: then no file is older than another.
    """
    for key in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        value = entry.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
