"""Compares the state in two checkpoints, whichever world size and strategy each was written
with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.checkpoint.format.layout import TensorSpec, itemsize
from elasticzero.checkpoint.rewrite.progress import ProgressBar
from elasticzero.checkpoint.rewrite.sources import CheckpointSource, TensorSource, model_names
from elasticzero.checkpoint.rewrite.step_copy import CopyOptions
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.spans import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Describes one tensor whose elements differ in their bits."""

    name: str
    first: int
    """Index of the first element that differs, in row-major order."""
    count: int
    """Number of elements that differ."""
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDiff:
    """Lists the differences between two checkpoints, A and B."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    specs: tuple[tuple[str, str, str], ...]
    """The (name, dtype and shape in A, dtype and shape in B) of tensors that differ in these."""
    tensors: tuple[Difference, ...]
    state: tuple[str, ...]
    """Paths of the values that differ and are not tensors."""
    equal_tensors: int

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.specs or self.tensors or self.state)


def compare(
    a: Readable, b: Readable, *, model_only: bool = False, copy_options: CopyOptions | None = None
) -> CheckpointDiff:
    """Compares every tensor by its bits, with both sides verified, and all other state.

    Args:
        a: One checkpoint's step.
        b: The other checkpoint's step.
        model_only: Only the model's own tensors are compared.
        copy_options: Memory, threads and progress; None: the defaults.
    """
    copy_options = copy_options or CopyOptions()
    manifests = catalog.read_manifest(a), catalog.read_manifest(b)
    left, right = (_chosen(m.layout.tensors, model_only) for m in manifests)
    alike = [name for name in left if left[name] == right.get(name)]
    unlike = [name for name in left if name in right and left[name] != right[name]]
    copy_options.progress.expect(sum(left[name].nbytes for name in alike))
    half = copy_options.buffer_bytes // 2
    sources = CheckpointSource(a, manifests[0], half), CheckpointSource(b, manifests[1], half)
    differences = []
    for name in alike:
        difference = _difference(*sources, name, copy_options.progress)
        if difference is not None:
            differences.append(difference)
    return CheckpointDiff(
        only_a=tuple(name for name in left if name not in right),
        only_b=tuple(name for name in right if name not in left),
        specs=tuple((name, str(left[name]), str(right[name])) for name in unlike),
        tensors=tuple(differences),
        state=() if model_only else tuple(_unlike(manifests[0].state, manifests[1].state, "")),
        equal_tensors=len(alike) - len(differences),
    )


def _chosen(tensors: Mapping[str, TensorSpec], model_only: bool) -> dict[str, TensorSpec]:
    names = model_names(tensors) if model_only else tensors.keys()
    return {name: spec for name, spec in tensors.items() if name in names}


def _difference(
    a: TensorSource, b: TensorSource, name: str, progress: ProgressBar
) -> Difference | None:
    spec = a.specs[name]
    first, count = -1, 0
    for position, left, right in _paired(a, b, name, spec):
        progress.add(len(left))
        if bytearray(left) == right:  # compares memory at once, not element by element
            continue
        at, unlike = _unlike_elements(left, right, itemsize(spec.dtype))
        first = position + at if first < 0 else first
        count += unlike
    return Difference(name=name, first=first, count=count, of=spec.numel) if count else None


def _paired(
    a: TensorSource, b: TensorSource, name: str, spec: TensorSpec
) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yields (index of the first element, the same elements of both) until the tensor ends.

    Args:
        a: One checkpoint.
        b: The other checkpoint.
        name: The tensor's name.
        spec: Its dtype and shape, which are the same in both.
    """
    width, position = itemsize(spec.dtype), 0
    whole = Span(0, spec.numel)
    left_chunks, right_chunks = a.chunks(name, whole), b.chunks(name, whole)
    left = right = memoryview(b"")
    while position < spec.numel:
        left, right = left or next(left_chunks), right or next(right_chunks)
        size = min(len(left), len(right))
        yield position, left[:size], right[:size]
        left, right = left[size:], right[size:]
        position += size // width


def _unlike_elements(left: memoryview, right: memoryview, width: int) -> tuple[int, int]:
    """Returns (index of the first element that differs, number of elements that differ).

    Args:
        left: Bytes of whole elements, of which at least one differs.
        right: As many bytes.
        width: Size of an element in bytes.
    """
    import numpy as np

    kind = np.dtype(f"u{width}")
    unlike = np.flatnonzero(np.frombuffer(left, kind) != np.frombuffer(right, kind))
    return int(unlike[0]), len(unlike)


def _unlike(a: Any, b: Any, path: str) -> Iterator[str]:
    """Yields the paths at which two JSON values differ.

    Args:
        a: JSON value of one checkpoint.
        b: JSON value of the other checkpoint.
        path: Path of both values, with "/" between keys; empty at the root.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            below = f"{path}/{key}" if path else str(key)
            if key in a and key in b:
                yield from _unlike(a[key], b[key], below)
            else:
                yield below
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _unlike(left, right, f"{path}/{index}")
    elif a != b or type(a) is not type(b):
        yield path
