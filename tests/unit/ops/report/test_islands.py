"""A report on islands: rounds of all, and the rest of one."""

from __future__ import annotations

from collections.abc import Sequence

from elasticzero.ops.report.digest import digest
from elasticzero.ops.report.html.page import report_page
from elasticzero.ops.report.model import IslandSummary, NodeLog, RunSummary
from elasticzero.ops.report.runs import last_run
from elasticzero.ops.report.summarize import summarize_run
from tests.unit.ops.report.made_up import MadeUpJob


def island(name: str, rounds: Sequence[int]) -> MadeUpJob:
    job = MadeUpJob()
    job.register(name)
    job.world(name)
    for number in rounds:
        job.train(5)
        parts = [
            {"island": "a", "samples": 40, "staleness": 0},
            {"island": "b", "samples": 24, "staleness": number % 2},
        ]
        fields = {"history": 1, "fragment": 0, "round": number, "contributors": parts}
        job.note([name], "averaged", **fields)
    job.end()
    return job


def summary(*jobs: MadeUpJob) -> RunSummary:
    lives = [life for job in jobs for node, log in job.logs.items() for life in digest(node, log)]
    run = last_run(lives)
    assert run is not None
    logs = [NodeLog(node=node, bytes=1000) for job in jobs for node in job.logs]
    return summarize_run("j", run, logs)


def test_rounds_are_those_of_all_islands_and_the_rest_is_of_the_last() -> None:
    averaged = summary(island("a", [1, 2]), island("b", [1, 2, 3, 4])).averaged
    assert averaged is not None
    assert (averaged.rounds, averaged.samples, averaged.shown) == (4, 256, "b")
    assert averaged.islands == (
        IslandSummary(island="a", rounds=4, samples=160, late=0.0),
        IslandSummary(island="b", rounds=4, samples=96, late=0.5),
    )


def test_the_page_says_so() -> None:
    page = report_page(summary(island("a", [1, 2]), island("b", [1, 2, 3])), 0.0)
    assert "Island b of job j finished" in page
    assert "Rounds of the islands" in page
    assert "0.7 rounds" in page
    plain = MadeUpJob()
    plain.register("a")
    plain.world("a")
    plain.train(3)
    plain.end()
    assert "Rounds of the islands" not in report_page(summary(plain), 0.0)
