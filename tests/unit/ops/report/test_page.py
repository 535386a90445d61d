"""The page of a report: what it says, what it escapes, and how large it becomes."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from elasticzero.launcher.goodput import TIME_CLASSES
from elasticzero.ops.report.html.page import report_page
from elasticzero.ops.report.html.sentences import PHASE_NAMES, TIME_MEANINGS
from elasticzero.ops.report.model import FaultSummary, RunSummary
from elasticzero.ops.report.summarize import PHASES
from tests.unit.ops.report.made_up import BEGIN_S, MadeUpJob, eventful

EVIL = "<script>alert(1)</script>\x1b[31m\"'&\ud800"
VOID = {"meta"}


class Reader(HTMLParser):
    """Checks that elements are closed in order; collects tables by section, and texts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.rows: dict[str, list[list[str]]] = {}
        self.section = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
            self.rows[self.section] = []
        if tag == "tr":
            self.rows[self.section].append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open and "title" not in self.open:
            self.rows[self.section][-1][-1] += data


def read(summary: RunSummary) -> tuple[str, Reader]:
    page = report_page(summary, BEGIN_S + 100.0)
    return page, Reader(page)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page, reader = read(eventful().summary())
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    names = {name for name, _ in reader.attributes}
    assert not {"src", "href"} & names and not [name for name in names if name.startswith("on")]
    assert "url(" not in page and "@import" not in page and "http://" not in page
    assert "default-src 'none'" in page


def test_everything_from_logs_is_escaped() -> None:
    job = MadeUpJob()
    job.register(EVIL, "b")
    job.world(EVIL, "b", reason=EVIL)
    job.train(12)
    failed = {"rank": 0, "step": 12, "blame": "user", "message": EVIL, "traceback": EVIL}
    job.note([EVIL], "failed", **failed)
    job.note([EVIL], "store_trouble", message=EVIL)
    job.round("failure", EVIL, seen_by=(EVIL, "b"))
    job.world(EVIL, "b", resume=12, reason=f"{EVIL} is lost")
    job.train(3)
    job.recovered("failure", lost=0)
    job.end("failed", EVIL)
    page, reader = read(replace(job.summary(), job=EVIL))
    assert "script" not in reader.tags
    assert "<script" not in page and "\x1b" not in page
    page.encode("utf-8")
    assert reader.text.count("<script>alert(1)</script>\\x1b[31m\"'&\\ud800") > 5


def test_the_classes_in_the_table_add_up_to_the_wall_time() -> None:
    summary = eventful().summary()
    _, reader = read(summary)
    rows = reader.rows["time"][1:]
    seconds = [float(row[3].replace(",", "")) for row in rows]
    assert sum(seconds[:-1]) == pytest.approx(seconds[-1], abs=0.1)
    assert seconds[-1] == pytest.approx(summary.wall_s, abs=0.01)
    assert len(rows) == len(TIME_CLASSES) + 1


def test_the_page_says_what_happened() -> None:
    _, reader = read(eventful().summary())
    for text in (
        "Job j finished all 100 steps in 14.9 s on 2 to 3 nodes",
        "c is lost",
        "d joined",
        "node lost",
        "goodput",
        "The loss went from 4.99 to 4",
    ):
        assert text in reader.text
    [fault] = reader.rows["faults"][1:]
    assert fault[1:] == ["1", "node lost", "c is lost", "c", "4", "1.3 s"]
    assert [row[0] for row in reader.rows["recoveries"][1:]] == ["2", "3"]


def test_a_run_without_anything_is_a_page_too() -> None:
    job = MadeUpJob()
    job.register("a")
    _, reader = read(job.summary())
    assert "without a generation" in reader.text
    job.world("a")
    read(job.summary())
    job.note(["a"], "plain", generation=1)
    _, reader = read(job.summary())
    assert "the steps of its script are not seen" in reader.text


def test_every_class_and_phase_has_a_name() -> None:
    assert set(TIME_MEANINGS) == set(TIME_CLASSES)
    assert set(PHASE_NAMES) == set(PHASES)


def test_ten_thousand_generations_are_a_page_of_at_most_two_megabytes() -> None:
    """A week of faults on 200 nodes, each change with a long reason."""
    small = eventful().summary()
    (_, second, _), [recovery], week_s = small.generations, small.recoveries[:1], 604800.0
    count, nodes = 10_000, tuple(f"node-{i:03d}.cluster.internal" for i in range(200))
    reason = "rank 17 on node-017 failed (RuntimeError: " + "x" * 2000 + ")"
    each_s = week_s / count

    def fault(i: int) -> FaultSummary:
        return replace(small.faults[0], at_s=i * each_s, cause=reason, details=reason * 10)

    long = replace(
        small,
        wall_s=week_s,
        nodes=nodes,
        generations=tuple(
            replace(
                second,
                number=i + 1,
                began_s=i * each_s,
                ended_s=(i + 1) * each_s,
                cause=reason,
                members=nodes,
            )
            for i in range(count)
        ),
        recoveries=tuple(replace(recovery, generation=i, cause=reason) for i in range(count)),
        faults=tuple(fault(i) for i in range(count)),
        states={
            node: tuple(
                (i * each_s, (i + 0.9) * each_s, ("training", "recovering")[i % 2])
                for i in range(count // 10)
            )
            for node in nodes
        },
    )
    page, reader = read(long)
    assert len(page.encode()) < 2_000_000
    assert "32 of 200 nodes are shown" in reader.text
    assert "The 40 longest of 10,000 are shown" in reader.text


def test_no_tag_is_left_of_a_cut_text() -> None:
    page = report_page(replace(eventful().summary(), notes=("<b>" * 500,)), BEGIN_S)
    assert not re.search(r"<b><b>", page)
