"""The model's floating-point tensors in another dtype, converted as they are read.

torch does the rounding; it is imported when the first tensor is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.rewrite.sources import Source, model_names
from elasticzero.spans import Span

DTYPES: Mapping[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""What a conversion can end in: safetensors' spelling by the usual one."""
_CONVERTED = frozenset({"F64", "F32", "F16", "BF16"})


def cast_specs(specs: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """What the tensors are after conversion; `dtype`: a key of `DTYPES`, or None for no change.

    Only tensors of the model are converted: optimizer state and masters stay as they are.
    """
    if dtype is None:
        return dict(specs)
    models = model_names(specs)
    return {
        name: TensorSpec(DTYPES[dtype], spec.shape)
        if name in models and spec.dtype in _CONVERTED
        else spec
        for name, spec in specs.items()
    }


def unconverted(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The model's tensors of float8, which no conversion changes: their values mean nothing without
    the scales that the model keeps beside them."""
    models = model_names(specs)
    return [name for name in specs if name in models and specs[name].dtype.startswith("F8_")]


class CastSource:
    """Another source's tensors, some of them converted."""

    def __init__(self, inner: Source, dtype: str) -> None:
        """`dtype`: a key of `DTYPES`."""
        self._inner = inner
        self.specs: Mapping[str, TensorSpec] = cast_specs(inner.specs, dtype)

    def chunks(self, name: str, span: Span) -> Iterator[memoryview]:
        """As `Source.chunks`."""
        old, new = self._inner.specs[name].dtype, self.specs[name].dtype
        if old == new:
            yield from self._inner.chunks(name, span)
            return
        import torch

        from elasticzero.checkpoint.format.dtypes import byte_view, torch_dtype

        for chunk in self._inner.chunks(name, span):
            values = torch.frombuffer(chunk, dtype=torch_dtype(old))
            yield byte_view(values.to(torch_dtype(new)))
