"""The body of the status page, for jobs in every state."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

import pytest

from elasticzero.ops.dashboard.body import status_page_body
from elasticzero.ops.dashboard.body_tables import NODES_SHOWN
from elasticzero.ops.dashboard.page import TRUSTED_TYPES, status_page
from elasticzero.ops.dashboard.service import PageBody
from tools.sample_job import document

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\"'&\ud800"
TABLES = ("nodes", "generations", "islands")
VOID = {"img", "input", "meta", "link", "br"}


class Body(HTMLParser):
    """Reads a page's body: elements are closed in order; attributes and text by id, and rows."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.by_id: dict[str, dict[str, str | None]] = {}
        self.texts: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.row_looks: list[dict[str, str | None]] = []
        self.feed(markup)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.attributes += attrs
        name = values.get("id")
        if name is not None:
            assert name not in self.by_id, "an id is there twice"
            self.by_id[name] = values
            self.texts[name] = ""
        if tag not in VOID:
            self.stack.append((tag, name))
        table = next((n for _, n in reversed(self.stack) if n in TABLES), None)
        if table is not None and tag == "tr":
            self.rows.setdefault(table, []).append([])
            self.row_looks.append(values)
        if table is not None and tag == "td":
            self.rows[table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = [name for _, name in self.stack if name is not None]
        for name in names:
            self.texts[name] += data
        for table in TABLES:
            if table in names and ("td", None) in self.stack:
                self.rows[table][-1][-1] += data

    def look(self, name: str) -> str:
        return self.by_id[name].get("class") or ""

    def is_hidden(self, name: str) -> bool:
        return "hidden" in self.by_id[name]


def body(status: Mapping[str, Any]) -> Body:
    return Body(status_page_body(status))


def empty() -> dict[str, Any]:
    """A job of which nothing is known yet."""
    unknown = dict.fromkeys(
        ("step", "total_steps", "steps_per_s", "goodput", "seconds", "loss", "checkpoint_step",
         "generation_age_s", "nnodes", "done", "leader", "page")
    )  # fmt: skip
    return {
        **unknown, "job": "j", "state": "waiting", "generation": 0, "world_size": 0,
        "resume_step": 0, "reason": "waiting for nodes", "plain": False, "nodes": [],
        "control": {"drain": [], "nnodes": None, "stop": False}, "at": 1000.0, "node": "a",
        "leads": False, "history": {},
    }  # fmt: skip


def test_a_running_job_has_all_parts() -> None:
    status = document(waiting=["node-6"])
    page = body(status)
    assert page.texts["job"] == "gpt-1b" and page.texts["state"] == "training"
    assert page.texts["source"] == "from node-0, which leads · "
    assert page.texts["line"] == (
        "Generation 6: 8 ranks on 4 nodes (2 to 4 allowed), began 5 min ago at step 5,189"
    )
    assert page.by_id["status"]["data-title"] == "step 5923 · gpt-1b"
    assert page.by_id["status"]["data-wait-ms"] == str(1000 + 20 * 5)
    assert page.texts["step"] == "5,923"
    for text in ("of 12,000 · 41 min to go", "2.5 steps/s", "0.4 s a step", "96.6%",
                 "step 5,000", "step 5,920", "6 min ago", "lowest 2.4"):  # fmt: skip
        assert text in page.texts["status"]
    assert [page.is_hidden(name) for name in ("lost", "alone", "over", "wishes")] == [True] * 4
    assert "productive" in page.texts["legend"] and "data wait" in page.texts["legend"]


def test_the_tables_have_nodes_generations_and_events() -> None:
    page = body(document(waiting=["node-6"]))
    nodes = page.rows["nodes"]
    assert nodes[0] == ["node-0", "leader", "0-1", "training", "5,923", "0.1 s ago", "0.4 s",
                        "0.221 s", "40 min", "10.0.0.11:9400"]  # fmt: skip
    assert nodes[2][7] == "0.317 s, 1.4×"
    assert nodes[4][1:8] == ["spare", "–", "waiting", "–", "–", "–", "–"]
    generations = page.rows["generations"]
    assert [row[0] for row in generations] == ["6", "5", "4", "3", "2", "1"]
    assert generations[0][4:] == ["5,189 in memory", "1.3 s", "node-5 joins"]
    assert generations[5][4] == "0"
    assert page.texts["events"].startswith("14:48:26training goes on after 1.60 s")


def test_the_curves_carry_what_the_script_reads_of_them() -> None:
    status = document()
    markup = status_page_body(status)
    curves = re.findall(r"<polyline [^>]*>", markup)
    assert len(curves) == 2
    for line, name in zip(curves, ("loss", "goodput"), strict=True):
        attributes = Body(f"{line}</polyline>").attributes
        values = {key: value or "" for key, value in attributes}
        count = len(status["history"][name])
        assert len(values["points"].split()) == len(json.loads(values["data-read"])) == count
        if name == "goodput":
            times = [row[0] for row in status["history"][name]]
            assert json.loads(values["data-at"]) == times


def test_a_job_without_a_generation_is_a_page_too() -> None:
    page = body(empty())
    assert page.texts["line"] == "No generation yet"
    assert page.texts["loss"] == "The script has logged no loss yet"
    assert page.texts["lossread"] == ""
    assert page.texts["goodput"] == "Not known yet"
    assert page.texts["timeline"] == "No generation yet"
    assert page.is_hidden("alone"), "nobody leads a job that has no generation"
    assert "not known to this node" in page.texts["status"]
    assert page.by_id["status"]["data-title"] == "j"
    assert page.texts["step"] == "–"


def test_the_steps_of_a_plain_script_are_not_seen() -> None:
    status = {**document(), "plain": True, "step": None, "total_steps": None, "steps_per_s": None}
    page = body(status)
    assert "the script's steps are not seen" in page.texts["status"]
    assert page.texts["line"].endswith("began 5 min ago")


@pytest.mark.parametrize(
    ("outcome", "look", "text"),
    [
        ("finished", "banner good", "The job has finished: why"),
        ("stopped", "banner good", "The job has been stopped: why"),
        ("failed", "banner bad", "The job has failed: why"),
    ],
)
def test_a_job_that_is_over_says_so(outcome: str, look: str, text: str) -> None:
    status = {**document(), "state": outcome, "done": {"outcome": outcome, "reason": "why"}}
    page = body({**status, "leads": False})
    assert (page.look("over"), page.texts["over"]) == (look, text)
    assert page.is_hidden("alone")
    assert page.by_id["status"]["data-wait-ms"] == "5000"


def test_an_agent_that_does_not_lead_says_what_it_has_seen() -> None:
    page = body({**document(), "leads": False})
    assert page.texts["alone"] == (
        "No agent that leads the job answers node-0. This is what node-0 has seen itself."
    )
    assert not page.is_hidden("alone")


def test_what_operators_asked_for_is_shown() -> None:
    control = {"drain": [{"node": "node-2"}], "nnodes": [2, 8], "stop": True}
    page = body({**document(), "control": control})
    assert page.texts["wishes"] == "Operators asked for: drain node-2, scale 2:8, stop"


def test_a_node_that_is_set_aside_says_why_and_how_long() -> None:
    status = document()
    aside = {"state": "set aside", "set_aside_s": 540.0, "set_aside_for": "3 failures"}
    status["nodes"][1] |= aside
    status["nodes"][2] |= {"silent": True, "step": None, "up_s": None, "address": None}
    page = body(status)
    assert page.rows["nodes"][1][3] == "set aside, 9 min more"
    assert ("title", "3 failures") in page.attributes
    assert page.rows["nodes"][2][4] == "?" and page.rows["nodes"][2][8:] == ["?", "–"]


def test_of_many_nodes_those_in_trouble_come_first() -> None:
    names = [f"node-{i}" for i in range(1000)]
    status = document(names)
    status["nodes"][997]["state"] = "gone"
    page = body(status)
    rows = page.rows["nodes"]
    assert [row[0] for row in rows[:3]] == ["node-997", "node-0", "node-1"]
    assert len(rows) == 1000
    looks = [look for look in page.row_looks if "data-place" in look]
    assert [look.get("class") for look in looks] == [None] * NODES_SHOWN + ["rest"] * (
        1000 - NODES_SHOWN
    )
    assert sorted(int(look["data-place"] or "") for look in looks) == list(range(1000))
    assert page.texts["more"] == "Show all 1,000 nodes" and not page.is_hidden("more")
    assert body(document()).is_hidden("more")


def test_names_and_messages_are_text() -> None:
    status = document(waiting=["node-6"])
    status |= {"job": EVIL, "reason": EVIL, "state": EVIL, "node": EVIL}
    status["done"] = {"outcome": EVIL, "reason": EVIL}
    status["control"]["drain"] = [{"node": EVIL}]
    status["seconds"] = {EVIL: 3.0}
    for key in ("node", "role", "state", "ranks", "address", "set_aside_for"):
        status["nodes"][0][key] = EVIL
    status["history"]["events"] = [[status["at"], EVIL, EVIL]]
    for record in status["history"]["generations"]:
        record |= {"reason": EVIL, "tier": EVIL}
    markup = status_page_body(status)
    page = Body(markup)
    assert not page.tags & {"script", "img", "style", "link", "iframe", "a"}
    names = {name for name, _ in page.attributes}
    assert not names & {"style", "src", "href"}
    assert not [name for name in names if name.startswith("on")]
    assert "\x1b" not in markup
    markup.encode("utf-8")
    assert page.texts["job"].startswith("<script>alert(1)</script>")


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_values_that_are_no_numbers_are_left_out(value: float | None) -> None:
    status = document()
    rows = status["history"]["loss"]
    rows[3] = [rows[3][0], value, value, value]
    status["history"]["goodput"][1][1] = value
    markup = status_page_body(status)
    assert "nan" not in markup.lower().replace("&#x27;", "") and "inf%" not in markup
    points = re.findall(r'<polyline points="([^"]*)"', markup)
    assert len(points[0].split()) == len(rows) - 1


def test_a_goodput_near_nothing_is_text() -> None:
    assert ">&lt;0.1%<" in status_page_body({**document(), "goodput": 0.0004})


def test_loss_that_does_not_change_has_a_curve() -> None:
    status = document()
    status["history"]["loss"] = [[1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    assert "<polyline" in status_page_body(status)


def test_a_body_is_written_once_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    status = document()

    def count(job_status: Mapping[str, Any]) -> str:
        written.append(job_status["at"])
        return "markup"

    monkeypatch.setattr("elasticzero.ops.dashboard.service.status_page_body", count)
    page = PageBody(lambda *, pass_on: status)
    first = page.answer("")
    assert page.answer("") is first
    status = {**status, "at": status["at"] + 1}
    assert page.answer("") is not first
    assert len(written) == 2
    assert "sandbox" in first.headers["Content-Security-Policy"]


def test_the_page_sets_markup_in_one_place() -> None:
    page, headers = status_page()
    text, policy = page.decode(), headers["Content-Security-Policy"]
    assert f'createPolicy("{TRUSTED_TYPES}"' in text
    assert f"trusted-types {TRUSTED_TYPES}" in policy
    assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    assert text.count("createHTML(latest)") == text.count("parseFromString") == 1
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
        assert sink not in text
    assert "style=" not in text and not re.search(r"\son[a-z]+=", text)


def test_an_island_s_page_has_the_rounds() -> None:
    islands: list[dict[str, Any]] = [
        {"island": "node-0", "round": 12, "samples": 1600, "staleness": 0, "waiting": None},
        {"island": "node-1", "round": 11, "samples": 800, "staleness": 2, "waiting": 400},
        {"island": EVIL, "round": None, "samples": None, "staleness": None, "waiting": None},
    ]
    rounds: dict[str, Any] = {
        "round": 12,
        "samples": 48,
        "total": 100,
        "given_back": 30,
        "is_over": False,
    }
    rounds["islands"] = [{**island, "on_hand": 2400, "address": "h:1"} for island in islands]
    page = body(document() | {"rounds": rounds})
    assert "round 12 · 48.0% of the samples · 30 samples given back" in page.texts["status"]
    assert page.rows["islands"][:2] == [
        ["node-0", "12", "1,600", "–", "2,400", "h:1"],
        ["node-1", "11", "800, 2 rounds late", "400", "2,400", "h:1"],
    ]
    assert page.rows["islands"][2][1:3] == ["–", "–"]
    over = body(document() | {"rounds": {**rounds, "is_over": True}})
    assert "round 12, the last · 48.0% of the samples" in over.texts["status"]
    assert "islands" not in body(document()).rows
