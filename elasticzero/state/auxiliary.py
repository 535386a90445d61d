"""Copies the small mutable state at each boundary: buffers, tracked objects, options of the
optimizer, random generators, and flags of the model that the script has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import dumps, loads
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elasticzero.data.position import DataPosition
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.nested import flatten, unflatten
from elasticzero.state.buffers import BufferCopy
from elasticzero.state.model import EXTRA, GROUPS, MODEL, NOT_SAVED, TRACKED, NamedModel
from elasticzero.state.rng import Generator, RngState
from elasticzero.state.script_flags import ScriptFlags

LACKS_TRACKED = (
    "to begin with the model alone, give session.prepare load= and take another checkpoint "
    "directory; an import gives it the state by --track NAME=PATH"
)
HAS_TRACKED = "track it as the script did that wrote this state"
"""What to do where tracked objects are others than the stored ones."""


class Stateful(Protocol):
    """Describes the objects that `session.track` takes: schedulers, scalers, moving averages."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class NamedGroup(Protocol):
    """Describes a group of parameters of an optimizer."""

    @property
    def names(self) -> list[str]:
        """Returns the parameters' names."""

    @property
    def options(self) -> dict[str, Any]:
        """Returns the group as the optimizer has it."""


class SharedByRankZero(Stateful, Protocol):
    """Describes state that rank 0 finds, and gives all ranks at a boundary."""

    @property
    def is_open(self) -> bool: ...

    def shared(self) -> dict[str, Tensor]: ...

    def take_shared(self) -> None: ...


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Returns the value as `flatten` does, with the tensors copied.

    Args:
        value: Dicts, lists and tuples, nested in any way.
        path: The path of `value` itself, with which the tensors' names begin.
        tensors: Takes the copies by name.

    Raises:
        UserError: A value cannot be stored, or a tensor has this rank's rows of a parameter alone.
    """
    flat: dict[str, Tensor] = {}
    json = flatten(value, path, flat)
    for name, tensor in flat.items():
        if isinstance(tensor, DTensor):
            raise UserError(
                f"{name!r} is a DTensor of torch, of which this rank has its rows: zero3 divides "
                "parameters so, and what is computed with them. Have the state hold what "
                "`full_tensor()` gives on all ranks, or use ddp, zero1 or zero2"
            )
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
    buffers: BufferCopy = field(default_factory=BufferCopy)
    rng: RngState
    json: dict[str, Any]
    """Tracked objects, the optimizer's groups and the guard's state, encoded."""
    tensors: dict[str, Tensor]
    """The tensors inside `json`, by full name."""

    def stored_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that are part of the training state, by full name."""
        saved = {MODEL + name: tensor for name, tensor in self.buffers.saved.items()}
        return saved | {NOT_SAVED + name: t for name, t in self.buffers.changed.items()}


class AuxiliaryState:
    """Copies and restores buffers, tracked objects, optimizer options and random generators."""

    def __init__(
        self,
        device: torch.device,
        *,
        named: NamedModel | None = None,
        flags: ScriptFlags | None = None,
        groups: Sequence[NamedGroup] = (),
        guard: Stateful | None = None,
        buckets: SharedByRankZero | None = None,
    ) -> None:
        """Tracks no object at first.

        Args:
            device: The device of the rank.
            named: The model; None: one without buffers and extra state.
            flags: The flags of its parameters and modules; None: it has none.
            groups: The groups of parameters of the optimizers.
            guard: What decides whether steps are applied; None: it keeps nothing.
            buckets: The job's choice of gradient buckets, which is stored; None: there is none.
        """
        self.device = device
        self.tracked: dict[str, Stateful] = {}
        self._generators: dict[str, Generator] = {}
        self._rng_to_set: RngState | None = None
        """The restored generators, until training goes on from where they stood."""
        named = named or NamedModel(nn.Module())
        # Not its parameters: zero3 replaces them, and what is whole would stay in memory.
        self.buffers, self._extra_states = named.buffers, named.extra_states
        self._aliases = named.aliases
        self.flags = flags or ScriptFlags({}, {})
        self._groups = groups
        self._guard = guard
        self._buckets = buckets

    def track(self, name: str, thing: Stateful | Generator) -> None:
        """Makes an object part of the state; a random generator is kept for each rank by itself.

        Args:
            name: The object's name.
            thing: The object.

        Raises:
            UserError: It has no state, or the name is taken.
        """
        if not isinstance(thing, Generator) and not (
            hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        ):
            raise UserError(
                f"session.track({name!r}, …) was given a {type(thing).__name__}, which has no "
                "state_dict and load_state_dict"
            )
        if name in {*self.tracked, *self._generators} or not name or "/" in name:
            raise UserError(f"session.track: {name!r} is empty, has a slash, or is used twice")
        if isinstance(thing, Generator):
            self._generators[name] = thing
        else:
            self.tracked[name] = thing

    def begin(self, changed: frozenset[str] = frozenset()) -> None:
        """Begins with the modules as the script has made them, or as they were restored.

        Args:
            changed: Names of buffers that are no part of a `state_dict` and were restored.
        """
        self.buffers.begin(changed)
        self.flags.begin()

    def restore_rng(self, state: RngState) -> None:
        """Takes over the states of the random generators; they are set by `set_generators`."""
        present = RngState.capture(self.device, self._generators).tracked
        self._rng_to_set = replace(state, tracked={**present, **state.tracked})

    def set_generators(self) -> None:
        """Sets the random generators as they stood where training goes on.

        What a script draws before, as it makes its model anew, changes nothing of what follows.
        """
        if self._rng_to_set is not None:
            self._rng_to_set.apply(self.device, self._generators)
            self._rng_to_set = None

    def generators(self) -> RngState:
        """Returns the states of the random generators with which training goes on."""
        return self._rng_to_set or RngState.capture(self.device, self._generators)

    @property
    def modules_keep_state(self) -> bool:
        """Returns whether modules keep more than parameters, or may; equal on all ranks."""
        return bool(self.buffers.names or self._extra_states.names)

    def state_of_modules(self) -> dict[str, Tensor]:
        """Returns what modules keep besides parameters, not copied, as one rank tells it others:
        buffers, and extra state as JSON with its tensors."""
        tensors = {MODEL + name: tensor for name, tensor in self.buffers.state().items()}
        if self._extra_states.names:
            values = self._extra_states.values()
            text = dumps({n: flatten(v, EXTRA + n, tensors) for n, v in values.items()})
            tensors[EXTRA] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return tensors

    def differing_buffers(
        self, told: Mapping[str, Tensor], present: Mapping[str, Tensor]
    ) -> list[str]:
        """Returns the names of buffers that another rank has otherwise, but for those of BatchNorm,
        whose statistics are of a rank's micro-batch in any case.

        Args:
            told: What another rank has told.
            present: What `state_of_modules` has returned here.
        """
        return [
            name
            for full in dict.fromkeys((*told, *present))
            if full.startswith(MODEL)
            and (name := full.removeprefix(MODEL)) not in self.buffers.of_batch_norms
            and not (full in told and full in present and _equal(told[full], present[full]))
        ]

    def put_state_of_modules(
        self, told: Mapping[str, Tensor], present: Mapping[str, Tensor]
    ) -> None:
        """Gives the modules what another rank has told.

        present: what `state_of_modules` has returned here.
        """
        names = {name.removeprefix(MODEL): name for name in told if name.startswith(MODEL)}
        unset = (n.removeprefix(MODEL) for n in present if n.startswith(MODEL) and n not in told)
        values = {name: told[full] for name, full in names.items()}
        self.buffers.put(BufferCopy(values=values, unset=tuple(unset)))
        extra = {name: tensor for name, tensor in told.items() if name.startswith(EXTRA)}
        if any(n not in present or not _equal(t, present[n]) for n, t in extra.items()):
            on_cpu = {name: tensor.cpu() for name, tensor in extra.items()}
            values = loads(bytes(on_cpu[EXTRA].numpy()))
            self._extra_states.put({n: decode_state(v, on_cpu) for n, v in values.items()})

    @property
    def awaits_rank_zero(self) -> bool:
        """Returns whether all ranks wait for something that this world's rank 0 finds; the same on
        all of them."""
        return self._buckets is not None and self._buckets.is_open

    def of_rank_zero(self) -> dict[str, Tensor]:
        """Returns what all ranks take from rank 0 at a boundary, to be filled in place."""
        return self._buckets.shared() if self._buckets is not None else {}

    def take_shared(self) -> None:
        """Takes over, after a step, what rank 0 has shared at the boundary before."""
        if self._buckets is not None:
            self._buckets.take_shared()

    def capture(self, step: int, position: DataPosition) -> BoundaryCopy:
        tensors: dict[str, Tensor] = {}
        tracked = {
            name: encode_state(thing.state_dict(), TRACKED + name, tensors)
            for name, thing in self.tracked.items()
        }
        groups = [
            {
                "names": group.names,
                "options": encode_state(_options(group.options), f"{GROUPS}{i}", tensors),
            }
            for i, group in enumerate(self._groups)
        ]
        buffers = self.buffers.copy()
        slots = set(self.buffers.names)
        aliases = {n: first for n, first in self._aliases.items() if n not in slots}
        aliases |= buffers.aliases
        json: dict[str, Any] = {"tracked": tracked, "groups": groups, "aliases": aliases}
        if buffers.unset:
            json["unset"] = list(buffers.unset)
        extra = self._extra_states.values()
        if extra:
            json["modules"] = {n: encode_state(v, EXTRA + n, tensors) for n, v in extra.items()}
        if self._generators:
            json["generators"] = sorted(self._generators)
        if self._guard is not None:
            json["guard"] = self._guard.state_dict()
        if self._buckets is not None:
            json["buckets"] = self._buckets.state_dict()
        if flags := self.flags.state_dict():
            json["flags"] = flags
        return BoundaryCopy(
            step=step,
            position=position,
            buffers=buffers,
            rng=self.generators(),
            json=json,
            tensors=tensors,
        )

    def check(self, json: Mapping[str, Any], where: str) -> None:
        """Raises `CheckpointMismatch` if the script tracks other objects than `json` has."""
        stored = {*json.get("tracked", {}), *json.get("generators", ())}
        tracked = {*self.tracked, *self._generators}
        for names, has, tracks, advice in (
            (tracked - stored, "has no state for", "tracks", LACKS_TRACKED),
            (stored - tracked, "has state for", "does not track", HAS_TRACKED),
        ):
            if names:
                listed = ", ".join(repr(name) for name in sorted(names)[:4])
                raise CheckpointMismatch(
                    f"{where} {has} {listed}, which the script {tracks} with session.track: "
                    f"{advice}"
                )
        if "modules" in json and (name := self._extra_states.odd(json["modules"])):
            has = "has" if name in json["modules"] else "has no"
            raise CheckpointMismatch(
                f"{where} {has} extra state {name!r}, and with the model it is the other way "
                "round: give it the modules that wrote the checkpoint"
            )

    def apply(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restores stored options of the optimizer, tracked objects and flags of the model.

        Args:
            json: The stored state, without its tensors.
            tensors: The tensors by name, on the CPU.
        """
        self.put_options(json.get("groups", []), tensors)
        if self._guard is not None:
            self._guard.load_state_dict(json.get("guard", {}))
        self.take_buckets(json)
        self.flags.load_state_dict(json.get("flags", {}))
        extra = json.get("modules", {})
        self._extra_states.put({n: decode_state(v, tensors) for n, v in extra.items()})
        for name, thing in self.tracked.items():
            thing.load_state_dict(decode_state(json["tracked"][name], tensors))

    def take_buckets(self, json: Mapping[str, Any]) -> None:
        """Takes over the stored choice of gradient buckets, before the rest is restored."""
        if self._buckets is not None:
            self._buckets.load_state_dict(json.get("buckets", {}))

    def put_options(
        self, groups: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
    ) -> None:
        """Gives the optimizers' groups stored options.

        Args:
            groups: The names of the parameters and the options of each stored group.
            tensors: The tensors among the options by name, on the CPU.
        """
        stored = {name: group["options"] for group in groups for name in group["names"]}
        for index, group in enumerate(self._groups):
            options: Any = next((stored[name] for name in group.names if name in stored), {})
            if not group.names and len(groups) == len(self._groups):
                options = groups[index]["options"]  # a group without parameters has its place alone
            for key, value in decode_state(options, tensors).items():
                old = group.options.get(key)
                if isinstance(old, Tensor) and isinstance(value, Tensor):
                    old.copy_(value)
                else:
                    group.options[key] = value


def _equal(told: Tensor, present: Tensor) -> bool:
    alike = told.shape == present.shape and told.dtype == present.dtype
    return alike and torch.equal(told, present.to(told.device))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
