"""Which agents are gone from hosts that answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from elasticzero.launcher.http.host_probe import CONFIRM_S, HostProbe

DEADLINE_S = 30.0


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_host_without_a_listener_refuses_and_one_with_does_not(listening: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = address_of(closed)
    woken = threading.Event()
    probe = HostProbe(woken.set)
    asked = {"gone": gone, "here": address_of(listening), "nowhere": "nowhere.invalid:1"}
    began_s = time.monotonic()
    assert not probe.poll(asked)
    assert woken.wait(DEADLINE_S)
    assert time.monotonic() - began_s >= CONFIRM_S
    assert probe.poll(asked) == {"gone"}
    assert not probe.poll({"come anew": gone}), "what another agent there has refused"
    assert not probe.poll(asked), "of an earlier round"


def test_a_refusal_counts_once_it_is_confirmed(listening: socket.socket) -> None:
    """A server that listens again before the second connection is no dead one."""
    where = address_of(listening)
    listening.close()
    woken = threading.Event()
    probe = HostProbe(woken.set)
    probe.poll({"a": where})
    time.sleep(CONFIRM_S / 4)
    host, _, port = where.rpartition(":")
    with socket.create_server((host, int(port))) as again:
        again.settimeout(DEADLINE_S)
        again.accept()[0].close()
        assert not probe.poll({"a": where})
    assert not woken.is_set()
