"""Exports and imports a model as Hugging Face safetensors, in one file or several.

Every tensor is written whole. A tensor with several names is written once; `__metadata__` names its
aliases, as safetensors' own `save_model` does.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticzero.checkpoint.format.layout import TensorSpec, check_tensor_names, itemsize
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_of
from elasticzero.checkpoint.format.shards import (
    HEADER_LIMIT_BYTES,
    TensorEntry,
    header,
    parse_header,
)
from elasticzero.checkpoint.format.strict_json import reason, strict_json
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import (
    MODEL_PREFIX,
    CheckpointSource,
    TensorSource,
    cast_specs,
    model_names,
    open_converted,
)
from elasticzero.checkpoint.rewrite.step_copy import CopyJob, CopyOptions, new_directory, run_jobs
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable, Storage, explain, read_small
from elasticzero.checkpoint.storage.disk import read_regular
from elasticzero.checkpoint.storage.urls import open_directory, open_storage
from elasticzero.errors import CheckpointDamaged, StorageError, UserError
from elasticzero.spans import Span
from elasticzero.text import list_text

ONE_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model.safetensors.index.json"
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
NO_IMPORT = "no import is needed; use `reshard` or `export`"
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes that a config.json states, by their safetensors names."""
_INDEX_LIMIT_BYTES = 1 << 28
_OF_DIFFUSERS = "diffusion_pytorch_model"
_PREFERRED = (
    ONE_FILE,
    INDEX_NAME,
    _OF_DIFFUSERS + INDEX_SUFFIX,
    _OF_DIFFUSERS + ".safetensors",
)
"""The names that programs look for, in their order."""
_FILE_SUFFIX = ".safetensors"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfExportOptions:
    """Selects the size of the files, the dtype, and the model's config.json."""

    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    """Maximum size of a file; only a file of one larger tensor exceeds it."""
    dtype: str | None = None
    """The dtype of floating-point tensors, as in `reshard.TargetShape`; None: as they are."""
    allow_overflow: bool = False
    """True: finite values beyond the range of `dtype` become infinite; False: they are refused."""
    config: Path | None = None
    """Path of the model's config.json, which is copied beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Describes the files and tensors that an export wrote."""

    where: str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    """Size of the tensors alone."""
    notes: tuple[str, ...] = ()
    """Lines for the user about what was changed besides."""


def export_hf(
    source: Readable,
    target: str,
    options: HfExportOptions | None = None,
    copy_options: CopyOptions | None = None,
) -> ExportResult:
    """Writes the model's own tensors under their own names.

    The index, which only several files need, comes last.

    Args:
        source: The checkpoint's step.
        target: A new or empty directory, or a URL; an export that fails leaves it as it was.
        options: The size of files, the dtype and the config.json; None: the defaults.
        copy_options: Memory, threads and progress of the copy; None: the defaults.
    """
    check_export_target(target)
    options, copy_options = options or HfExportOptions(), copy_options or CopyOptions()
    manifest = catalog.read_manifest(source)
    specs = model_specs(source, manifest)
    config = None if options.config is None else _config(options.config)
    written = cast_specs(specs, options.dtype)
    notes: tuple[str, ...] = ()
    if config is not None:
        config, notes = with_dtype(config, written.values())
    parts = _split_into_files(written, options.max_shard_bytes)
    count = len(parts)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = dict(zip(names if count > 1 else [ONE_FILE], parts, strict=True))
    aliases = aliases_of(manifest)
    _check_exported(specs, aliases)

    def open_plain(buffer_bytes: int) -> TensorSource:
        return CheckpointSource(source, manifest, buffer_bytes)

    open_source = open_converted(open_plain, options.dtype, options.allow_overflow)

    total = sum(spec.nbytes for part in parts for spec in part.values())
    copy_options.progress.expect(total)
    with new_directory(target) as storage:
        jobs = [_file_job(storage, file, part, aliases) for file, part in files.items()]
        run_jobs(jobs, open_source, copy_options)
        if config is not None:
            storage.write("config.json", [config])
        if count > 1:
            storage.write(INDEX_NAME, [_index(files, total)])
    return ExportResult(
        where=storage.where, files=tuple(files), tensors=len(specs), bytes=total, notes=notes
    )


def missing_files_text(where: str, *, has_config: bool) -> str:
    """Returns one line that names the files that `from_pretrained` of Transformers still needs."""
    config = "" if has_config else "config.json (model.config.save_pretrained, or --config FILE), "
    return (
        f"for from_pretrained({where!r}) put beside it what a checkpoint does not hold: {config}"
        "generation_config.json of a model that generates, and the files of its tokenizer or "
        "processor (tokenizer.save_pretrained)"
    )


def _check_exported(names: Iterable[str], aliases: Mapping[str, str]) -> None:
    """Raises `UserError` for a name that a safetensors file cannot hold without its prefix."""
    try:
        check_tensor_names(name.removeprefix(MODEL_PREFIX) for name in names)
        check_tensor_names([*aliases, *aliases.values()])
    except ValueError as error:
        raise UserError(f"this model cannot be exported as safetensors: {error}") from None


def check_export_target(target: str) -> None:
    """Raises `UserError` for a directory that is a step or a checkpoint directory, or lies in
    one."""
    where = open_directory(target).where
    catalog.check_outside_steps(where)
    parent = where.rstrip("/").rpartition("/")[0] or "/"
    if parent.endswith(":/"):  # the bucket itself
        return
    for place in (where, parent):
        if any(step_of(name) is not None for name in open_directory(place).names()):
            raise UserError(f"{place} is a checkpoint directory: export to a directory elsewhere")


def model_specs(source: Readable, manifest: Manifest) -> dict[str, TensorSpec]:
    """Returns the model's own tensors by their names in the checkpoint; raises `UserError` if none
    exist."""
    names = model_names(manifest.layout.tensors)
    if not names:
        raise UserError(f"{source.where} has no tensors named {MODEL_PREFIX}...: nothing to export")
    return {name: spec for name, spec in manifest.layout.tensors.items() if name in names}


def aliases_of(manifest: Manifest) -> dict[str, str]:
    """Returns the other names of the model's tensors: {alias: the name that is kept}."""
    stated = manifest.state.get("aliases")
    pairs = stated.items() if isinstance(stated, Mapping) else ()
    held = manifest.layout.tensors
    return {
        alias: kept
        for alias, kept in pairs
        if isinstance(kept, str)
        and MODEL_PREFIX + kept in held
        and MODEL_PREFIX + alias not in held
    }


def _file_job(
    storage: Storage, file: str, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]
) -> CopyJob:
    """Returns a job that writes a safetensors file of whole tensors under their names in the model,
    wide dtypes first.

    Args:
        storage: Directory that the file is written into.
        file: Name of the file.
        specs: Tensors of the file, by their names in the checkpoint.
        aliases: By a second name in the model, the name under which the tensor is stored.
    """
    ordered = dict(sorted(specs.items(), key=lambda item: -itemsize(item[1].dtype)))
    bare = {name.removeprefix(MODEL_PREFIX): spec for name, spec in ordered.items()}
    metadata = {alias: kept for alias, kept in aliases.items() if kept in bare}
    metadata |= {"format": "pt"}

    def job(source: TensorSource) -> None:
        data = (
            chunk
            for name, spec in ordered.items()
            for chunk in source.chunks(name, Span(0, spec.numel))
        )
        storage.write(file, itertools.chain([header(bare, metadata)], data))

    return job


def _split_into_files(
    specs: Mapping[str, TensorSpec], max_shard_bytes: int
) -> list[dict[str, TensorSpec]]:
    """Cuts the tensors, in their order, into parts of at most `max_shard_bytes`, none of them
    empty."""
    parts: list[dict[str, TensorSpec]] = [{}]
    room = max_shard_bytes
    for name, spec in specs.items():
        if spec.nbytes > room and parts[-1]:
            parts.append({})
            room = max_shard_bytes
        parts[-1][name] = spec
        room -= spec.nbytes
    return parts


def _index(files: Mapping[str, Mapping[str, TensorSpec]], total_bytes: int) -> bytes:
    """Returns the index, which names the file of each tensor."""
    weight_map = {n.removeprefix(MODEL_PREFIX): file for file, part in files.items() for n in part}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"


def _config(path: Path) -> bytes:
    try:
        data = read_regular(path)
        json.loads(data)
    except OSError as error:
        raise UserError(f"the config {path} cannot be read: {explain(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the config {path} is not JSON: {reason(error)}") from None
    return data


def with_dtype(config: bytes, specs: Iterable[TensorSpec]) -> tuple[bytes, tuple[str, ...]]:
    """Returns a config.json that states the dtype of the weights, and lines about what it changed.

    The dtype is that of most floating-point values of 16 bits and more. Transformers loads a model
    in the dtype that its config states. A config without such a key, or with the right value, stays
    as it is. The configs of parts, such as `text_config`, follow where all weights have one dtype.

    Args:
        config: Contents of the file, which are JSON.
        specs: The weights.
    """
    counts: dict[str, int] = {}
    for spec in specs:
        if spec.dtype in _DTYPE_NAMES:
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.numel
    value = json.loads(config)
    if not counts or not isinstance(value, dict):
        return config, ()
    dtype = _DTYPE_NAMES[max(counts, key=lambda name: counts[name])]
    changed = _set_dtype(value, dtype, "", parts_too=len(counts) == 1)
    if not changed:
        return config, ()
    lines = [f"config.json: {key} is {dtype}, as the weights; it was {old}" for key, old in changed]
    return json.dumps(value, indent=2).encode() + b"\n", tuple(lines)


def _set_dtype(
    config: dict[str, Any], dtype: str, path: str, *, parts_too: bool
) -> list[tuple[str, str]]:
    """Sets the dtype in a config and in those of its parts; returns (key, old value) of each
    change.

    Args:
        config: The config, which is changed in place.
        dtype: The dtype's name in torch.
        path: Keys from the root to this config, with a dot after each.
        parts_too: Whether the configs of parts are changed.
    """
    changed = []
    for key in ("dtype", "torch_dtype"):
        old = config.get(key)
        stated = old.removeprefix("torch.") if isinstance(old, str) else dtype
        if stated != dtype and stated in _DTYPE_NAMES.values():
            config[key] = dtype
            changed.append((path + key, str(old)))
    for key, part in config.items() if parts_too else ():
        if key.endswith("_config") and key != "quantization_config" and isinstance(part, dict):
            changed += _set_dtype(part, dtype, f"{path}{key}.", parts_too=True)
    return changed


def open_hf(url: str) -> ForeignCheckpoint:
    """Opens a model in Hugging Face safetensors: one file, or a directory of them.

    Args:
        url: The file, or the directory; a path or a URL.

    Raises:
        UserError: It is no such model.
        CheckpointDamaged: A file is cut off, missing, or lacks a tensor that the index names.
    """
    storage, files, notes = _locate_files(url)
    places: dict[str, tuple[str, TensorEntry]] = {}
    aliases: dict[str, str] = {}
    for file, tensor_names in files.items():
        metadata, entries = _read_header(storage, file)
        if {"step", "rank", "token"} <= metadata.keys():
            raise UserError(
                f"{storage.where}/{file} is one rank's part of an ElasticZero checkpoint: "
                f"{NO_IMPORT}"
            )
        if missing := next((name for name in tensor_names or () if name not in entries), None):
            raise CheckpointDamaged(
                f"{storage.where}/{file} has no tensor {missing!r}, which the index says it has"
            )
        chosen = entries if tensor_names is None else {name: entries[name] for name in tensor_names}
        places |= {MODEL_PREFIX + name: (file, entry) for name, entry in chosen.items()}
        aliases |= metadata
    if not places:
        raise UserError(f"{url} holds no tensors")
    aliases = {a: k for a, k in aliases.items() if MODEL_PREFIX + k in places and a != "format"}
    return ForeignCheckpoint(
        specs={name: TensorSpec(e.dtype, e.shape) for name, (_, e) in places.items()},
        state={"aliases": aliases},
        notes=notes,
        open_source=lambda buffer_bytes: _Files(storage, places, buffer_bytes),
    )


class _Files:
    """Reads tensors from plain safetensors files, which have no checksums."""

    def __init__(
        self, storage: Readable, places: Mapping[str, tuple[str, TensorEntry]], buffer_bytes: int
    ) -> None:
        self.specs = {name: TensorSpec(e.dtype, e.shape) for name, (_, e) in places.items()}
        self._storage = storage
        self._places = places
        self._buffer = memoryview(bytearray(min(8 << 20, buffer_bytes)))

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        """Yields the bytes as `TensorSource.chunks` does."""
        file, entry = self._places[name]
        width = itemsize(entry.dtype)
        position, stop = entry.start + span.start * width, entry.start + span.stop * width
        most = len(self._buffer) // width * width
        while position < stop:
            view = self._buffer[: min(most, stop - position)]
            _read(self._storage, file, position, view)
            yield view
            position += len(view)


def _locate_files(url: str) -> tuple[Storage, dict[str, list[str] | None], tuple[str, ...]]:
    """Returns (the files' storage, the tensors to take from each file; None: all; notes)."""
    parent, _, name = str(url).rstrip("/").rpartition("/")
    if name.endswith(".safetensors"):
        return open_storage(parent or "."), {name: None}, ()
    storage = open_storage(url)
    check_foreign(url)
    names = storage.names()
    taken = _preferred(storage, names)
    if taken.endswith(INDEX_SUFFIX):
        by_file = _read_index(storage, taken, [n for n in names if n.endswith(_FILE_SUFFIX)])
    else:
        by_file = {taken: None}
    return storage, by_file, _notes(storage, taken, by_file)


def _preferred(storage: Storage, names: list[str]) -> str:
    """Returns the file, or the index of several, that the program which wrote them would read.

    Transformers reads what its config.json names, then one file before an index; diffusers reads an
    index first. A variant such as `model.fp16.safetensors` is read only where it is alone.

    Args:
        storage: Directory of the model.
        names: Names of its files.

    Raises:
        UserError: The directory has no safetensors, or several of unknown names.
    """
    files = [n for n in names if n.endswith(_FILE_SUFFIX)]
    indices = [n for n in names if n.endswith(INDEX_SUFFIX)]
    by_config = _named_in_config(storage) if "config.json" in names else None
    for name in (by_config, *_PREFERRED):
        if name in files or name in indices:
            return str(name)
    if len(indices) == 1 or (not indices and len(files) == 1):
        return (indices or files)[0]
    if files:
        raise UserError(
            f"{storage.where} has {len(files)} safetensors files and not one index "
            f"({INDEX_NAME}): name the file to import"
        )
    if any(n.endswith(_PICKLED) for n in names):
        raise UserError(
            f"{storage.where} holds pickled weights, which can run code when they are read: "
            "convert them to safetensors first (`elasticzero checkpoint import --format torch` or "
            "`trainer` reads them without running any, and `export` writes safetensors)"
        )
    raise UserError(f"{storage.where} holds no safetensors files")


def _named_in_config(storage: Storage) -> str | None:
    """Returns the file of weights that config.json names, as Transformers 5 may write it."""
    try:
        config = strict_json(read_small(storage, "config.json", _INDEX_LIMIT_BYTES))
    except (CheckpointDamaged, StorageError, ValueError, RecursionError):
        return None
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None


def _notes(storage: Storage, taken: str, by_file: Mapping[str, object]) -> tuple[str, ...]:
    """Returns a line about weights beside those that are read, if there are any.

    Args:
        storage: Directory of the model.
        taken: The file or index that is read.
        by_file: The files that it means.
    """
    rest = {n for n in storage.names() if n.endswith((_FILE_SUFFIX, INDEX_SUFFIX))}
    rest -= {taken, *by_file}
    if not rest:
        return ()
    shards = {name for name in rest if _SHARD.search(name)}
    others = sorted(rest - shards) or sorted(shards)
    reader = "diffusers" if taken.startswith(_OF_DIFFUSERS) else "Transformers"
    by = f", as {reader} does" if taken in _PREFERRED else ""
    verb = "is" if len(others) == 1 else "are"
    return (
        f"{storage.where} has more weights than one model: {taken} is read{by}, and "
        f"{list_text(others, 3)} {verb} not",
    )


def check_foreign(url: str) -> None:
    """Raises `UserError` for a directory that is empty or that needs no import."""
    directory = open_directory(url)
    names = directory.names()
    if not names:
        raise UserError(f"{directory.where} is empty or does not exist")
    a_step = MANIFEST_NAME in names and any(name.startswith("rank-") for name in names)
    if a_step or any(step_of(name) is not None for name in names):
        raise UserError(f"{directory.where} is an ElasticZero checkpoint already: {NO_IMPORT}")


def _read_index(storage: Storage, index: str, files: list[str]) -> dict[str, list[str] | None]:
    """Returns the tensors to take from each file, as the index lists them.

    Args:
        storage: Directory of the model.
        index: Name of the index.
        files: Names of the safetensors files that exist.

    Raises:
        CheckpointDamaged: It is not an index, or it names a file that does not exist.
    """
    where = f"{storage.where}/{index}"
    try:
        weight_map: Any = strict_json(read_small(storage, index, _INDEX_LIMIT_BYTES))["weight_map"]
        by_file: dict[str, list[str] | None] = {}
        for name, file in weight_map.items():
            names = by_file.setdefault(str(file), [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not an index of tensors: {error!r:.100}") from None
    if missing := [file for file in by_file if file not in files]:
        raise CheckpointDamaged(
            f"{storage.where} lacks {missing[0]!r}, which its index names"
            + (f", and {len(missing) - 1} more files" if len(missing) > 1 else "")
        )
    return by_file


def _read_header(storage: Readable, file: str) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    where = f"{storage.where}/{file}"
    try:
        size = storage.size(file)
    except FileNotFoundError:
        raise UserError(f"{where} does not exist") from None
    prefix = bytearray(8)
    _read(storage, file, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_LIMIT_BYTES, size - 8):
        raise CheckpointDamaged(f"{where} says its header has {length} bytes, and it has {size}")
    text = bytearray(length)
    _read(storage, file, 8, memoryview(text))
    return parse_header(bytes(text), size, where)


def _read(storage: Readable, file: str, start: int, view: memoryview) -> None:
    if storage.read_into(file, start, view) != len(view):
        raise CheckpointDamaged(f"{storage.where}/{file} ends before byte {start + len(view)}")
