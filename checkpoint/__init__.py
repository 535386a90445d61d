"""Defines the checkpoint format and its tools; `save` and `load` also work without an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ == "checkpoint":
    raise ImportError("import this package as elasticzero.checkpoint, not as checkpoint")

if TYPE_CHECKING:
    from elasticzero.checkpoint.api import load as load
    from elasticzero.checkpoint.api import load_state as load_state
    from elasticzero.checkpoint.api import save as save

__all__ = ["load", "load_state", "save"]


def __getattr__(name: str) -> Any:
    """Imports at its first use what needs torch (PEP 562)."""
    if name in __all__:
        from elasticzero.checkpoint import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
