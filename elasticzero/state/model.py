"""Model, optimizer and tracked objects as named tensors and spans, and the copies of small mutable
state that are taken at each boundary.

Names: `model/<name in state_dict>`, `optimizer/<parameter>/<key>`, `tracked/<object>/<path>`,
`rng/<kind>/<rank>`. What is no tensor becomes JSON, in which `{"$tensor": name}` stands for one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from elasticzero.data.sampling import Position, mixed
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.nested import decode_value, encode_value
from elasticzero.spans import Rule

MODEL, OPTIMIZER, TRACKED, GROUPS, RNG = "model/", "optimizer/", "tracked/", "groups/", "rng/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole tensor, wherever its elements lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def spec_of(tensor: Tensor) -> Spec:
    return Spec(dtype=tensor.dtype, shape=tuple(tensor.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Tensors that are dealt to the ranks together, by one rule."""

    rule: Rule
    names: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """Rule `whole`: the rank of each tensor."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of a tensor that this rank has in memory: those from `start` on."""

    tensor: Tensor
    start: int = 0


@dataclass(slots=True)
class Share:
    """The training state as this rank sees it: every tensor's spec, how all are dealt, and the
    elements that this rank can write, which cover what the partitions give it."""

    specs: dict[str, Spec] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    """Parameters that training does not change: they may hold anything, -inf in a mask, say."""

    def trained(self) -> set[str]:
        """What must be finite; call before buffers and the like are added."""
        return self.specs.keys() - self.frozen

    def not_finite(self) -> list[str]:
        """What this rank holds of it that is not; looks at every element."""
        names = [name for name in self.trained() if name in self.held]
        return sorted(n for n in names if not bool(torch.isfinite(self.held[n].tensor).all()))

    def add_whole(self, tensors: Mapping[str, Tensor], ranks: tuple[int, ...]) -> None:
        """Add tensors that lie whole with one rank each."""
        for name, tensor in tensors.items():
            self.specs[name] = spec_of(tensor)
            self.held[name] = Held(tensor)
        if tensors:
            self.partitions.append(Partition(rule="whole", names=tuple(tensors), ranks=ranks))

    def add_even(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors that every rank has whole, to be written in even parts."""
        for name, tensor in tensors.items():
            self.specs[name] = spec_of(tensor)
            self.held[name] = Held(tensor)
        if tensors:
            self.partitions.append(Partition(rule="even", names=tuple(tensors)))


class Stateful(Protocol):
    """Anything that `session.track` takes: schedulers, scalers, moving averages."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class NamedModel:
    """A model's own parameters and persistent buffers by their `state_dict` names, taken before
    any strategy wraps it. One tensor under several names is kept under the first."""

    def __init__(self, model: nn.Module) -> None:
        entries = model.state_dict()
        strange = [name for name, value in entries.items() if not isinstance(value, Tensor)]
        if strange:
            raise UserError(
                f"the model's state_dict holds something that is no tensor under {strange[0]!r}; "
                "keep it in an object of its own and give that to session.track"
            )
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add(name, parameter, self.parameters, first)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in entries:
                self._add(name, buffer, self.buffers, first)

    def _add(self, name: str, tensor: Any, into: dict[str, Any], first: dict[int, str]) -> None:
        if (known := first.setdefault(id(tensor), name)) != name:
            self.aliases[name] = known
        else:
            into[name] = tensor

    def name_of(self) -> dict[int, str]:
        """Parameter names by `id`."""
        return {id(parameter): name for name, parameter in self.parameters.items()}


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`encode_value`, with the tensors copied."""
    found: dict[str, Tensor] = {}
    json = encode_value(value, path, found)
    for name, tensor in found.items():
        tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return json


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode_state` was given, its tensors copied from `tensors`."""
    return decode_value(value, lambda name: tensors[name].clone())


@dataclass(frozen=True, slots=True)
class RngState:
    """The global random generators of this process."""

    torch_cpu: Tensor
    cuda: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def apply(self, device: torch.device) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def tensors(self) -> dict[str, Tensor]:
        """By kind, as uint8 of constant size."""
        _, words, gauss = self.python
        python = np.array(words, dtype=np.uint32).tobytes() + _float_or_none(gauss)
        _, keys, place, has_gauss, cached = self.numpy
        tail = np.array([place, has_gauss], dtype=np.int64).tobytes() + np.float64(cached).tobytes()
        found = {
            "torch": self.torch_cpu,
            "python": _bytes_tensor(python),
            "numpy": _bytes_tensor(keys.astype(np.uint32).tobytes() + tail),
        }
        return found | ({"cuda": self.cuda} if self.cuda is not None else {})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RngState:
        python = tensors["python"].numpy().tobytes()
        words = tuple(int(word) for word in np.frombuffer(python[:-9], dtype=np.uint32))
        gauss = float(np.frombuffer(python[-8:], dtype=np.float64)[0]) if python[-9] else None
        state = tensors["numpy"].numpy().tobytes()
        keys = np.frombuffer(state[:-24], dtype=np.uint32)
        place, has_gauss = (int(n) for n in np.frombuffer(state[-24:-8], dtype=np.int64))
        cached = float(np.frombuffer(state[-8:], dtype=np.float64)[0])
        return cls(
            tensors["torch"],
            tensors.get("cuda"),
            (3, words, gauss),
            ("MT19937", keys, place, has_gauss, cached),
        )


def _float_or_none(value: float | None) -> bytes:
    return bytes([value is not None]) + np.float64(value or 0.0).tobytes()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def seed_all(seed: int, rank: int, step: int) -> None:
    """Seed every generator for a rank that has no state of its own to go on from."""
    value = mixed(mixed(mixed(seed) + rank) + step)
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the random generators as they were."""
    before = RngState.capture(device)
    try:
        yield
    finally:
        before.apply(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCopy:
    """Small mutable state as it was at a boundary: what a forward that fails may have moved."""

    step: int
    position: Position
    buffers: dict[str, Tensor]
    rng: RngState
    json: dict[str, Any]
    """Tracked objects and the optimizer's groups, encoded."""
    tensors: dict[str, Tensor]
    """Those inside `json`, by full name."""


class SmallState:
    """What is copied at each boundary: buffers, tracked objects, optimizer options, generators."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tracked: dict[str, Stateful] = {}
        self.buffers: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.groups: list[dict[str, Any]] = []
        self.group_names: list[list[str]] = []
        """The parameters of each optimizer group, by name."""

    def track(self, name: str, thing: Stateful) -> None:
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UserError(
                f"session.track({name!r}, …) was given a {type(thing).__name__}, which has no "
                "state_dict and load_state_dict"
            )
        if name in self.tracked or not name or "/" in name:
            raise UserError(f"session.track: {name!r} is empty, has a slash, or is used twice")
        self.tracked[name] = thing

    def capture(self, step: int, position: Position) -> BoundaryCopy:
        tensors: dict[str, Tensor] = {}
        tracked = {
            name: encode_state(thing.state_dict(), TRACKED + name, tensors)
            for name, thing in self.tracked.items()
        }
        groups = [
            {
                "names": names,
                "options": encode_state(_options(group), f"{GROUPS}{i}", tensors),
            }
            for i, (names, group) in enumerate(zip(self.group_names, self.groups, strict=True))
        ]
        return BoundaryCopy(
            step=step,
            position=position,
            buffers={
                MODEL + name: b.detach().clone(memory_format=torch.contiguous_format)
                for name, b in self.buffers.items()
            },
            rng=RngState.capture(self.device),
            json={"tracked": tracked, "groups": groups, "aliases": self.aliases},
            tensors=tensors,
        )

    def check(self, json: Mapping[str, Any], where: str) -> None:
        """Raise `CheckpointMismatch` when the script tracks other objects than `json` has."""
        stored, here = set(json.get("tracked", {})), set(self.tracked)
        for names, has, tracks in (
            (here - stored, "has no state for", "tracks"),
            (stored - here, "has state for", "does not track"),
        ):
            if names:
                listed = ", ".join(repr(name) for name in sorted(names)[:4])
                raise CheckpointMismatch(
                    f"{where} {has} {listed}, which the script {tracks} with session.track"
                )

    def apply(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put stored options of the optimizer and tracked objects back. tensors: on the CPU."""
        stored = {
            name: group["options"] for group in json.get("groups", []) for name in group["names"]
        }
        for names, group in zip(self.group_names, self.groups, strict=True):
            options: Any = next((stored[name] for name in names if name in stored), {})
            for key, value in decode_state(options, tensors).items():
                old = group.get(key)
                if isinstance(old, Tensor) and isinstance(value, Tensor):
                    old.copy_(value)
                else:
                    group[key] = value
        for name, thing in self.tracked.items():
            thing.load_state_dict(decode_state(json["tracked"][name], tensors))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
