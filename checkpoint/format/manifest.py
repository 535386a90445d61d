"""The manifest of a checkpoint: its values, its JSON, and the names of its files.

Pure. A manifest describes where every element of every tensor lies by rule (`Layout`), so that it
grows with tensors plus ranks and not with their product.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsIndex

import xxhash

from elasticzero import spans
from elasticzero.checkpoint.format.strict_json import check_depth, reason, strict_json
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.serialization import RecordError, decode, encode
from elasticzero.spans import EMPTY, Rule, Span

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
SUMS_SUFFIX = ".sums"

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by safetensors' spelling of the dtype."""

_MAX_DIMS = 64
"""Maximum number of dimensions that torch computes with."""
TREE = "$tree"
"""The key of the state that has the nesting of what was saved by hand; absent where tensors are all
there is."""
_TOO_MANY_BYTES = 1 << 63
_DIGEST = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n')
_DIGEST_BYTES = len(b',"digest":""}\n') + 32
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MAX_STEP = 10**18 - 1
"""What the name of a step's directory has room for."""
_STEP_DIRECTORY = re.compile(r"step-(\d{12,18})")


def itemsize(dtype: str) -> int:
    """Bytes of one element; `ValueError` for a dtype that safetensors does not have."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}") from None


def file_name(rank: int, world_size: int, token: str) -> str:
    """The name of one rank's shard file; its checksums stand in the same name + `.sums`."""
    return f"rank-{rank:05d}-of-{world_size:05d}-{token}.safetensors"


def snapshot_manifest_name(rank: int, world_size: int) -> str:
    """The name of one rank's own manifest in a snapshot."""
    return f"manifest-rank-{rank:05d}-of-{world_size:05d}.json"


def checked_step(step: object) -> int:
    """A step's number as an int, for which any kind of integer will do; `UserError` for one that no
    step can have."""
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise UserError(f"step {step!r}: a whole number is wanted")
    number = operator.index(step)
    if not 0 <= number <= MAX_STEP:
        raise UserError(f"step {number}: give 0 to {MAX_STEP}")
    return number


def step_directory(step: int) -> str:
    """The name of the directory of one step."""
    return f"step-{step:012d}"


def step_of(directory: str) -> int | None:
    """The step that a directory's name says, or None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(directory)
    return int(match[1]) if match and step_directory(int(match[1])) == directory else None


def check_names(names: Iterable[str]) -> None:
    """Raises `ValueError` for a name that no safetensors file can hold: its header is strict JSON,
    in which one key is taken."""
    for name in names:
        if name == "__metadata__":
            raise ValueError("no tensor can have the name '__metadata__' in safetensors")
        if not name.isascii() and _LONE_SURROGATE.search(name):
            raise ValueError(f"no tensor can have the name {name!r} in safetensors: not Unicode")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its elements."""

    dtype: str
    """Safetensors' spelling: "F32", "BF16", "I64", "BOOL", ..."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        width = itemsize(self.dtype)
        if len(self.shape) > _MAX_DIMS:
            raise ValueError(f"a shape of {len(self.shape)} dimensions: {_MAX_DIMS} are the most")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {list(self.shape)} has a negative size")
        if width * math.prod(size for size in self.shape if size) >= _TOO_MANY_BYTES:
            raise ValueError(f"shape {list(self.shape)} has more bytes than can be counted")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are dealt to the ranks together, by one rule."""

    rule: Rule
    tensors: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """Rule `whole` only: the rank of each tensor."""

    def __post_init__(self) -> None:
        expected = len(self.tensors) if self.rule == "whole" else 0
        if len(self.ranks) != expected:
            raise ValueError(
                f"a group of rule {self.rule!r} with {len(self.tensors)} tensors names "
                f"{expected} ranks, not {len(self.ranks)}"
            )


@dataclass(frozen=True, slots=True)
class _Place:
    group: int
    index: int
    offset: int
    """Elements of the group before this tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank holds which span of which tensor."""

    world_size: int
    tensors: Mapping[str, TensorSpec]
    groups: tuple[Group, ...]
    """Every tensor is in exactly one."""
    _places: Mapping[str, _Place] = field(init=False, repr=False, compare=False)
    _totals: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _known: dict[str, Any] = field(init=False, repr=False, compare=False)
    """What was worked out before: a layout serves many captures, each within milliseconds."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world size {self.world_size} is not positive")
        places: dict[str, _Place] = {}
        totals = []
        check_names(self.tensors)
        for number, group in enumerate(self.groups):
            offset = 0
            for index, name in enumerate(group.tensors):
                if name not in self.tensors:
                    raise ValueError(f"a group names the tensor {name!r}, which is not described")
                if name in places:
                    raise ValueError(f"tensor {name!r} stands in the groups twice")
                places[name] = _Place(number, index, offset)
                offset += self.tensors[name].numel
            if any(not 0 <= rank < self.world_size for rank in group.ranks):
                raise ValueError(f"a group names a rank outside 0..{self.world_size - 1}")
            totals.append(offset)
        if missing := next((name for name in self.tensors if name not in places), None):
            raise ValueError(f"tensor {missing!r} is in no group")
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_totals", tuple(totals))
        object.__setattr__(self, "_known", {})

    def digest(self) -> str:
        """xxh3_128 of the layout, in hexadecimal: equal exactly for equal layouts."""
        if "digest" not in self._known:
            self._known["digest"] = self._digest()
        return str(self._known["digest"])

    def _digest(self) -> str:
        tensors = [(name, spec.dtype, spec.shape) for name, spec in self.tensors.items()]
        groups = [(group.rule, group.tensors, group.ranks) for group in self.groups]
        text = json.dumps([self.world_size, sorted(tensors), groups])
        return xxhash.xxh3_128_hexdigest(text.encode())

    def json(self) -> Any:
        """The layout's own part of a manifest's JSON."""
        if "json" not in self._known:
            self._known["json"] = encode(self)
        return self._known["json"]

    def spans(self, rank: int) -> dict[str, Span]:
        """What `rank` holds, in the groups' order; a tensor without elements lies with one rank."""
        known = self._known.get("spans")
        if known is None or known[0] != rank:
            self._known["spans"] = known = (rank, self._spans(rank))
        return dict(known[1])

    def _spans(self, rank: int) -> dict[str, Span]:
        held: dict[str, Span] = {}
        for group in self.groups:
            specs = [self.tensors[name] for name in group.tensors]
            if group.rule == "even":
                numels = [spec.numel for spec in specs]
                parts = dict(spans.even(numels, self.world_size, rank))
            elif group.rule == "fsdp_rows":
                rows = (spans.fsdp_rows(spec.shape, self.world_size, rank) for spec in specs)
                parts = {index: span for index, span in enumerate(rows) if span}
            else:
                parts = {i: Span(0, specs[i].numel) for i, r in enumerate(group.ranks) if r == rank}
            if rank == 0 and group.rule != "whole":
                parts |= {i: EMPTY for i, spec in enumerate(specs) if not spec.numel}
            held |= {group.tensors[index]: parts[index] for index in sorted(parts)}
        return held

    def holders(self, name: str, within: Span | None = None) -> list[tuple[int, Span]]:
        """(rank, span) of every rank that `spans` gives a part of the tensor, by rank.

        `within`: only of those that hold elements of this span.
        """
        place, spec = self._places[name], self.tensors[name]
        group = self.groups[place.group]
        whole = Span(0, spec.numel)
        if group.rule == "whole":
            return [(group.ranks[place.index], whole)]
        if not spec.numel:
            return [(0, EMPTY)]
        asked = whole if within is None else spans.intersect(whole, within)
        if not asked:
            return []
        if group.rule == "fsdp_rows":
            rows = -(-(spec.shape[0] if spec.shape else 1) // self.world_size)
            size = rows * math.prod(spec.shape[1:])
            ranks = range(asked.start // size, (asked.stop - 1) // size + 1)
            return [(r, spans.fsdp_rows(spec.shape, self.world_size, r)) for r in ranks]
        size = -(-self._totals[place.group] // self.world_size)
        first, last = place.offset + asked.start, place.offset + asked.stop - 1
        tensor = Span(place.offset, place.offset + spec.numel)
        return [
            (r, Span(part.start - place.offset, part.stop - place.offset))
            for r in range(first // size, last // size + 1)
            if (part := spans.intersect(tensor, Span(r * size, (r + 1) * size)))
        ]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One rank's safetensors file."""

    name: str
    bytes: int
    """0 where `digest` is None."""
    digest: str | None
    """xxh3_128 of its checksum file, in hexadecimal. None: not known (a snapshot's manifest knows
    its own rank's file only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint or snapshot but the tensors' elements."""

    version: int = FORMAT_VERSION
    step: int
    generation: int
    token: str
    """The generation's own; stands in every file's name."""
    strategy: str
    layout: Layout
    files: tuple[ShardFile, ...] = ()
    """By rank. Empty in a draft: what is about to be written."""
    state: Mapping[str, Any]
    """JSON: what is not a tensor."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.generation < 0:
            raise ValueError(f"step {self.step}, generation {self.generation}: one is negative")
        if not _TOKEN.fullmatch(self.token):
            raise ValueError(f"token {self.token!r} is not 1 to 64 letters, digits, '-' or '_'")
        if self.files and len(self.files) != self.layout.world_size:
            raise ValueError(f"{len(self.files)} files for a world of {self.layout.world_size}")
        for rank, file in enumerate(self.files):
            if file.name != self.file_name(rank):
                raise ValueError(f"file {rank} is {file.name!r}, not {self.file_name(rank)!r}")
            if not 0 <= file.bytes < _TOO_MANY_BYTES:
                raise ValueError(f"file {file.name} has {file.bytes} bytes")

    def file_name(self, rank: int) -> str:
        """The name of one rank's shard file."""
        return file_name(rank, self.layout.world_size, self.token)


def with_own_file(draft: Manifest, rank: int, file: ShardFile) -> Manifest:
    """A draft as one rank knows it: with that rank's file, and of the others the names."""
    world = range(draft.layout.world_size)
    others = tuple(ShardFile(draft.file_name(r), 0, None) for r in world)
    return replace(draft, files=(*others[:rank], file, *others[rank + 1 :]))


def to_json(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file."""
    parts = {f.name: getattr(manifest, f.name) for f in fields(manifest) if f.name != "layout"}
    return with_digest(encode(parts) | {"layout": manifest.layout.json()})


def with_digest(value: Mapping[str, Any]) -> bytes:
    """A manifest's file from its JSON: an object whose last key is the digest of what is before
    it."""
    text = json.dumps(value, separators=(",", ":")).encode()[:-1]
    return text + b',"digest":"%s"}\n' % _digest(text)


def from_json(data: bytes, where: str) -> Manifest:
    """The manifest in `data`; raises `CheckpointDamaged` saying what is wrong in `where`.

    The digest is compared before anything is parsed.
    """
    try:
        said = _DIGEST.fullmatch(data[-_DIGEST_BYTES:])
        if said is None:
            raise RecordError("it does not end in its own digest: it is cut off, or no manifest")
        if said[1] != _digest(data[:-_DIGEST_BYTES]):
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
        manifest = decode(Manifest, value, "manifest")
        _check_files(manifest)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is damaged: not JSON ({reason(error)})") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{where}: {reason(error)}") from None
    return manifest


def _check_files(manifest: Manifest) -> None:
    """Raise `RecordError` where the files cannot hold what the layout promises."""
    if not manifest.files:
        raise RecordError("it names no files")
    held = sum(file.bytes for file in manifest.files)
    promised = sum(spec.nbytes for spec in manifest.layout.tensors.values())
    if promised > held and all(file.digest is not None for file in manifest.files):
        raise RecordError(f"its tensors have {promised} bytes, and its files only {held}")


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(text).encode()
