"""Decides the number of samples in a step of a framework's trainer. Pure."""

from __future__ import annotations

from elasticzero.errors import UserError


def agreed_global_batch(wanted: int | None, stored: int | None, first: int) -> int:
    """Returns the samples in a step over all ranks.

    wanted: what the script gives; None: nothing. stored: what training began with; None or 0: it
    begins now. first: what the batch size of a rank makes of the ranks with which training begins.
    Raises `UserError` if the script gives another number than training began with: a trainer counts
    its training in steps, and so would train for another time than it is told.
    """
    if not stored:
        return wanted or first
    if wanted not in (None, stored):
        raise UserError(
            f"training began with global_batch={stored}, and the script now gives {wanted}. A "
            "trainer counts its training in steps, so that the number cannot change on the way, "
            f"and must not follow from the number of ranks: give global_batch={stored}, or begin "
            "anew with another --checkpoint-dir"
        )
    return stored
