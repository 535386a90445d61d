"""Sends a span of each recovery to an OpenTelemetry collector, where the environment names one.

The variables are OpenTelemetry's own: `OTEL_EXPORTER_OTLP_ENDPOINT` and its kin.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from elasticzero.launcher.observability.metrics import PHASES
from elasticzero.version import __version__

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
CLOSE_S = 2.0
"""Most seconds for which the end of an agent waits for spans that are not sent yet."""
NS = 1_000_000_000


class RecoverySpans:
    """Makes spans of the events `recovery` of one agent, and sends them in a thread of its own."""

    def __init__(self, provider: Any) -> None:
        """Creates what sends spans.

        Args:
            provider: A `TracerProvider` of OpenTelemetry's SDK.
        """
        self._provider = provider
        self._tracer = provider.get_tracer("elasticzero", __version__)

    def take(self, event: Mapping[str, Any]) -> None:
        """Sends what an event tells of a recovery: a span, and one in it for each phase."""
        if event["event"] != "recovery":
            return
        from opentelemetry.trace import set_span_in_context

        ended_ns = int(event["time"] * NS)
        at_ns = ended_ns - int(event["seconds"] * NS)
        names = ("generation", "kind", "reason", "steps_lost")
        whole = self._tracer.start_span(
            "recovery",
            start_time=at_ns,
            attributes={f"elasticzero.{name}": event[name] for name in names},
        )
        for phase in PHASES:
            seconds = event[f"{phase}_s"]
            if seconds is not None:
                within = set_span_in_context(whole)
                part = self._tracer.start_span(phase, context=within, start_time=at_ns)
                at_ns += int(seconds * NS)
                part.end(at_ns)
        whole.end(ended_ns)

    def close(self) -> None:
        """Sends what is left, for `CLOSE_S` at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def open_spans(job: str, node: str, log_line: Callable[[str], object]) -> RecoverySpans | None:
    """Returns what sends the spans of an agent; None: the environment names no collector.

    Args:
        job: The job's name.
        node: The node's name.
        log_line: Receives why no spans are sent, where a collector is named.
    """
    name = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if name is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = next((os.environ[n] for n in PROTOCOLS if os.environ.get(n)), HTTP)
    if protocol != HTTP:
        log_line(f"no spans are sent to {os.environ[name]}: only {HTTP} is spoken")
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log_line(
            f"no spans are sent, though {name} is set: {error}; pip install 'elasticzero[otel]'"
        )
        return None
    logging.getLogger("opentelemetry").addHandler(_FirstFailure(os.environ[name], log_line))
    logging.getLogger("opentelemetry").propagate = False
    defaults = {"service.name": "elasticzero"} if not os.environ.get("OTEL_SERVICE_NAME") else {}
    resource = Resource.create({**defaults, "elasticzero.job": job, "elasticzero.node": node})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RecoverySpans(provider)


class _FirstFailure(logging.Handler):
    """Tells the first failure of the exporter, which logs each of them."""

    def __init__(self, address: str, log_line: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._address = address
        self._log_line = log_line

    def emit(self, record: logging.LogRecord) -> None:
        self._log_line(f"spans of recoveries do not reach {self._address}: {record.getMessage()}")
        self.setLevel(logging.CRITICAL)
