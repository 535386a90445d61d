"""Saves and restores what islands have agreed on with an island's training state.

Which tensors that are, the islands' part in the loop says, once there is one (`islands/rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from elasticzero.state.model import LoadTarget, RankState, Spec

Targets = Callable[[Mapping[str, Spec], Mapping[str, Any]], Sequence[LoadTarget]]


class OuterState:
    """Adds the outer parameters and momentum to what is saved."""

    def __init__(self) -> None:
        self.stored: Callable[[], Mapping[str, Tensor]] = dict
        """Returns the tensors to save, by name, which all ranks have alike; none at first."""
        self.targets: Targets = lambda specs, json: ()
        """Returns where stored tensors go, from the shape and dtype of each stored tensor and the
        stored state that is no tensor."""

    def added_to(self, state: RankState) -> RankState:
        """Returns the state of a rank with these tensors."""
        state.outer = self.stored()
        return state
