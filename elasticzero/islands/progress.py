"""Decides when an island contributes to a round, and keeps what it has contributed. Pure.

An island that has contributed goes on with inner steps, and contributes again `every` inner steps
after that, or when it is called to. While a contribution to a fragment is not settled it sends no
other one for this fragment: its next one then has all steps since. Rules:
 CT1  An island contributes to fragment f of F for the first time after every · (f + 1) // F inner
      steps, and then every `every` steps (arXiv 2501.18512), or when it is called to, or when it
      has no further samples.
 CT2  The first inner step after a contribution counts for the next one.
 CT3  A contribution is the difference between the outer parameters that the island last took and
      its parameters. It is sent only where no other one waits: so these parameters are what the
      next one differs from, whatever rounds come in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from elasticzero.ipc.rounds import FragmentProgress, IslandProgress, Sent, StreamMark
from elasticzero.options.diloco import DiLoCo


def after_step(
    progress: IslandProgress,
    claim: int,
    upto: int,
    samples: int,
    mark: StreamMark | None = None,
) -> IslandProgress:
    """Returns the progress after an inner step.

    Args:
        progress: That before.
        claim: Number of the claim that its samples are of.
        upto: Position after them.
        samples: Number of them.
        mark: Where the readers of a stream go on there.
    """
    fragments = tuple(
        replace(
            part,
            steps=part.steps + 1,
            samples=part.samples + samples,
            sent=None if part.sent is None else replace(part.sent, since=part.sent.since + 1),
        )
        for part in progress.fragments
    )
    return replace(progress, fragments=fragments, claim=claim, upto=upto, mark=mark)


def with_ends(
    progress: IslandProgress,
    ends: Iterable[int],
    claims: Sequence[tuple[int, int]],
    section: int,
) -> IslandProgress:
    """Returns the progress with the ends of sections that the rounds are to be told of: as long as
    the island is given positions beyond them, for its contributions are to have no such positions.

    Args:
        progress: That before.
        ends: Positions after the last samples of sections, as far as they are known.
        claims: Positions `[start, stop)` of each claim of the island.
        section: Number of positions in a section.
    """

    def is_passed(end: int) -> bool:
        return any(start // section == end // section and stop > end for start, stop in claims)

    told = filter(is_passed, {*progress.ends, *ends})
    return replace(progress, ends=tuple(sorted(told)))


def is_due(
    progress: IslandProgress, settings: DiLoCo, fragment: int, *, called: bool, last: bool
) -> bool:
    """Returns whether the island contributes to a fragment now (CT1).

    Args:
        progress: How far it is.
        settings: Say how often.
        fragment: Number of the fragment.
        called: Whether the lead asks for what there is.
        last: Whether the island has no further samples.
    """
    part = progress.fragments[fragment]
    if part.sent is not None or not part.steps:
        return False
    first = max(1, settings.every * (fragment + 1) // settings.fragments)
    return called or last or part.steps >= (settings.every if part.number else first)


def contributed(progress: IslandProgress, fragment: int) -> IslandProgress:
    """Returns the progress once the island has a contribution to a fragment ready.

    Args:
        progress: That before.
        fragment: Number of the fragment.
    """
    part = progress.fragments[fragment]
    sent = Sent(
        number=part.number + 1,
        base=part.base,
        samples=part.samples,
        steps=part.steps,
        claim=progress.claim,
        upto=progress.upto,
        mark=progress.mark,
    )
    after = replace(part, sent=sent, number=sent.number, steps=0, samples=0)
    return _with_fragment(progress, fragment, after)


def took(
    progress: IslandProgress, fragment: int, base: int, digest: str, settled: int
) -> IslandProgress:
    """Returns the progress once the island has taken the outer parameters of a round.

    Args:
        progress: That before.
        fragment: Number of the fragment.
        base: The round.
        digest: Digest of the outer state after it.
        settled: Number of the island's last contribution that was settled by then.
    """
    part = progress.fragments[fragment]
    sent = part.sent if part.sent is not None and part.sent.number > settled else None
    return _with_fragment(progress, fragment, replace(part, base=base, digest=digest, sent=sent))


def _with_fragment(
    progress: IslandProgress, fragment: int, part: FragmentProgress
) -> IslandProgress:
    fragments = (*progress.fragments[:fragment], part, *progress.fragments[fragment + 1 :])
    return replace(progress, fragments=fragments)
