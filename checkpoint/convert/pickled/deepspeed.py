"""Opens checkpoints of DeepSpeed: the files of each rank of ZeRO 1 to 3, and universal ones.

ZeRO flattens the parameters of a group into one vector of 32-bit numbers, and its optimizer keeps
vectors of the same length. With stages 1 and 2 each rank has one part of a vector, one after the
other. With stage 3 each rank has one part of each parameter, `ceil(numel / ranks)` elements, and
the last ones are padded. `param_shapes` lists the parameters in the order of the vector. A
universal checkpoint has a directory for each parameter, with one file for each vector.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from elasticzero.checkpoint.convert.huggingface import check_foreign
from elasticzero.checkpoint.convert.import_plan import LeftOut
from elasticzero.checkpoint.convert.pickle_reader import Constructor, InertRecord, Opaque, StandIn
from elasticzero.checkpoint.convert.pickled.archive import Archive
from elasticzero.checkpoint.convert.pickled.leaves import ArchivedTensor, JoinedTensor
from elasticzero.checkpoint.convert.pickled.values import is_tensor, read_values
from elasticzero.checkpoint.convert.pickled.walk import Saved
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.storage.base import Storage, read_small
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.spans import Span

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt"
)
_OTHER_PARALLELISM = re.compile(r"(layer_\d+|expp_rank_\d+|expert_\d+).*\.pt")
_UNIVERSAL, _UNIVERSAL_GROUPS = "zero", "optimizer_state.pt"
_LATEST = ("latest", "latest_universal")
_CONSUMED = {
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "optimizer",
}  # fmt: skip
"""Values of a rank's model file that do not become state under their own names."""
_TO_UNIVERSAL = "make a universal checkpoint of it (ds_to_universal.py of DeepSpeed), and import it"


class _Fragment(InertRecord):
    """Stands for the place of a parameter in a rank's part of a vector."""

    numel = start = 0


TABLE: Mapping[tuple[str, str], StandIn] = {
    ("deepspeed.utils.tensor_fragment", "fragment_address"): _Fragment,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Constructor(lambda stage: stage),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): Opaque("loss scaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): Opaque("loss scaler"),
    ("deepspeed.runtime.config", "DeepSpeedConfig"): Opaque("configuration of DeepSpeed"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): Opaque("shape of parts"),
}
"""The stand-ins for DeepSpeed's own names."""


def open_deepspeed(url: str) -> Saved:
    """Opens a directory of a step, or the directory above whose `latest` names one.

    Raises:
        UserError: The directory is of another kind, or of a parallelism besides ZeRO's.
        CheckpointDamaged: A file is missing, is damaged, or does not fit the others.
    """
    check_foreign(url)
    storage = _step_of(open_storage(url))
    names = storage.names()
    if odd := next((name for name in names if _OTHER_PARALLELISM.fullmatch(name)), None):
        raise UserError(f"{storage.where}/{odd} is of pipelines or experts: {_TO_UNIVERSAL}")
    reading = _Reading(storage)
    try:
        return reading.saved(names)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{storage.where}: its files make no sense together: "
            f"{type(error).__name__}: {error!s:.150}"
        ) from None


def _step_of(storage: Storage) -> Storage:
    """Returns the directory that `latest` names, or the same if it has none."""
    latest = next((name for name in _LATEST if name in storage.names()), None)
    if latest is None:
        return storage
    tag = read_small(storage, latest, 1 << 12).decode(errors="replace").strip()
    if not tag or "/" in tag or tag in (".", ".."):
        raise CheckpointDamaged(f"{storage.where}/{latest} names no directory: {tag!r:.80}")
    return open_storage(f"{storage.where}/{tag}")


class _Vector:
    """Presents tensors of one dimension as one vector, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """Takes the parts; raises `ValueError` for one that is no vector."""
        for part in parts:
            if not isinstance(part, ArchivedTensor) or len(part.spec.shape) != 1:
                raise ValueError("a part of a vector has another number of dimensions than one")
        self._parts = [part for part in parts if part.spec.numel]
        self.numel = sum(part.spec.numel for part in self._parts)
        self.dtype = parts[0].spec.dtype if parts else "F32"
        if any(part.spec.dtype != self.dtype for part in self._parts):
            raise ValueError("the parts of a vector have several dtypes")

    def parts(self, start: int, count: int) -> Iterator[tuple[ArchivedTensor, Span]]:
        """Yields the parts that have `count` elements from `start` on; raises `ValueError` if it
        ends before."""
        if start + count > self.numel:
            raise ValueError(f"a vector of {self.numel} elements ends before {start + count}")
        first = 0
        for part in self._parts:
            low, high = max(start, first), min(start + count, first + part.spec.numel)
            if low < high:
                yield part, Span(low - first, high - first)
            first += part.spec.numel


@dataclass(frozen=True, slots=True)
class _Rank:
    """Has what one rank of ZeRO saved of its optimizer."""

    flat: Sequence[Any]
    """The vectors of the parameters."""
    state: Mapping[int, Mapping[str, Any]]
    """The vectors of the optimizer, by the number of the parameters' one."""
    groups: Sequence[Mapping[str, Any]]


def _rank(values: Any) -> _Rank:
    zero = values["optimizer_state_dict"]
    base = zero.get("base_optimizer_state", zero.get("optimizer_state_dict"))
    flat = zero.get("single_partition_of_fp32_groups", zero.get("fp32_flat_groups"))
    if isinstance(base, list):  # an elastic checkpoint has no groups
        return _Rank(list(flat), dict(enumerate(base)), ())
    return _Rank(list(flat), base["state"], base["param_groups"])


class _Reading:
    """Reads the files of a step."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._pickle_bytes = 0
        self._left_out: list[LeftOut] = []

    def saved(self, names: Sequence[str]) -> Saved:
        """Returns what was saved."""
        models = self._files(names, _MODEL_FILE)
        optimizers = self._files(names, _OPTIMIZER_FILE)
        if not models:
            raise UserError(f"{self._storage.where} has no model states of DeepSpeed")
        states = [self._values(self._storage, name) for name in models]
        first = states[0]
        if _UNIVERSAL in names:
            tree = self._universal(states)
        elif optimizers:
            tree = self._of_ranks(states, [self._values(self._storage, n) for n in optimizers])
        else:  # no stage of ZeRO: rank 0 has all
            tree = {"model": dict(first["module"]), "optimizer": first.get("optimizer")}
        aliases = dict(first.get("shared_params") or {})
        tree["model"] = {n: leaf for n, leaf in tree["model"].items() if n not in aliases}
        others = {k: v for k, v in first.items() if k not in _CONSUMED and k not in tree}
        step = first.get("global_steps")
        taken = {*models, *optimizers, _UNIVERSAL}
        left_out = [LeftOut(n, "it is no state of training") for n in names if n not in taken]
        return Saved(
            where=self._storage.where,
            tree={**tree, **others},
            model=("model",),
            pickle_bytes=self._pickle_bytes,
            step=step if type(step) is int and step >= 0 else None,
            aliases={str(alias): str(name) for alias, name in aliases.items()},
            left_out=(*left_out, *self._left_out),
        )

    def _files(self, names: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
        """Returns the files of a kind in the order of ranks."""
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        if any(int(match["part"]) for match in matches):
            raise UserError(f"{self._storage.where} is of tensor parallelism: {_TO_UNIVERSAL}")
        by_rank = {int(match["rank"] or 0): match.string for match in matches}
        if len(by_rank) != len(matches) or sorted(by_rank) != list(range(len(by_rank))):
            raise CheckpointDamaged(f"{self._storage.where} lacks the file of a rank, or has two")
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _values(self, storage: Storage, name: str) -> Any:
        archive = Archive(storage, name)
        self._pickle_bytes += archive.pickle_bytes
        return read_values(archive, TABLE)

    def _of_ranks(self, states: Sequence[Any], optimizers: Sequence[Any]) -> dict[str, Any]:
        """Returns the model and the optimizer of the files of all ranks."""
        zero = optimizers[0]["optimizer_state_dict"]
        counts = zero.get("partition_count", len(optimizers))
        count = max(counts) if isinstance(counts, list | tuple) else counts
        if count != len(optimizers):
            raise CheckpointDamaged(
                f"{self._storage.where} has the optimizer states of {len(optimizers)} ranks, and "
                f"{count} ranks have saved"
            )
        ranks = [_rank(values) for values in optimizers]
        shapes = [dict(group) for group in states[0]["param_shapes"]]
        partitioned = "fp32_flat_groups" in zero
        layout = _partitioned(shapes, count) if partitioned else _flattened(shapes, zero)
        model = {**_whole(states[0]), **_frozen(states, partitioned)}
        state: dict[str, dict[str, Any]] = {}
        for number, (places, end) in enumerate(layout):
            vectors = _vectors(ranks, number, partitioned)
            for name, place in places.items():
                model[name] = place.tensor(vectors["fp32"])
                state[name] = {
                    key: place.tensor(vector) if isinstance(vector, list) else vector
                    for key, vector in vectors.items()
                    if key != "fp32"
                }
            _check_used(end, vectors["fp32"], count, self._storage.where)
            if not partitioned and "param_slice_mappings" in zero:
                noted = [o["optimizer_state_dict"]["param_slice_mappings"] for o in optimizers]
                sizes = [rank.flat[number].spec.numel for rank in ranks]
                _check_fragments(places, [mapping[number] for mapping in noted], sizes)
        self._leave_out(zero)
        groups = [_group(group, shapes, state) for group in ranks[0].groups]
        return {"model": model, "optimizer": {"state": state, "param_groups": groups}}

    def _leave_out(self, zero: Mapping[str, Any]) -> None:
        """Lists what the optimizer of ZeRO keeps for itself."""
        for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"):
            if key in zero:
                self._left_out.append(LeftOut(f"optimizer_state_dict/{key}", "DeepSpeed's own"))

    def _universal(self, states: Sequence[Any]) -> dict[str, Any]:
        """Returns the model and the optimizer of a universal checkpoint.

        The model states are those of the ranks. What they have whole may also be among the
        parameters, in 32 bits.
        """
        first = states[0]
        above = open_storage(f"{self._storage.where}/{_UNIVERSAL}")
        groups = self._values(above, _UNIVERSAL_GROUPS)
        shapes = [dict(group) for group in first["param_shapes"]]
        shape_of = {name: shape for group in shapes for name, shape in group.items()}
        inner = groups.get("optimizer_state_dict") or {}
        common = {k: v for k, v in (inner.get("state") or {}).get(0, {}).items() if k == "step"}
        fragments = first.get("frozen_param_fragments") or {}
        is_whole = all(fragments[n].spec.shape == tuple(s) for n, s in _frozen_shapes(first))
        model = {**_whole(first), **_frozen(states, not is_whole)}
        state: dict[str, dict[str, Any]] = {}
        for name in above.names():
            if name == _UNIVERSAL_GROUPS or name in model:
                continue
            entries = self._universal_entries(f"{above.where}/{name}", shape_of.get(name))
            model[name] = entries.pop("fp32")
            state[name] = common | entries
        made = [_group(group, shapes, state) for group in groups["param_groups"]]
        return {"model": model, "optimizer": {"state": state, "param_groups": made}}

    def _universal_entries(self, url: str, shape: Any) -> dict[str, Any]:
        """Returns the tensors of one parameter, by their kind."""
        storage = open_storage(url)
        entries = {}
        for file in storage.names():
            value = self._values(storage, file)
            value = value.get("param") if isinstance(value, dict) else value
            if isinstance(value, ArchivedTensor) and value.spec.shape and shape is not None:
                if prod(shape) != value.spec.numel:
                    raise ValueError(f"{url}/{file} has another number of elements than {shape}")
                spec = TensorSpec(value.spec.dtype, tuple(shape))
                value = JoinedTensor(spec, ((value, Span(0, spec.numel)),))
            entries[file.removesuffix(".pt")] = value
        return entries


@dataclass(frozen=True, slots=True)
class _Place:
    """Locates a parameter in the vectors of the ranks."""

    shape: tuple[int, ...]
    starts: tuple[tuple[int, int], ...]
    """First element and number of elements in each vector."""

    def tensor(self, vectors: Sequence[_Vector]) -> JoinedTensor:
        parts = [
            part
            for vector, (start, count) in zip(vectors, self.starts, strict=True)
            for part in vector.parts(start, count)
        ]
        return JoinedTensor(TensorSpec(vectors[0].dtype, self.shape), tuple(parts))


def _flattened(
    shapes: Sequence[Mapping[str, Any]], zero: Mapping[str, Any]
) -> list[tuple[dict[str, _Place], int]]:
    """Returns (places, elements) of each vector of stages 1 and 2, which has one group."""
    paddings = zero.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    layout = []
    for group, padding in zip(shapes, paddings, strict=True):
        places, start = {}, 0
        for (name, shape), after in zip(group.items(), padding, strict=True):
            places[name] = _Place(tuple(shape), ((start, prod(shape)),))
            start += prod(shape) + after
        layout.append((places, start))
    return layout


def _partitioned(
    shapes: Sequence[Mapping[str, Any]], count: int
) -> list[tuple[dict[str, _Place], int]]:
    """Returns the places of stage 3, where each rank has a part of each parameter, and the number
    of elements of a rank's vector."""
    places: dict[str, _Place] = {}
    start = 0
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        size, part = prod(shape), ceil(prod(shape) / count)
        held = (min(part, max(0, size - rank * part)) for rank in range(count))
        places[name] = _Place(tuple(shape), tuple((start, number) for number in held))
        start += part
    return [(places, start)]


def _vectors(ranks: Sequence[_Rank], number: int, partitioned: bool) -> dict[str, Any]:
    """Returns the parameters' and the optimizer's vectors by kind; what is no vector stays a value.

    Args:
        ranks: What each rank saved.
        number: Number of the vector, with stages 1 and 2.
        partitioned: Whether it is stage 3, where a rank's vectors follow each other.
    """
    numbers = range(len(ranks[0].flat)) if partitioned else [number]
    first = ranks[0].state.get(numbers[0], {}) if len(numbers) else {}
    kinds: dict[str, Any] = {}
    for key, value in [("fp32", ranks[0].flat[numbers[0]]), *first.items()]:
        if not is_tensor(value) or not value.spec.shape:
            kinds[key] = value
            continue
        parts = [
            [rank.flat[n] if key == "fp32" else rank.state[n][key] for n in numbers]
            for rank in ranks
        ]
        if partitioned:
            kinds[key] = [_Vector(of_rank) for of_rank in parts]
        else:
            kinds[key] = [_Vector([part for of_rank in parts for part in of_rank])]
    return kinds


def _check_used(end: int, vectors: Sequence[_Vector], ranks: int, where: str) -> None:
    """Raises `CheckpointDamaged` if vectors have more elements than parameters and padding.

    Args:
        end: Number of elements of the parameters of one vector.
        vectors: One vector of all ranks, which may be padded to twice their number, or one of each.
        ranks: Number of ranks.
        where: The checkpoint, for the message.
    """
    alignment = 1 if len(vectors) > 1 else 2 * ranks
    for vector in vectors:
        if vector.numel > end and ceil(vector.numel / alignment) != ceil(end / alignment):
            raise CheckpointDamaged(
                f"{where}: a vector has {vector.numel} elements, and its parameters have {end}"
            )


def _check_fragments(
    places: Mapping[str, _Place], fragments: Sequence[Any], sizes: Sequence[int]
) -> None:
    """Raises `ValueError` if the ranks themselves have noted other places of the parameters.

    Args:
        places: The parameters of one vector.
        fragments: By rank, the place of each parameter in the rank's part of the vector.
        sizes: By rank, the number of elements of that part.
    """
    first = 0
    for noted, size in zip(fragments, sizes, strict=True):
        for name, fragment in (noted or {}).items():
            start, count = places[name].starts[0]
            low, high = max(start, first), min(start + count, first + size)
            if (fragment.start, fragment.numel) != (low - first, high - low):
                raise ValueError(f"{name} lies elsewhere than the order of its group says")
        first += size


def _whole(first: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors that are not in vectors: buffers, and with stages 1 and 2 what is
    frozen."""
    flat = {name for group in first.get("param_shapes") or () for name in group}
    apart = flat.union(name for name, _ in _frozen_shapes(first))
    return {n: t for n, t in first["module"].items() if n not in apart}


def _frozen_shapes(first: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list((first.get("frozen_param_shapes") or {}).items())


def _frozen(states: Sequence[Mapping[str, Any]], partitioned: bool) -> dict[str, Any]:
    """Returns the frozen parameters, of which each rank has a part with stage 3."""
    frozen = {}
    for name, shape in _frozen_shapes(states[0]):
        ranks = states if partitioned else states[:1]
        parts = [state["frozen_param_fragments"][name] for state in ranks]
        if not partitioned:
            frozen[name] = parts[0]
            continue
        spec = TensorSpec(parts[0].spec.dtype, tuple(shape))
        vector = _Vector(parts)
        frozen[name] = JoinedTensor(spec, tuple(vector.parts(0, spec.numel)))
    return frozen


def _group(
    group: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    state: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Returns a group with the names of its parameters, whose step it may hold.

    Args:
        group: The group, whose parameters are numbers of vectors.
        shapes: The parameters of each vector.
        state: The optimizer's state by parameter.
    """
    names = [name for number in group["params"] for name in shapes[number]]
    if "step" in group:
        for name in names:
            state[name].setdefault("step", group["step"])
    return {**{k: v for k, v in group.items() if k != "params"}, "params": names}
