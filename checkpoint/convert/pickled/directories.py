"""Opens directories that transformers' Trainer and `Accelerator.save_state` have written.

Each file of a known name is one value: `optimizer.pt` becomes `optimizer`, and the weights, of
whatever format, `model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from elasticzero.checkpoint.convert.dcp_import import open_dcp
from elasticzero.checkpoint.convert.huggingface import check_foreign, open_hf
from elasticzero.checkpoint.convert.import_plan import LeftOut
from elasticzero.checkpoint.convert.pickled.archive import Archive
from elasticzero.checkpoint.convert.pickled.leaves import ForeignTensor
from elasticzero.checkpoint.convert.pickled.values import read_values
from elasticzero.checkpoint.convert.pickled.walk import Saved
from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.checkpoint.format.strict_json import strict_json
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import MODEL_PREFIX
from elasticzero.checkpoint.storage.base import Storage, read_small
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.nested import unflatten

_PICKLES = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict|scaler|rng_state|random_states|custom_checkpoint)"
    r"(_\d+)?\.(pt|bin|pth|pkl)"
)
"""Files of `torch.save` that hold state."""
_MORE_MODELS = re.compile(r"model_\d+\.safetensors")
_SHARDED = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""Directories of torch.distributed.checkpoint that FSDP leaves."""
_PICKLED_MODEL = re.compile(r"pytorch_model(_fsdp|-\d+-of-\d+)?\.bin")
_SAFETENSORS = (".safetensors", ".safetensors.index.json")
_STATE_OF_TRAINER = "trainer_state.json"
_OF_DEEPSPEED = re.compile(r"(global_step|zero_pp_rank|mp_rank|bf16_zero_pp_rank).*")
_LIMIT_BYTES = 1 << 28
_NO_STATE = "it is no state of training"


def open_directory_of_state(url: str) -> Saved:
    """Opens a directory of a Trainer or of `save_state`.

    Raises:
        UserError: The directory has no weights, or is of another kind.
        CheckpointDamaged: A file is damaged.
    """
    check_foreign(url)
    storage = open_storage(url)
    names = storage.names()
    if any(_OF_DEEPSPEED.fullmatch(name) for name in names):
        raise UserError(f"{storage.where} was written by DeepSpeed: use `--format deepspeed`")
    reading = _Reading(storage, names)
    reading.read()
    if not reading.tree.get("model"):
        raise UserError(f"{storage.where} has no weights of a model that can be imported")
    state = reading.tree.get("trainer_state")
    step = state.get("global_step") if isinstance(state, dict) else None
    return Saved(
        where=storage.where,
        tree=reading.tree,
        model=("model",),
        pickle_bytes=reading.pickle_bytes,
        aliases=reading.aliases,
        step=step if type(step) is int and step >= 0 else None,
        left_out=tuple(reading.left_out),
    )


class _Reading:
    """Reads the files of a directory, one after the other."""

    def __init__(self, storage: Storage, names: Iterable[str]) -> None:
        self._storage = storage
        self._names = list(names)
        self.tree: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.left_out: list[LeftOut] = []
        self.pickle_bytes = 0

    def read(self) -> None:
        """Reads all files; a file of no known name is left out."""
        weights = [name for name in self._names if name.endswith(_SAFETENSORS)]
        weights = [name for name in weights if not _MORE_MODELS.fullmatch(name)]
        if weights:
            foreign = open_hf(self._storage.where)
            self._add_model("model", foreign)
        for name in self._names:
            if name in weights:
                continue
            stem = name.partition(".")[0]
            if _PICKLES.fullmatch(name):
                self.tree[stem] = self._values(name)
            elif _SHARDED.fullmatch(name):
                self._add_sharded(name)
            elif _MORE_MODELS.fullmatch(name):
                self._add_model(stem, open_hf(f"{self._storage.where}/{name}"))
            elif _PICKLED_MODEL.fullmatch(name) and not weights:
                self._add_pickled(name)
            elif name == _STATE_OF_TRAINER:
                self._add_json(name)
            else:
                self.left_out.append(LeftOut(name, _NO_STATE))

    def _values(self, name: str) -> Any:
        archive = Archive(self._storage, name)
        self.pickle_bytes += archive.pickle_bytes
        return read_values(archive)

    def _add_model(self, key: str, foreign: ForeignCheckpoint) -> None:
        leaves = {n.removeprefix(MODEL_PREFIX): ForeignTensor(foreign, n) for n in foreign.specs}
        self.tree.setdefault(key, {}).update(leaves)
        self.pickle_bytes += len(leaves)
        if key == "model":
            self.aliases |= foreign.state.get("aliases", {})

    def _add_pickled(self, name: str) -> None:
        values = self._values(name)
        if not isinstance(values, dict):
            raise UserError(f"{self._storage.where}/{name} holds no state dict")
        self.tree.setdefault("model", {}).update(values)

    def _add_sharded(self, name: str) -> None:
        foreign = open_dcp(f"{self._storage.where}/{name}")
        tree = unflatten(foreign.state[TREE], lambda tensor: ForeignTensor(foreign, tensor))
        self.pickle_bytes += len(foreign.specs)
        if isinstance(tree, dict):
            self.tree |= tree

    def _add_json(self, name: str) -> None:
        data = read_small(self._storage, name, _LIMIT_BYTES)
        self.pickle_bytes += len(data)
        try:
            self.tree[name.partition(".")[0]] = strict_json(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(
                f"{self._storage.where}/{name} is not JSON: {error!s:.100}"
            ) from None
