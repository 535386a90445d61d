"""Finds tensors of the script that change from boundary to boundary, and that nothing keeps.

A copy of the model that the script updates by itself, such as a target network or an average, is
such a one. It is looked for among the variables of the script's functions that run, and of its main
module. A tensor counts if the same object has other elements at the next boundary: batches and
losses are new objects each time.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.rehearsal.projection import live_value

MAX_DEPTH = 3
"""Containers and objects within each other that are looked into."""
MAX_ITEMS = 10_000
"""Items of a container beyond which it is not looked into."""
LIBRARIES = (
    str(Path(sysconfig.get_path("stdlib")).resolve()),
    str(Path(__file__).resolve().parents[1]),
)
"""Directories whose code is not the script's."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of directories of installed packages."""


class UnkeptTensors:
    """Compares the script's tensors with those of the boundary before."""

    def __init__(self, kept: Callable[[], Iterable[Tensor]], passed_over: Iterable[object]) -> None:
        """Has not looked yet.

        Args:
            kept: Returns the tensors that are part of the training state.
            passed_over: Objects of which everything is part of it.
        """
        self._kept = kept
        self._passed_over = {id(thing) for thing in passed_over}
        self._digests: dict[tuple[str, int], str] = {}
        self.names: dict[str, None] = {}
        """The names of those that have changed, in the order in which that was seen."""

    def look(self) -> None:
        """Looks at the script's tensors as they are now."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in self._kept()}
        before, self._digests = self._digests, {}
        for name, tensor in self._tensors():
            if tensor.is_meta or tensor.layout is not torch.strided:
                continue
            if tensor.untyped_storage().data_ptr() in kept:
                continue
            key = name, id(tensor)
            self._digests[key] = digest = live_value("", name, tensor).digest
            if before.get(key, digest) != digest:
                self.names.setdefault(name)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        seen = set(self._passed_over)
        for place, variables in _script_variables():
            for name, value in variables.items():
                if not name.startswith("__"):
                    for path, tensor in self._inside(name, value, seen, 0):
                        yield f"{path} of {place}", tensor

    def _inside(
        self, name: str, value: Any, seen: set[int], depth: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors in a value.

        Args:
            name: The value's name.
            value: The value.
            seen: Objects that are not looked into again, by their `id`; those inside are added.
            depth: Number of containers around the value.
        """
        if id(value) in seen or depth > MAX_DEPTH:
            return
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                yield name, value
            return
        for path, item in _items(name, value):
            seen.add(id(value))
            yield from self._inside(path, item, seen, depth + 1)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        yield from ((f"{name}.{path}", tensor) for path, tensor in tensors)
    elif isinstance(value, Mapping) and len(value) <= MAX_ITEMS:
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS:
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif _is_of_script(sys.modules.get(type(value).__module__)):
        yield from ((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())


def _is_of_script(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and _is_script_file(path)


def _is_script_file(path: str) -> bool:
    if path.startswith("<"):
        return False
    real = Path(path).resolve()
    return not (INSTALLED.intersection(real.parts) or str(real).startswith(LIBRARIES))


def _script_variables() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the variables of the script's functions that run, and those of its main module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if _is_script_file(code.co_filename) and code.co_name != "<module>":
            yield f"{code.co_name}()", dict(frame.f_locals)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if _is_of_script(main):
        yield "the script", dict(vars(main))
