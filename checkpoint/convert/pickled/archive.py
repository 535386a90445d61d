"""Reads the files that `torch.save` writes: zip archives of a pickle and the bytes of storages.

Only the pickle is read whole. The bytes of a storage are read by range, after one pass over them
that compares the archive's checksum.
"""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib

from elasticzero.checkpoint.convert.file_window import FileWindow
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.errors import CheckpointDamaged, UserError

_PICKLE, _STORAGES = "data.pkl", "data/"
_LIMIT_BYTES = 1 << 29
"""Maximum size of a pickle."""
_PASS_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, length of the name and length of the extra field of a record's own header."""
_ZIP = b"PK\x03\x04"
_OLD_FORMAT = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
"""First bytes of what torch wrote before 1.6, or writes with `_use_new_zipfile_serialization`."""
_ERRORS = (
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""The exceptions that zipfile raises for bytes that are no archive."""


class Archive:
    """Presents one file of `torch.save`: its pickle, and the storages beside it."""

    def __init__(self, storage: Readable, file: str) -> None:
        """Reads the list of records, and nothing else.

        Args:
            storage: The directory of the file.
            file: Name of the file.

        Raises:
            UserError: The file does not exist or is of another kind.
            CheckpointDamaged: The archive is damaged.
        """
        self.where = f"{storage.where}/{file}"
        self._storage, self._file = storage, file
        try:
            size = storage.size(file)
        except FileNotFoundError:
            raise UserError(f"{self.where} does not exist") from None
        first = bytearray(min(size, 32))
        storage.read_into(file, 0, memoryview(first))
        _check_kind(bytes(first), self.where)
        try:
            with zipfile.ZipFile(FileWindow(storage, file, 0, size)) as archive:
                self._records = {entry.filename: entry for entry in archive.infolist()}
        except _ERRORS as error:
            raise CheckpointDamaged(
                f"{self.where} is cut off or damaged, or is no archive: {error!r:.150}"
            ) from None
        self._first_bytes: dict[str, int] = {}
        """The place of each record's first byte in the file, once it is known."""
        self._root = next(iter(self._records), "").partition("/")[0] + "/"
        self._check_records()
        self._has_checksums = self._record(_PICKLE).CRC != 0  # torch can be told to write none
        self._checked: dict[str, threading.Lock | None] = {}
        self._lock = threading.Lock()

    def _check_records(self) -> None:
        if self._root + _PICKLE not in self._records:
            raise UserError(f"{self.where} is a zip archive that `torch.save` has not written")
        if self._root + "constants.pkl" in self._records:
            raise UserError(
                f"{self.where} is a program of TorchScript: save its state_dict() instead, "
                "`torch.save(torch.jit.load(FILE).state_dict(), NEW)`"
            )
        if any(record.compress_type != zipfile.ZIP_STORED for record in self._records.values()):
            raise UserError(
                f"{self.where} was compressed by another program than torch: unpack it, and pack "
                "it again without compression (`zip -0`)"
            )
        order = "byteorder"
        if self._root + order in self._records and self._read(order) != b"little":
            raise UserError(f"{self.where} has numbers with their first byte highest")

    @property
    def pickle_bytes(self) -> int:
        """Returns the size of the pickle."""
        return self._record(_PICKLE).file_size

    def pickle(self) -> bytes:
        """Returns the pickle, after comparing its checksum."""
        record = self._record(_PICKLE)
        if record.file_size > _LIMIT_BYTES:
            raise UserError(
                f"{self.where} has a pickle of {record.file_size} bytes, more than the "
                f"{_LIMIT_BYTES} that are read"
            )
        data = self._read(_PICKLE)
        if self._has_checksums and zlib.crc32(data) != record.CRC:
            raise CheckpointDamaged(f"{self.where}: {_PICKLE} is not what was written (CRC)")
        return data

    def size_of(self, key: str) -> int:
        """Returns the number of bytes of a storage; raises `CheckpointDamaged` if it is missing."""
        return self._record(_STORAGES + key).file_size

    def read_into(self, key: str, start: int, view: memoryview) -> None:
        """Fills `view` from byte `start` of a storage on.

        Args:
            key: The storage.
            start: Its first byte that is read.
            view: Takes the bytes.

        Raises:
            CheckpointDamaged: The bytes are not those that were written.
        """
        self._verify(key)
        self._read_at(self._record(_STORAGES + key), start, view)

    def _verify(self, key: str) -> None:
        """Compares a storage with its checksum, once for all threads."""
        with self._lock:
            lock = self._checked.setdefault(key, threading.Lock())
        if lock is None or not self._has_checksums:
            return
        with lock:
            if self._checked[key] is None:
                return
            record = self._record(_STORAGES + key)
            buffer = memoryview(bytearray(min(_PASS_BYTES, record.file_size)))
            done = checksum = 0
            while done < record.file_size:
                view = buffer[: min(_PASS_BYTES, record.file_size - done)]
                self._read_at(record, done, view)
                checksum, done = zlib.crc32(view, checksum), done + len(view)
            if checksum != record.CRC:
                raise CheckpointDamaged(
                    f"{self.where}: storage {key} is not what was written (its CRC differs)"
                )
            self._checked[key] = None

    def _record(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._records[self._root + name]
        except KeyError:
            raise CheckpointDamaged(f"{self.where} lacks its record {name!r:.80}") from None

    def _read(self, name: str) -> bytes:
        record = self._record(name)
        if record.file_size > self._storage.size(self._file):
            raise CheckpointDamaged(f"{self.where} ends before its record {name!r:.80}")
        data = bytearray(record.file_size)
        self._read_at(record, 0, memoryview(data))
        return bytes(data)

    def _read_at(self, record: zipfile.ZipInfo, start: int, view: memoryview) -> None:
        first = self._first_byte(record) + start
        if self._storage.read_into(self._file, first, view) != len(view):
            raise CheckpointDamaged(f"{self.where} ends within its record {record.filename!r:.80}")

    def _first_byte(self, record: zipfile.ZipInfo) -> int:
        """Returns the place of a record's first byte, which only its own header tells."""
        if (place := self._first_bytes.get(record.filename)) is not None:
            return place
        head = bytearray(_LOCAL_HEADER.size)
        count = self._storage.read_into(self._file, record.header_offset, memoryview(head))
        if count != len(head) or head[:4] != _ZIP:
            raise CheckpointDamaged(f"{self.where}: record {record.filename!r:.80} has no header")
        name_bytes, extra_bytes = map(int, _LOCAL_HEADER.unpack(head)[1:])
        place = int(record.header_offset) + len(head) + name_bytes + extra_bytes
        self._first_bytes[record.filename] = place
        return place


def _check_kind(first: bytes, where: str) -> None:
    """Raises `UserError` for a file of another kind, by its first bytes."""
    again = "write it again with `torch.save(torch.load(FILE, weights_only=True), NEW)`"
    if first.startswith(_OLD_FORMAT):
        raise UserError(f"{where} is of torch's format before 1.6, which is no archive: {again}")
    if first.startswith(b"\x80"):
        raise UserError(
            f"{where} is a pickle that `torch.save` has not written: load it where it was written, "
            "and save its tensors with `torch.save`"
        )
    if not first.startswith(_ZIP):
        raise UserError(f"{where} is no file that `torch.save` writes")
