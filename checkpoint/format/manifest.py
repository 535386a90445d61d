"""Defines the manifest of a checkpoint or snapshot: its values, its JSON and its digest.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from elasticzero.checkpoint.format.layout import TOO_MANY_BYTES, Layout, spec_of
from elasticzero.checkpoint.format.names import is_tag, is_token, shard_file_name
from elasticzero.checkpoint.format.strict_json import check_depth, reason, strict_json
from elasticzero.errors import CheckpointDamaged
from elasticzero.serialization import OMIT_DEFAULT, RecordError, decode, encode

FORMAT_VERSION = 1
TREE = "$tree"
"""Key of the state that holds the nesting of the values that `checkpoint.save` was given. It is
absent where all of them are tensors in one dict."""
_DIGEST = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n')
_DIGEST_BYTES = len(b',"digest":""}\n') + 32


@dataclass(frozen=True, slots=True)
class ShardFile:
    """Describes one rank's safetensors file."""

    name: str
    bytes: int
    """Size of the file; 0 where `digest` is None."""
    digest: str | None
    """The xxh3_128 of its checksum file, in hexadecimal. None: not known; a snapshot's manifest
    knows the file of its own rank only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describes a checkpoint or snapshot completely, except for its tensors' elements."""

    version: int = FORMAT_VERSION
    step: int
    generation: int
    token: str
    """The generation's own random token, which is part of every file's name."""
    strategy: str
    layout: Layout
    files: tuple[ShardFile, ...] = ()
    """The files by rank; empty in a draft, before the files are written."""
    state: Mapping[str, Any]
    """JSON of all state that is not a tensor."""
    tags: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """The tags under which a script has asked for this step; `steps/tags.py` has what they mean."""
    run: int = field(default=1, metadata=OMIT_DEFAULT)
    """Number of the job's run that saved it."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.generation < 0:
            raise ValueError(f"step {self.step}, generation {self.generation}: one is negative")
        if self.run < 1:
            raise ValueError(f"run {self.run}: the first run of a job is 1")
        if not is_token(self.token):
            raise ValueError(f"token {self.token!r} is not 1 to 64 letters, digits, '-' or '_'")
        for tag in self.tags:
            if not is_tag(tag):
                raise ValueError(f"{tag!r} is no tag")
        if self.files and len(self.files) != self.layout.world_size:
            raise ValueError(f"{len(self.files)} files for a world of {self.layout.world_size}")
        for rank, file in enumerate(self.files):
            if file.name != self.file_name(rank):
                raise ValueError(f"file {rank} is {file.name!r}, not {self.file_name(rank)!r}")
            if not 0 <= file.bytes < TOO_MANY_BYTES:
                raise ValueError(f"file {file.name} has {file.bytes} bytes")

    def file_name(self, rank: int) -> str:
        """Returns the name of one rank's shard file."""
        return shard_file_name(rank, self.layout.world_size, self.token)


def with_own_file(draft: Manifest, rank: int, file: ShardFile) -> Manifest:
    """Returns a draft as one rank knows it: with that rank's file, and the names alone of the
    others.

    Args:
        draft: The manifest without `files`, the same on every rank.
        rank: The rank whose file is known.
        file: Name, size and digest of that file.
    """
    world = range(draft.layout.world_size)
    others = tuple(ShardFile(draft.file_name(r), 0, None) for r in world)
    return replace(draft, files=(*others[:rank], file, *others[rank + 1 :]))


def to_json(manifest: Manifest) -> bytes:
    """Returns the contents of the manifest's file."""
    value = encode(manifest, without=("layout",))
    return with_digest(value | {"layout": manifest.layout.json()})


def with_digest(value: Mapping[str, Any]) -> bytes:
    """Returns a manifest's file: a JSON object whose last key is the digest of the text before
    it."""
    text = json.dumps(value, separators=(",", ":")).encode()[:-1]
    return text + b',"digest":"%s"}\n' % _digest(text)


def from_json(data: bytes, where: str) -> Manifest:
    """Returns the manifest in `data`; raises `CheckpointDamaged` with the fault and `where`.

    The digest is compared before anything is parsed.
    """
    try:
        digest = _DIGEST.fullmatch(data[-_DIGEST_BYTES:])
        if digest is None:
            raise RecordError("it does not end in its own digest: it is cut off, or no manifest")
        if digest[1] != _digest(data[:-_DIGEST_BYTES]):
            raise RecordError("it does not match its own digest: it was damaged or edited")
        value = strict_json(data)
        version = value.get("version") if isinstance(value, dict) else None
        if not isinstance(version, int) or version < 1:
            raise RecordError("it does not say its format version: not a manifest")
        if version > FORMAT_VERSION:
            raise RecordError(
                f"its format version is {version}, and this ElasticZero reads up to "
                f"{FORMAT_VERSION}: use the version that wrote it, or a newer one"
            )
        check_depth(value.get("state"))
        _make_specs(value)
        manifest = decode(Manifest, value, "manifest")
        _check_files(manifest)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is damaged: not JSON ({reason(error)})") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{where}: {reason(error)}") from None
    return manifest


def _make_specs(value: dict[str, Any]) -> None:
    """Puts records in the place of the tensors' objects, one for each kind of tensor.

    An object that is wrong stays, and `decode` says what is wrong with it.
    """
    layout = value.get("layout")
    tensors = layout.get("tensors") if isinstance(layout, dict) else None
    if not isinstance(tensors, dict):
        return
    for name, item in tensors.items():
        match item:
            case {"dtype": str(dtype), "shape": [*sizes]} if set(map(type, sizes)) <= {int}:
                with suppress(ValueError):
                    tensors[name] = spec_of(dtype, tuple(sizes))


def _check_files(manifest: Manifest) -> None:
    """Raises `RecordError` if the files cannot hold the tensors of the layout."""
    if not manifest.files:
        raise RecordError("it names no files")
    held = sum(file.bytes for file in manifest.files)
    promised = sum(spec.nbytes for spec in manifest.layout.tensors.values())
    if promised > held and all(file.digest is not None for file in manifest.files):
        raise RecordError(f"its tensors have {promised} bytes, and its files only {held}")


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(text).encode()
