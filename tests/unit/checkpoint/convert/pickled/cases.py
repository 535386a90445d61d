"""What the tests of files of `torch.save` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from elasticzero.checkpoint.api import load
from elasticzero.checkpoint.convert.import_plan import Import, ImportOptions
from elasticzero.checkpoint.convert.pickled.contents import name_contents
from elasticzero.checkpoint.convert.pickled.torch_file import open_file
from elasticzero.checkpoint.rewrite.reshard import TargetShape, import_foreign
from elasticzero.checkpoint.storage.disk import DiskDirectory


class Malice:
    """Pickled, it asks its reader to run a command."""

    def __init__(self, run: Callable[..., object], *arguments: object) -> None:
        self.call = (run, arguments)

    def __reduce__(self) -> Any:
        return self.call


def opened(path: Path, **options: Any) -> Import:
    return name_contents(open_file(str(path)), ImportOptions(**options))


def written(seen: Import, target: Path, **shape: Any) -> Path:
    """Returns the step that an import is written as."""
    shape = {"world_size": 2, **shape}
    done = import_foreign(seen.foreign, DiskDirectory(target), seen.step or 0, TargetShape(**shape))
    return Path(done.where)


def loaded(seen: Import, target: Path) -> Any:
    return load(written(seen, target))


def spoil(data: st.DataObject, content: bytes) -> bytes:
    """Returns a file of `torch.save` with some bytes changed, most of them of its pickle.

    It may have no checksums then, so that its pickle is read whatever it is.
    """
    spoiled = bytearray(content)
    pickle_end = spoiled.index(b"PK", 4)
    for _ in range(data.draw(st.integers(1, 4))):
        where = st.one_of(st.integers(0, pickle_end), st.integers(0, len(spoiled) - 1))
        spoiled[data.draw(where)] = data.draw(st.integers(0, 255))
    position = spoiled.rfind(b"PK\x01\x02") if data.draw(st.booleans()) else -1
    while position >= 0:
        spoiled[position + 16 : position + 20] = bytes(4)
        position = spoiled.rfind(b"PK\x01\x02", 0, position)
    return bytes(spoiled)


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.arange(15.0).reshape(5, 3) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
