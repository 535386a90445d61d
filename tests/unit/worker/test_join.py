"""How long the start of a worker may take, on machines that have time for it and on others."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from elasticzero.worker.join import LOOK_S, time_is_up


@dataclass
class Machine:
    """A clock, and a process that is not always let run when it asks to be woken."""

    late_s: tuple[float, ...] = (0.0,)
    """Seconds by which each wait ends late, again and again."""
    over_s: float = float("inf")
    """Time from which on the wait is over."""
    now_s: float = 100.0
    ran_s: float = 0.0
    """Time for which the process has waited as long as it asked to."""
    looks: int = 0

    def clock(self) -> float:
        return self.now_s

    def is_over(self, look_s: float) -> bool:
        if self.now_s >= self.over_s:
            return True
        self.ran_s += look_s
        self.now_s += look_s + self.late_s[self.looks % len(self.late_s)]
        self.looks += 1
        return self.now_s >= self.over_s


def test_a_step_that_hangs_is_given_up_after_its_limit() -> None:
    machine = Machine()
    assert time_is_up(10.0, machine.is_over, machine.clock)
    assert machine.now_s == pytest.approx(110.0)


def test_a_step_that_ends_is_not_given_up() -> None:
    for over_s in (100.0, 103.1, 109.9):
        machine = Machine(over_s=over_s)
        assert not time_is_up(10.0, machine.is_over, machine.clock)


def test_the_time_in_which_the_process_did_not_run_does_not_count() -> None:
    """Ranks that had all come were given up after 10 s, and then after 20 s, by the clock alone."""
    machine = Machine(late_s=(0.0, 7.0, 0.5), over_s=190.0)
    assert not time_is_up(10.0, machine.is_over, machine.clock)
    assert machine.now_s > 185.0
    hangs = Machine(late_s=(0.0, 7.0, 0.5))
    assert time_is_up(10.0, hangs.is_over, hangs.clock)
    assert hangs.looks == 10.0 / LOOK_S  # and it is given up in the end all the same


def test_whatever_the_machine_does_no_more_and_no_less_counts_than_the_process_ran() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        late_s = tuple(draw.choice([0.0, 0.0, 0.01, 3.0, 40.0]) for _ in range(7))
        limit_s = draw.choice([0.0, 0.1, 1.0, 10.0, 300.0])
        machine = Machine(late_s=late_s)
        assert time_is_up(limit_s, machine.is_over, machine.clock)
        assert machine.ran_s == pytest.approx(limit_s), seed
