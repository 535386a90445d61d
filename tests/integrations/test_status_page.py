"""The status page of a real job in a real browser: it shows the job, and does nothing else.

`make integrations` runs these in an environment that has Playwright; the browser is the system's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.test_job_dashboard import job_token_of, ports_of
from tools.browser import browser, find_browser
from tools.sample_job import document, served_page

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
SIZES = [(1400, False), (1000, True), (768, False), (390, True)]
"""Widths of windows, and whether they are dark."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="`make integrations` has it")
    path = find_browser()
    if path is None:
        reason = "Chromium is not installed: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with browser(path) as running:
        yield running


@dataclass
class Window:
    """A page, and all that it asked for and complained of."""

    page: Any
    requests: list[Any] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def wait(self, expression: str) -> None:
        """Until it is true; the page's policy forbids a function that Playwright leaves in it."""
        deadline_s = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline_s, f"{expression}\n{self.text('body')}"
            self.page.wait_for_timeout(100)


@pytest.fixture
def window(chromium: Any) -> Iterator[Window]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, timezone_id="UTC")
    opened = Window(context.new_page())
    opened.page.on("request", lambda request: opened.requests.append(request))
    opened.page.on(
        "console",
        lambda message: (
            opened.complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    yield opened
    context.close()


def members(told: Story) -> list[str]:
    return list(told.of("world")[-1]["members"])


def test_a_job_is_followed_through_the_death_of_a_node(
    tmp_path: Path, job: str, etcd: EtcdServer, window: Window
) -> None:
    arguments = ["--nnodes", "1:3", "--checkpoint-dir", str(tmp_path / "c")]
    arguments += ["--checkpoint-every", "9"]
    arguments += ["--lease-ttl", "2", str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=3) as told:
        told.wait_for_step(10)
        told.pause(1.0)
        ports, token = ports_of(told), job_token_of(etcd, job)
        leader, other, third = members(told)
        address = f"http://127.0.0.1:{ports[other]}/"
        page = window.page
        page.goto(f"{address}#token={token}")
        window.wait("document.querySelectorAll('#nodes tr').length === 3")
        window.wait("Number(document.querySelector('#step').textContent.split(' ')[0]) >= 10")
        assert page.url == address, "the token is in the page's memory alone"
        assert window.text("#job") == job
        assert window.text("#state") == "training"
        assert leader in window.text("#source")
        rows = page.locator("#nodes tr").all_inner_texts()
        assert [row.split()[0] for row in rows] == [leader, other, third]
        assert all("training" in row for row in rows)
        assert page.locator("#loss polyline").count() == 1
        assert "productive" in window.text("#legend")

        told.cluster.kill_node(told.cluster.nodes[third])
        window.wait("document.querySelectorAll('#generations tr').length === 2")
        window.wait("document.querySelectorAll('#nodes tr').length === 2")
        assert f"{third} is lost" in window.text("#reason")
        assert f"{third} is lost" in window.text("#events")
        folder = os.environ.get("STATUS_PAGE_PICTURES")
        if folder:
            page.screenshot(path=Path(folder) / "job.png", full_page=True)
        assert told.wait_for_end()[leader] == 0
        window.wait("!document.querySelector('#lost').hidden")
        assert "does not answer" in window.text("#lost")
    asked = window.requests
    assert {request.method for request in asked} == {"GET"}
    addresses = {r.url for r in asked if not r.url.startswith("data:")}
    assert addresses == {address, f"{address}job/page"}
    assert token not in page.content()
    refused = [text for text in window.complaints if "ERR_CONNECTION_REFUSED" not in text]
    assert not refused, "the agent's end is the only trouble"


def test_a_wrong_token_is_asked_for_again(window: Window) -> None:
    with served_page(document()) as address:
        start, _, token = address.partition("#token=")
        window.page.goto(start)
        window.wait("!document.querySelector('#ask').hidden")
        assert "needs its token" in window.text("#ask")
        window.page.fill("#token", "wrong")
        window.page.click("#ask button")
        window.wait("document.querySelector('#asked').textContent.startsWith('That is not')")
        window.page.fill("#token", token)
        window.page.click("#ask button")
        window.wait("!document.querySelector('#all').hidden")
        assert window.text("#job") == "gpt-1b"
        assert window.page.input_value("#token") == ""


def test_names_and_messages_are_text(window: Window) -> None:
    """A node's name or an error's text is no part of the page."""
    status = document()
    bad = "<img src=x onerror=document.title='bad'><script>document.title='bad'</script>"
    status["job"] = status["reason"] = bad
    status["nodes"][0]["node"] = bad
    status["history"]["events"] = [[status["at"], "error", bad]]
    status["history"]["generations"][-1]["reason"] = bad
    with served_page(status) as address:
        window.page.goto(address)
        window.wait("!document.querySelector('#all').hidden")
        assert window.text("#job") == bad
        assert bad in window.text("#events") and bad in window.text("#nodes")
        assert window.page.title() == f"step {status['step']} · {bad}"
        assert window.page.locator("img").count() == 0
        assert not window.complaints


SHOWN = "[...document.querySelectorAll('#nodes tr')].filter((row) => row.offsetHeight > 0)"


def test_all_of_many_nodes_are_shown_when_asked_for(window: Window) -> None:
    """Also once the agent does not answer any more."""
    status = document([f"node-{i}" for i in range(200)])
    status["nodes"][150]["state"] = "gone"
    page = window.page
    with served_page(status) as address:
        page.goto(address)
        window.wait("document.querySelectorAll('#nodes tr').length === 200")
        assert page.evaluate(f"{SHOWN}.length") == 40
        first = "document.querySelector('#nodes tr td').textContent"
        assert page.evaluate(first) == "node-150"
        page.click("#more")
        assert page.evaluate(f"{SHOWN}.length") == 200
        assert page.evaluate(first) == "node-0"
        assert window.text("#more") == "Show fewer"
    window.wait("!document.querySelector('#lost').hidden")
    page.click("#more")
    assert page.evaluate(f"{SHOWN}.length") == 40
    assert page.evaluate(first) == "node-150"
    assert window.text("#more") == "Show all 200 nodes"


def test_the_pointer_reads_a_curve(window: Window) -> None:
    with served_page(document()) as address:
        page = window.page
        page.goto(address)
        page.wait_for_selector("#loss svg")
        assert window.text("#lossread") == "mean and range over steps"
        page.hover("#loss .plot")
        window.wait("document.querySelector('#lossread').textContent.startsWith('step 2,9')")
        assert page.locator("#loss .cursor circle").count() == 1
        page.wait_for_timeout(2500)
        assert window.text("#lossread").startswith("step 2,9"), "a new body keeps it"
        page.hover("#goodput .plot")
        window.wait("/^14:33:\\d\\d: 9\\d/.test(document.querySelector('#goodread').textContent)")
        assert window.text("#lossread") == "mean and range over steps"
        assert not window.complaints


def test_what_stays_the_same_is_left_in_place(window: Window) -> None:
    """A reader's scrolling, focus and selection outlive the next answer."""
    status = document([f"node-{i}" for i in range(60)])
    with served_page(status) as address:
        page = window.page
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto(address)
        page.wait_for_selector("#loss svg")
        page.evaluate("document.querySelector('#nodes').closest('.scroll').scrollLeft = 40")
        page.focus("#more")
        status["step"] += 7
        status["nodes"][0]["step"] += 7
        status["at"] += 1
        window.wait(f"document.querySelector('#step').textContent === '{status['step']:,}'")
        assert page.evaluate("document.querySelector('#nodes').closest('.scroll').scrollLeft") == 40
        assert page.evaluate("document.activeElement.id") == "more"
        assert not window.complaints


@pytest.mark.parametrize(
    ("zone", "event", "ticks"),
    [
        ("UTC", "14:48:26", ["14:20", "14:30", "14:40", "14:50"]),
        ("Asia/Kolkata", "20:18:26", ["19:50", "20:00", "20:10", "20:20"]),
        ("Asia/Kathmandu", "20:33:26", ["20:00", "20:10", "20:20", "20:30"]),
        ("America/New_York", "10:48:26", ["10:20", "10:30", "10:40", "10:50"]),
    ],
)
def test_times_are_those_of_the_reader(
    chromium: Any, zone: str, event: str, ticks: list[str]
) -> None:
    """An axis has round times of the reader's zone, also where that is not a whole hour away."""
    with served_page(document()) as address:
        context = chromium.new_context(timezone_id=zone)
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#loss svg")
        assert page.locator("#events time").first.inner_text() == event
        assert page.locator("#goodput .moments text").all_text_contents() == ticks
        context.close()


@pytest.mark.parametrize(("width", "dark"), SIZES)
@pytest.mark.parametrize("nodes", [4, 200])
def test_nothing_overlaps_or_is_cut(
    chromium: Any, width: int, dark: bool, nodes: int, tmp_path: Path
) -> None:
    status = document([f"node-{i}" for i in range(nodes)]) if nodes > 4 else document()
    with served_page(status) as address:
        colours = "dark" if dark else "light"
        size = {"width": width, "height": 900}
        context = chromium.new_context(viewport=size, color_scheme=colours, timezone_id="UTC")
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#loss svg")
        folder = Path(os.environ.get("STATUS_PAGE_PICTURES", tmp_path))
        page.screenshot(path=folder / f"{width}-{colours}-{nodes}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            "[...document.querySelectorAll('.tile .value, .tile .note, h1, h2, .chip')]"
            ".filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"
        )
        assert cut == []
        overlaps = page.evaluate(
            "[...document.querySelectorAll('svg')].flatMap((image) => {"
            " const texts = [...image.querySelectorAll('text')]"
            "   .map((t) => [t.textContent, t.getBoundingClientRect()]);"
            " return texts.flatMap(([one, a], i) => texts.slice(i + 1)"
            "   .filter(([, b]) => a.left < b.right && b.left < a.right"
            "     && a.top < b.bottom - 2 && b.top < a.bottom - 2)"
            "   .map(([other]) => `${one} | ${other}`)); })"
        )
        assert overlaps == []
        context.close()
