"""Which answers of a store tell that its data are not those that were there before."""

from __future__ import annotations

import pytest

from elasticzero.launcher.store.data_loss import History, HistoryPosition

CLUSTER = 0xA


@pytest.fixture
def history() -> History:
    """One that has seen revision 10 of a cluster."""
    history = History()
    assert history.judge_response(history.position(), CLUSTER, 10) == "same"
    return history


@pytest.mark.parametrize(
    ("cluster", "revision", "wrote", "verdict"),
    [
        (CLUSTER, 10, False, "same"),
        (CLUSTER, 12, False, "same"),
        (CLUSTER, 11, True, "same"),
        (CLUSTER, 0, False, "same"),
        (0, 10, False, "same"),
        (CLUSTER, 9, False, "lost"),
        (CLUSTER, 10, True, "lost"),
        (0xB, 10, False, "lost"),
        (0xB, 0, False, "lost"),
        (0xB, 99, True, "lost"),
    ],
)
def test_an_answer_tells_of_a_loss(
    history: History, cluster: int, revision: int, wrote: bool, verdict: str
) -> None:
    assert history.judge_response(history.position(), cluster, revision, wrote=wrote) == verdict
    assert history.number == (verdict == "lost")


def test_answers_that_cross_are_no_loss(history: History) -> None:
    """Two calls at once: the one that was served first is answered last."""
    first, second = history.position(), history.position()
    assert history.judge_response(second, CLUSTER, 15) == "same"
    assert history.judge_response(first, CLUSTER, 12) == "same"
    assert history.judge_response(history.position(), CLUSTER, 14) == "lost"


def test_an_answer_of_an_earlier_history_counts_for_nothing(history: History) -> None:
    """It would raise the known revision, and the next good answer would look like a loss."""
    before = history.position()
    assert history.judge_response(history.position(), CLUSTER, 3) == "lost"
    assert history.judge_response(before, CLUSTER, 11) == "late"
    assert history.position() == HistoryPosition(1, 3)
    assert history.judge_response(history.position(), CLUSTER, 4) == "same"
    assert "10" in history.reason and "3" in history.reason


def test_a_loss_that_two_callers_find_is_one(history: History) -> None:
    assert history.begin("the record is gone", 0)
    assert not history.begin("the record is gone", 0)
    assert history.number == 1
    assert history.judge_response(history.position(), CLUSTER, 2) == "same"
