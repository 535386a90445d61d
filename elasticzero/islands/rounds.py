"""Takes part in the rounds on one rank of an island: contributes, and takes what comes.

All ranks of an island do the same at the same boundary: they agree on the news that they follow.
Each writes a part of a contribution, and takes what comes into all elements that it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from elasticzero.errors import UserError
from elasticzero.ipc.messages import Message
from elasticzero.ipc.rounds import (
    FragmentNews,
    FragmentProgress,
    GivenSamples,
    IslandAt,
    IslandProgress,
    RoundNews,
    outer_name,
    own_name,
    sent_name,
)
from elasticzero.islands.elements import Elements
from elasticzero.islands.files import mapped
from elasticzero.islands.layout import FragmentLayout
from elasticzero.islands.parameters import Reference, take, write_difference
from elasticzero.islands.progress import contributed, is_due, took
from elasticzero.options.diloco import DiLoCo

POLL_S = 0.002
"""Seconds between two looks for news where a rank waits for it."""


class Link(Protocol):
    """Receives news from the agent, and sends what the agent must know."""

    round_news: dict[int, RoundNews]

    def send(self, message: Message) -> None: ...

    def check(self) -> None:
        """Raises where the generation is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Says what a rank shares with the others of its island."""

    least: Callable[[int], int]
    """Returns the least of the numbers that all ranks of the island give."""
    folder: Path
    """Folder of the node's files of the rounds."""
    elements: Callable[[], AbstractContextManager[Elements]]
    """Yields the elements that this rank has between two steps, which may be changed in place until
    the context ends."""


class IslandRounds:
    """Takes part in the rounds on one rank."""

    def __init__(
        self,
        link: Link,
        part: Part,
        settings: DiLoCo,
        layouts: Sequence[FragmentLayout],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins before the state is in place.

        Args:
            link: The client of the agent.
            part: This rank's part.
            settings: The settings of the strategy.
            layouts: The fragments.
            on_change: Called before parameters change.
        """
        self._on_change = on_change
        self._link, self._part, self._settings = link, part, settings
        self._layouts = layouts
        self._is_lossy, self._has_ended = settings.wire != "fp32", False
        self._news: RoundNews | None = None
        self._told: IslandAt | None = None
        self._waiting: tuple[tuple[int, ...], float] | None = None
        """Numbers of the contributions for whose rounds it waits, and since when."""

    @property
    def claims(self) -> tuple[GivenSamples, ...]:
        """Returns the samples that the island has been given."""
        return () if self._news is None else self._news.claims

    @property
    def newest(self) -> Sequence[FragmentNews]:
        """Returns the newest news of each fragment; none before the rounds begin."""
        return () if self._news is None else self._news.fragments

    @property
    def takes_part(self) -> bool:
        """Returns whether the island has a place in the rounds."""
        return self._news is not None

    def write_own(self) -> None:
        """Writes this rank's part of the parameters that it begins with."""
        with self._part.elements() as elements:
            for number, layout in enumerate(self._layouts):
                own_E = mapped(self._part.folder / own_name(number), layout, create=True)
                for place, local in layout.places(elements.written):
                    own_E[place].copy_(local)

    def at_boundary(self, progress: IslandProgress, *, has_samples: bool) -> IslandProgress:
        """Follows the news that all ranks have, and contributes what is due; all ranks call this
        together, between two steps.

        Args:
            progress: How far the island is.
            has_samples: Whether it can make a step now.

        Returns:
            How far it is after that.
        """
        news = self._agreed_news()
        if news is None:
            return progress
        if news.incarnation != progress.incarnation:
            progress = self._begin(news)
        for number, fragment in enumerate(news.fragments):
            if has_samples and self._is_early(progress.fragments[number], fragment):
                continue
            progress = self._take(progress, number, fragment)
        progress = replace(progress, left=news.left)
        last = news.none_left and not has_samples
        for number, fragment in enumerate(news.fragments):
            if is_due(progress, self._settings, number, called=fragment.called, last=last):
                self._contribute(progress, number)
                progress = contributed(progress, number)
        if self._is_lossy and not self._has_ended and news.done and _has_all(progress, news):
            self._has_ended = True  # what no contribution has any more is dropped
            self._take_outer(news)
        self._say(progress, waits=not has_samples)
        return progress

    def is_over(self, progress: IslandProgress) -> bool:
        """Returns whether all samples are committed, and the island has the last outer state."""
        news = self._news
        return news is not None and news.done and _has_all(progress, news)

    def waits_for_round(self, progress: IslandProgress) -> bool:
        """Returns whether the island is to wait for a round before its next step; all ranks call
        this together."""
        expected = any(
            part.sent is not None and part.sent.since == self._settings.overlap
            for part in progress.fragments
        )
        if not expected or not self._settings.wait:
            return False
        now_s, numbers = time.monotonic(), tuple(part.number for part in progress.fragments)
        if self._waiting is None or self._waiting[0] != numbers:
            self._waiting = numbers, now_s
        over = now_s - self._waiting[1] >= self._settings.wait
        return self._part.least(0 if over else 1) > 0

    def pause(self) -> None:
        """Waits a moment for news; raises where the generation is over."""
        self._link.check()
        time.sleep(POLL_S)

    def _agreed_news(self) -> RoundNews | None:
        """Returns the newest news that all ranks have, or the last that they had, where agents of
        the island's nodes have passed over it; None: some rank has none."""
        news = self._news
        version = self._part.least(max(self._link.round_news, default=0))
        newest = self._link.round_news.get(version)
        if newest is not None and newest.refused:
            raise UserError(newest.refused)
        is_new = version != (0 if news is None else news.version)
        if not is_new or not self._part.least(int(newest is not None)) or newest is None:
            return news
        for older in [v for v in [*self._link.round_news] if v < version]:
            del self._link.round_news[older]
        self._news = newest
        return newest

    def _begin(self, news: RoundNews) -> IslandProgress:
        """Begins with the outer parameters, as another incarnation of the island."""
        self._take_outer(news)
        parts = tuple(FragmentProgress(base=f.round, digest=f.digest) for f in news.fragments)
        return IslandProgress(fragments=parts, incarnation=news.incarnation)

    def _take_outer(self, news: RoundNews) -> None:
        """Takes the outer parameters in place of the island's own."""
        self._on_change()
        with self._part.elements() as elements:
            for number, fragment in enumerate(news.fragments):
                outer = self._outer(number, fragment.round, fragment.digest)
                for place, local in self._layouts[number].places(elements.held):
                    after = Reference(outer_E=outer[place])
                    take(local, after, after, alpha=0.0)

    def _take(self, progress: IslandProgress, number: int, news: FragmentNews) -> IslandProgress:
        """Takes a round that is new, and what has become of the contribution."""
        part = progress.fragments[number]
        settled = part.sent is not None and part.sent.number <= news.settled
        if news.round == part.base and not settled:
            return progress
        self._on_change()
        progress_after = took(progress, number, news.round, news.digest, news.settled)
        waits = progress_after.fragments[number].sent is not None
        before = self._outer(number, part.base, part.digest)
        after = self._outer(number, news.round, news.digest)
        # One that waits still is on both sides, where it cancels.
        sent = self._sent(progress, number) if part.sent is not None and not waits else None
        in_time = part.sent is not None and part.sent.since == self._settings.overlap and settled
        # Without a step since its contribution, the parameters are the outer ones, but for what a
        # lossy wire has left out of it, which stays in them and comes with the next one.
        is_outer = not part.steps and (settled or not self._settings.alpha) and not waits
        alpha = self._settings.alpha if in_time else 0.0 if is_outer else None
        if self._is_lossy and not part.steps and not self._settings.alpha:
            alpha = None
        with self._part.elements() as elements:
            for place, local in self._layouts[number].places(elements.held):
                took_E = None if sent is None else sent[place]
                take(
                    local,
                    Reference(outer_E=before[place], sent_E=took_E),
                    Reference(outer_E=after[place]),
                    alpha,
                )
        return progress_after

    def _is_early(self, part: FragmentProgress, news: FragmentNews) -> bool:
        """Returns whether a round that has the island's contribution comes before its time."""
        sent = part.sent
        settled = sent is not None and sent.number <= news.settled
        return sent is not None and settled and sent.since < self._settings.overlap

    def _contribute(self, progress: IslandProgress, number: int) -> None:
        """Writes this rank's part of a contribution."""
        part, layout = progress.fragments[number], self._layouts[number]
        path = self._part.folder / sent_name(number, progress.incarnation, part.number + 1)
        outer = self._outer(number, part.base, part.digest)
        sent_E = mapped(path, layout, create=True)
        with self._part.elements() as elements:
            for place, local in layout.places(elements.written):
                write_difference(outer[place], local, sent_E[place])

    def _outer(self, number: int, round: int, digest: str) -> Tensor:
        path = self._part.folder / outer_name(number, round, digest)
        return mapped(path, self._layouts[number], create=False)

    def _sent(self, progress: IslandProgress, number: int) -> Tensor:
        sent = progress.fragments[number].sent
        assert sent is not None
        path = self._part.folder / sent_name(number, progress.incarnation, sent.number)
        return mapped(path, self._layouts[number], create=False)

    def _say(self, progress: IslandProgress, *, waits: bool) -> None:
        """Tells the agent how far the island is, where that is new to it."""
        grace = self._settings.grace
        parts = tuple(
            replace(
                part,
                steps=0,
                samples=0,
                sent=None
                if part.sent is None
                else replace(part.sent, since=min(grace, part.sent.since)),
            )
            for part in progress.fragments
        )
        shown = replace(progress, fragments=parts, upto=0, mark=None)
        at = IslandAt(progress=shown, waits=waits)
        if at != self._told:
            self._told = at
            self._link.send(IslandAt(progress=progress, waits=waits))


def _has_all(progress: IslandProgress, news: RoundNews) -> bool:
    """Returns whether the island has taken all rounds that there are, and sends nothing more."""
    return all(
        part.base == fragment.round and part.sent is None and not part.steps
        for part, fragment in zip(progress.fragments, news.fragments, strict=True)
    )
