"""Gives a model its first values from Hugging Face safetensors files: `load=` of `session.prepare`.

Rank 0 reads, where training begins; the other ranks get the values from it, and a generation that
goes on from a state has them there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from elasticzero.checkpoint.convert.huggingface import open_hf
from elasticzero.checkpoint.format.dtypes import byte_view, tensor_spec, torch_dtype
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.storage.base import as_storage_error
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.spans import Span
from elasticzero.state.model import MODEL, NamedModel
from elasticzero.text import list_text, size_text

BUFFER_BYTES = 8 << 20
"""Bytes that are read at a time."""


class Pretrained:
    """Has the first values of all parameters and persistent buffers of a model."""

    def __init__(self, model: nn.Module, where: str | os.PathLike[str], link: AgentClient) -> None:
        """Opens the files, if this rank is to read them.

        where: a directory or a URL with safetensors files, or one such file. Raises `UserError` if
        it is none, and `CheckpointMismatch` if it lacks a tensor of the model, or has one of
        another shape or kind.
        """
        self._where, self._link = _path(where), link
        named = NamedModel(model)
        own: dict[str, Tensor] = {**named.parameters, **named.buffers}
        self._names = {id(tensor): name for name, tensor in own.items()}
        self._unread: dict[str, str] = {}
        """The name in the files of each tensor that is still to be read, by that in the model."""
        if link.assignment.resume.tier == "fresh" and link.assignment.rank == 0:
            foreign = open_hf(self._where)
            self._unread = stored_names(own, named.aliases, foreign, self._where)
            self._source = foreign.open_source(BUFFER_BYTES)
            known = {*own, *named.aliases, *(n.removeprefix(MODEL) for n in self._unread.values())}
            print(_summary(foreign.specs, known, self._where), file=sys.stderr, flush=True)

    def has(self, tensor: Tensor) -> bool:
        """Returns whether this is one of the model's parameters and persistent buffers."""
        return id(tensor) in self._names

    def fill(self, tensor: Tensor) -> None:
        """Gives a tensor of the model its values, if this rank reads them."""
        self.fill_named({self._names[id(tensor)]: tensor})

    def fill_named(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives tensors their values by their names, each once; others stay as they are."""
        for name, tensor in tensors.items():
            if (stored := self._unread.pop(name, None)) is not None:
                with self._link.exit_on_abort():
                    tensor.data.copy_(self._read(stored))

    def _read(self, stored: str) -> Tensor:
        spec = self._source.specs[stored]
        values = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        to, at = byte_view(values), 0
        what = f"cannot read {stored.removeprefix(MODEL)} in {self._where}"
        with as_storage_error(what, or_missing=True):
            for chunk in self._source.chunks(stored, Span(0, spec.numel)):
                to[at : at + len(chunk)] = chunk
                at += len(chunk)
        return values


def stored_names(
    own: Mapping[str, Tensor], aliases: Mapping[str, str], foreign: ForeignCheckpoint, where: str
) -> dict[str, str]:
    """Returns the name in the files of each tensor of the model.

    A tensor that has several names in the model, or in the files, is stored under any of them.
    aliases: {other name in the model: the name in `own`}. Raises `CheckpointMismatch` if one is
    missing or does not fit.
    """
    names = {name: [name] for name in own}
    for alias, kept in aliases.items():
        names[kept].append(alias)
    found: dict[str, str] = {}
    for name, several in names.items():
        kept_there = foreign.state["aliases"]
        candidates = [MODEL + each for n in several for each in (n, kept_there.get(n, n))]
        if (hit := next((each for each in candidates if each in foreign.specs), None)) is not None:
            found[name] = hit
    if missing := [name for name in own if name not in found]:
        more = f", nor {len(missing) - 1} more of the model's" if missing[1:] else ""
        example = next(iter(foreign.specs)).removeprefix(MODEL)
        raise CheckpointMismatch(
            f"session.prepare(…, load={where!r}): the files have no tensor {missing[0]!r}{more}; "
            f"they have {example!r}, for example. If it is a second name of another tensor, tie "
            "the two before (Transformers: model.tie_weights())"
        )
    for name, stored in found.items():
        there, here = foreign.specs[stored], tensor_spec(own[name], name)
        if there.shape != here.shape or not _converts(there, here):
            raise CheckpointMismatch(
                f"session.prepare(…, load={where!r}): {name!r} is {there.dtype} "
                f"{list(there.shape)} in the files, and {here.dtype} {list(here.shape)} here"
            )
    return found


def _converts(found: TensorSpec, wanted: TensorSpec) -> bool:
    """Returns whether numbers of one kind are also of the other, up to rounding."""
    kinds = torch_dtype(found.dtype), torch_dtype(wanted.dtype)
    plain = all(kind.is_floating_point and kind.itemsize > 1 for kind in kinds)
    return plain or found.dtype == wanted.dtype


def _summary(specs: Mapping[str, TensorSpec], known: set[str], where: str) -> str:
    names = [name.removeprefix(MODEL) for name in specs]
    unused = [name for name in names if name not in known]
    size = sum(specs[MODEL + name].nbytes for name in names if name in known)
    line = f"the model begins with {size_text(size)} of values from {where}"
    if unused:
        line += f"; it has no {list_text(map(repr, unused), 3)}, which the files have"
    return line


def _path(where: str | os.PathLike[str]) -> str:
    try:
        return os.fspath(where)
    except TypeError:
        raise UserError(
            f"session.prepare(…, load=…) takes the path of a directory with safetensors files, not "
            f"a {type(where).__name__}"
        ) from None
