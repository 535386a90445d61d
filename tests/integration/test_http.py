"""The agent's server over real sockets, with clients that behave."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from elasticzero.checkpoint.storage.http import HttpStorage
from elasticzero.errors import OperatorError, StorageError
from elasticzero.launcher.http import limits as http_guard
from elasticzero.launcher.http import server as agent_http
from elasticzero.launcher.http.server import AgentServer
from tests.integration.http_agent import (
    BEARER,
    CONTENT,
    EVENTS,
    FILE,
    HEAD,
    TOKEN,
    Agent,
    agent_in,
    ask,
    raw,
)
from tests.support.deadlines import patience
from tools.sample_job import document


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return agent_in(tmp_path)


@pytest.fixture
def server(agent: Agent) -> Iterator[AgentServer]:
    with agent.serve() as running:
        yield running


def test_metrics(server: AgentServer, agent: Agent) -> None:
    agent.metrics.generation.set(3)
    status, headers, body = ask(server, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain")
    assert b"\nelasticzero_generation 3.0\n" in body


def test_health_says_why(server: AgentServer, agent: Agent) -> None:
    assert ask(server, "/healthz")[::2] == (200, b"3 workers train\n")
    agent.well = (False, "etcd has been silent for 70 s")
    assert ask(server, "/healthz?verbose=1")[::2] == (503, b"etcd has been silent for 70 s\n")


def test_status_is_json(server: AgentServer) -> None:
    status, headers, body = ask(server, "/status", **BEARER)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {"job": "j", "generation": 3}


def test_the_status_of_the_job(server: AgentServer) -> None:
    for path, passed_on in (("/job", True), ("/job/own", False), ("/job?x=1", True)):
        status, headers, body = ask(server, path, **BEARER)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(body) == {"job": "j", "passed_on": passed_on}


def test_a_request_of_another_run_is_refused(agent: Agent) -> None:
    """Operators and releases without runs state none."""
    agent.run = 1
    with agent.serve() as server:
        assert ask(server, "/status", **BEARER)[0] == 200
        assert ask(server, "/status", **BEARER, ElasticZero_Run="1")[0] == 200
        status, _, body = ask(server, "/status", **BEARER, ElasticZero_Run="2")
        assert (status, body) == (409, b"this agent is of run 1 of the job, not of run 2\n")
        assert ask(server, "/status", ElasticZero_Run="1")[0] == 401
        address = f"http://127.0.0.1:{server.port}/snapshots/3/120"
        for run, refused in ((2, True), (1, False), (None, False)):
            storage = HttpStorage(address, TOKEN, run=run)
            with pytest.raises(StorageError, match="409") if refused else nullcontext():
                assert storage.size("empty") == 0
            storage.close()


def test_an_open_status_needs_no_token_and_opens_nothing_else(agent: Agent) -> None:
    agent.open_status = True
    with agent.serve() as server:
        for path in ("/job", "/job/own", "/status"):
            assert ask(server, path)[0] == 200
        for path in (FILE, "/events"):
            assert ask(server, path)[0] == 401


def test_the_body_of_the_page_is_for_those_who_may_read_the_job(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, as a document in a browser, it may load and run nothing."""
    monkeypatch.setattr(agent, "job", lambda *, pass_on: document())
    agent.open_status = True
    with agent.serve() as server:
        status, headers, body = ask(server, "/job/page")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = headers["Content-Security-Policy"].split("; ")
    assert policy == ["default-src 'none'", "frame-ancestors 'none'", "sandbox"]
    assert b'id="job">gpt-1b<' in body and TOKEN.encode() not in body


def test_the_page_needs_no_token_and_allows_its_own_parts_alone(server: AgentServer) -> None:
    status, headers, body = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert TOKEN.encode() not in body
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (part,) = re.findall(rf"<{kind}>(.*?)</{kind}>".encode(), body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    text = body.decode()
    assert not re.search(r"<[^>]+ (style|on\w+)=", text), "the policy forbids these attributes"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert re.findall(r"(?:https?:)?//[\w.-]+", text) == ["http://www.w3.org"] * 2, "namespaces"


@pytest.mark.parametrize(
    "path", ["/", "/job", "/status", "/events", "/metrics", "/healthz", FILE, "/nothing"]
)
def test_no_answer_can_be_framed_embedded_or_kept(server: AgentServer, path: str) -> None:
    for authorization in (BEARER["Authorization"], ""):
        _, headers, _ = ask(server, path, Authorization=authorization)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_bug_behind_a_page_is_a_500_and_no_more(server: AgentServer, agent: Agent) -> None:
    agent.broken = True
    status, _, body = ask(server, "/status", **BEARER)
    assert status == 500 and b"bug" not in body
    agent.broken = False
    assert ask(server, "/status", **BEARER)[0] == 200


def test_a_whole_snapshot(server: AgentServer, agent: Agent) -> None:
    status, headers, body = ask(server, FILE, **BEARER)
    assert status == 200 and body == CONTENT
    assert headers["Accept-Ranges"] == "bytes"
    assert agent.folder.asked == [(3, 120, "rank-00000-of-00002.safetensors")]
    assert ask(server, "/snapshots/3/120/empty", **BEARER)[::2] == (200, b"")


@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-1004", 5, 1005),
        ("bytes=2999999-", 2_999_999, 3_000_000),
        ("bytes=100-99999999", 100, 3_000_000),
        ("bytes=-10", 2_999_990, 3_000_000),
        ("bytes=-99999999", 0, 3_000_000),
    ],
)
def test_a_range(server: AgentServer, header: str, start: int, stop: int) -> None:
    status, headers, body = ask(server, FILE, Range=header, **BEARER)
    assert status == 206 and body == CONTENT[start:stop]
    assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/3000000"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bytes=3000000-", 416),
        ("bytes=9-8", 416),
        ("bytes=-0", 416),
        ("bytes=0-1,4-5", 400),
        ("bytes=-", 400),
        ("bytes=a-b", 400),
        ("lines=1-2", 400),
        ("bytes=" + "9" * 4000 + "-", 400),
    ],
)
def test_a_range_that_cannot_be(server: AgentServer, header: str, status: int) -> None:
    answer = ask(server, FILE, Range=header, **BEARER)
    assert answer[0] == status
    if status == 416:
        assert answer[1]["Content-Range"] == "bytes */3000000"


def test_no_range_of_an_empty_file(server: AgentServer) -> None:
    assert ask(server, "/snapshots/3/120/empty", Range="bytes=0-", **BEARER)[0] == 416


@pytest.mark.parametrize("path", [FILE, "/status", "/job", "/job/own", "/job/page", "/events"])
@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer é",
        "Bearer " + "a" * 15_000,
    ],
    ids=lambda text: text[:20],
)
def test_without_the_token_nothing(
    server: AgentServer, agent: Agent, path: str, authorization: str
) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    status, answered, body = ask(server, path, **headers)
    assert (status, answered["WWW-Authenticate"]) == (401, "Bearer")
    assert body == b"this needs the job's token\n"
    assert agent.folder.asked == []


OUTSIDE = ("evil.example.com", "evil.example.com:9400", "127.0.0.1.evil.net", "x.y.", "a.local.de")
INSIDE = (
    *("127.0.0.1", "127.0.0.1:9400", "[::1]:9400", "[fd00::7]", "localhost:9400", "node-a:9400"),
    *("job-agents.default.svc", "a.svc.cluster.local:9400", "ip-10-0-0-7.ec2.internal"),
    *("WATCH.example.org:80", "watch.example.org.", socket.gethostname()),
)


@pytest.mark.parametrize("path", ["/", "/metrics", "/status", "/job", "/job/page"])
def test_a_page_of_another_site_reads_nothing(
    agent: Agent, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is made to lead here (DNS rebinding), so that a browser lets it read answers."""
    monkeypatch.setattr(agent, "job", lambda *, pass_on: document())
    agent.open_status = True
    with agent.serve() as server:
        for host in OUTSIDE:
            answers = [ask(server, path, Host=host, **headers)[0] for headers in ({}, BEARER)]
            assert answers == [421, 200], host
        for host in INSIDE:
            assert ask(server, path, Host=host)[0] == 200, host
        assert ask(server, "/healthz", Host=OUTSIDE[0])[0] == 200, "probes name any host"


def test_metrics_and_health_need_no_token(server: AgentServer) -> None:
    for authorization in ("", "Bearer wrong"):
        for path in ("/metrics", "/healthz"):
            assert ask(server, path, Authorization=authorization)[0] == 200


def test_refused_requests_are_told_of_once_a_minute(
    server: AgentServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in ("wrong-one", "another"):
        assert ask(server, f"/status?token={secret}", Authorization=f"Bearer {secret}")[0] == 401
    raw(server, b"nonsense with a\x1b[31m colour\r\n\r\n")
    assert [record.getMessage() for record in caplog.records] == [
        "refused an HTTP request of 127.0.0.1: 401, this needs the job's token"
    ]
    monkeypatch.setattr(http_guard, "LOG_INTERVAL_S", 0.0)
    assert ask(server, "/nothing")[0] == 404
    assert caplog.records[-1].getMessage() == (
        "refused an HTTP request of 127.0.0.1: 404, this server has /, /metrics, /healthz, "
        "/status, /job and /events; 2 more since the last such line"
    )
    assert len(caplog.records) == 2
    assert ask(server, "/snapshots/3/120/none", **BEARER)[0] == 404
    assert ask(server, FILE, Range="bytes=9-8", **BEARER)[0] == 416
    assert len(caplog.records) == 2, "who shows the token may ask for what is not there"


@pytest.mark.parametrize(
    "path",
    [
        "/snapshots/3/120/none",
        "/snapshots/4/120/empty",
        "/snapshots/3/120/",
        "/snapshots/3/empty",
        "/snapshots/-3/120/empty",
        "/snapshots/3/120/../../secret",
        "/snapshots/3/120/..%2f..%2fsecret",
        "/snapshots/3/120/..",
        "/snapshots/3/120/.hidden",
        "/snapshots/3/120//etc/passwd",
        f"/snapshots/{'9' * 400}/120/empty",
        f"/snapshots/3/120/{'n' * 300}",
        "/snapshots/3/120/empty%0a",
    ],
)
def test_what_is_no_snapshot_is_not_found(server: AgentServer, path: str) -> None:
    assert ask(server, path, **BEARER)[0] == 404


def test_the_newest_part_of_the_event_log(server: AgentServer, agent: Agent) -> None:
    status, headers, body = ask(server, "/events", **BEARER)
    assert (status, body) == (200, HEAD + EVENTS)
    assert agent.asked_bytes == agent_http.EVENTS_BYTES
    status, headers, body = ask(server, "/events?most=30", **BEARER)
    assert (status, body, agent.asked_bytes) == (200, HEAD + EVENTS[-30:], 30)
    assert headers["Content-Type"] == "application/x-ndjson"
    assert headers[agent_http.LEFT_OUT_HEADER] == str(len(EVENTS) - 30 - len(HEAD))
    (agent.folder.root / "events.jsonl").unlink()
    assert ask(server, "/events", **BEARER)[::2] == (404, b"there is no event log yet\n")


def test_unknown_pages(server: AgentServer) -> None:
    for path in ("/index.html", "/metrics/", "/job/", "/nothing"):
        assert ask(server, path)[0] == 404


def test_head_is_get_without_the_body(server: AgentServer) -> None:
    for path in ("/", "/metrics", "/healthz", "/status", "/job", "/events", FILE, "/nothing"):
        got, head = ask(server, path, **BEARER), ask(server, path, "HEAD", **BEARER)
        assert head[0] == got[0] and head[2] == b""
        assert head[1]["Content-Length"] == got[1]["Content-Length"]


def test_other_methods_are_refused(server: AgentServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
        for path in ("/status", "/job", "/"):
            status, headers, _ = ask(server, path, method, **BEARER)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_many_requests_on_one_connection(server: AgentServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for start in range(0, 50_000, 1_000):
        headers = {**BEARER, "Range": f"bytes={start}-{start + 999}"}
        connection.request("GET", FILE, headers=headers)
        assert connection.getresponse().read() == CONTENT[start : start + 1_000]
    first_socket = connection.sock
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    assert connection.sock is first_socket
    connection.close()


def test_close_ends_connections_and_threads(agent: Agent) -> None:
    before = set(threading.enumerate())
    server = agent.serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert s.recv(12) == b"HTTP/1.1 200"
        server.close()
        while s.recv(65536):
            pass
    deadline_s = time.monotonic() + patience(30)
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(ConnectionError):
        ask(server, "/healthz")


def test_a_port_that_is_taken_is_said_so(agent: Agent, server: AgentServer) -> None:
    with pytest.raises(OperatorError, match=rf"127\.0\.0\.1:{server.port}.*--http-port"):
        agent.serve(port=server.port)


def test_every_address_is_served_where_none_is_named(agent: Agent) -> None:
    with agent.serve(host="") as server:
        assert ask(server, "/healthz")[0] == 200
        if socket.has_dualstack_ipv6():
            connection = http.client.HTTPConnection("::1", server.port, timeout=30)
            try:
                connection.request("GET", "/healthz")
                assert connection.getresponse().status == 200
            except OSError as error:
                pytest.skip(f"no IPv6 loopback here: {error}")
            finally:
                connection.close()
