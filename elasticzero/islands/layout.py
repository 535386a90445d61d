"""Lays the parameters and buffers of a model end to end in fragments, the same on all islands.

A fragment has parameters that follow each other in the model, the small ones after the others, then
the buffers of its share. Each
rank of an island writes a part of a fragment's elements, and takes those that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from elasticzero.ipc.round_wire import SMALL
from elasticzero.ipc.rounds import FragmentShape
from elasticzero.spans import Span
from elasticzero.state.model import LocalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentLayout:
    """Says where the elements of one fragment lie."""

    names: tuple[str, ...]
    """Names of parameters and then of buffers, in their order."""
    offsets: tuple[int, ...]
    """First element of each, and the number of all."""
    parameters: int
    """Number of the names that are of parameters."""
    dtype: Literal["float32", "float64"]
    exact: int
    """Number of the last elements that are sent as they are."""
    matrices: tuple[tuple[int, int], ...]
    """Rows and columns of the parameters before those."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def shape(self) -> FragmentShape:
        return FragmentShape(
            elements=self.offsets[-1],
            averaged=self.offsets[-1] - self.offsets[self.parameters],
            dtype=self.dtype,
            exact=self.exact,
            matrices=self.matrices,
        )

    def spans(self) -> Iterator[tuple[str, Span]]:
        """Yields the name of each parameter and buffer, and where it lies in the fragment."""
        for name, start, stop in zip(self.names, self.offsets, self.offsets[1:], strict=False):
            yield name, Span(start, stop)

    def places(
        self, tensors: Mapping[str, Sequence[LocalTensor]]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields (where they lie in the fragment, a flat view of them) for elements of tensors.

        Args:
            tensors: Elements of each tensor by its name, each contiguous in memory.
        """
        for name, first in zip(self.names, self.offsets, strict=False):
            for local in tensors.get(name, ()):
                start = first + local.start
                flat = local.tensor.detach().view(-1)
                yield slice(start, start + flat.numel()), flat


def fragments_of(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], count: int
) -> list[FragmentLayout]:
    """Returns the fragments of a model, of about as many elements each.

    Args:
        parameters: The model's parameters, in its order.
        buffers: Its buffers of floating-point numbers.
        count: Number of fragments; there are fewer where there are fewer tensors.
    """
    names = _divided(parameters, count)
    shares = _divided(buffers, len(names)) if names else _divided(buffers, count)
    shares += [()] * (len(names) - len(shares))
    layouts = []
    for group, share in zip(names or [()] * len(shares), shares, strict=True):
        small = [name for name in group if _is_small(parameters[name])]
        own_names = [*(name for name in group if name not in small), *small]
        tensors = [*(parameters[n] for n in own_names), *(buffers[n] for n in share)]
        large = [parameters[n] for n in own_names if n not in small]
        numel = sum(tensor.numel() for tensor in tensors)
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        layouts.append(
            FragmentLayout(
                names=(*own_names, *share),
                offsets=tuple(accumulate((t.numel() for t in tensors), initial=0)),
                parameters=len(own_names),
                dtype="float64" if wide else "float32",
                exact=numel - sum(tensor.numel() for tensor in large),
                matrices=tuple((t.shape[0], t.numel() // t.shape[0]) for t in large),
            )
        )
    return layouts


def _is_small(parameter: Tensor) -> bool:
    return parameter.dim() < 2 or parameter.numel() < SMALL


def _divided(tensors: Mapping[str, Tensor], count: int) -> list[tuple[str, ...]]:
    """Divides tensors into groups that follow each other, none of them empty."""
    total = sum(tensor.numel() for tensor in tensors.values())
    groups: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name, tensor in tensors.items():
        middle = before + tensor.numel() / 2
        groups[min(count - 1, int(middle * count / max(total, 1)))].append(name)
        before += tensor.numel()
    return [tuple(group) for group in groups if group]


def described(layouts: Sequence[FragmentLayout]) -> list[list[object]]:
    """Returns what must be the same on all islands, as JSON."""
    return [[layout.names, layout.offsets, layout.parameters, layout.dtype] for layout in layouts]
