"""Decides what the lead of the islands writes next, from what all islands report.

Pure: `lead(view, settings)` returns the next document of the rounds. The lead calls it whenever a
report or the document has changed, and writes what it returns on condition that the document is
as it was read, and that its own registration stands: of two leads one writes. A decision depends on
documents alone, so that another lead goes on from the same point. Rules:
 RD1  An island has a seat from its first report that names the samples of the job, until its
      registration is gone. Then its claims are free again. What it does counts once its report
      names the seat. What islands hold is known by digest: a state counts where it is one of the
      recent rounds'.
 RD2  A round of a fragment is open until it is closed: when all islands that train have
      contributed, or when the quorum of them has and the first of these has made `grace` steps
      since. Once the quorum has, the others are called: they contribute what they have. Islands
      that have contributed to no round yet count for the quorum only where none has. The first
      round stays open until each island that lives has been given samples, as long as there are
      some: so all that the rounds begin with take part in it.
 RD3  Closing names the contributions, in the order of seats, and the owner: fragment f belongs to
      seat f of those that hold the newest state, and with each further attempt to the next one.
 RD4  The owner computes the mean, and others fetch it. The round is committed once two islands
      have the result, or the only one that there is. So no committed round is lost with one island.
 RD5  An attempt is given up while no island that lives has its result and the owner or a
      contributor is gone, or the owner cannot fetch a contribution, which is left out of this round
      then; and whenever it has taken too long. The contributions are there for the next attempt.
 RD6  A contribution counts once: numbers of an island's contributions grow, and only one above
      the last settled number is taken. One that comes too late for a round is taken by the next
      one. One that is more than `max_staleness` rounds late is dropped, and its samples are free.
 RD7  If no island that lives holds the newest state, because all that had it are gone, the rounds
      after the newest one that is held are void: their samples are free again, and contributions
      that counted in them are dropped.
 RD8  An island that holds a state is given samples as often as it asks, those that were given back
      first: `every` inner batches. The samples of an inner step of all islands are divided over
      those that have a seat. No claim has samples of two sections. An island may ask for several at
      once, to train on while a lost lead is replaced; near the end it has one that it has not
      begun, or half of its part of what is left. Before the first round all have one before any
      has two.
 RD9  Samples are committed with the last fragment's rounds: those of earlier claims, and of the
      newest claim up to the position that the contribution names. What is left of a claim stays.
 RD10 The rounds begin with the state of the island that has most samples behind it, the first one
      of equals, and begin again so where no island holds any state of them.
 RD11 A section of a stream is begun as a whole: what is not given of it yet is free. Islands that
      come to its end say where that is, and what is beyond is no sample. Committed contributions
      bring marks, from which other islands' readers go on.
Invariants: a round commits once; each sample is in one claim, free, or in one committed round; a
contribution counts once; all islands hold the same bits of a committed round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from elasticzero.launcher.protocol.rounds.claims import (
    granted,
    nearest_marks,
    share_of,
    split,
    to_give,
    united,
    without_beyond,
)
from elasticzero.launcher.protocol.rounds.documents import (
    Closing,
    Committed,
    Contribution,
    Contributor,
    Fragment,
    FragmentReport,
    IslandReport,
    Outer,
    Rounds,
    Seat,
    Settled,
    Sum,
)

REMEMBERED = 32
"""Maximum number of rounds of a fragment that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """Holds what a user chooses of the rounds."""

    every: int
    """Number of inner steps between two contributions to one fragment."""
    quorum: float = 1.0
    """Share of the islands that must have contributed."""
    max_staleness: int = 8
    """Maximum number of rounds for which a contribution may be late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadView:
    """Holds what the lead sees."""

    rounds: Rounds | None
    """The document; None: there is none yet."""
    reports: Mapping[str, IslandReport]
    """Reports of the islands that live, in the order of their registrations."""
    silent: Collection[str] = ()
    """Islands without a registration that may come back with it: the store was away."""
    overdue: Collection[tuple[int, int]] = ()
    """Fragments with the number of an attempt that has taken too long."""
    complete: bool = True
    """All islands are there that the rounds are to begin with."""


def lead(view: LeadView, settings: RoundSettings) -> Rounds | None:
    """Returns the next document of the rounds: an equal one where nothing changes, and None where
    they cannot begin yet.

    Args:
        view: What the lead sees.
        settings: The settings of the rounds.
    """
    rounds = view.rounds
    if rounds is not None and rounds.done:
        return rounds
    alike = {n: r for n, r in view.reports.items() if rounds is None or r.order == rounds.order}
    if rounds is None or _nobody_holds(rounds, replace(view, reports=alike)):
        return _begun(view)
    view = replace(view, reports=alike)
    rounds = _without_beyond(_seated(rounds, view), view)
    for number in range(len(rounds.fragments)):
        rounds = _without_lost_rounds(rounds, view, number)
        rounds = _attempt(rounds, view, number)
        rounds = _without_stale(rounds, view, settings, number)
        rounds = _closed(rounds, view, settings, number)
    rounds = _given(rounds, view, settings)
    return replace(rounds, done=_is_done(rounds, view), marks=nearest_marks(rounds))


def _begun(view: LeadView) -> Rounds | None:
    """Returns rounds that begin with an island's state (RD10); None: they cannot yet."""
    if not view.reports or not view.complete:
        return None
    first = max(view.reports.values(), key=lambda report: report.origin.samples)
    states = [fragment.outer for fragment in first.fragments]
    if not all(states):
        return None
    before = view.rounds
    rounds = Rounds(
        history=1 if before is None else before.history + 1,
        order=first.order,
        fragments=tuple(
            Fragment(
                recent=(Committed(outer=outer),),
                attempts=0 if before is None else before.fragments[number].attempts,
            )
            for number, outer in enumerate(states)
            if outer is not None
        ),
        seats=(),
        numbered=0 if before is None else before.numbered,
        next=first.origin.next,
        free=first.origin.free,
        samples=first.origin.samples,
        marks=first.origin.marks,
        run=first.run,
    )
    alike = {island: r for island, r in view.reports.items() if r.order == rounds.order}
    return _seated(rounds, replace(view, reports=alike))


def _nobody_holds(rounds: Rounds, view: LeadView) -> bool:
    """Returns whether of some fragment no island that lives, or may come back, holds a state."""
    numbers = range(len(rounds.fragments))
    return not _some_are_silent(rounds, view) and not all(
        _rounds_held(rounds, view, number) for number in numbers
    )


def _rounds_held(rounds: Rounds, view: LeadView, number: int) -> list[int]:
    """Returns the recent rounds of a fragment whose states islands have that live; none of those
    before the last one whose contributors are forgotten, for what came after that cannot be
    taken back."""
    return [
        past.outer.round
        for report in view.reports.values()
        for past in rounds.fragments[number].since_forgotten()
        if report.fragments[number].has(past)
    ]


def _seated(rounds: Rounds, view: LeadView) -> Rounds:
    """Returns the rounds with seats for all islands that live, and those alone (RD1)."""
    stay = []
    free = [*rounds.free]
    for seat in rounds.seats:
        if _is_lost(*seat.place, view) and not _counts(seat, rounds):
            free += (claim.samples for claim in seat.claims)
        else:
            stay.append(seat)
    places = {seat.place for seat in stay}
    settled = tuple(Settled() for _ in rounds.fragments)
    come = [
        (island, report.incarnation)
        for island, report in view.reports.items()
        if (island, report.incarnation) not in places and report.order == rounds.order
    ]
    stay += (
        Seat(island=island, incarnation=incarnation, number=number, settled=settled)
        for number, (island, incarnation) in enumerate(come, rounds.numbered + 1)
    )
    numbered = rounds.numbered + len(come)
    free_pieces = united(free, rounds.order.section)
    return replace(rounds, seats=tuple(stay), numbered=numbered, free=free_pieces)


def _report(seat: Seat, view: LeadView) -> IslandReport | None:
    """Returns the report that an island has written with this seat; None: it has written none, or
    is gone."""
    report = view.reports.get(seat.island)
    place = None if report is None else (report.incarnation, report.seat)
    return report if place == (seat.incarnation, seat.number) else None


def _is_lost(island: str, incarnation: str, view: LeadView) -> bool:
    """Returns whether a registration is gone for good."""
    report = view.reports.get(island)
    return island not in view.silent if report is None else report.incarnation != incarnation


def _some_are_silent(rounds: Rounds, view: LeadView) -> bool:
    """Returns whether an island with a seat may come back that has no registration now."""
    return any(s.island in view.silent and s.island not in view.reports for s in rounds.seats)


def _counts(seat: Seat, rounds: Rounds) -> bool:
    """Returns whether a closing round has a contribution of this registration."""
    return any(
        seat.place == c.place
        for fragment in rounds.fragments
        if fragment.closing is not None
        for c in fragment.closing.contributors
    )


def _living(rounds: Rounds, view: LeadView, number: int) -> Iterator[tuple[Seat, FragmentReport]]:
    """Yields the seats of islands that live and hold a state, with what they say of a fragment."""
    for seat in rounds.seats:
        report = _report(seat, view)
        if report is not None and _holds(rounds, report):
            yield seat, report.fragments[number]


def _holds(rounds: Rounds, report: IslandReport) -> bool:
    pairs = zip(rounds.fragments, report.fragments, strict=True)
    return all(fragment.has(part.outer) for fragment, part in pairs)


def _with_fragment(rounds: Rounds, number: int, fragment: Fragment) -> Rounds:
    fragments = (*rounds.fragments[:number], fragment, *rounds.fragments[number + 1 :])
    return replace(rounds, fragments=fragments)


def _without_lost_rounds(rounds: Rounds, view: LeadView, number: int) -> Rounds:
    """Returns the rounds without those of a fragment whose state nobody holds (RD7). Of those that
    all hold a later state of, the states alone are kept, and not for ever: an island that comes may
    be fetching one."""
    fragment = rounds.fragments[number]
    rounds_held = _rounds_held(rounds, view, number)
    if not rounds_held or _some_are_silent(rounds, view):
        return rounds
    first, last = min(rounds_held), max(rounds_held)
    void = [past for past in fragment.recent if past.outer.round > last]
    recent = tuple(
        past if past.outer.round >= first else replace(past, contributors=())
        for past in fragment.recent[-REMEMBERED:]
        if past.outer.round <= last
    )
    if void:
        fragment = replace(fragment, closing=None, called=False)
    rounds = _with_fragment(rounds, number, replace(fragment, recent=recent))
    for past in void:
        pieces = [piece for c in past.contributors for piece in c.taken]
        seats = tuple(_dropped_from(seat, number, past.outer.round) for seat in rounds.seats)
        rounds = replace(
            rounds,
            free=united([*rounds.free, *pieces], rounds.order.section),
            samples=rounds.samples - sum(map(len, pieces)),
            seats=seats,
            done=False,
        )
    return rounds


def _dropped_from(seat: Seat, number: int, void: int) -> Seat:
    settled = seat.settled[number]
    return _settled(seat, number, settled.number, None) if settled.round == void else seat


def _settled(seat: Seat, fragment: int, number: int, committed: int | None) -> Seat:
    """Returns the seat with another contribution settled.

    Args:
        seat: The seat.
        fragment: Number of the fragment.
        number: Number of the contribution.
        committed: Round in which it counts; None: it is dropped.
    """
    settled = [*seat.settled]
    settled[fragment] = Settled(number=number, round=committed)
    return replace(seat, settled=tuple(settled))


def _attempt(rounds: Rounds, view: LeadView, number: int) -> Rounds:
    """Returns the rounds with a fragment's attempt committed (RD4), given up (RD5), or as it is."""
    fragment = rounds.fragments[number]
    closing = fragment.closing
    if closing is None:
        return rounds
    living = [*_living(rounds, view, number)]
    results = {
        seat.island: part.sum
        for seat, part in living
        if part.sum is not None and part.sum.attempt == closing.attempt
    }
    agreed = _agreed(results, closing.owner)
    holders = [island for island, result in results.items() if result == agreed]
    enough = 1 if len(living) == 1 and not _some_are_silent(rounds, view) else 2
    if agreed is not None and len(holders) >= enough:
        return _committed(rounds, number, closing, agreed)
    owner = next((part for seat, part in living if seat.island == closing.owner), None)
    owner_is_gone = owner is None and closing.owner not in view.silent
    gone = owner_is_gone or any(_is_lost(*c.place, view) for c in closing.contributors)
    missed = None if owner is None else owner.unreachable
    of_this = missed is not None and missed.attempt == closing.attempt
    unreachable = missed.islands if missed is not None and of_this else ()
    late = (number, closing.attempt) in view.overdue
    if late or (not results and (gone or unreachable)):
        left_out = tuple(dict.fromkeys([*fragment.left_out, *unreachable]))
        again = replace(fragment, closing=None, left_out=left_out)
        return _with_fragment(rounds, number, again)
    return rounds


def _agreed(results: Mapping[str, Sum], owner: str) -> Sum | None:
    """Returns the owner's result, or where it is gone the first island's; None: there is none."""
    return results.get(owner) or next(iter(results.values()), None)


def _committed(rounds: Rounds, number: int, closing: Closing, agreed: Sum) -> Rounds:
    """Returns the rounds with an attempt committed (RD4).

    Args:
        rounds: The rounds.
        number: Number of the fragment.
        closing: The attempt.
        agreed: Its result.
    """
    fragment = rounds.fragments[number]
    outer = Outer(round=fragment.outer.round + 1, digest=agreed.outer)
    commits_samples = number == len(rounds.fragments) - 1
    seats, marks = {seat.place: seat for seat in rounds.seats}, [*rounds.marks]
    contributors = []
    for contributor in closing.contributors:
        seat = _settled(seats[contributor.place], number, contributor.number, outer.round)
        if commits_samples:
            taken, claims = split(seat.claims, contributor.claim, contributor.upto)
            seat = replace(seat, claims=claims)
            marks += () if contributor.mark is None else (contributor.mark,)
            contributor = replace(contributor, taken=taken, mark=None)
        seats[contributor.place] = seat
        contributors.append(contributor)
    past = Committed(outer=outer, attempt=closing.attempt, contributors=tuple(contributors))
    fragment = replace(
        fragment, called=False, closing=None, left_out=(), recent=(*fragment.recent, past)
    )
    rounds = replace(
        rounds,
        seats=tuple(seats.values()),
        marks=tuple(marks),
        samples=rounds.samples + sum(len(piece) for c in contributors for piece in c.taken),
    )
    return _with_fragment(rounds, number, fragment)


def _open_contributions(
    rounds: Rounds, view: LeadView, number: int
) -> list[tuple[Seat, Contribution]]:
    """Returns the contributions to a fragment that are not settled, in the order of seats (RD6)."""
    return [
        (seat, part.contribution)
        for seat, part in _living(rounds, view, number)
        if part.contribution is not None and part.contribution.number > seat.settled[number].number
    ]


def _without_stale(rounds: Rounds, view: LeadView, settings: RoundSettings, number: int) -> Rounds:
    """Returns the rounds with contributions dropped that are too late (RD6)."""
    fragment = rounds.fragments[number]
    if fragment.closing is not None:
        return rounds
    free, seats = [*rounds.free], {seat.place: seat for seat in rounds.seats}
    for seat, contribution in _open_contributions(rounds, view, number):
        if fragment.outer.round - contribution.base <= settings.max_staleness:
            continue
        if number == len(rounds.fragments) - 1:
            taken, claims = split(seat.claims, contribution.claim, contribution.upto)
            free += taken
            seat = replace(seat, claims=claims)
        seats[seat.place] = _settled(seat, number, contribution.number, None)
    if tuple(seats.values()) == rounds.seats:
        return rounds
    free_pieces = united(free, rounds.order.section)
    return replace(rounds, seats=tuple(seats.values()), free=free_pieces)


def _closed(rounds: Rounds, view: LeadView, settings: RoundSettings, number: int) -> Rounds:
    """Returns the rounds with a fragment's round closed, or called for, where it is time (RD2,
    RD3)."""
    fragment = rounds.fragments[number]
    if fragment.closing is not None or _some_are_to_begin(rounds, view):
        return rounds
    waiting = _open_contributions(rounds, view, number)
    if all(seat.island in fragment.left_out for seat, _ in waiting):
        fragment = replace(fragment, left_out=())  # another owner may reach them
    ready = {
        seat.island: (seat, contribution)
        for seat, contribution in waiting
        if seat.island not in fragment.left_out
    }
    if not ready:
        return _with_fragment(rounds, number, fragment)
    training = [
        seat
        for seat, _ in _living(rounds, view, number)
        if (_trains(seat, view) or seat.island in ready) and seat.island not in fragment.left_out
    ]
    established = [seat for seat in training if seat.settled[number].number] or training
    count = sum(seat.island in ready for seat in established)
    if len(ready) < len(training):
        if count < ceil(settings.quorum * len(established) - 1e-9):
            return rounds
        fragment = replace(fragment, called=True)
        if not any(contribution.waits for _, contribution in ready.values()):
            return _with_fragment(rounds, number, fragment)
    owner = _owner(rounds, view, number)
    if owner is None:
        return rounds
    attempt = fragment.attempts + 1
    contributors = tuple(
        Contributor(
            island=seat.island,
            incarnation=seat.incarnation,
            number=contribution.number,
            samples=contribution.samples,
            staleness=fragment.outer.round - contribution.base,
            claim=contribution.claim,
            upto=contribution.upto,
            mark=contribution.mark if number == len(rounds.fragments) - 1 else None,
        )
        for seat, contribution in ready.values()
    )
    closing = Closing(attempt=attempt, owner=owner, contributors=contributors)
    return _with_fragment(rounds, number, replace(fragment, closing=closing, attempts=attempt))


def _some_are_to_begin(rounds: Rounds, view: LeadView) -> bool:
    """Returns whether before the first round an island that lives has no samples yet, and there are
    some for it (RD2, RD8)."""
    has_begun = any(past.attempt for fragment in rounds.fragments for past in fragment.recent)
    return (
        not has_begun
        and to_give(rounds) > 0
        and any(
            not seat.granted and not _is_lost(*seat.place, view) and _asks(seat.island, view)
            for seat in rounds.seats
        )
    )


def _asks(island: str, view: LeadView) -> bool:
    """Returns whether an island wants samples, as far as is known."""
    report = view.reports.get(island)
    return report is None or report.ahead > 0


def _trains(seat: Seat, view: LeadView) -> bool:
    """Returns whether an island has samples, and will train on them."""
    report = _report(seat, view)
    return bool(seat.claims) and report is not None and report.ahead > 0


def _owner(rounds: Rounds, view: LeadView, number: int) -> str | None:
    """Returns the island that computes the next attempt; None: none holds the newest state."""
    fragment = rounds.fragments[number]
    living = _living(rounds, view, number)
    able = [seat.island for seat, part in living if part.outer == fragment.outer]
    return able[(number + fragment.attempts) % len(able)] if able else None


def _without_beyond(rounds: Rounds, view: LeadView) -> Rounds:
    """Returns the rounds without the positions that islands have found to have no sample (RD11)."""
    for end in {end for report in view.reports.values() for end in report.ends}:
        rounds = without_beyond(rounds, end)
    return rounds


def _given(rounds: Rounds, view: LeadView, settings: RoundSettings) -> Rounds:
    """Returns the rounds with the claims that islands ask for (RD8)."""
    seated = [seat for seat in rounds.seats if not _is_lost(*seat.place, view)]
    first = _some_are_to_begin(rounds, view)
    for place, seat in enumerate(seated):
        report = _report(seat, view)
        if report is None or not _holds(rounds, report):
            continue
        batch = share_of(rounds.order.global_batch, place, len(seated))
        while not (first and seat.granted) and _may_have_more(rounds, seat, report, len(seated)):
            claim, free, after = granted(rounds, seat, settings.every * batch, batch)
            if claim is None:
                break
            before = seat
            seat = replace(seat, claims=(*seat.claims, claim), granted=seat.granted + 1)
            if rounds.order.is_stream:
                seat = replace(seat, after=claim.samples.stop)
            seats = tuple(seat if other is before else other for other in rounds.seats)
            rounds = replace(rounds, seats=seats, free=free, next=after)
            if first:
                break
    return rounds


def _may_have_more(rounds: Rounds, seat: Seat, report: IslandReport, islands: int) -> bool:
    """Returns whether an island is to be given another claim.

    Args:
        rounds: The rounds.
        seat: The island's seat.
        report: Its report.
        islands: Number of islands that live.
    """
    unbegun = [len(claim.samples) for claim in seat.claims if claim.number > report.claim]
    fits = not unbegun or 2 * sum(unbegun) * islands < to_give(rounds)
    return len(unbegun) < report.ahead and fits


def _is_done(rounds: Rounds, view: LeadView) -> bool:
    """Returns whether all samples are committed, and all islands have contributed all their steps
    and have the last state: then none needs another one."""
    if to_give(rounds) or any(seat.claims for seat in rounds.seats):
        return False
    return all(
        fragment.closing is None
        and all(part.outer == fragment.outer for _, part in _living(rounds, view, number))
        for number, fragment in enumerate(rounds.fragments)
    ) and all(
        report.is_over
        for seat in rounds.seats
        if (report := _report(seat, view)) is not None and _holds(rounds, report)
    )
