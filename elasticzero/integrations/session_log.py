"""Gives `session.log` what a framework logs, so that `--log-to` writes each step once."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from elasticzero.session import Session


def log_numbers(session: Session, values: Mapping[str, Any]) -> None:
    """Logs the values that are single numbers, for the current step; others are passed over."""
    numbers: dict[str, Any] = {
        name: value
        for name, value in values.items()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    }
    if numbers:
        session.log(**numbers)
