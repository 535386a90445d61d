"""What a page of another site reaches of an etcd of our own, by a browser on this machine."""

from __future__ import annotations

import base64
import http.client
import json

import pytest

from elasticzero.launcher.store.etcd.server import EtcdServer


@pytest.mark.parametrize("path", ["/v3/kv/put", "/v3/kv/range", "/v3beta/kv/put"])
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_a_page_can_neither_read_nor_write_keys(etcd: EtcdServer, path: str, kind: str) -> None:
    """etcd took JSON from pages of every site: they could end the job, and read its token."""
    key, value = (base64.b64encode(text).decode() for text in (b"/elasticzero/j/world", b"{}"))
    host, _, port = etcd.endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=30)
    headers = {"Content-Type": kind, "Origin": "http://attacker.example"}
    connection.request("POST", path, json.dumps({"key": key, "value": value}), headers)
    assert connection.getresponse().status == 404
    connection.close()
