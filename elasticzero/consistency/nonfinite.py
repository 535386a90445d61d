"""Formats the ranks' findings of NaN and infinity as one sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticzero.errors import NotFinite

LISTED = 3
"""Maximum number of tensors that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Holds the findings of all ranks, equal on all of them."""

    step: int
    """The step that was not applied, counted from 1."""
    losses: Sequence[int]
    """Ranks with a loss that is not finite."""
    gradients: Sequence[tuple[str, int]]
    """Parameters whose gradient is not finite, each with the first rank that holds such
    elements."""
    state: Sequence[tuple[str, int]]
    """Tensors of the training state before the step that are not finite, each with a rank as
    above."""

    def sentence(self) -> str:
        """Returns a sentence with the non-finite values, and that the step was not applied."""
        places: list[str] = []
        if self.losses:
            ranks = ", ".join(map(str, self.losses))
            places.append(
                f"the loss on rank {ranks}"
                if len(self.losses) == 1
                else f"the losses on ranks {ranks}"
            )
        if self.gradients:
            places.append(f"the gradient of {_listed(self.gradients)}")
        if not places:
            places.append("the norm of the whole gradient (its elements are finite)")
        text = f"step {self.step} was not applied: NaN or infinity in {' and in '.join(places)}"
        if self.state:
            text += (
                f"; the state of step {self.step - 1} already holds NaN or infinity in "
                f"{_listed(self.state)} and is not saved"
            )
        return text

    def advice(self) -> str:
        """Returns what to do next."""
        if self.state:
            return f"an earlier step has broken the state: {NotFinite.ADVICE}"
        return (
            "--on-nonfinite skip leaves such batches out, and rollback goes back to a snapshot "
            f"too; if they are not the cause, {NotFinite.ADVICE}"
        )


def _listed(tensors: Sequence[tuple[str, int]]) -> str:
    """Returns the names of the first of these tensors."""
    names = ", ".join(f"{name!r} on rank {rank}" for name, rank in tensors[:LISTED])
    unlisted = len(tensors) - LISTED
    return f"{names} and {unlisted} more" if unlisted > 0 else names
