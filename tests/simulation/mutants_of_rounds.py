"""Deliberately broken rules of the rounds of islands: see `mutants`."""

from __future__ import annotations

from tests.simulation.mutants import Mutant

LEAD = "protocol/rounds/lead.py"
CLAIMS = "protocol/rounds/claims.py"
DOCUMENTS = "protocol/rounds/documents.py"
PROGRESS = "../elasticzero/islands/progress.py"

MUTANTS_OF_ROUNDS = (
    Mutant(
        name="a round is committed that one island has, though there are two",
        file=LEAD,
        right="enough = 1 if len(living) == 1 and not _some_are_silent(rounds, view) else 2",
        wrong="enough = 1",
        search="islands",
    ),
    Mutant(
        name="a contribution is taken again",
        file=LEAD,
        right="and part.contribution.number > seat.settled[number].number",
        wrong="and part.contribution.number > 0",
        search="islands",
    ),
    Mutant(
        name="rounds that nobody has the state of still count",
        file=LEAD,
        right="    void = [past for past in fragment.recent if past.outer.round > last]",
        wrong="    void, last = [], max(last, fragment.outer.round)",
        search="islands",
    ),
    Mutant(
        name="contributions of void rounds stay settled",
        file=LEAD,
        right="_settled(seat, number, settled.number, None) if settled.round == void else",
        wrong="seat if settled.round == void else",
        search="islands",
    ),
    Mutant(
        name="a seat goes whose contribution is being summed",
        file=LEAD,
        right="if _is_lost(*seat.place, view) and not _counts(seat, rounds):",
        wrong="if _is_lost(*seat.place, view):",
        search="islands",
    ),
    Mutant(
        name="the samples of a lost island are lost with it",
        file=LEAD,
        right="            free += (claim.samples for claim in seat.claims)",
        wrong="            pass",
        search="islands",
    ),
    Mutant(
        name="what was done with a seat counts with the next one",
        file=LEAD,
        right="    return report if place == (seat.incarnation, seat.number) else None",
        wrong="    return report if place and place[0] == seat.incarnation else None",
        search="islands",
        further=(("../tests/simulation/islands/island.py", "(0, seat.number)", "range(10**6)"),),
    ),
    Mutant(
        name="an attempt may take for ever",
        file=LEAD,
        right="    late = (number, closing.attempt) in view.overdue",
        wrong="    late = False",
        search="islands",
    ),
    Mutant(
        name="an attempt is not given up where a contribution cannot be fetched",
        file=LEAD,
        right="if late or (not results and (gone or unreachable)):",
        wrong="if not results and gone:",
        search="islands",
    ),
    Mutant(
        name="a contribution that one owner could not fetch is left out for ever",
        file=LEAD,
        right="        fragment = replace(fragment, left_out=())  # another owner may reach them",
        wrong="        pass",
        search="islands",
    ),
    Mutant(
        name="the samples of a contribution that comes too late are lost",
        file=LEAD,
        right="            free += taken\n",
        wrong="",
        search="islands",
    ),
    Mutant(
        name="the rounds are done before the last samples are committed",
        file=LEAD,
        right="if to_give(rounds) or any(seat.claims for seat in rounds.seats):",
        wrong="if to_give(rounds):",
        search="islands",
    ),
    Mutant(
        name="a contribution takes the whole claim",
        file=CLAIMS,
        right="        middle = stop if claim.number < number else start",
        wrong="        middle = stop if claim.number <= number else start",
        search="islands",
        further=((CLAIMS, "        if claim.number == number:\n", "        if False:\n"),),
    ),
    Mutant(
        name="a claim goes on into the next section",
        file=DOCUMENTS,
        right="        return min((position // self.section + 1) * self.section, self.total)",
        wrong="        return self.total",
        search="islands",
    ),
    Mutant(
        name="positions beyond the end of a section count as samples",
        file=LEAD,
        right="    rounds = _without_beyond(_seated(rounds, view), view)",
        wrong="    rounds = _seated(rounds, view)",
        search="islands",
    ),
    Mutant(
        name="the rest of a section that was begun is lost",
        file=CLAIMS,
        right="    return claim, united([*others, rest], order.section), after",
        wrong="    return claim, others, after",
        search="islands",
    ),
    Mutant(
        name="more samples are given than the loop has",
        file=CLAIMS,
        right="    return max(0, min(positions, order.limit - rounds.samples - claimed))",
        wrong="    return max(0, min(positions, order.limit - rounds.samples))",
        search="islands",
    ),
    Mutant(
        name="the end of a section is forgotten before the rounds are told",
        file=PROGRESS,
        right="    told = filter(is_passed, {*progress.ends, *ends})",
        wrong="    told = filter(is_passed, ends)",
        search="islands",
    ),
    Mutant(
        name="no mark is kept of where a stream's readers go on",
        file=LEAD,
        right="            marks += () if contributor.mark is None else (contributor.mark,)",
        wrong="            marks += ()",
        search="islands",
    ),
    Mutant(
        name="an island contributes again before it knows what became of the first one",
        file=PROGRESS,
        right="    if part.sent is not None or not part.steps:",
        wrong="    if not part.steps:",
        search="islands",
    ),
)
