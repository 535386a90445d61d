"""Opens the storage that a path or URL means.

What opens a kind of storage is imported where a URL means that kind: a job on disk does without
fsspec, and a command that opens no storage without either.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from pathlib import Path

from elasticzero.checkpoint.storage.base import Directory, Storage
from elasticzero.errors import UserError

_URL_OF_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/|$)")
"""Matches a URL that lost a slash, as `pathlib.Path("s3://bucket")` does."""
_WITH_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})


def open_directory(url: str | os.PathLike[str]) -> Directory:
    """Returns the checkpoint directory at a path, a `file://` URL or any URL that fsspec supports.

    Raises `UserError` for an invalid URL, or if its package is not installed.
    """
    path = _disk_path(url)
    if path is not None:
        from elasticzero.checkpoint.storage.disk import DiskDirectory

        return DiskDirectory(path)
    from elasticzero.checkpoint.storage.object_store import ObjectDirectory, file_system

    text = _remote_url(os.fspath(url))
    return ObjectDirectory(*file_system(text), text)


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Returns the files directly at a path or URL, which is as for `open_directory`."""
    path = _disk_path(url)
    if path is not None:
        from elasticzero.checkpoint.storage.disk import DiskStorage

        return DiskStorage(path)
    from elasticzero.checkpoint.storage.object_store import ObjectStorage, file_system

    text = _remote_url(os.fspath(url))
    return ObjectStorage(*file_system(text), text)


def _disk_path(url: str | os.PathLike[str]) -> Path | None:
    """Returns the absolute path of a directory on a file system, None for a URL of another kind."""
    text = os.fspath(url)
    if not text.strip():
        raise UserError('the path is empty: give a directory ("." for this one)')
    scheme, separator, rest = text.partition("://")
    if not separator:
        if match := _URL_OF_ONE_SLASH.match(text):
            raise UserError(
                f"{text!r} is neither a path nor a URL: give {match[1]}://..., as text and not as "
                f"a pathlib.Path, or ./{text} for a directory of that name"
            )
        return Path(os.path.abspath(os.path.expanduser(text)))
    if scheme.lower() not in ("file", "local"):
        return None
    host, _, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise UserError(f"{text!r} is on another machine: a file:// URL means a path on this one")
    if not path:
        raise UserError(f"{text!r} names no directory: give file:///PATH")
    return Path(os.path.abspath("/" + urllib.parse.unquote(path)))


def _remote_url(text: str) -> str:
    """Returns the URL without slashes at its end; raises `UserError` for one that names no
    place."""
    scheme, _, rest = text.partition("://")
    if not rest.strip("/") or (scheme.lower() in _WITH_BUCKETS and rest.startswith("/")):
        example = "BUCKET/DIRECTORY" if scheme.lower() in _WITH_BUCKETS else "DIRECTORY"
        raise UserError(f"{text!r} names no place: give {scheme}://{example}")
    return text.rstrip("/")
