"""Imports from a torch.distributed.checkpoint directory without running code from its files.

`dcp_metadata` reads `.metadata`, and torch reads every item with `weights_only`. The items are zip
archives. This module compares their CRCs, which torch's own reader does not do.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, cast

import torch

from elasticzero.checkpoint.convert.dcp_metadata import (
    METADATA_NAME,
    Box,
    Contents,
    KeyPath,
    StoredItem,
    StoredTensor,
    UnpicklingError,
    read_contents,
)
from elasticzero.checkpoint.convert.dcp_names import (
    PARAMS_KEY,
    PrefixMap,
    extra_state_of,
    flat_parameter,
    is_rooted,
    name_of,
    unread_note,
    usual_paths,
)
from elasticzero.checkpoint.convert.exported_state import (
    GROUPS_KEY,
    OPTIMIZER_KEY,
    OWN_KEY,
    is_copy,
    parse_exported,
)
from elasticzero.checkpoint.convert.file_window import FileWindow
from elasticzero.checkpoint.convert.huggingface import check_foreign
from elasticzero.checkpoint.convert.import_plan import Import, LeftOut
from elasticzero.checkpoint.format.dtypes import byte_view, tensor_spec, torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.checkpoint.format.strict_json import strict_json
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import MODEL_PREFIX
from elasticzero.checkpoint.storage.base import Readable, read_small
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged, StorageError, UserError
from elasticzero.nested import flatten
from elasticzero.spans import Span


def open_dcp(
    url: str, *, model_only: bool = False, maps: Sequence[PrefixMap] = ()
) -> ForeignCheckpoint:
    """Opens a torch.distributed.checkpoint directory as `plan_dcp` does.

    Args:
        url: The directory, a path or a URL.
        model_only: Whether to leave out everything but the model.
        maps: Prefixes of paths, and what takes their place.
    """
    return plan_dcp(url, model_only=model_only, maps=maps).foreign


def plan_dcp(url: str, *, model_only: bool = False, maps: Sequence[PrefixMap] = ()) -> Import:
    """Opens a torch.distributed.checkpoint directory and gives its tensors the names of this
    format.

    The tensors under the key "model" are the model; without such a key, the tensors at the root
    are. Optimizer state keyed by parameter names gets the names `optimizer/<parameter>/<key>`.
    `dcp_names` has the keys that mean the same. Every other tensor is named by its path. All else
    becomes state, and `checkpoint.load` returns the whole with its nesting.

    Args:
        url: The directory, a path or a URL.
        model_only: Whether to leave out everything but the model.
        maps: Prefixes of paths with keys joined by "/", and what takes their place.

    Raises:
        UserError: The directory is of another kind, or it asks for code to be run.
        CheckpointDamaged: The metadata are damaged.
    """
    check_foreign(url)
    storage = open_storage(url)
    if (backend := megatron_backend(storage)) is not None:
        raise UserError(
            f"{storage.where} is of Megatron-core ({backend}), whose names are its own: import it "
            "with `--format megatron`"
        )
    contents = read_contents(storage)
    exported = (OWN_KEY, "state") in contents.values
    ours: dict[str, Any] = {}
    named: dict[KeyPath, str] = {}
    if exported:
        text = _load(storage, contents.values[OWN_KEY, "state"], OWN_KEY)
        ours, named = parse_exported(text, storage.where)
    paths = [*contents.tensors, *contents.values]
    usual = {path: path for path in paths} if exported and not maps else usual_paths(paths, maps)
    rooted = is_rooted(usual[path] for path in contents.tensors)
    names = {p: named.get(p, name_of(usual[p], rooted=rooted)) for p in contents.tensors}
    if exported:
        names = {path: name for path, name in names.items() if not is_copy(path, ours)}
    left_out = _left_out(paths, names, usual, rooted=rooted) if model_only else ()
    if model_only:
        names = {path: name for path, name in names.items() if name.startswith(MODEL_PREFIX)}
    if len(set(names.values())) != len(names):
        raise UserError(f"{storage.where}: two tensors would get the same name")
    if not names:
        raise UserError(f"{storage.where} holds no tensors{' of a model' if model_only else ''}")
    if exported and not model_only:
        state = ours
    else:
        values = {} if model_only else contents.values
        read = {path: _load(storage, item, _text(path)) for path, item in values.items()}
        state = _state(names, read, usual, rooted=rooted)
        state |= {key: ours[key] for key in ("aliases",) if key in ours}
    tensors = {name: contents.tensors[path] for path, name in names.items()}
    note = None if exported else unread_note(names, usual)
    foreign = _foreign(storage, tensors, state, () if note is None else (note,))
    return Import(foreign=foreign, left_out=left_out)


def open_tensors(storage: Readable, contents: Contents) -> ForeignCheckpoint:
    """Opens the tensors of a directory under their own paths, with keys joined by "/".

    Args:
        storage: The directory.
        contents: What its `.metadata` lists.

    Raises:
        UserError: A tensor has a dtype that no checkpoint can hold.
        CheckpointDamaged: A tensor has more elements than its file has bytes for.
    """
    return _foreign(storage, {_text(path): item for path, item in contents.tensors.items()}, {})


def _foreign(
    storage: Readable,
    tensors: Mapping[str, StoredTensor],
    state: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> ForeignCheckpoint:
    """Returns the checkpoint of named tensors.

    Args:
        storage: The directory.
        tensors: The tensors by name.
        state: The values that are no tensors.
        notes: Lines that the user should read.
    """
    specs = {name: _spec(name, tensor) for name, tensor in tensors.items()}
    return ForeignCheckpoint(
        specs=specs,
        state=state,
        open_source=lambda _: _Directory(storage, tensors, specs),
        notes=notes,
    )


def megatron_backend(storage: Readable) -> str | None:
    """Returns the name of the format in which Megatron-core wrote a directory; None: it did not."""
    try:
        about = strict_json(read_small(storage, MEGATRON_NAME, 1 << 20))
    except (FileNotFoundError, StorageError, ValueError, RecursionError):
        return None
    if not isinstance(about, dict) or "sharded_backend" not in about:
        return None
    return str(about["sharded_backend"])[:40]


def _left_out(
    paths: Iterable[KeyPath],
    names: Mapping[KeyPath, str],
    usual: Mapping[KeyPath, KeyPath],
    *,
    rooted: bool,
) -> tuple[LeftOut, ...]:
    """Returns what is left out where only the model's tensors are imported.

    Args:
        paths: The paths of all tensors and values.
        names: The name of each tensor.
        usual: Each path with the usual keys.
        rooted: Whether the model is at the root.
    """
    reasons: dict[str, str] = {}
    for path in paths:
        if names.get(path, "").startswith(MODEL_PREFIX) or path[0] == OWN_KEY:
            continue
        if (extra := extra_state_of(usual[path], rooted=rooted)) is not None:
            top = path[: len(path) - len(extra) + 1]
            reasons[_text(top)] = "--model-only leaves out the extra state of modules too"
        else:
            reasons[_text(path)] = "--model-only takes the model's tensors alone"
    return tuple(LeftOut(path, reason) for path, reason in reasons.items())


def _text(path: KeyPath) -> str:
    return "/".join(map(str, path))


def _state(
    names: Mapping[KeyPath, str],
    values: Mapping[KeyPath, Any],
    usual: Mapping[KeyPath, KeyPath],
    *,
    rooted: bool,
) -> dict[str, Any]:
    """Returns the values that are not tensors, and the nesting, as `checkpoint.save` stores them.

    The optimizer's groups and the extra state of modules are also stored as a session stores them.

    Args:
        names: The name of each tensor, by its path.
        values: The values that are not tensors, by their paths.
        usual: Each path with the usual keys.
        rooted: Whether the model is at the root.
    """
    leaves: dict[KeyPath, Any] = {path: {"$tensor": name} for path, name in names.items()}
    for path, value in values.items():
        tensors: dict[str, torch.Tensor] = {}
        try:
            leaves[path] = flatten(value, _text(path), tensors)
        except UserError as error:
            raise UserError(f"{error}; `--model-only` leaves it out") from None
        if tensors:
            raise UserError(
                f"{next(iter(tensors))!r} is a tensor inside a value that torch saved as one "
                "piece: it cannot be imported; `--model-only` leaves it out"
            )
    state: dict[str, Any] = {TREE: _nested(leaves)}
    if groups := _groups(leaves, usual):
        state["groups"] = groups
    extra = {path: extra_state_of(usual[path], rooted=rooted) for path in leaves}
    if modules := {below: leaves[path] for path, below in extra.items() if below is not None}:
        state["modules"] = _nested(modules)
    return state


def _groups(
    leaves: Mapping[KeyPath, Any], usual: Mapping[KeyPath, KeyPath]
) -> list[dict[str, Any]]:
    """Returns the optimizer's groups as a session stores them; empty unless all have names.

    Args:
        leaves: The encoded values by their paths.
        usual: Each path with the usual keys.
    """
    below: dict[KeyPath, Any] = {}
    for path, leaf in leaves.items():
        if usual[path][:2] == (OPTIMIZER_KEY, GROUPS_KEY):
            below[usual[path][2:]] = leaf
            if (parameter := flat_parameter(path, usual[path])) is not None:
                below[usual[path][2], PARAMS_KEY] = [parameter]
    groups = _nested(below) if below else []
    if not isinstance(groups, list) or not all(_is_named(group) for group in groups):
        return []
    return [
        {
            "names": group[PARAMS_KEY],
            "options": {key: value for key, value in group.items() if key != PARAMS_KEY},
        }
        for group in groups
    ]


def _is_named(group: Any) -> bool:
    params = group.get(PARAMS_KEY) if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def _nested(leaves: Mapping[KeyPath, Any]) -> Any:
    """Nests encoded values: numbers in paths are positions in lists, and all others are keys."""
    if () in leaves:
        return leaves[()]
    below: dict[str | int, dict[KeyPath, Any]] = {}
    for path, leaf in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = leaf
    if all(isinstance(key, int) for key in below):
        return [_nested(below[key]) for key in sorted(below, key=int)]
    if any(isinstance(key, int) or key.startswith("$") for key in below):
        return {"$map": [[key, _nested(part)] for key, part in below.items()]}
    return {str(key): _nested(part) for key, part in below.items()}


def _spec(name: str, tensor: StoredTensor) -> TensorSpec:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"{name} has the dtype {tensor.dtype}, which this version of torch does not have"
        )
    spec = TensorSpec(tensor_spec(torch.empty(0, dtype=dtype)).dtype, tensor.shape)
    for box in tensor.boxes:
        if TensorSpec(spec.dtype, box.sizes).nbytes > box.item.bytes:
            raise CheckpointDamaged(
                f"{METADATA_NAME} says that {box.item.bytes} bytes of {box.item.file} hold "
                f"{spec.dtype}{list(box.sizes)} of {name}"
            )
    return spec


class _Directory:
    """Reads a directory's tensors; memory holds one span, and one part that torch saved, at a
    time."""

    def __init__(
        self,
        storage: Readable,
        tensors: Mapping[str, StoredTensor],
        specs: Mapping[str, TensorSpec],
    ) -> None:
        self.specs = specs
        self._storage = storage
        self._tensors = tensors

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        """Yields the bytes as `TensorSource.chunks` does, the whole span at once."""
        if not span:
            return
        stored, spec = self._tensors[name], self.specs[name]
        width = spec.numel // spec.shape[0] if spec.shape else 1
        first, last = span.start // width, -(-span.stop // width)
        rows = torch.empty((last - first, *spec.shape[1:]), dtype=torch_dtype(spec.dtype))
        for box in stored.boxes:
            top = box.offsets[0] if spec.shape else 0
            size = box.sizes[0] if spec.shape else 1
            start, stop = max(first, top), min(last, top + size)
            if start >= stop:
                continue
            part = self._part(name, spec, box)
            where = [slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True)]
            rows[(slice(start - first, stop - first), *where)] = part[start - top : stop - top]
        flat = rows.reshape(-1)[span.start - first * width : span.stop - first * width]
        yield byte_view(flat)

    def _part(self, name: str, spec: TensorSpec, box: Box) -> torch.Tensor:
        part = _load(self._storage, box.item, name)
        described = (torch_dtype(spec.dtype), box.sizes)
        if not isinstance(part, torch.Tensor) or (part.dtype, tuple(part.shape)) != described:
            raise CheckpointDamaged(
                f"{self._storage.where}/{box.item.file}: the part of {name} at byte "
                f"{box.item.start} is not what {METADATA_NAME} says"
            )
        return part.reshape(1) if not spec.shape else part


_UNKNOWN_NAME = re.compile(r"GLOBAL ([\w.]+)")
"""Matches the name in torch's error about a value that `weights_only` does not read."""
MEGATRON_NAME = "metadata.json"
"""File in which Megatron-core says how it has written the directory."""
_ITEM_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The exceptions that zipfile and torch raise for bytes that are not a valid item."""


def _load(storage: Readable, item: StoredItem, what: str) -> Any:
    """Returns the value that `torch.save` wrote as an item, after comparing its checksum; no code
    runs.

    Args:
        storage: The directory.
        item: Place of the item.
        what: Path of the value, or name of the tensor, for messages.

    Raises:
        UserError: Reading the item would run code.
        CheckpointDamaged: The item is not what was written.
    """
    where = f"{storage.where}/{item.file}, bytes {item.start} to {item.start + item.bytes}"
    window = FileWindow(storage, item.file, item.start, item.bytes)
    try:
        if storage.size(item.file) < item.start + item.bytes:
            raise CheckpointDamaged(f"{where}: the file ends before")
        with zipfile.ZipFile(window) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise CheckpointDamaged(f"{where}: it is compressed, as torch writes no item")
            if bad := archive.testzip():
                raise CheckpointDamaged(f"{where}: {bad} is not what was written (its CRC differs)")
        window.seek(0)
        return torch.load(cast(IO[bytes], window), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{storage.where}/{item.file} is missing") from None
    except UnpicklingError as error:
        unknown = _UNKNOWN_NAME.search(str(error))
        name = f" ({unknown[1]:.80})" if unknown else ""
        raise UserError(
            f"{what!r} asks for code to be run when it is read{name}, so it is not read; "
            f"`--model-only` leaves out all but the model's tensors ({where})"
        ) from None
    except _ITEM_ERRORS as error:
        raise CheckpointDamaged(f"{where} is not an item of torch's: {error!r:.150}") from None
