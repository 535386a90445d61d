"""When an island contributes."""

from __future__ import annotations

import pytest

from elasticzero.ipc.rounds import FragmentProgress, IslandProgress
from elasticzero.islands.progress import after_step, contributed, is_due, took
from elasticzero.options.diloco import DiLoCo


def due(
    progress: IslandProgress, settings: DiLoCo, *, called: bool = False, last: bool = False
) -> str:
    """The fragments that are due, as digits."""
    numbers = range(settings.fragments)
    return "".join(
        str(n) for n in numbers if is_due(progress, settings, n, called=called, last=last)
    )


def begun(fragments: int) -> IslandProgress:
    return IslandProgress(fragments=(FragmentProgress(),) * fragments)


@pytest.mark.parametrize(
    ("every", "fragments", "first"),
    [(5, 1, ["", "", "", "", "0"]), (4, 2, ["", "0", "", "1"]), (3, 3, ["0", "1", "2"])],
)
def test_fragments_take_turns(every: int, fragments: int, first: list[str]) -> None:
    """After their first time each is due every `every` steps."""
    settings, progress = DiLoCo(every=every, fragments=fragments), begun(fragments)
    told = []
    for step in range(1, 3 * every + 1):
        progress = after_step(progress, claim=1, upto=step, samples=1)
        told.append(due(progress, settings))
        for number in map(int, told[-1]):
            progress = took(contributed(progress, number), number, step, "", settled=step)
    assert told == first * 3


def test_a_contribution_has_all_steps_since_the_last_one() -> None:
    progress = begun(1)
    for claim, upto, samples in [(1, 4, 4), (1, 8, 4), (2, 23, 3)]:
        progress = after_step(progress, claim, upto, samples)
    progress = contributed(progress, 0)
    sent = progress.fragments[0].sent
    assert sent is not None
    assert (sent.number, sent.samples, sent.steps, sent.claim, sent.upto) == (1, 11, 3, 2, 23)
    assert progress.fragments[0].steps == 0


def test_no_other_one_is_sent_while_one_waits() -> None:
    settings = DiLoCo(every=1)
    progress = contributed(after_step(begun(1), 1, 1, 1), 0)
    progress = after_step(after_step(progress, 1, 2, 1), 1, 3, 1)
    assert due(progress, settings, called=True, last=True) == ""
    sent = progress.fragments[0].sent
    assert sent is not None
    assert sent.since == 2
    unsettled = took(progress, 0, base=1, digest="", settled=0)
    assert due(unsettled, settings) == ""
    assert unsettled.fragments[0].base == 1
    assert due(took(progress, 0, base=1, digest="", settled=1), settings) == "0"


@pytest.mark.parametrize("why", ["called", "last"])
def test_an_island_contributes_what_it_has_when_it_is_asked(why: str) -> None:
    settings, progress = DiLoCo(every=50), begun(1)
    assert due(progress, settings, **{why: True}) == ""
    progress = after_step(progress, 1, 1, 1)
    assert due(progress, settings) == ""
    assert due(progress, settings, **{why: True}) == "0"
