"""Implements `checkpoint.save`, `load` and `load_state`, which a script can call without an agent.

The values to save may be nested as state dicts are. The name of a tensor in the checkpoint is its
path, the keys joined by "/". Everything else, and the nesting, becomes JSON in the manifest's
state.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elasticzero.checkpoint.format.dtypes import (
    check_fillable,
    check_plain,
    tensor_spec,
    torch_dtype,
)
from elasticzero.checkpoint.format.layout import Layout, TensorSpec, check_tensor_names
from elasticzero.checkpoint.format.manifest import TREE, Manifest
from elasticzero.checkpoint.format.names import checked_step, step_directory
from elasticzero.checkpoint.format.strict_json import check_depth, reason, strict_json
from elasticzero.checkpoint.io.dtensor import layout_of, local_part, pieces_of, writing_ranks
from elasticzero.checkpoint.io.reader import Checkpoint, open_step
from elasticzero.checkpoint.io.writer import (
    DEFAULT_WAIT_S,
    SaveCoordination,
    write_checkpoint,
)
from elasticzero.checkpoint.steps import catalog, commit
from elasticzero.checkpoint.steps.retention import clean_up_after_manual_save
from elasticzero.checkpoint.storage.base import Directory
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    OperatorError,
    RetryError,
    StorageError,
    UserError,
    one_line,
)
from elasticzero.nested import encoded_items, flatten, unflatten
from elasticzero.state.model import LoadTarget
from elasticzero.text import printable

log = logging.getLogger(__name__)

_T = TypeVar("_T")

WRAPPED = "$wrapped"
"""Key of the state that holds, by path, the class and options of tensors that wrap others."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEVICE = re.compile(r"device\(type='[a-z]+'(?:, index=\d+)?\)")
_MAX_LOADS = 5
"""Maximum number of steps that a load begins to read while retention removes them."""
_MAX_ERROR_BYTES = 1000
"""Maximum size of an error's text that one rank gives to the others."""


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[Any, Any],
    *,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    wait_s: float = DEFAULT_WAIT_S,
) -> str:
    """Writes a checkpoint by hand, without an agent, and returns the step's directory.

    Where torch.distributed is initialised every rank calls this, and it returns on every rank once
    the checkpoint is committed. A plain tensor must be equal on all ranks, and each rank writes an
    even share of it. Of a DTensor each rank writes its own rows. Everything that is not a tensor is
    taken from rank 0. A save that fails leaves nothing behind.

    Args:
        path: The checkpoint directory, a path or a URL; the step becomes a directory in it.
        tensors: Dicts, lists and tuples, nested in any way, of tensors, arrays, numbers, strings
            and None.
        step: The number of the step.
        state: Further JSON, which `load_state` returns.
        wait_s: How many seconds rank 0 waits for the files of the others.

    Raises:
        UserError: The step exists already, or a checkpoint cannot hold the values.
        StorageError: The directory cannot be written, or another save of the step came first.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)
    ready = _run_on_all_ranks(lambda: _check_input(path, tensors, step, state, world))
    storage = ready.directory.step(step_directory(ready.step))
    stands = _run_on_all_ranks(lambda: rank == 0 and commit.is_good(storage))
    token = _broadcast_from_rank_0(0 if stands else secrets.randbits(62) | 1)
    if not token:
        raise UserError(f"{storage.where} holds a checkpoint already: save under another step")
    draft = Manifest(
        step=ready.step,
        generation=0,
        token=f"{token:016x}",
        strategy="saved",
        layout=ready.layout,
        state=ready.state,
    )
    writer = ready.writers.index(rank) if rank in ready.writers else None
    pieces = () if writer is None else pieces_of(ready.layout, writer, ready.named)
    coordination = SaveCoordination(
        allreduce_max=_allreduce_max, share_error=_share_error, wait_s=wait_s
    )
    try:
        written = write_checkpoint(ready.directory, draft, writer, pieces, coordination)
    except RetryError as error:
        raise StorageError(str(error)) from None
    if not _allreduce_max(int(written.committed)):
        raise StorageError(
            f"{storage.where}: another save of this step came first, and nothing of this one is "
            "left: save under another step"
        )
    if written.committed:
        clean_up_after_manual_save(ready.directory, draft)
    return storage.where


def load(path: str | os.PathLike[str], into: Mapping[Any, Any] | None = None) -> dict[Any, Any]:
    """Reads a checkpoint and returns the values that `save` was given.

    Of a checkpoint that a job wrote, it returns the tensors by name. Loading needs no process
    group. Without `into`, every tensor is newly made, whole, on the CPU. With it, its tensors are
    filled in place (of a DTensor this rank's part) and appear in the result, and everything else in
    the result comes from the checkpoint. A tensor that wraps others, as quantized ones do, is
    filled through its inner tensors; without `into` it is a dict of these. Of a checkpoint that
    holds more, only the values under the first-level keys of `into` are read.

    Args:
        path: A checkpoint directory, of which the newest good step is read, or one step's
            directory.
        into: Nested as the saved values; its tensors must be in the checkpoint.

    Raises:
        UserError: There is no checkpoint.
        CheckpointMismatch: The checkpoint does not fit `into`.
        CheckpointDamaged: Bytes are missing or wrong.
        StorageError: The bytes cannot be read.
    """
    log_line = _warn if _is_rank_0() else _ignore
    for _ in range(_MAX_LOADS):
        storage, manifest = catalog.resolve_manifest(path, log_line)
        try:
            return _load(open_step(storage, manifest), into)
        except CheckpointDamaged:
            if storage.where == open_directory(path).where or not catalog.was_removed(storage):
                raise
            log_line(f"{storage.where} was removed while it was read: the next good step is read")
    raise StorageError(f"the steps in {path} are removed faster than they can be read: try again")


def _load(checkpoint: Checkpoint, into: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """Reads a step, as `load` does."""
    targets: dict[str, torch.Tensor] = {}
    wrappers: dict[str, torch.Tensor] = {}
    requested = None if into is None else flatten(into, "", targets, wrappers)
    _check_wrappers(wrappers, checkpoint.manifest)
    for name, tensor in targets.items():
        check_plain(name, tensor)
        check_fillable(name, local_part(name, tensor)[1])
    checkpoint.check({n: tensor_spec(t, n) for n, t in targets.items()}, allow_more=True)
    tensors = dict(targets)

    def tensor_of(name: str) -> torch.Tensor:
        if name not in tensors:
            tensors[name] = _empty(name, checkpoint.manifest.layout.tensors[name])
        return tensors[name]

    step = checkpoint.manifest.step
    try:
        chosen = _select_items(_first_level(checkpoint.manifest), requested, step)
        result = {key: unflatten(json, tensor_of) for key, json in chosen.items()}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(
            f"the checkpoint of step {step}: its nesting makes no sense: {error!r:.200}"
        ) from None
    checkpoint.load(LoadTarget(name, *local_part(name, t)) for name, t in tensors.items())
    return _with_wrappers(result, into, wrappers) if wrappers else result


def _check_wrappers(wrappers: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Raises `CheckpointMismatch` for a wrapper of another class, or with other options, than the
    one whose inner tensors were saved."""
    stored = manifest.state.get(WRAPPED, {})
    for path, wrapper in wrappers.items():
        expected, saved = _wrapper_text(wrapper), stored.get(path)
        if saved is not None and saved != expected:
            raise CheckpointMismatch(
                f"{path!r} was saved as {saved}, and `into` has {expected}: the same numbers would "
                "mean something else"
            )


def _wrapper_text(wrapper: torch.Tensor) -> str:
    """Returns the class, sizes and options of a tensor that wraps others, without addresses."""
    context = wrapper.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    kind = type(wrapper)
    options = _ADDRESS.sub("", repr(context))
    options = _DEVICE.sub("", options)[:_MAX_ERROR_BYTES]
    return f"{kind.__module__}.{kind.__qualname__} of {list(wrapper.shape)}, {options}"


def _with_wrappers(result: Any, into: Any, wrappers: Mapping[str, torch.Tensor]) -> Any:
    """Returns the result with the wrappers of `into` in the place of their inner tensors.

    Args:
        result: The values that were read.
        into: The values whose tensors were filled.
        wrappers: The tensors of `into` that wrap others.
    """
    if isinstance(into, torch.Tensor):
        return into if any(into is wrapper for wrapper in wrappers.values()) else result
    if isinstance(into, Mapping) and isinstance(result, dict):
        return {k: _with_wrappers(v, into.get(k), wrappers) for k, v in result.items()}
    lists = isinstance(into, (list, tuple)) and isinstance(result, (list, tuple))
    if lists and len(into) == len(result):
        pairs = zip(result, into, strict=True)
        return type(result)(_with_wrappers(v, i, wrappers) for v, i in pairs)
    return result


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the `state` that `save` was given.

    Args:
        path: A checkpoint directory, or one step's directory, as for `load`.

    Raises:
        UserError: There is no checkpoint.
        CheckpointDamaged: The manifest is missing or wrong.
        StorageError: The manifest cannot be read.
    """
    manifest = catalog.resolve_manifest(path, _ignore)[1]
    return {key: value for key, value in manifest.state.items() if key not in (TREE, WRAPPED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveInput:
    """Holds the checked input of a save: values and directory that can be written."""

    step: int
    named: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    writers: list[int]
    """The ranks that write, in the order of the ranks in the layout."""
    layout: Layout
    directory: Directory


def _check_input(
    path: str | os.PathLike[str],
    tensors: Mapping[Any, Any],
    step: int,
    state: Mapping[str, Any] | None,
    world_size: int,
) -> _SaveInput:
    """Checks the values and the directory of a save.

    Args:
        path: The checkpoint directory, a path or a URL.
        tensors: The values, nested in any way, as `save` takes them.
        step: The number of the step.
        state: Further JSON; None: there is none.
        world_size: Number of ranks of the process group; 1 without one.

    Raises:
        UserError: The values, the step or the directory cannot be used.
    """
    number = checked_step(step)
    named, json_state = _savable(tensors, state)
    writers = writing_ranks(named, world_size)
    directory = open_directory(path)
    catalog.check_target(directory)
    return _SaveInput(
        step=number,
        named=named,
        state=json_state,
        writers=writers,
        layout=layout_of(named, len(writers)),
        directory=directory,
    )


def _savable(
    tensors: Mapping[Any, Any], state: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns (the tensors by name, the manifest's state); raises `UserError` for other values."""
    named: dict[str, torch.Tensor] = {}
    if not isinstance(tensors, Mapping):
        raise UserError(f"checkpoint.save takes a dict, not a {type(tensors).__name__}")
    try:
        wrappers: dict[str, torch.Tensor] = {}
        tree = flatten(tensors, "", named, wrappers)
    except RecursionError:
        raise UserError("checkpoint.save: this is nested too deep, or contains itself") from None
    extra = dict(state or {})
    try:
        check_depth(extra)
        strict_json(json.dumps(extra).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint.save: `state` is not JSON: {reason(error)}") from None
    if not named:
        raise UserError("checkpoint.save was given no tensors: there is nothing to save")
    try:
        check_tensor_names(named)
    except ValueError as error:
        raise UserError(f"checkpoint.save: {error}") from None
    for name, tensor in named.items():
        check_plain(name, tensor)
    if taken := {TREE, WRAPPED} & extra.keys():
        raise UserError(f"checkpoint.save: the key {min(taken)!r} of `state` is taken")
    if tree != _flat(named):
        extra[TREE] = tree
    if wrappers:
        extra[WRAPPED] = {path: _wrapper_text(wrapper) for path, wrapper in wrappers.items()}
    return named, extra


def _flat(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$tensor": name} for name in names}


def _first_level(manifest: Manifest) -> dict[Any, Any]:
    """Returns the saved values by their first-level keys, each value encoded."""
    tree = manifest.state.get(TREE)
    return _flat(manifest.layout.tensors) if tree is None else encoded_items(tree)


def _select_items(saved: dict[Any, Any], requested: Any, step: int) -> dict[Any, Any]:
    """Returns the values to load: all saved values, or those under the first-level keys requested.

    Args:
        saved: The values that were saved, by first-level key.
        requested: What `into` holds, without its tensors; None: everything is requested. A key of
            it that was not saved must hold tensors only; their names then tell where they are.
        step: The checkpoint's step, for messages.

    Raises:
        CheckpointMismatch: A key was requested that was not saved.
    """
    if requested is None:
        return saved
    chosen = {}
    for key, json_value in encoded_items(requested).items():
        if key not in saved and not _only_tensors(json_value):
            raise CheckpointMismatch(
                f"the checkpoint of step {step} has nothing under {key!r}, which `into` asks for"
            )
        chosen[key] = saved.get(key, json_value)
    return chosen


def _empty(name: str, spec: TensorSpec) -> torch.Tensor:
    try:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    except (RuntimeError, MemoryError):
        raise OperatorError(
            f"there is no memory for {name}, {spec} of {spec.nbytes} bytes: load it `into` tensors "
            "that are divided among ranks, or only what is needed"
        ) from None


def _only_tensors(encoded: Any) -> bool:
    if isinstance(encoded, list):
        return all(_only_tensors(item) for item in encoded)
    if not isinstance(encoded, dict):
        return False
    match encoded:
        case {"$tensor": _} | {"$array": _}:
            return True
        case {"$map": pairs}:
            return all(_only_tensors(item) for _, item in pairs)
    return all(_only_tensors(item) for item in encoded.values())


def _run_on_all_ranks(work: Callable[[], _T]) -> _T:
    """Returns the result of `work` on every rank; if it fails on one rank it fails on all."""
    result: list[_T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
        failure = error
    if _allreduce_max(int(failure is not None)):
        reason = _share_error("" if failure is None else one_line(failure))
        raise failure or StorageError(f"nothing is saved: {reason}")
    return result[0]


def _warn(text: str) -> None:
    """Tells the script's user of newer steps that are skipped."""
    log.warning("%s", printable(text))


def _ignore(_: str) -> None:
    """Drops a line that another call or another rank also prints."""


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_rank_0() -> bool:
    return not _is_distributed() or dist.get_rank() == 0


def _broadcast_from_rank_0(value: int) -> int:
    """Returns rank 0's value, on every rank; the value itself where there is no process group."""
    return _communicate([value], lambda tensor: dist.broadcast(tensor, src=0))[0]


def _allreduce_max(value: int) -> int:
    """Returns the greatest value of all ranks; the value itself where there is no process group."""
    return _communicate([value], lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX))[0]


def _share_error(text: str) -> str:
    """Returns on every rank the text of the first rank that has any, and names that rank."""
    if not _is_distributed():
        return text
    world, rank = dist.get_world_size(), dist.get_rank()
    first = world - _allreduce_max(world - rank if text else 0)
    if first == world:
        return "no rank says why"
    message = f"rank {rank} failed: {text}".encode(errors="replace")[:_MAX_ERROR_BYTES]
    padded = list(message.ljust(_MAX_ERROR_BYTES, b"\0"))
    received = bytes(_communicate(padded, lambda tensor: dist.broadcast(tensor, src=first)))
    return received.rstrip(b"\0").decode(errors="replace")


def _communicate(values: list[int], exchange: Callable[[torch.Tensor], object]) -> list[int]:
    if not _is_distributed():
        return values
    device = "cuda" if "cpu:" not in dist.get_backend_config() else "cpu"
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    exchange(tensor)
    return [int(value) for value in tensor.tolist()]
