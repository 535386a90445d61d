"""When an island contributes."""

from __future__ import annotations

import pytest

from elasticzero.islands.progress import FragmentProgress, Progress, Schedule


def due(progress: Progress, schedule: Schedule, *, called: bool = False, last: bool = False) -> str:
    """The fragments that are due, as digits."""
    numbers = range(schedule.fragments)
    return "".join(
        str(n) for n in numbers if progress.is_due(schedule, n, called=called, last=last)
    )


def begun(fragments: int) -> Progress:
    return Progress(fragments=(FragmentProgress(),) * fragments)


@pytest.mark.parametrize(
    ("every", "fragments", "first"),
    [(5, 1, ["", "", "", "", "0"]), (4, 2, ["", "0", "", "1"]), (3, 3, ["0", "1", "2"])],
)
def test_fragments_take_turns(every: int, fragments: int, first: list[str]) -> None:
    """After their first time each is due every `every` steps."""
    schedule, progress = Schedule(every=every, fragments=fragments), begun(fragments)
    told = []
    for step in range(1, 3 * every + 1):
        progress = progress.after_step(claim=1, upto=step, samples=1)
        told.append(due(progress, schedule))
        for number in map(int, told[-1]):
            progress = progress.contributed(number).took(number, step, settled=step)
    assert told == first * 3


def test_a_contribution_has_all_steps_since_the_last_one() -> None:
    progress = begun(1).after_step(claim=1, upto=4, samples=4).after_step(1, 8, 4)
    progress = progress.after_step(claim=2, upto=23, samples=3).contributed(0)
    sent = progress.fragments[0].sent
    assert sent is not None
    assert (sent.number, sent.samples, sent.steps, sent.claim, sent.upto) == (1, 11, 3, 2, 23)
    assert progress.fragments[0].steps == 0


def test_no_other_one_is_sent_while_one_waits() -> None:
    schedule = Schedule(every=1)
    progress = begun(1).after_step(1, 1, 1).contributed(0)
    progress = progress.after_step(1, 2, 1).after_step(1, 3, 1)
    assert due(progress, schedule, called=True, last=True) == ""
    sent = progress.fragments[0].sent
    assert sent is not None
    assert sent.since == 2
    unsettled = progress.took(0, base=1, settled=0)
    assert due(unsettled, schedule) == ""
    assert unsettled.fragments[0].base == 1
    assert due(progress.took(0, base=1, settled=1), schedule) == "0"


@pytest.mark.parametrize("why", ["called", "last"])
def test_an_island_contributes_what_it_has_when_it_is_asked(why: str) -> None:
    schedule, progress = Schedule(every=50), begun(1)
    assert due(progress, schedule, **{why: True}) == ""
    progress = progress.after_step(1, 1, 1)
    assert due(progress, schedule) == ""
    assert due(progress, schedule, **{why: True}) == "0"
