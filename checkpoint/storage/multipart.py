"""Uploads a file to S3 in parts, several at a time, in bounded memory; it appears whole or not at
all."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

from tenacity import Retrying, stop_after_attempt

from elasticzero.checkpoint.storage.base import Bytes
from elasticzero.errors import StorageError

UPLOAD_PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
PART_S = 60.0
"""Time limit for sending one part, in seconds."""
_ABORT_S = 5.0
_MOST_PARTS = 10_000
"""Maximum number of parts of an upload, which S3 sets."""


def upload(fs: Any, path: str, chunks: Iterable[Bytes], size: int | None, retry: Retrying) -> None:
    """Uploads bytes to a place of an s3fs file system.

    The object appears whole or not at all, and an upload that fails is aborted. The upload of a
    killed process stays in the bucket, invisible, until the bucket's own rule removes it
    (`AbortIncompleteMultipartUpload`).

    Args:
        fs: The file system.
        path: The bucket and the key, as `bucket/key`.
        chunks: The bytes.
        size: Their number; None: it is not known, and must be at most 160 GB.
        retry: How requests are retried.
    """
    part_bytes = max(UPLOAD_PART_BYTES, -(-(size or 0) // _MOST_PARTS))
    parts = _cut(chunks, part_bytes)
    first = next(parts, b"")
    bucket, key, _ = fs.split_path(path)
    target: dict[str, Any] = {"Bucket": bucket, "Key": key}
    if len(first) < part_bytes:
        retry(lambda: fs.call_s3("put_object", Body=io.BytesIO(first), timeout=PART_S, **target))
        return
    target["UploadId"] = retry(fs.call_s3, "create_multipart_upload", **target)["UploadId"]
    try:
        sent, total = _send(fs, target, chain([first], parts), retry)
        try:
            done = {"Parts": sent}
            retry(fs.call_s3, "complete_multipart_upload", MultipartUpload=done, **target)
        except FileNotFoundError:
            # If only the answer was lost, the second try finds no upload but the object.
            if retry(fs.info, path)["size"] != total:
                raise
    except BaseException:
        with suppress(Exception):
            few = retry.copy(stop=stop_after_attempt(3))
            few(fs.call_s3, "abort_multipart_upload", timeout=_ABORT_S, **target)
        raise


def put_matching(fs: Any, path: str, data: bytes, tag: str, retry: Retrying) -> None:
    """Puts a small object in the place of one; does nothing if that has another tag by now.

    Args:
        fs: The file system.
        path: The bucket and the key, as `bucket/key`.
        data: The bytes.
        tag: S3's tag (ETag) of the object that is replaced.
        retry: How requests are retried.
    """
    _call_matching(fs, "put_object", path, tag, retry, lambda: {"Body": io.BytesIO(data)})


def remove_matching(fs: Any, path: str, tag: str, retry: Retrying) -> None:
    """Removes an object; does nothing if it has another tag by now.

    Args:
        fs: The file system.
        path: The bucket and the key, as `bucket/key`.
        tag: S3's tag (ETag) of the object.
        retry: How requests are retried.
    """
    _call_matching(fs, "delete_object", path, tag, retry, dict)


def _call_matching(
    fs: Any,
    method: str,
    path: str,
    tag: str,
    retry: Retrying,
    body: Callable[[], dict[str, Any]],
) -> None:
    """Sends a request with `If-Match`; a server that has no such condition gets it without.

    Args:
        fs: The file system.
        method: The request's name.
        path: The bucket and the key, as `bucket/key`.
        tag: Tag that the object must have.
        retry: How requests are retried.
        body: Returns the request's further arguments, anew for each try.
    """
    bucket, key, _ = fs.split_path(path)
    target: dict[str, Any] = {"Bucket": bucket, "Key": key, "timeout": PART_S}
    try:
        retry(lambda: fs.call_s3(method, IfMatch=tag, **body(), **target))
    except FileNotFoundError:
        return
    except Exception as error:
        if http_status(error) == 412:
            return
        if http_status(error) != 501 and type(error).__name__ != "ParamValidationError":
            raise
        retry(lambda: fs.call_s3(method, **body(), **target))


def http_status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error, or None; packages store it in several attributes."""
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status if isinstance(status, int) else None
        for name in ("status", "status_code", "code"):
            if isinstance(value := getattr(link, name, None), int):
                return value
    return None


def _send(
    fs: Any, target: dict[str, Any], parts: Iterable[bytes], retry: Retrying
) -> tuple[list[dict[str, Any]], int]:
    """Sends the parts; returns (the parts' numbers and ETags for S3, their number of bytes).

    Args:
        fs: File system of s3fs.
        target: Arguments of the requests: bucket, key and id of the upload.
        parts: Parts of the object, in order.
        retry: How requests are retried.

    Raises:
        StorageError: Another process has aborted the upload.
    """

    def send(number: int, part: bytes) -> dict[str, Any]:
        named = target | {"PartNumber": number}
        try:
            answer = retry(
                lambda: fs.call_s3("upload_part", Body=io.BytesIO(part), timeout=PART_S, **named)
            )
        except FileNotFoundError as error:
            raise StorageError(f"the upload was aborted by another: {error}") from error
        return {"PartNumber": number, "ETag": answer["ETag"]}

    sent: list[dict[str, Any]] = []
    flying: deque[Future[dict[str, Any]]] = deque()
    total = 0
    with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="upload") as pool:
        try:
            for number, part in enumerate(parts, 1):
                if len(flying) == PARTS_IN_FLIGHT:
                    sent.append(flying.popleft().result())
                flying.append(pool.submit(send, number, part))
                total += len(part)
            sent.extend(future.result() for future in flying)
        except BaseException:
            for future in flying:
                future.cancel()
            raise
    return sent, total


def _cut(chunks: Iterable[Bytes], part_bytes: int) -> Iterator[bytes]:
    """Yields the same bytes in parts of one size; the last is smaller."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        start = 0
        while start < len(view):
            stop = min(len(view), start + part_bytes - len(part))
            part += view[start:stop]
            start = stop
            if len(part) == part_bytes:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)
