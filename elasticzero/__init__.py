"""Trains PyTorch models on machines that come and go.

A public name is loaded at its first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elasticzero.version import __version__ as __version__

if TYPE_CHECKING:
    from elasticzero.data.streams.source import Stream
    from elasticzero.entry_point import run
    from elasticzero.errors import (
        CheckpointDamaged,
        CheckpointMismatch,
        ElasticZeroError,
        OperatorError,
        RetryError,
        StorageError,
        UserError,
    )
    from elasticzero.options.diloco import DiLoCo
    from elasticzero.session import Session

__all__ = [
    "CheckpointDamaged",
    "CheckpointMismatch",
    "DiLoCo",
    "ElasticZeroError",
    "OperatorError",
    "RetryError",
    "Session",
    "StorageError",
    "Stream",
    "UserError",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {
        "DiLoCo": "options.diloco",
        "Session": "session",
        "Stream": "data.streams.source",
        "run": "entry_point",
    }.get(name, "errors")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
