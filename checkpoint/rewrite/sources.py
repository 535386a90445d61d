"""Reads named tensors in bounded memory, for every rewriting of a checkpoint.

A source can convert the model's floating-point tensors to another dtype as they are read. torch
does the rounding; it is imported when the first tensor is converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Protocol

from elasticzero.checkpoint.format.checksums import BLOCK_BYTES
from elasticzero.checkpoint.format.layout import TensorSpec, itemsize
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.plan import plan
from elasticzero.checkpoint.format.shards import ShardReader, open_shard
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.errors import UserError
from elasticzero.spans import Span

MODEL_PREFIX = "model/"
"""Prefix of the names of the model's own tensors in a session's checkpoint."""
CAST_DTYPES: Mapping[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Target dtypes of a conversion: the safetensors name by the usual name."""
_CONVERTED = frozenset({"F64", "F32", "F16", "BF16"})
_NAME_END = re.compile(r"[./][^./]*$")
_SCALE = re.compile(r"scale[^./]*$")
_LARGEST_READ_BYTES = 8 << 20
_MOST_OPEN_SHARDS = 256


def model_names(names: Iterable[str]) -> set[str]:
    """Returns the names of the model's own tensors, which begin with `model/`.

    If none does, as when a model was saved by hand, they are the names without "/".
    """
    all_names = list(names)
    prefixed = {name for name in all_names if name.startswith(MODEL_PREFIX)}
    return prefixed or {name for name in all_names if "/" not in name}


class TensorSource(Protocol):
    """Reads named tensors in one thread."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Returns the description of every tensor by name."""
        ...

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        """Yields the bytes of a span of a tensor in whole elements; each chunk is valid until the
        next is requested."""
        ...


OpenSource = Callable[[int], TensorSource]
"""Opens a source for one more thread; takes the number of bytes that its buffers may have."""


class CheckpointSource:
    """Reads a checkpoint's tensors and verifies every block by its checksum."""

    def __init__(self, storage: Readable, manifest: Manifest, buffer_bytes: int) -> None:
        """Prepares to read; each shard is opened when it is first needed.

        Args:
            storage: The step's files.
            manifest: Manifest of the step.
            buffer_bytes: Memory for the data read at a time, and for two blocks of each open shard.
        """
        self._layout = manifest.layout
        self._buffer = memoryview(bytearray(max(8, min(_LARGEST_READ_BYTES, buffer_bytes // 2))))
        room = (buffer_bytes - len(self._buffer)) // (2 * BLOCK_BYTES)

        def opened(rank: int) -> ShardReader:
            return open_shard(storage, manifest, rank)

        self._shard = lru_cache(maxsize=max(2, min(room, _MOST_OPEN_SHARDS)))(opened)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._layout.tensors

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        width = itemsize(self._layout.tensors[name].dtype)
        most = len(self._buffer) // width
        for copy in plan(self._layout, {name: span}):
            held = copy.span_in_shard
            for start in range(held.start, held.stop, most):
                part = Span(start, min(start + most, held.stop))
                view = self._buffer[: len(part) * width]
                self._shard(copy.rank).read_into(name, part, view)
                yield view


def cast_specs(specs: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """Returns the descriptions of the tensors after conversion.

    Only tensors of the model are converted: optimizer state and master weights stay as they are,
    and so do float8 tensors and their scales.

    Args:
        specs: Descriptions of the tensors by name.
        dtype: A key of `CAST_DTYPES`; None: nothing is converted.
    """
    if dtype is None:
        return dict(specs)
    models = model_names(specs)
    kept = _scales(specs, models)
    return {
        name: TensorSpec(CAST_DTYPES[dtype], spec.shape)
        if name in models and name not in kept and spec.dtype in _CONVERTED
        else spec
        for name, spec in specs.items()
    }


def unconverted(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Returns the model's tensors of 8 bits and fewer, and their scales, which no conversion
    changes: their values mean something only together."""
    models = model_names(specs)
    kept = _scales(specs, models)
    return [name for name in specs if name in models and (name in kept or _is_narrow(specs[name]))]


def _scales(specs: Mapping[str, TensorSpec], models: set[str]) -> set[str]:
    """Returns the model's floating-point tensors that scale narrow ones.

    A scale has `scale` in the last part of its name. It is in the module of a narrow tensor, or in
    the module around that one, as the scale of an attention's keys is.

    Args:
        specs: Descriptions of all tensors by name.
        models: Names of the model's tensors.
    """
    modules: set[str] = set()
    for name in models:
        if _is_narrow(specs[name]):
            module = _NAME_END.sub("", name)
            modules |= {module, _NAME_END.sub("", module)}
    scales = (name for name in models if specs[name].dtype in _CONVERTED and _SCALE.search(name))
    return {name for name in scales if _NAME_END.sub("", name) in modules} if modules else set()


def _is_narrow(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("F8_", "F4"))


def open_converted(open_source: OpenSource, dtype: str | None, overflow: bool) -> OpenSource:
    """Returns a function that opens the same source with the model's tensors converted.

    Args:
        open_source: Opens the source.
        dtype: A key of `CAST_DTYPES`; None: nothing is converted.
        overflow: Whether finite values may become infinite; else they are refused.
    """
    if dtype is None:
        return open_source
    return lambda buffer_bytes: CastSource(open_source(buffer_bytes), dtype, overflow)


class CastSource:
    """Reads another source's tensors and converts the model's."""

    def __init__(self, inner: TensorSource, dtype: str, overflow: bool = False) -> None:
        """Takes the source, a key of `CAST_DTYPES`, and whether finite values may become
        infinite."""
        self._inner = inner
        self._overflow = overflow
        self.specs: Mapping[str, TensorSpec] = cast_specs(inner.specs, dtype)

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        """Yields the bytes as `TensorSource.chunks` does.

        Raises `UserError` for a finite value that the new dtype cannot hold, unless that is
        allowed.
        """
        old, new = self._inner.specs[name].dtype, self.specs[name].dtype
        if old == new:
            yield from self._inner.chunks(name, span)
            return
        import torch

        from elasticzero.checkpoint.format.dtypes import byte_view, overflowed, torch_dtype

        for chunk in self._inner.chunks(name, span):
            values = torch.frombuffer(chunk, dtype=torch_dtype(old))
            converted = values.to(torch_dtype(new))
            if not self._overflow and (value := overflowed(values, converted)) is not None:
                raise UserError(
                    f"{name} has the value {value:g}, which {new} cannot hold: it would become "
                    "infinite. Give another --dtype, or --allow-overflow"
                )
            yield byte_view(converted)
