"""Spans of recoveries, as OpenTelemetry's own exporter sends them to a collector."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from elasticzero.launcher.observability.recovery.spans import open_spans
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, story

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
EVENT = {
    "time": 1_800_000_000.5,
    "event": "recovery",
    "generation": 3,
    "kind": "lapse",
    "reason": "node-1 is lost",
    "steps_lost": 2,
    "seconds": 1.5,
    "detect_s": 0.5,
    "regroup_s": 0.25,
    "start_s": 0.25,
    "connect_s": 0.25,
    "build_s": None,
    "restore_s": None,
    "first_step_s": 0.25,
}


@dataclass
class Collector:
    """What agents have sent: the node and the span."""

    endpoint: str
    spans: list[tuple[str, Any]] = field(default_factory=list)

    def named(self, name: str) -> list[tuple[str, Any]]:
        return [(node, span) for node, span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                told = attributes(resource.resource)
                assert told["service.name"] == "elasticzero"
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                collector_server.spans += [(told["elasticzero.node"], span) for span in spans]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector_server = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield collector_server
    server.shutdown()
    server.server_close()


def attributes(owner: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in owner.attributes}


def test_a_span_lies_where_the_recovery_was_and_its_phases_in_it(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, collector.endpoint)
    spans = open_spans("j", "node-0", pytest.fail)
    assert spans is not None
    spans.take({"time": 1.0, "event": "step", "step": 3})
    spans.take(EVENT)
    spans.close()
    ((node, whole),) = collector.named("recovery")
    assert node == "node-0"
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (
        1_799_999_999_000_000_000,
        1_800_000_000_500_000_000,
    )
    assert attributes(whole) == {
        "elasticzero.generation": 3,
        "elasticzero.kind": "lapse",
        "elasticzero.reason": "node-1 is lost",
        "elasticzero.steps_lost": 2,
    }
    parts = [span for _, span in collector.spans if span.name != "recovery"]
    assert [p.name for p in parts] == ["detect", "regroup", "start", "connect", "first_step"]
    assert {(p.trace_id, p.parent_span_id) for p in parts} == {(whole.trace_id, whole.span_id)}
    begins = [p.start_time_unix_nano for p in parts]
    ends = [p.end_time_unix_nano for p in parts]
    assert (begins[0], ends[-1]) == (whole.start_time_unix_nano, whole.end_time_unix_nano)
    assert begins[1:] == ends[:-1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, None),
        ({"OTEL_SDK_DISABLED": "true", ENDPOINT: "http://127.0.0.1:1"}, None),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", ENDPOINT: "http://host:4317"},
            "no spans are sent to http://host:4317: only http/protobuf is spoken",
        ),
    ],
)
def test_where_no_spans_are_sent(
    variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    assert open_spans("j", "n", lines.append) is None
    assert lines == ([message] if message else [])


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_agents_send_a_recovery_each_and_outlive_a_collector_that_is_away(
    tmp_path: Path, job: str, etcd: EtcdServer, collector: Collector
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        arguments = ["--nnodes", "2", str(REGRESSION), "--pause", "0.05"]
        environments = [{ENDPOINT: collector.endpoint}, {ENDPOINT: away}]
        with story(
            tmp_path, etcd.endpoint, job, arguments, nodes=2, environments=environments
        ) as told:
            told.wait_for_step(3)
            told.cluster.kill_worker(told.node(0))
            assert told.wait_for_end() == {"node-0": 0, "node-1": 0}
            logs = [told.node(i).log.read_text() for i in range(2)]
    ((node, whole),) = collector.named("recovery")
    (event,) = [event for name, event in told.told if (name, event["event"]) == (node, "recovery")]
    assert node == "node-0"
    assert attributes(whole)["elasticzero.reason"] == event["reason"]
    lines = ["spans of recoveries do not reach" in log for log in logs]
    assert lines == [False, True]
    assert logs[1].count("spans of recoveries") == 1, logs[1]
    assert "Traceback" not in logs[1]
