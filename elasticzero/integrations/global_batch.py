"""Decides the number of samples in a step of a framework's trainer. Pure."""

from __future__ import annotations

from elasticzero.errors import UserError


def agreed_global_batch(requested: int | None, stored: int | None, first: int) -> int:
    """Decides the number of samples in a step over all ranks.

    Args:
        requested: samples in a step that the script gives; None: it gives none.
        stored: samples in a step with which training began; None or 0: it begins now.
        first: samples that the batch size of a rank makes with the ranks of the first generation.

    Returns:
        The number.

    Raises:
        UserError: the script gives another number than training began with. A trainer counts its
            training in steps, and so would train for another time than it is told.
    """
    if not stored:
        return requested or first
    if requested not in (None, stored):
        raise UserError(
            f"training began with global_batch={stored}, and the script now gives {requested}. A "
            "trainer counts its training in steps, so that the number cannot change on the way, "
            f"and must not follow from the number of ranks: give global_batch={stored}, or begin "
            "anew with another --checkpoint-dir"
        )
    return stored
