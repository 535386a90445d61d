"""Gives a model its first values from another program's files: `load=` of `session.prepare`.

Rank 0 reads, where training begins; the other ranks get the values from it, and a generation that
goes on from a state has them there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from elasticzero.checkpoint.convert.any_format import Plan, open_any
from elasticzero.checkpoint.convert.import_plan import ImportOptions
from elasticzero.checkpoint.format.dtypes import overflowed, tensor_spec, torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import TensorSource
from elasticzero.checkpoint.storage.base import as_storage_error
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.spans import Span
from elasticzero.state.model import MODEL, NamedModel
from elasticzero.text import list_text, size_text

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Holds files that were opened, and where they have the model's tensors."""

    plan: Plan
    options: ImportOptions
    foreign: ForeignCheckpoint
    stored: Mapping[str, str]
    """The full name in the files of each parameter and buffer, by its name in the model."""


class Pretrained:
    """Has the first values of all parameters and persistent buffers of a model."""

    def __init__(
        self,
        model: nn.Module,
        where: str | os.PathLike[str],
        link: AgentClient,
        *,
        with_optimizer: bool = False,
    ) -> None:
        """Opens the files, if this rank is to read them.

        Args:
            model: The model, whose tensors are not filled yet.
            where: A directory or a URL with files of a format that `import` reads, or one file.
            link: The client of the agent, by whose assignment rank 0 reads where training begins.
            with_optimizer: Whether the files also have the optimizer's first state.

        Raises:
            UserError: There are no such files.
            CheckpointMismatch: The files lack a tensor of the model, or have one of another shape
                or kind.
        """
        self._where, self._link = _path(where), link
        named = NamedModel(model)
        tensors = {**named.parameters, **named.buffers.saved()}
        self._tensors = tensors  # kept, or ids would be used again
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._unread: dict[str, str] = {}
        """The name in the files of each tensor that is still to be read, by that in the model."""
        self._source: TensorSource | None = None
        self.opened: Opened | None = None
        """The files, if this rank reads them."""
        if link.assignment.resume.tier == "fresh" and link.assignment.rank == 0:
            try:
                options = ImportOptions(model_only=not with_optimizer, refuse_unknown=False)
                plan, foreign = _open(self._where, options)
                self._unread = stored_names(tensors, named.aliases, foreign)
            except UserError as error:
                raise type(error)(f"session.prepare(…, load={self._where!r}): {error}") from None
            self.opened = Opened(plan, options, foreign, dict(self._unread))
            self._source = foreign.open_source(BUFFER_BYTES)
            names = {
                *tensors,
                *named.aliases,
                *(n.removeprefix(MODEL) for n in self._unread.values()),
            }
            for note in () if with_optimizer else foreign.notes:
                log.warning("session.prepare(…, load=…): %s", note)
            log.info(_summary(foreign.specs, names, self._where))

    def has(self, tensor: Tensor) -> bool:
        """Returns whether this is one of the model's parameters and persistent buffers."""
        return id(tensor) in self._names

    def fill(self, tensor: Tensor) -> None:
        """Gives a tensor of the model its values, if this rank reads them and has not yet."""
        stored = self._unread.pop(self._names[id(tensor)], None)
        if stored is None or self._source is None:
            return
        flat, start = tensor.data.reshape(-1), 0
        dtype = torch_dtype(self._source.specs[stored].dtype)
        with self._reading(stored):
            for chunk in self._source.chunks(stored, Span(0, flat.numel())):
                part = torch.frombuffer(chunk, dtype=dtype)
                target = flat[start : start + part.numel()]
                target.copy_(part)
                self._check_range(stored, part, target)
                start += part.numel()
        if not tensor.is_contiguous():  # then `flat` is a copy
            tensor.data.copy_(flat.view(tensor.shape))

    def _check_range(self, stored: str, part: Tensor, filled: Tensor) -> None:
        """Raises `CheckpointMismatch` for a value that the model's dtype cannot hold.

        Args:
            stored: The tensor's name in the files.
            part: Values of the files.
            filled: The same values in the model's tensor.
        """
        if part.dtype == filled.dtype:
            return
        if (value := overflowed(part, filled.to(part.device))) is not None:
            raise CheckpointMismatch(
                f"{stored.removeprefix(MODEL)!r} in {self._where} has the value {value:g}, which "
                f"the model's {filled.dtype} cannot hold: give the model another dtype"
            )

    @contextmanager
    def _reading(self, stored: str) -> Iterator[None]:
        what = f"cannot read {stored.removeprefix(MODEL)} in {self._where}"
        with (
            self._link.exit_on_abort(),
            self._link.busy("reading the model's first values"),
            as_storage_error(what, or_missing=True),
        ):
            yield


def stored_names(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str], foreign: ForeignCheckpoint
) -> dict[str, str]:
    """Returns the name in the files of each tensor of the model.

    A tensor that has several names in the model, or in the files, is stored under any of them. In
    files of a training loop all names may begin with one more attribute, as in a module of
    Lightning's.

    Args:
        tensors: The model's tensors by name.
        aliases: The name in `tensors` of each other name in the model.
        foreign: The files.

    Raises:
        CheckpointMismatch: A tensor is missing, or does not fit, or differs under its names.
    """
    full_names = {name.removeprefix(MODEL): name for name in _of_model(foreign.specs)}
    for alias, kept in foreign.state.get("aliases", {}).items():
        full_names.setdefault(alias, full_names[kept])
    is_nested = TREE in foreign.state  # safetensors have the names of a model alone
    if is_nested and (prefix := _prefix(tensors, aliases, full_names)):
        log.info(f"the names in the files have {prefix!r} before those of the model")
        starting = (name for name in full_names if name.startswith(prefix))
        full_names = {name.removeprefix(prefix): full_names[name] for name in starting}
    stored: dict[str, str] = {}
    for name, kept in [*((name, name) for name in tensors), *aliases.items()]:
        if name in full_names:
            _check(name, foreign.specs[full_names[name]], tensor_spec(tensors[kept], kept))
            first = stored.setdefault(kept, full_names[name])
            if not _equal(foreign, first, full_names[name]):
                raise CheckpointMismatch(
                    f"{kept!r} and {name!r} are one tensor in the model, and differ in the files"
                )
    if missing := [name for name in tensors if name not in stored]:
        raise CheckpointMismatch(
            f"the files have no tensor {missing[0]!r}"
            f"{f', nor {len(missing) - 1} more of the model' if missing[1:] else ''}; they have "
            f"{next(iter(full_names))!r}, for example. If it is a second name of another tensor, "
            "tie the two before (Transformers: model.tie_weights()). If their library has other "
            "names in files than in memory, as Transformers 5 has for experts, leave load= out and "
            "load them with it (from_pretrained)"
        )
    return stored


def _of_model(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(MODEL)]


def _prefix(names: Iterable[str], aliases: Mapping[str, str], in_files: Mapping[str, str]) -> str:
    """Returns what all names in files have before those of the model; empty if it is not one thing.

    Args:
        names: The names of the model's tensors.
        aliases: The name among these of each other name.
        in_files: The names in the files, as keys.
    """
    names_of: dict[str, list[str]] = {name: [name] for name in names}
    for alias, kept in aliases.items():
        names_of.get(kept, []).append(alias)
    if not names_of or any(name in in_files for same in names_of.values() for name in same):
        return ""
    prefixes = {
        full.removesuffix(name)
        for name in next(iter(names_of.values()))
        for full in in_files
        if full.endswith("." + name)
    }
    fitting = [
        prefix
        for prefix in prefixes
        if all(any(prefix + name in in_files for name in same) for same in names_of.values())
    ]
    return fitting[0] if len(fitting) == 1 else ""


def _check(name: str, stored: TensorSpec, spec: TensorSpec) -> None:
    """Checks that a tensor of the files can fill one of the model.

    Args:
        name: The tensor's name, for the message.
        stored: Shape and dtype in the files.
        spec: Shape and dtype in the model.

    Raises:
        CheckpointMismatch: The shapes differ, or the values cannot be rounded from one dtype to the
            other.
    """
    kinds = torch_dtype(stored.dtype), torch_dtype(spec.dtype)
    rounds = all(kind.is_floating_point and kind.itemsize > 1 for kind in kinds)
    if stored.shape != spec.shape or not (rounds or stored.dtype == spec.dtype):
        raise CheckpointMismatch(
            f"{name!r} is {stored.dtype} {list(stored.shape)} in the files, and {spec.dtype} "
            f"{list(spec.shape)} in the model"
        )


def _equal(foreign: ForeignCheckpoint, one: str, other: str) -> bool:
    """Returns whether two tensors of the files, of the same shape, are the same.

    Args:
        foreign: The files.
        one: Name of the one in the files.
        other: Name of the other.
    """
    if one == other:
        return True
    whole = Span(0, foreign.specs[one].numel)
    sources = [foreign.open_source(BUFFER_BYTES) for _ in range(2)]
    parts = (source.chunks(n, whole) for source, n in zip(sources, (one, other), strict=True))
    return all(bytes(a) == bytes(b) for a, b in zip(*parts, strict=True))


def _summary(specs: Mapping[str, TensorSpec], of_model: set[str], where: str) -> str:
    names = [name.removeprefix(MODEL) for name in _of_model(specs)]
    size = sum(specs[MODEL + name].nbytes for name in names if name in of_model)
    line = f"the model begins with {size_text(size)} of values from {where}"
    if unused := [repr(name) for name in names if name not in of_model]:
        line += f"; the model has no {list_text(unused, 3)}"
    return line


def _open(where: str, options: ImportOptions) -> tuple[Plan, ForeignCheckpoint]:
    """Returns what names the files' tensors, and what it has named."""
    try:
        plan = open_any(where, model_only=options.model_only)
        return plan, plan(options).foreign
    except CheckpointDamaged as error:  # another try would find the same
        raise UserError(str(error)) from None
    except UserError as error:
        hint = ""
        if "://" not in where and not Path(where).exists():
            hint = " (of a model on the Hub, huggingface_hub.snapshot_download gives the path)"
        raise UserError(f"{error}{hint}") from None


def _path(where: str | os.PathLike[str]) -> str:
    path = os.fspath(where) if isinstance(where, os.PathLike) else where
    if isinstance(path, str):
        return path
    raise UserError(
        "session.prepare(…, load=…) takes the path of a file or of a directory with files, not a "
        f"{type(where).__name__}"
    )
