"""When an agent must look again though nothing wakes it: nothing is to be done before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from elasticzero.launcher.protocol.decide import decide, quiet_until_s
from elasticzero.launcher.protocol.view import View
from tests.unit.launcher.protocol.test_decide import L5, NOW, POLICY, TABLE

VIEWS = [row[1] for row in TABLE] + [row[1] for row in L5]
TOGETHER = (
    ("world", "workers"),
    ("members", "missing_since_s"),
    ("reports", "my_report"),
    ("alarm", "alarm_s", "round_s", "outside_s"),
    ("control",),
    ("store",),
    ("oldest", "surplus"),
    ("me",),
    ("leaving", "notice"),
    ("done",),
)
"""Fields of a view that a mixture of two views takes from one of them together."""
HOUR_S = 3600.0


def mixtures(count: int) -> list[View]:
    """The views of all rows, and as many mixtures of two and more of them."""
    random = Random(7)
    mixed = list(VIEWS)
    while len(mixed) < count:
        view = random.choice(VIEWS)
        for names in random.sample(TOGETHER, random.randint(1, 5)):
            other = random.choice(VIEWS)
            view = replace(view, **{name: getattr(other, name) for name in names})
        if random.random() < 0.5:  # one that watches no other node
            view = replace(view, members=None, reports=None, oldest=False, missing_since_s={})
        mixed.append(view)
    return mixed


def aged(view: View, by_s: float) -> View:
    """The view after a time in which the workers gave no sign."""
    workers = view.workers
    later = replace(
        workers,
        silent_s=workers.silent_s + by_s,
        before_step_s=workers.before_step_s + by_s,
        frozen_s=workers.frozen_s + by_s if workers.frozen_s else 0.0,
    )
    return replace(view, workers=later)


def test_nothing_is_to_be_done_before_the_next_look() -> None:
    """An agent that looks again only when a timer is due misses nothing."""
    quiet: Counter[str] = Counter()
    for view in mixtures(6000):
        try:
            decision = decide(view, NOW, POLICY)
        except (AssertionError, KeyError):  # no agent sees such a mixture
            continue
        until_s = min(quiet_until_s(view, decision, NOW, POLICY), NOW + HOUR_S)
        for share in (0.001, 0.1, 0.5, 0.9, 0.999) if until_s > NOW else ():
            at_s = NOW + (until_s - NOW) * share
            later = decide(aged(view, at_s - NOW), at_s, POLICY)
            assert later.actions == decision.actions == (), (view, at_s, later)
        if until_s > NOW:
            quiet[decision.reason.partition(":")[0].partition(";")[0]] += 1
    assert len(quiet) >= 4 and min(quiet.values()) >= 5, quiet
