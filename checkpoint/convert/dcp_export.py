"""Exports to a torch.distributed.checkpoint directory with torch's own writer, tensor by tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from elasticzero.checkpoint.convert.exported_state import (
    GROUPS_KEY,
    MODEL_KEY,
    OPTIMIZER_KEY,
    OWN_KEY,
)
from elasticzero.checkpoint.convert.huggingface import (
    ExportResult,
    aliases_of,
    check_export_target,
    model_specs,
)
from elasticzero.checkpoint.format.dtypes import byte_view, torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.format.manifest import TREE, Manifest
from elasticzero.checkpoint.rewrite.sources import (
    MODEL_PREFIX,
    CheckpointSource,
    TensorSource,
    cast_specs,
    open_converted,
)
from elasticzero.checkpoint.rewrite.step_copy import CopyOptions, new_directory, run_jobs
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable, explain
from elasticzero.errors import ElasticZeroError, StorageError, UserError
from elasticzero.nested import tensor_names, unflatten
from elasticzero.spans import Span

_TORCH_WRITER = "inline_container.cc"
"""Text in torch's error when its file could not be written to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpExportOptions:
    """Selects the state that is exported, and its dtype."""

    everything: bool = False
    """True: export all state; False: export only the model's tensors."""
    dtype: str | None = None
    """The dtype of the model's floating-point tensors, as in `reshard.TargetShape`."""
    allow_overflow: bool = False
    """True: finite values beyond the range of `dtype` become infinite; False: they are refused."""


def export_dcp(
    source: Readable,
    target: str,
    options: DcpExportOptions | None = None,
    copy_options: CopyOptions | None = None,
) -> ExportResult:
    """Writes a checkpoint as torch.distributed.checkpoint would; memory holds one tensor at a time.

    An export of the model alone has the keys of the model's own `state_dict()`, aliases included.
    An export of everything has the nesting of what `checkpoint.save` was given. Of a checkpoint
    that a job wrote it is `{"model": ..., "optimizer": {"state": ..., "param_groups": ...},
    "elasticzero": ...}`, keyed by parameter names.

    Args:
        source: The checkpoint's step.
        target: A new or empty local directory; an export that fails leaves it as it was.
        options: What is exported; None: the defaults.
        copy_options: Memory, threads and progress of the copy; None: the defaults.

    Raises:
        UserError: The target is no new or empty local directory.
        StorageError: The target cannot be written.
    """
    options, copy_options = options or DcpExportOptions(), copy_options or CopyOptions()
    if "://" in target and not target.startswith("file://"):
        raise UserError(f"{target} is not on this machine's disks: export to a directory and copy")
    check_export_target(target)
    manifest = catalog.read_manifest(source)
    chosen = manifest.layout.tensors if options.everything else model_specs(source, manifest)
    specs = cast_specs(chosen, options.dtype)
    placeholders = _Placeholders(specs)
    if options.everything:
        state_dict = all_state(manifest, specs, placeholders, _torch_nesting)
    else:
        state_dict = model_state(manifest, specs, placeholders)
    total = sum(spec.nbytes for spec in specs.values())
    copy_options.progress.expect(total)

    def open_plain(buffer_bytes: int) -> TensorSource:
        return CheckpointSource(source, manifest, buffer_bytes)

    open_source = open_converted(open_plain, options.dtype, options.allow_overflow)

    with new_directory(target) as storage:
        path = Path(storage.where)

        def job(opened: TensorSource) -> None:
            planner = _Planner(lambda tensor: _read(opened, placeholders.name_of(tensor)))
            writer = FileSystemWriter(path)
            try:
                with warnings.catch_warnings(category=UserWarning, action="ignore"):
                    save_by_torch(state_dict, storage_writer=writer, planner=planner, no_dist=True)
            except CheckpointException as error:
                raise _cause(error, path) from None

        run_jobs([job], open_source, copy_options)
        files = tuple(name for name in storage.names() if name.endswith(".distcp"))
    return ExportResult(where=storage.where, files=files, tensors=len(specs), bytes=total)


def _cause(error: CheckpointException, path: Path) -> BaseException:
    """Returns the original error inside the exception of torch's writer, which wraps every one."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    link: BaseException | None = cause
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    if link is not None and not isinstance(cause, ElasticZeroError):
        return StorageError(f"cannot write to {path}: {explain(link)}")
    if _TORCH_WRITER in str(cause):
        return StorageError(f"cannot write to {path}: is the disk full, or a quota used up?")
    return cause


class _Placeholders:
    """Makes tensors without elements that stand for a checkpoint's tensors until each is
    written."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.specs = specs
        self._names: dict[int, str] = {}
        self._made: list[torch.Tensor] = []

    def __call__(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        made = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        self._names[id(made)] = name
        self._made.append(made)
        return made

    def name_of(self, tensor: torch.Tensor) -> str:
        return self._names[id(tensor)]


class _Planner(DefaultSavePlanner):
    """Reads each tensor just before torch writes it."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return self._read(value) if isinstance(value, torch.Tensor) else value


def _read(source: TensorSource, name: str) -> torch.Tensor:
    spec = source.specs[name]
    tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    if spec.numel:
        view, done = byte_view(tensor), 0
        for chunk in source.chunks(name, Span(0, spec.numel)):
            view[done : done + len(chunk)] = chunk
            done += len(chunk)
    return tensor


def model_state(
    manifest: Manifest,
    names: Iterable[str],
    tensor_of: Callable[[str], Any],
) -> dict[str, Any]:
    """Returns the model's tensors under the keys of its own state dict.

    Args:
        manifest: Manifest of the checkpoint.
        names: Full names of the model's tensors.
        tensor_of: Returns what stands for a tensor of this full name.
    """
    keys = {name.removeprefix(MODEL_PREFIX): name for name in names}
    keys |= {alias: MODEL_PREFIX + kept for alias, kept in aliases_of(manifest).items()}
    return {key: tensor_of(name) for key, name in keys.items()}


def all_state(
    manifest: Manifest,
    names: Iterable[str],
    tensor_of: Callable[[str], Any],
    nesting: Callable[[Any], Any] = lambda json: json,
) -> dict[str, Any]:
    """Returns all state, nested as it was saved, or else as torch's state dicts are.

    Args:
        manifest: Manifest of the checkpoint.
        names: Full names of its tensors.
        tensor_of: Returns what stands for a tensor of this full name.
        nesting: Changes encoded values to those that the format can hold.
    """
    ours: dict[str, Any] = {"state": json.dumps(manifest.state)}
    if TREE in manifest.state:
        return {**unflatten(nesting(manifest.state[TREE]), tensor_of), OWN_KEY: ours}
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for name in names:
        parts = name.split("/")
        if name.startswith(MODEL_PREFIX):
            model[name.removeprefix(MODEL_PREFIX)] = tensor_of(name)
        elif len(parts) == 3 and parts[0] == OPTIMIZER_KEY:
            states.setdefault(parts[1], {})[parts[2]] = tensor_of(name)
        else:
            others[name] = tensor_of(name)
    for alias, kept in aliases_of(manifest).items():
        model[alias] = tensor_of(MODEL_PREFIX + kept)
    nested: dict[str, Any] = {MODEL_KEY: model} if model else {}
    if states:
        groups = [
            {"params": list(group["names"]), **unflatten(nesting(group["options"]), tensor_of)}
            for group in manifest.state.get("groups", ())
        ]
        nested[OPTIMIZER_KEY] = {"state": states, GROUPS_KEY: groups}
    return {**nested, OWN_KEY: {**ours, "tensors": others}}


def _torch_nesting(json: Any) -> Any:
    """Returns an encoded value with its arrays as tensors, and with tuples that hold tensors as
    lists.

    torch's format finds tensors in dicts and lists only.
    """
    if isinstance(json, list):
        return [_torch_nesting(item) for item in json]
    if not isinstance(json, dict):
        return json
    if json.keys() == {"$array"}:
        return {"$tensor": json["$array"]}
    if json.keys() == {"$tuple"} and tensor_names(json):
        return _torch_nesting(json["$tuple"])
    return {key: _torch_nesting(item) for key, item in json.items()}
