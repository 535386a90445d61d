"""Runs transformers' trainers on nodes that come and go: `docs/transformers.md`.

Import it before `TrainingArguments` are made, which open a process group where they find a
launcher. Supported: transformers 4.57 to 5, accelerate 1.10 and later.
"""

from __future__ import annotations

from elasticzero.integrations.launch_environment import hide

hide()

from elasticzero.integrations.transformers.trainer import (  # noqa: E402 - after the hiding
    Seq2SeqTrainer,
    Trainer,
)

__all__ = ["Seq2SeqTrainer", "Trainer"]
