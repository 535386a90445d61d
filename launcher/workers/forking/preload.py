"""Says which modules workers have imported when they begin, and imports them.

It stands apart from `server.py`, which is the program of the process that imports them.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elasticzero.errors import one_line

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "numpy",
    "elasticzero.entry_point",
    "elasticzero.comm.gloo",
    "elasticzero.parallel.ddp",
    "elasticzero.parallel.zero",
    "elasticzero.parallel.fsdp.strategy",
)
"""Modules that a worker would import anyway, and the strategies, which are imported when
created."""


def preloaded_modules(checkpoint_dir: str | None) -> tuple[str, ...]:
    """Returns the modules for the fork server to import: `MODULES`, and the one that reads
    checkpoints."""
    scheme = (checkpoint_dir or "").partition("://")[0]
    package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(scheme)
    installed = package is not None and importlib.util.find_spec(package) is not None
    return (*MODULES, package) if installed and package else MODULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Says which modules the fork server imports."""

    modules: tuple[str, ...] = ()
    """These are of this project and of torch; what is not installed is left out."""
    named: tuple[str, ...] = ()
    """The user names these; they are imported in this order."""
    directory: str = ""
    """Where the script lies, from which these are imported too; empty: there is none."""
    refused: tuple[str, ...] = ()
    """Why modules that were named are not among `named`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that these modules have set or changed, with what they are since."""


class Unforkable(Exception):
    """Says that a module was imported after which this process can fork no workers."""

    def __init__(self, without: Preload) -> None:
        """Takes the preload without that module, which says why it is refused."""
        super().__init__(without.refused[-1])
        self.without = without


def import_modules(preload: Preload) -> Preload:
    """Imports the modules; returns what was imported in the end, with what was refused.

    Raises:
        Unforkable: A module that the user names leaves what no fork may have.
    """
    gc.disable()  # it would take a quarter of the time that the imports take
    for name in preload.modules:
        with suppress(ImportError):
            importlib.import_module(name)
    imported: list[str] = []
    refused = list(preload.refused)
    before = dict(os.environ)
    for number, name in enumerate(preload.named, 1):
        threads = _thread_count()
        try:
            _import_from(preload.directory, name)
            failed = ""
        except BaseException as error:  # noqa: BLE001 - whatever a module of the user's raises
            failed = f"{name} cannot be imported: {one_line(error)}"
        unforkable = _unforkable(name, threads)
        if why := failed or unforkable:
            refused.append(why)
        else:
            imported.append(name)
        if unforkable:
            left = (*imported, *preload.named[number:])
            raise Unforkable(replace(preload, named=left, refused=tuple(refused)))
    gc.collect()
    gc.freeze()  # what is imported stays: a worker's collector need not go through it
    gc.enable()
    environment = {k: v for k, v in os.environ.items() if before.get(k) != v}
    return replace(preload, named=tuple(imported), refused=tuple(refused), environment=environment)


def _import_from(directory: str, name: str) -> None:
    """Imports a module as a script in this directory would."""
    sys.path.insert(0, directory)
    try:
        importlib.import_module(name)
    finally:
        with suppress(ValueError):
            sys.path.remove(directory)


def _unforkable(name: str, threads: int) -> str:
    """Returns why a fork cannot have what importing a module has left; empty: it can.

    Args:
        name: The module.
        threads: Number of threads before it was imported.
    """
    if (started := _thread_count() - threads) > 0:
        return f"importing {name} starts threads ({started}), which a worker would not have"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"importing {name} initializes CUDA, which a worker could not use then"
    return ""


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))
