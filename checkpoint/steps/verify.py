"""Reads every byte of a step to find the bytes that differ from what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from elasticzero.checkpoint.format.checksums import BlockReader
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile
from elasticzero.checkpoint.format.names import MANIFEST_NAME
from elasticzero.checkpoint.format.shards import HEADER_LIMIT_BYTES, open_shard, parse_header
from elasticzero.checkpoint.steps.catalog import read_manifest, step_error
from elasticzero.checkpoint.storage.base import Readable, out_of_reach
from elasticzero.errors import ElasticZeroError


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """Describes one fault of a step."""

    file: str
    start: int | None = None
    """Position of the first bad byte; None: the file as a whole is bad."""
    stop: int | None = None
    reason: str


def find_corruption(storage: Readable) -> Iterator[Corruption]:
    """Yields every fault of a step: in its manifest, and in every block of every file it names.

    The reason tells if a file is, by its own header, another one. Raises `StorageError` if nothing
    can be determined about the bytes: permission is missing, or storage gives no answer.
    """
    try:
        manifest = read_manifest(storage)
    except ElasticZeroError as error:
        yield _fault(MANIFEST_NAME, error)
        return
    good = True
    for rank, file in enumerate(manifest.files):
        faults = list(_block_faults(storage, file))
        faults = faults or list(_content_faults(storage, manifest, rank))
        instead = _file_found_instead(storage, manifest, rank) if faults else None
        for fault in faults:
            good = False
            yield fault if instead is None else replace(fault, reason=f"{fault.reason}; {instead}")
    if good and (seen_at_a_look := step_error(storage)) is not None:
        yield _fault(MANIFEST_NAME, seen_at_a_look)


def _block_faults(storage: Readable, file: ShardFile) -> Iterator[Corruption]:
    try:
        for start, stop in BlockReader(storage, file).bad_ranges():
            past = start >= file.bytes
            reason = "more bytes than were written" if past else "not what was written, or missing"
            yield Corruption(file=file.name, start=start, stop=stop, reason=reason)
    except ElasticZeroError as error:
        yield _fault(file.name, error)


def _content_faults(storage: Readable, manifest: Manifest, rank: int) -> Iterator[Corruption]:
    try:
        open_shard(storage, manifest, rank)
    except ElasticZeroError as error:
        yield _fault(manifest.files[rank].name, error)


def _fault(name: str, error: ElasticZeroError) -> Corruption:
    """Returns an error as corruption of a file; raises it if it says nothing about the file's
    bytes."""
    if out_of_reach(error):
        raise error
    return Corruption(file=name, reason=str(error))


def _file_found_instead(storage: Readable, manifest: Manifest, rank: int) -> str | None:
    """Returns which other file is in the place of a rank's, by its unverified header.

    Returns None if that cannot be read, or names the right file.

    Args:
        storage: The step's files.
        manifest: Manifest of the step.
        rank: The rank whose file is examined.
    """
    name = manifest.files[rank].name
    try:
        size = storage.size(name)
        length = int.from_bytes(_bytes(storage, name, 0, 8), "little")
        if length > min(size, HEADER_LIMIT_BYTES):
            return None
        metadata, _ = parse_header(_bytes(storage, name, 8, length), size, name)
    except (ElasticZeroError, FileNotFoundError):
        return None
    right = {"step": str(manifest.step), "rank": str(rank), "token": manifest.token}
    held = {key: metadata.get(key) for key in right}
    wrong = [f"{key} {held[key]!r:.70}" for key in right if held[key] != right[key]]
    if not wrong:
        return None
    return f"it is the file of {' and '.join(wrong)}, from another place or save"


def _bytes(storage: Readable, name: str, start: int, count: int) -> bytes:
    data = bytearray(count)
    return bytes(data[: storage.read_into(name, start, memoryview(data))])
