"""Runs accelerate's `Accelerator` on nodes that come and go: `docs/accelerate.md`.

Import it before anything of accelerate is made. Supported: accelerate 1.10 and later.
"""

from __future__ import annotations

from elasticzero.integrations.launch_environment import hide

hide()

from elasticzero.integrations.accelerate.accelerator import Accelerator  # noqa: E402 - as it says

__all__ = ["Accelerator"]
