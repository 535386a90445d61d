"""Reads a node's certificate from files, and reads it anew once they have changed.

Kubernetes and cert-manager change such files by turning a symbolic link to another directory. So
the three files may be of two certificates for a moment, and what does not go together is read again
at the next look. Until then, and where the new files are of no use, the earlier certificate counts.
A thread looks, for a file system may hang, and a connection must not wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticzero.errors import UserError
from elasticzero.launcher.tls.contexts import context_pair
from elasticzero.security.certificates import Credentials

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Least seconds between two looks at whether the files have changed."""
MAX_BYTES = 1 << 20
"""Maximum bytes of a file."""
Stamp = tuple[tuple[int, int, int, int] | None, ...]
"""Device, inode, size and time of change of each file; None: it cannot be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFiles:
    """Names the PEM files of a node's certificate."""

    certificate: str
    key: str
    authorities: str

    def paths(self) -> tuple[str, str, str]:
        return (self.certificate, self.key, self.authorities)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="elasticzero-certificates", daemon=True).start()


class FileCredentials:
    """Is the source of a certificate in files."""

    def __init__(
        self,
        files: CredentialFiles,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        """Reads the files; raises `UserError` for files that do not go together.

        Args:
            files: The files.
            clock: Returns the monotonic time.
            begin: Begins to call a function.
        """
        self._files, self._clock, self._begin = files, clock, begin
        self._is_looking = False
        self._stamp = _stamp(files)
        self._credentials = _read_checked(files)
        self._next_s = clock() + LOOK_S
        self._refused: Stamp | None = None
        """Files that were found to be of no use, so that this is logged once."""

    def __call__(self) -> Credentials:
        """Returns the certificate that counts now; where it is time, has the files looked at."""
        if self._clock() >= self._next_s and not self._is_looking:
            self._next_s = self._clock() + LOOK_S
            self._is_looking = True
            try:
                self._begin(self._look)
            except RuntimeError:  # the process can have no more threads
                self._is_looking = False
        return self._credentials

    def _look(self) -> None:
        try:
            self._read_changed()
        finally:
            self._is_looking = False

    def _read_changed(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        try:
            credentials = _read_checked(self._files)
        except UserError as error:
            if stamp == _stamp(self._files) and stamp != self._refused:
                self._refused = stamp
                log.warning("the changed certificate is not used, the earlier one is: %s", error)
            return
        self._stamp, self._credentials = stamp, credentials
        log.info("TLS: the certificate in %s has changed, and is used", self._files.certificate)


def read_authorities(path: str) -> str:
    """Returns the contents of the file of --tls-ca; raises `UserError`."""
    return _read("--tls-ca", path)


def _read_checked(files: CredentialFiles) -> Credentials:
    """Returns what the files hold; raises `UserError` if it is of no use."""
    credentials = Credentials(
        certificate=_read("--tls-cert", files.certificate),
        key=_read("--tls-key", files.key),
        authorities=_read("--tls-ca", files.authorities),
    )
    try:
        context_pair(credentials)
    except UserError as error:
        names = " ".join(
            f"{flag} {path}"
            for flag, path in zip(
                ("--tls-cert", "--tls-key", "--tls-ca"), files.paths(), strict=True
            )
        )
        raise UserError(f"{names}: {error}") from None
    return credentials


def _read(flag: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}; name a PEM file") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not text; a PEM file is expected") from None


def _stamp(files: CredentialFiles) -> Stamp:
    return tuple(map(_file_stamp, files.paths()))


def _file_stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
