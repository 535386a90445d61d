"""Runs Lightning's `Trainer` on nodes that come and go: `docs/lightning.md`.

Import it before a `lightning.Trainer` is made. Supported: lightning 2.6.
"""

from __future__ import annotations

from elasticzero.integrations.launch_environment import hide

hide()

from elasticzero.integrations.lightning.logger import SessionLogger  # noqa: E402 - after the hiding
from elasticzero.integrations.lightning.strategy import Elastic  # noqa: E402 - likewise

__all__ = ["Elastic", "SessionLogger"]
