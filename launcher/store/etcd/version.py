"""Reads the version and the clock of an etcd endpoint, by HTTP at the port of its clients."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from elasticzero.launcher.store.etcd.access import Access, Endpoint, tls_context

ANSWER_S = 3.0
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdVersion:
    """Holds what one endpoint says of itself."""

    endpoint: str
    version: str
    """As in 3.5.1; empty if the endpoint says none."""
    clock_ahead_s: float | None = None
    """Seconds by which its clock is before this machine's, to about half a second; None: it does
    not say."""


def read_version(endpoint: Endpoint, access: Access) -> EtcdVersion | None:
    """Returns what the endpoint says; None if it gives no answer.

    Raises `UserError` for certificates that cannot be used.
    """
    if endpoint.tls:
        context = tls_context(access)
        context.set_alpn_protocols(["http/1.1"])
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=ANSWER_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=ANSWER_S)
    began_s = time.time()
    try:
        connection.request("GET", "/version")
        response = connection.getresponse()
        ended_s = time.time()
        text = response.read(MAX_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    version, ahead_s = "", None
    with suppress(ValueError, AttributeError, RecursionError):
        version = str(json.loads(text).get("etcdserver", ""))
    with suppress(ValueError, TypeError):
        shown_s = parsedate_to_datetime(response.getheader("Date", "")).timestamp()
        ahead_s = shown_s + 0.5 - (began_s + ended_s) / 2  # the header has whole seconds
    return EtcdVersion(endpoint=str(endpoint), version=version, clock_ahead_s=ahead_s)
