"""A rank's own time in a step is its forwards and backwards, without waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticzero import step_clock
from elasticzero.step_clock import StepClock, wait_for


class FakeTime:
    """A clock that stands still but when it is told."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Work:
    """A collective that takes so long."""

    def __init__(self, clock: FakeTime, seconds: float, error: Exception | None = None) -> None:
        self._clock, self._seconds, self._error = clock, seconds, error

    def wait(self) -> None:
        self._clock.now_s += self._seconds
        if self._error is not None:
            raise self._error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTime]:
    fake = FakeTime()
    monkeypatch.setattr(step_clock, "time", fake)
    yield fake


def test_waits_for_data_and_for_collectives_do_not_count(clock: FakeTime) -> None:
    timer = StepClock(on_gpu=False)
    timer.reset()
    for _ in range(2):
        clock.now_s += 5.0  # the batch is read
        timer.start()
        clock.now_s += 1.0
        wait_for([Work(clock, 2.0), Work(clock, 3.0)])
        clock.now_s += 0.5
        timer.stop()
        wait_for([Work(clock, 7.0)])
    assert timer.seconds == pytest.approx(3.0)
    timer.reset()
    assert timer.seconds == 0.0


def test_what_the_script_does_besides_does_not_count(clock: FakeTime) -> None:
    timer = StepClock(on_gpu=False)
    timer.reset()
    timer.start()
    clock.now_s += 1.0
    evaluates_s = clock.now_s
    clock.now_s += 9.0
    timer.exclude_since(evaluates_s)
    timer.stop()
    assert timer.seconds == pytest.approx(1.0)


def test_a_wait_that_fails_is_counted_and_raises(clock: FakeTime) -> None:
    timer = StepClock(on_gpu=False)
    timer.reset()
    timer.start()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        wait_for([Work(clock, 2.0, RuntimeError("a peer is gone")), Work(clock, 1.0)])
    timer.stop()
    assert timer.seconds == 0.0
