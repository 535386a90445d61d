"""Defines which rank holds which span of which tensor.

Pure. A layout states a rule for each group of tensors instead of a place for each rank's part, so
its size grows with tensors plus ranks and not with their product.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import xxhash

from elasticzero import spans
from elasticzero.serialization import OMIT_DEFAULT, encode
from elasticzero.spans import EMPTY, Rule, Span

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "F4": 1,
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
"""Size of one element, by the dtype's safetensors name.

An element of F4 is a pair of values, as in torch's `float4_e2m1fn_x2`; only safetensors' header
counts single ones."""
PAIRED = "F4"
"""The dtype whose elements are pairs."""
_MAX_DIMS = 64
"""Maximum number of dimensions that torch computes with."""
TOO_MANY_BYTES = 1 << 63
"""Exclusive limit of a tensor's size: no file can have so many bytes."""
_MANY_SPECS = 1 << 14
"""Maximum number of different shapes that are remembered."""
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def itemsize(dtype: str) -> int:
    """Returns the size of one element; raises `ValueError` for a dtype that safetensors lacks."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}") from None


def check_tensor_names(names: Iterable[str]) -> None:
    """Raises `ValueError` for a name that no safetensors file can hold.

    The file's header is strict JSON, in which one key is reserved.
    """
    for name in names:
        if name == "__metadata__":
            raise ValueError("no tensor can have the name '__metadata__' in safetensors")
        if not name.isascii() and _LONE_SURROGATE.search(name):
            raise ValueError(f"no tensor can have the name {name!r} in safetensors: not Unicode")


@lru_cache(maxsize=_MANY_SPECS)
def _product(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor without its elements."""

    dtype: str
    """The safetensors name: "F32", "BF16", "I64", "BOOL", ...; an element of "F4" is a pair."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        width = itemsize(self.dtype)
        if len(self.shape) > _MAX_DIMS:
            raise ValueError(
                f"a shape has {len(self.shape)} dimensions; the maximum is {_MAX_DIMS}"
            )
        if self.dtype == PAIRED and not self.shape:
            raise ValueError(f"a scalar of {PAIRED}, of which a file cannot tell the shape")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {list(self.shape)} has a negative size")
        if width * math.prod(size for size in self.shape if size) >= TOO_MANY_BYTES:
            raise ValueError(f"shape {list(self.shape)} has more bytes than can be counted")

    @property
    def numel(self) -> int:
        return _product(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@lru_cache(maxsize=_MANY_SPECS)
def spec_of(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Returns the description of a tensor, one for all tensors of the same dtype and shape.

    A model has few of these, and may have a hundred thousand tensors.
    """
    return TensorSpec(dtype, shape)


@dataclass(frozen=True, slots=True)
class Group:
    """Lists tensors that are distributed over the ranks together, by one rule."""

    rule: Rule
    tensors: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """The rank of each tensor, under the rule `whole` only."""

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
    """Number of elements of the group before this tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Maps each rank to the spans of the tensors that it holds."""

    world_size: int
    tensors: Mapping[str, TensorSpec]
    groups: tuple[Group, ...]
    """The groups; every tensor is in exactly one."""
    replicas: int = field(default=1, metadata=OMIT_DEFAULT)
    """Number of nodes that each held the whole state and have written a part of it. The rules cut
    tensors in S = world_size / replicas chunks then, each chunk is cut alike in `replicas` parts,
    and rank r has part r // S of chunk r % S."""
    _places: Mapping[str, _Place] = field(init=False, repr=False, compare=False)
    _totals: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _derived: dict[str, Any] = field(init=False, repr=False, compare=False)
    """Caches what was computed: a layout serves many captures, each within milliseconds."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world size {self.world_size} is not positive")
        if self.replicas < 1 or self.world_size % self.replicas:
            raise ValueError(f"{self.world_size} ranks cannot be {self.replicas} replicas")
        places: dict[str, _Place] = {}
        totals = []
        check_tensor_names(self.tensors)
        for number, group in enumerate(self.groups):
            offset = 0
            for index, name in enumerate(group.tensors):
                if name not in self.tensors:
                    raise ValueError(f"a group names the tensor {name!r}, which is not described")
                if name in places:
                    raise ValueError(f"tensor {name!r} is in the groups twice")
                places[name] = _Place(number, index, offset)
                offset += self.tensors[name].numel
            if any(not 0 <= rank < self.world_size for rank in group.ranks):
                raise ValueError(f"a group names a rank outside 0..{self.world_size - 1}")
            totals.append(offset)
        if missing := next((name for name in self.tensors if name not in places), None):
            raise ValueError(f"tensor {missing!r} is in no group")
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_totals", tuple(totals))
        object.__setattr__(self, "_derived", {})

    def digest(self) -> str:
        """Returns the xxh3_128 of the layout in hexadecimal; only equal layouts have equal
        digests."""
        if "digest" not in self._derived:
            self._derived["digest"] = self._digest()
        return str(self._derived["digest"])

    def _digest(self) -> str:
        tensors = [(name, spec.dtype, spec.shape) for name, spec in self.tensors.items()]
        groups = [(group.rule, group.tensors, group.ranks) for group in self.groups]
        replicas = [self.replicas] if self.replicas > 1 else []
        text = json.dumps([self.world_size, sorted(tensors), groups, *replicas])
        return xxhash.xxh3_128_hexdigest(text.encode())

    def json(self) -> Any:
        """Returns the layout's part of a manifest's JSON."""
        if "json" not in self._derived:
            rest = encode(self, without=("world_size", "tensors"))
            tensors = {
                name: {"dtype": spec.dtype, "shape": list(spec.shape)}
                for name, spec in self.tensors.items()
            }
            size = {"world_size": self.world_size}
            self._derived["json"] = {**size, "tensors": tensors, **rest}
        return self._derived["json"]

    def spans(self, rank: int) -> dict[str, Span]:
        """Returns the spans that `rank` holds, in the groups' order; a tensor without elements has
        one rank."""
        cached = self._derived.get("spans")
        if cached is None or cached[0] != rank:
            self._derived["spans"] = cached = (rank, self._spans(rank))
        return dict(cached[1])

    def shard_specs(self, rank: int) -> dict[str, TensorSpec]:
        """Returns the tensors of a rank's file in file order: wide dtypes first, then as in the
        layout.

        A span that is the whole tensor has the tensor's shape, and any other is 1-D.
        """
        cached = self._derived.get("shard specs")
        if cached is None or cached[0] != rank:
            specs = {}
            for name, span in self.spans(rank).items():
                spec, count = self.tensors[name], len(span)
                specs[name] = spec if count == spec.numel else spec_of(spec.dtype, (count,))
            ordered = dict(sorted(specs.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
            self._derived["shard specs"] = cached = (rank, ordered)
        return dict(cached[1])

    def _spans(self, rank: int) -> dict[str, Span]:
        held: dict[str, Span] = {}
        for group in self.groups:
            specs = [self.tensors[name] for name in group.tensors]
            shapes, world = [spec.shape for spec in specs], (self.world_size, rank, self.replicas)
            parts = spans.dealt(group.rule, shapes, group.ranks, *world)
            if rank == 0 and group.rule != "whole":
                parts |= {i: EMPTY for i, spec in enumerate(specs) if not spec.numel}
            held |= {group.tensors[index]: parts[index] for index in sorted(parts)}
        return held

    def holders(self, name: str, within: Span | None = None) -> list[tuple[int, Span]]:
        """Returns (rank, span) of every rank that holds a part of the tensor, by rank.

        Args:
            name: The tensor's name.
            within: Only ranks that hold elements of this span are returned; None: all that hold
                any.
        """
        place, spec = self._places[name], self.tensors[name]
        group = self.groups[place.group]
        whole = Span(0, spec.numel)
        if group.rule == "whole":
            return [(group.ranks[place.index], whole)]
        if not spec.numel:
            return [(0, EMPTY)]
        if self.world_size == 1:
            return [(0, whole)] if within is None or spans.intersect(whole, within) else []
        asked = whole if within is None else spans.intersect(whole, within)
        if not asked:
            return []
        if group.rule == "fsdp_rows":
            if not spec.shape:
                return [(0, whole)]
            width = math.prod(spec.shape[1:])
            rows = Span(asked.start // width, -(-asked.stop // width))
            held = spans.chunks_within(spec.shape[0], self.world_size, self.replicas, rows)
            return sorted((r, Span(part.start * width, part.stop * width)) for r, part in held)
        tensor = Span(place.offset, place.offset + spec.numel)
        within = Span(place.offset + asked.start, place.offset + asked.stop)
        total = self._totals[place.group]
        parts = (
            (r, spans.intersect(tensor, part))
            for r, part in spans.chunks_within(total, self.world_size, self.replicas, within)
        )
        return sorted(
            (r, Span(part.start - place.offset, part.stop - place.offset)) for r, part in parts
        )
