"""Opens the directories that Megatron-core writes with its format `torch_dist`.

They are directories of torch.distributed.checkpoint with a plan of Megatron's own. A tensor has the
name of its parameter in Megatron's model, but the layers of a model whose layers are alike may be
one tensor, `decoder.layers.mlp.linear_fc1.weight`, with the layer as first dimension. The state of
an optimizer is `optimizer.state.<kind>.<parameter>`. What is no tensor is a list in an item of its
own, or in `common.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from elasticzero.checkpoint.convert.dcp_import import (
    MEGATRON_NAME,
    megatron_backend,
    open_tensors,
)
from elasticzero.checkpoint.convert.dcp_metadata import (
    Contents,
    StoredItem,
    read_contents,
)
from elasticzero.checkpoint.convert.file_window import ItemFile
from elasticzero.checkpoint.convert.huggingface import check_foreign
from elasticzero.checkpoint.convert.import_plan import LeftOut
from elasticzero.checkpoint.convert.pickle_reader import InertRecord, Opaque, StandIn
from elasticzero.checkpoint.convert.pickled.archive import Archive
from elasticzero.checkpoint.convert.pickled.leaves import ForeignTensor, JoinedTensor, Leaf
from elasticzero.checkpoint.convert.pickled.values import read_values
from elasticzero.checkpoint.convert.pickled.walk import Saved
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.spans import Span

_COMMON_NAME, _COMMON_ITEM = "common.pt", "common_state"
_BACKEND = "torch_dist"
_OPTIMIZER_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<name>.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*")
"""Matches the names of the distributed optimizer's own vectors."""
_SHARD = re.compile(r"(?P<key>.+)/shard_[\d.]+_[\d.]+")
"""Matches the name of an item that is no tensor."""
_ALIKE = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<after>\D.*)")
"""Matches the name of a tensor that holds all layers."""
_MASTERS = "fp32_param"
"""Kind of state that is the parameters' own values in 32 bits."""
_KEPT_COMMON = (
    "iteration", "checkpoint_version", "opt_param_scheduler",
    "num_floating_point_operations_so_far",
)  # fmt: skip
"""Values of all ranks that become state."""
_OWN = {
    "args": "options of Megatron's command line",
    "optimizer": "options of groups, whose parameters have no names here: the script gives its own",
}
"""Reasons why other values of all ranks are left out."""


def open_megatron(url: str, *, model_only: bool = False) -> Saved:
    """Opens a directory of Megatron-core.

    Args:
        url: The directory, `iter_<step>` of Megatron-LM; a path or a URL.
        model_only: True: the optimizer may have any form, for it is left out.

    Raises:
        UserError: The directory is of another kind, or its optimizer is in vectors of buckets.
        CheckpointDamaged: A file is damaged.
    """
    check_foreign(url)
    storage = open_storage(url)
    backend = megatron_backend(storage)
    if backend != _BACKEND:
        raise UserError(
            f"{storage.where} is of Megatron-core's format {backend}, and {_BACKEND} is read: "
            f"load it with Megatron and save it with --ckpt-format {_BACKEND}"
            if backend
            else f"{storage.where}/{MEGATRON_NAME} does not say that Megatron-core wrote it: name "
            "the directory of one step, `iter_…`"
        )
    return _Reading(storage, read_contents(storage, TABLE), model_only).saved()


class _Reading:
    """Sorts what a directory has."""

    def __init__(self, storage: Storage, contents: Contents, model_only: bool) -> None:
        self._storage, self._contents = storage, contents
        self._model_only = model_only
        self._pickle_bytes = storage.size(".metadata")
        self._left_out: list[LeftOut] = []

    def saved(self) -> Saved:
        """Returns what was saved."""
        model, state = self._tensors()
        common = self._common()
        step = common.get("iteration")
        if (count := _optimizer_steps(common.get("optimizer"))) is not None:
            for entries in state.values():
                entries.setdefault("step", count)
        tree: dict[str, Any] = {"model": model}
        if state:
            tree["optimizer"] = {"state": state, "param_groups": []}
        for key, value in common.items():
            if key in _KEPT_COMMON:
                tree[key] = value
            else:
                self._leave_out(key, _OWN.get(key, "it is Megatron's own"))
        return Saved(
            where=self._storage.where,
            tree=tree,
            model=("model",),
            pickle_bytes=self._pickle_bytes,
            step=step if type(step) is int and step >= 0 else None,
            left_out=tuple(self._left_out),
        )

    def _tensors(self) -> tuple[dict[str, Leaf], dict[str, dict[str, Any]]]:
        """Returns the model's tensors, and the optimizer's by parameter and kind."""
        foreign = open_tensors(self._storage, self._contents)
        model: dict[str, Leaf] = {}
        masters: dict[str, Leaf] = {}
        state: dict[str, dict[str, Any]] = {}
        for name in foreign.specs:
            leaf: Leaf = ForeignTensor(foreign, name)
            if _BUCKETS.fullmatch(name):
                self._refuse_optimizer(name, "is a vector of the distributed optimizer's buckets")
            elif match := _OPTIMIZER_STATE.fullmatch(name):
                shape = foreign.specs[match["name"]].shape if match["name"] in foreign.specs else ()
                if leaf.spec.shape != shape:
                    self._refuse_optimizer(name, "has another shape than its parameter")
                    continue
                kind = match["kind"]
                for parameter, part in _by_layer(match["name"], leaf):
                    if kind == _MASTERS:
                        masters[parameter] = part
                    else:
                        state.setdefault(parameter, {})[kind] = part
            else:
                model.update(_by_layer(name, leaf))
        for name, master in masters.items():
            if model[name].spec.dtype != master.spec.dtype:
                self._leave_out(f"model/{name}", "the optimizer's 32-bit values take its place")
        return model | masters, state

    def _refuse_optimizer(self, name: str, why: str) -> None:
        """Leaves a tensor of the optimizer out, or raises `UserError`."""
        if not self._model_only:
            raise UserError(
                f"{self._storage.where}: {name[:80]!a} {why}, so only Megatron can take it apart: "
                "save the optimizer by parameter there (--dist-ckpt-optim-fully-reshardable), or "
                "import the model alone with --model-only"
            )
        self._leave_out(name, f"it {why}")

    def _common(self) -> dict[str, Any]:
        """Returns the values that all ranks have, and leaves out those of single ranks."""
        common = None
        for path, item in self._contents.values.items():
            name = str(path[0])
            match = _SHARD.fullmatch(name)
            if match and match["key"] == _COMMON_ITEM:
                common = self._item(item)
            elif match and match["key"].endswith("_extra_state"):
                self._leave_out(name, "extra state of a module, which Megatron packs for itself")
            else:
                self._leave_out(name, "it is Megatron's own")
        if common is None and _COMMON_NAME in self._storage.names():
            common = self._values(Archive(self._storage, _COMMON_NAME))
        if common is None:
            return {}
        if not isinstance(common, dict):
            raise CheckpointDamaged(f"{self._storage.where}: its common state is no dict")
        return {str(key): value for key, value in common.items()}

    def _item(self, item: StoredItem) -> Any:
        """Returns the one value of an item, which Megatron saves as a list of one."""
        file = ItemFile(self._storage, item.file, item.start, item.bytes)
        values = self._values(Archive(file, item.file))
        return values[0] if isinstance(values, list) and len(values) == 1 else values

    def _values(self, archive: Archive) -> Any:
        self._pickle_bytes += archive.pickle_bytes
        return read_values(archive)

    def _leave_out(self, path: str, reason: str) -> None:
        self._left_out.append(LeftOut(path, reason))


def _by_layer(name: str, leaf: Leaf) -> Iterator[tuple[str, Leaf]]:
    """Yields the name in Megatron's model and the tensor of each layer that a tensor holds."""
    match = _ALIKE.fullmatch(name)
    if match is None or not leaf.spec.shape:
        yield name, leaf
        return
    spec = TensorSpec(leaf.spec.dtype, leaf.spec.shape[1:])
    for layer in range(leaf.spec.shape[0]):
        span = Span(layer * spec.numel, (layer + 1) * spec.numel)
        yield f"{match['before']}{layer}.{match['after']}", JoinedTensor(spec, ((leaf, span),))


def _optimizer_steps(optimizer: Any) -> int | None:
    """Returns the number of steps that an optimizer has taken; None: it does not say."""
    if not isinstance(optimizer, dict):
        return None
    inner = optimizer.get("optimizer")
    for values in (inner, optimizer, *optimizer.values()):  # the last are chained optimizers
        if not isinstance(values, dict):
            continue
        state, groups = values.get("state"), values.get("param_groups")
        counts: list[Any] = [state.get("common_step")] if isinstance(state, dict) else []
        if isinstance(groups, list):
            counts += [group.get("step") for group in groups if isinstance(group, dict)]
        for count in counts:
            if type(count) in (int, float):
                return int(count)
    return None


_PLANNER = "torch.distributed.checkpoint.planner"
_FILES = "megatron.core.dist_checkpointing.strategies"
TABLE: Mapping[tuple[str, str], StandIn] = {
    **{
        (_PLANNER, name): Opaque(name)
        for name in (
            "SavePlan",
            "WriteItem",
            "TensorWriteData",
            "BytesIOWriteData",
            "WriteItemType",
        )
    },
    (f"{_FILES}.torch", "MCoreMetadata"): InertRecord,
    (f"{_FILES}.torch", "MCoreSavePlan"): Opaque("MCoreSavePlan"),
}
"""The stand-ins for names of Megatron's plan, which its metadata repeat."""
