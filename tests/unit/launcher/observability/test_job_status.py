"""The status of a job as one agent sees it, and where its page is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.observability.job_status import (
    collect_status,
    job_in_view,
    page_address,
    phases_in_view,
)
from elasticzero.launcher.protocol.documents import Control, Done, Member, Report, World
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.ops.dashboard.service import job_document


def member(name: str, host: str = "10.0.0.1") -> Member:
    return Member(name, f"i-{name}", host, 9400, 29500, 1)


A, B, C = (member(name) for name in "abc")
WORLD = World(
    generation=2,
    token="t",
    members=(A, B),
    strategy="ddp",
    resume=Resume(tier="ram", step=7, generation=1),
    reason="c left",
)
LEADER = View(
    me=A,
    members={m.node: m for m in (A, B, C)},
    world=WORLD,
    reports={
        "a": Report(incarnation="i-a", phase="restored"),
        "b": Report(incarnation="i-b", phase="restored"),
    },
)
FOLLOWER = View(me=B, world=WORLD, my_report=Report(incarnation="i-b", phase="restored"))


def status_in(view: View | None, **statuses: dict[str, Any]) -> dict[str, Any]:
    return collect_status(job_in_view("j", view), phases_in_view(view), statuses)


def states(status: dict[str, Any]) -> dict[str, str]:
    return {node["node"]: node["state"] for node in status["nodes"]}


def test_the_leader_sees_every_node() -> None:
    status = status_in(LEADER)
    assert status["leader"] == "a"
    assert states(status) == {"a": "training", "b": "training", "c": "waiting"}
    assert status["page"] == "http://10.0.0.1:9400/"


def test_another_agent_does_not_claim_what_it_has_not_seen() -> None:
    assert states(status_in(FOLLOWER)) == {"a": "?", "b": "training"}
    outside = replace(FOLLOWER, me=C, my_report=None)
    assert states(status_in(outside)) == {"a": "?", "b": "?", "c": "waiting"}


def test_an_agent_that_has_seen_nothing_yet() -> None:
    status = status_in(None)
    assert (status["state"], status["nodes"], status["leader"], status["page"]) == (
        "waiting", [], None, None
    )  # fmt: skip


def reported(phase: Any) -> View:
    reports = {"a": Report(incarnation="i-a", phase=phase)}
    return replace(LEADER, reports={**(LEADER.reports or {}), **reports})


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (LEADER, "training"),
        (reported("alive"), "regrouping"),
        (reported("stopped"), "regrouping"),
        (replace(LEADER, reports={}), "starting"),
        (replace(LEADER, control=Control(stop=True)), "stopping"),
        (replace(LEADER, members={"b": B}), "training"),
        (FOLLOWER, "training"),
        (replace(FOLLOWER, my_report=None), "?"),
        (replace(LEADER, world=None), "waiting"),
        (replace(LEADER, done=Done(outcome="failed", step=9, reason="r")), "failed"),
    ],
)
def test_the_state_of_a_job_in_a_word(view: View, state: str) -> None:
    assert status_in(view)["state"] == state


def test_a_step_takes_the_inverse_of_the_speed() -> None:
    status = status_in(
        LEADER, a={"steps_per_s": 4.0, "compute_s": {"0": 0.1, "1": 0.2}}, b={"steps_per_s": None}
    )
    first, second, third = status["nodes"]
    assert (first["step_s"], first["compute_s"]) == (0.25, 0.2)
    assert (second["step_s"], third["step_s"]) == (None, None)


def test_a_nodes_slowest_worker_is_compared_with_the_median_of_all() -> None:
    status = status_in(
        LEADER,
        a={"generation": 2, "compute_s": {"0": 0.25, "1": 0.75}},
        b={"generation": 2, "compute_s": {"0": 0.5}},
        c={"generation": 2, "compute_s": {"0": 9.0}},
    )
    ratios = {node["node"]: node["compute_ratio"] for node in status["nodes"]}
    assert ratios == {"a": 1.5, "b": 1.0, "c": None}, "node c is no member"
    (alone, *_) = status_in(LEADER, a={"generation": 2, "compute_s": {"0": 0.1}})["nodes"]
    assert alone["compute_ratio"] is None


@pytest.mark.parametrize("host", ["10.0.0.1", "host.example", "fe80::1"])
def test_the_token_is_in_the_fragment_alone(host: str) -> None:
    at = page_address(member("a", host))
    assert at == ("http://[fe80::1]:9400/" if ":" in host else f"http://{host}:9400/")
    with_token = page_address(member("a", host), Secret("a/b#c&d=e%f+gh?i"))
    assert with_token == at + "#token=a%2Fb%23c%26d%3De%25f%2Bgh%3Fi"


def test_a_document_is_json_although_a_loss_is_not_finite() -> None:
    status = status_in(LEADER, a={"loss": float("nan"), "seconds": {"productive": float("inf")}})
    history = {"loss": [[1.0, 2.0]], "events": [[0.0, "info", "NaN"]]}
    document = job_document(status, history, at=1.0, node="a", leads=True, doing="training")
    read = json.loads(json.dumps(document, allow_nan=False))
    assert (read["loss"], read["seconds"]) == (None, {"productive": None})
    assert read["history"] == history
    assert (read["at"], read["node"], read["leads"], read["doing"]) == (1.0, "a", True, "training")
