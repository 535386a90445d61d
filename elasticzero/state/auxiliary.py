"""Copies the small mutable state at each boundary: buffers, tracked objects, options of the
optimizer, and random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from elasticzero.data.position import DataPosition
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.nested import flatten, unflatten
from elasticzero.state.model import GROUPS, MODEL, TRACKED
from elasticzero.state.rng import RngState


class Stateful(Protocol):
    """Describes the objects that `session.track` takes: schedulers, scalers, moving averages."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class SharedByRankZero(Stateful, Protocol):
    """Describes state that rank 0 finds, and gives all ranks at a boundary."""

    def shared(self) -> dict[str, Tensor]: ...

    def take_shared(self) -> None: ...


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Returns the value as `flatten` does, with the tensors copied."""
    flat: dict[str, Tensor] = {}
    json = flatten(value, path, flat)
    for name, tensor in flat.items():
        tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return json


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that `encode_state` was given, its tensors copied from `tensors`."""
    return unflatten(value, lambda name: tensors[name].clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCopy:
    """Holds the small mutable state at a boundary, which a forward that fails may have changed
    since."""

    step: int
    position: DataPosition
    buffers: dict[str, Tensor]
    rng: RngState
    json: dict[str, Any]
    """Tracked objects, the optimizer's groups and the guard's state, encoded."""
    tensors: dict[str, Tensor]
    """The tensors inside `json`, by full name."""


class AuxiliaryState:
    """Copies and restores buffers, tracked objects, optimizer options and random generators."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tracked: dict[str, Stateful] = {}
        self.guard: Stateful | None = None
        """What decides whether steps are applied; None: it keeps nothing."""
        self.buckets: SharedByRankZero | None = None
        """The job's choice of gradient buckets, which is stored; None: there is none."""
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

    def of_rank_zero(self) -> dict[str, Tensor]:
        """Returns what all ranks take from rank 0 at a boundary, to be filled in place."""
        return {**self.buffers, **(self.buckets.shared() if self.buckets is not None else {})}

    def take_shared(self) -> None:
        """Takes over, after a step, what rank 0 has shared at the boundary before."""
        if self.buckets is not None:
            self.buckets.take_shared()

    def capture(self, step: int, position: DataPosition) -> BoundaryCopy:
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
        json: dict[str, Any] = {"tracked": tracked, "groups": groups, "aliases": self.aliases}
        if self.guard is not None:
            json["guard"] = self.guard.state_dict()
        if self.buckets is not None:
            json["buckets"] = self.buckets.state_dict()
        return BoundaryCopy(
            step=step,
            position=position,
            buffers={
                MODEL + name: b.detach().clone(memory_format=torch.contiguous_format)
                for name, b in self.buffers.items()
            },
            rng=RngState.capture(self.device),
            json=json,
            tensors=tensors,
        )

    def check(self, json: Mapping[str, Any], where: str) -> None:
        """Raises `CheckpointMismatch` if the script tracks other objects than `json` has."""
        stored, tracked = set(json.get("tracked", {})), set(self.tracked)
        for names, has, tracks in (
            (tracked - stored, "has no state for", "tracks"),
            (stored - tracked, "has state for", "does not track"),
        ):
            if names:
                listed = ", ".join(repr(name) for name in sorted(names)[:4])
                raise CheckpointMismatch(
                    f"{where} {has} {listed}, which the script {tracks} with session.track"
                )

    def apply(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restores stored options of the optimizer and tracked objects. tensors: on the CPU."""
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
        if self.guard is not None:
            self.guard.load_state_dict(json.get("guard", {}))
        if self.buckets is not None:
            self.buckets.load_state_dict(json.get("buckets", {}))
        for name, thing in self.tracked.items():
            thing.load_state_dict(decode_state(json["tracked"][name], tensors))


def put_back(buffers: Mapping[str, Tensor], copy: BoundaryCopy) -> None:
    """Gives these buffers the values that they had at the boundary."""
    for name, buffer in buffers.items():
        buffer.copy_(copy.buffers[MODEL + name])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
