"""The status of a whole job, which any agent serves: agents asked in turn, and real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.extensions.base import AgentContext
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import STATUS
from elasticzero.launcher.http.routes import Answer, Route, json_answer
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.protocol.documents import Member, Report, World
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store import job_token
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.ops.dashboard import service
from elasticzero.ops.dashboard.service import DashboardExtension
from tests.integration.clusters import REGRESSION, Story, elasticzero, story
from tests.integration.test_live_metrics import get

TOKEN = "the-job's-own-password"


@dataclass
class AgentProgress:
    """The step that an agent serves at `/status`."""

    step: int = 0

    def status(self) -> dict[str, Any]:
        return {"step": self.step, "reason": "training", "steps_per_s": 2.0, "goodput": None}


def dashboard_of(node: str, progress: AgentProgress) -> DashboardExtension:
    options = AgentOptions(
        job="j",
        node=node,
        policy=JobPolicy(min_nodes=1, max_nodes=3),
        nproc=1,
        launch=Launch(target="x", is_module=False, arguments=(), environment={}, directory="/"),
        log_dir=Path("/unused"),
        snapshot_dir=Path("/unused"),
    )
    return DashboardExtension(
        AgentContext(options=options, status=progress.status, note=lambda event, **fields: None)
    )


class Served:
    """Agents `a`, `b`, … of one world, each with its own server."""

    def __init__(self, stack: ExitStack, names: str) -> None:
        self.agents = {name: AgentProgress() for name in names}
        self.servers: dict[str, AgentServer] = {}
        dashboards = {name: dashboard_of(name, agent) for name, agent in self.agents.items()}
        for name, dashboard in dashboards.items():
            stack.callback(dashboard.close, None)
            status = Route(answer=partial(self._status, name), served_to="status readers")
            self.servers[name] = stack.enter_context(
                AgentServer(
                    listen("127.0.0.1", 0),
                    routes={STATUS: status, **dashboard.routes()},
                    snapshots=None,  # type: ignore[arg-type]
                    events=None,  # type: ignore[arg-type]
                    token=lambda: Secret(TOKEN),
                )
            )
        members = tuple(
            Member(name, f"i-{name}", "127.0.0.1", server.port, 1, 1)
            for name, server in self.servers.items()
        )
        world = World(
            generation=1,
            token="t",
            members=members,
            strategy="ddp",
            resume=Resume(tier="fresh"),
            reason="test",
        )
        reports = {m.node: Report(incarnation=m.incarnation, phase="restored") for m in members}
        for index, one in enumerate(members):
            view = View(me=one, world=world, my_report=reports[one.node])
            if not index:
                view = replace(view, members={m.node: m for m in members}, reports=reports)
            self.agents[one.node].step = 10 + index
            dashboards[one.node].turn(view, AgentAccess(Secret(TOKEN)))

    def _status(self, name: str, query: str) -> Answer:
        return json_answer(self.agents[name].status())

    def job(self, name: str, path: str = "/job") -> dict[str, Any]:
        document: dict[str, Any] = json.loads(get(self.servers[name].port, path, TOKEN))
        return document


@pytest.fixture
def served() -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(stack, "abc")


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REFRESH_S", 0.0)
    monkeypatch.setattr(service, "REFRESH_A_NODE_S", 0.0)


def test_the_leader_asks_the_others_and_they_pass_its_answer_on(served: Served) -> None:
    for name in "abc":
        document = served.job(name)
        assert (document["node"], document["leads"], document["leader"]) == ("a", True, "a")
        assert {n["node"]: n["step"] for n in document["nodes"]} == {"a": 10, "b": 11, "c": 12}
        assert document["step"] == 12
        assert {n["state"] for n in document["nodes"]} == {"training"}


def test_every_agent_writes_the_page_of_what_the_leader_answers(served: Served) -> None:
    for name in "abc":
        body = get(served.servers[name].port, "/job/page", TOKEN)
        assert "from a, which leads" in body
        assert '<span id="step">12</span>' in body
        assert body.count('<td class="optional">member</td>') == 2
    served.servers["a"].close()
    body = get(served.servers["c"].port, "/job/page", TOKEN)
    assert "No agent that leads the job answers c." in body


def test_an_agent_that_is_asked_for_its_own_asks_nobody(served: Served) -> None:
    document = served.job("b", "/job/own")
    assert (document["node"], document["leads"]) == ("b", False)
    assert {n["node"]: n["silent"] for n in document["nodes"]} == {"a": True, "b": False, "c": True}


def test_without_a_leader_an_agent_says_what_it_has_seen_itself(served: Served) -> None:
    served.servers["a"].close()
    document = served.job("c")
    assert (document["node"], document["leads"], document["step"]) == ("c", False, 12)
    assert {n["node"]: n["state"] for n in document["nodes"]} == {
        "a": "?", "b": "?", "c": "training"
    }  # fmt: skip


def test_a_silent_node_is_shown_as_such(served: Served) -> None:
    served.servers["b"].close()
    nodes = {n["node"]: n for n in served.job("c")["nodes"]}
    assert nodes["b"]["silent"] and nodes["b"]["step"] is None
    assert not nodes["c"]["silent"]


def test_an_agent_without_a_world_answers_too() -> None:
    document = dashboard_of("b", AgentProgress()).document(pass_on=True)
    assert (document["state"], document["leads"], document["nodes"]) == ("waiting", False, [])


def test_screens_share_the_answers_of_the_other_agents(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REFRESH_S", 60.0)
    first = served.job("a")
    served.agents["c"].step = 99
    assert served.job("a") == first
    assert served.job("b") == first


def job_token_of(etcd: EtcdServer, job: str) -> str:
    with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
        token = job_token.token_for_operator(store, None)
    assert token is not None
    return token.reveal


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        elasticzero(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def ports_of(told: Story) -> dict[str, int]:
    return {node: event["port"] for node, event in told.told if event["event"] == "serving"}


@pytest.mark.timeout(120)
def test_a_job_is_seen_from_any_node_and_by_the_commands(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = ["--nnodes", "2:2", "--checkpoint-dir", str(tmp_path / "c")]
    arguments += ["--checkpoint-every", "5"]
    arguments += [str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(12)
        told.pause(1.0)
        ports, token = ports_of(told), job_token_of(etcd, job)
        answers = {n: json.loads(get(port, "/job", token)) for n, port in ports.items()}
        leader, other = told.of("world")[-1]["members"]
        for document in answers.values():
            assert (document["node"], document["leads"], document["state"]) == (
                leader,
                True,
                "training",
            )
            assert document["step"] >= 10 and document["loss"] > 0
            assert {n["state"] for n in document["nodes"]} == {"training"}
            assert all(n["step"] and n["step_s"] and not n["silent"] for n in document["nodes"])
            history = document["history"]
            assert history["loss"][-1][0] >= 10 and history["goodput"]
            assert history["checkpoint"]["step"] >= 5
            assert [g["generation"] for g in history["generations"]] == [1]
            assert "generation 1: 2 ranks on 2 nodes" in history["events"][0][2]
        page = get(ports[other], "/")
        assert "<title>ElasticZero</title>" in page and token not in page

        at = ["--etcd", etcd.endpoint, "--job", job]
        address = f"http://127.0.0.1:{ports[leader]}/"
        assert run("status", *at).stdout.splitlines()[-1] == (
            f"status page: {address} (--url prints it with the token)"
        )
        assert run("status", "--url", *at).stdout == f"{address}#token={token}\n"
        once = run("top", "--once", *at, COLUMNS="100")
        assert once.returncode == 0, once.stderr
        assert "● training" in once.stdout
        assert "checkpoint of step" in once.stdout
        assert {line.split()[0] for line in once.stdout.splitlines() if "training" in line} >= {
            leader, other
        }  # fmt: skip
        assert set(told.wait_for_end().values()) == {0}
    ended = run("top", "--once", *at)
    assert "● finished" in ended.stdout and ended.returncode == 0
    assert run("status", "--url", *at).returncode == 64
    for file in told.directory().rglob("*"):
        if file.is_file():
            assert token not in file.read_text(errors="replace"), file


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_node_that_comes_to_lead_knows_what_was_before_it(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    arguments = ["--nnodes", "1:2", "--lease-ttl", "2", str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(12)
        ports, token = ports_of(told), job_token_of(etcd, job)
        leader, other = told.of("world")[-1]["members"]
        told.cluster.kill_node(told.cluster.nodes[leader])
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 3)
        document = json.loads(get(ports[other], "/job", token))
        assert (document["node"], document["leads"], document["generation"]) == (other, True, 2)
        assert [g["generation"] for g in document["history"]["generations"]] == [1, 2]
        assert document["history"]["generations"][0]["ended_at"] is not None
        text = " ".join(line for _, _, line in document["history"]["events"])
        assert f"{leader} is lost" in text and "training goes on after" in text

        told.pause(2.0)
        third = told.cluster.start_node().name
        told.wait_for_first_step(3)
        told.pause(0.3)
        told.wait_for_step(told.step + 3)
        told.cluster.kill_node(told.cluster.nodes[other])
        told.wait_for_first_step(4)
        told.pause(2.0)
        document = json.loads(get(ports_of(told)[third], "/job", token))
        assert (document["node"], document["leads"]) == (third, True)
        history = document["history"]
        assert [g["generation"] for g in history["generations"]] == [1, 2, 3, 4]
        assert history["loss"][0][0] <= 2, "the node has what was there before it"
        assert told.wait_for_end()[third] == 0


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_an_open_status_is_served_to_everyone(tmp_path: Path, job: str, etcd: EtcdServer) -> None:
    arguments = ["--nnodes", "2:2", "--open-status", str(REGRESSION), "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(3)
        for port in ports_of(told).values():
            assert json.loads(get(port, "/job"))["leads"]
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                get(port, "/snapshots/1/5/x.safetensors")
            refused.value.close()


def test_top_says_what_it_needs(etcd: EtcdServer, tmp_path: Path) -> None:
    at = ["--etcd", etcd.endpoint, "--job", "nobody"]
    for arguments, message in (
        (["top", "--once", *at], "etcd has no job 'nobody'"),
        (["top", *at], "elasticzero top needs a terminal; --once prints the screen once"),
        (["top", "--interval", "0", *at], "--interval 0: 0.1 to 3600 seconds are expected"),
    ):
        completed = run(*arguments)
        assert completed.returncode == 64
        assert message in completed.stderr and len(completed.stderr.splitlines()) == 1
    without = (
        "import sys; sys.modules['rich'] = None; "
        "from elasticzero.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", without, "top", "--once", *at]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 64
    assert completed.stderr == (
        "error: elasticzero top needs the package rich: pip install 'elasticzero[top]'\n"
    )
