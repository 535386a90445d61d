"""Finds the rounds that were committed since a node last looked. Pure but for what it remembers."""

from __future__ import annotations

from elasticzero.launcher.protocol.rounds.documents import Committed, Rounds


class CommittedRounds:
    """Remembers which rounds are known."""

    def __init__(self) -> None:
        self._history: int | None = None
        self._newest: list[int] = []
        """Number of the newest known round of each fragment."""

    def new_in(self, rounds: Rounds) -> list[tuple[int, Committed]]:
        """Returns the rounds that are new, each with the number of its fragment. Those of before
        the first look are not.

        Args:
            rounds: The rounds as they are now.
        """
        newest = [fragment.outer.round for fragment in rounds.fragments]
        before, goes_on = self._newest, self._history == rounds.history
        self._history, self._newest = rounds.history, newest
        if not goes_on:
            return []
        return [
            (number, past)
            for number, fragment in enumerate(rounds.fragments)
            for past in fragment.recent
            if past.outer.round > before[number] and past.contributors
        ]
