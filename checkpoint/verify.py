"""Reading every byte of a step to see whether it is what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elasticzero.checkpoint.commit import read_manifest
from elasticzero.checkpoint.manifest import MANIFEST_NAME, ShardFile
from elasticzero.checkpoint.shards import BlockReader, open_shard
from elasticzero.checkpoint.storage import Readable
from elasticzero.errors import ElasticZeroError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong with a step."""

    file: str
    start: int | None = None
    """The first bad byte; None: the file as a whole."""
    stop: int | None = None
    reason: str


def faults(storage: Readable) -> Iterator[Fault]:
    """Everything wrong with a step: its manifest, and every block of every file it names."""
    try:
        manifest = read_manifest(storage)
    except ElasticZeroError as error:
        yield Fault(file=MANIFEST_NAME, reason=str(error))
        return
    for rank, file in enumerate(manifest.files):
        sound = True
        for fault in _block_faults(storage, file):
            sound = False
            yield fault
        if not sound:
            continue
        try:
            open_shard(storage, manifest, rank)
        except ElasticZeroError as error:
            yield Fault(file=file.name, reason=str(error))


def _block_faults(storage: Readable, file: ShardFile) -> Iterator[Fault]:
    try:
        for start, stop in BlockReader(storage, file).bad_ranges():
            past = start >= file.bytes
            reason = "more bytes than were written" if past else "not what was written, or missing"
            yield Fault(file=file.name, start=start, stop=stop, reason=reason)
    except ElasticZeroError as error:
        yield Fault(file=file.name, reason=str(error))
