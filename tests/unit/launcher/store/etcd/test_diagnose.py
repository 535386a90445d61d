"""A port without TLS is recognised however it turns a TLS handshake away."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elasticzero.launcher.store.etcd import diagnose
from elasticzero.launcher.store.etcd.access import Access, Endpoint, parse_endpoint

TLS_HANDSHAKE = 0x16


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def end(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.close()


def answer_in_plain_text(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


def wait(connection: socket.socket) -> None:
    threading.Timer(2 * diagnose.PROBE_TIMEOUT_S, connection.close).start()


@contextmanager
def http_server(turn_away: Callable[[socket.socket], None], *, plain: bytes) -> Iterator[Endpoint]:
    """Serves `plain` to whoever does not speak TLS, and turns away whoever does."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            first = connection.recv(1, socket.MSG_PEEK)
            if first and first[0] == TLS_HANDSHAKE:
                turn_away(connection)
            else:
                connection.recv(4096)
                connection.sendall(plain)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield parse_endpoint(f"https://127.0.0.1:{listener.getsockname()[1]}", Access())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("turn_away", [reset, end, answer_in_plain_text, wait])
def test_a_port_without_tls(
    turn_away: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnose, "PROBE_TIMEOUT_S", 0.5)
    with http_server(turn_away, plain=b"HTTP/1.0 200 OK\r\n\r\n") as endpoint:
        assert "does not speak TLS" in str(diagnose.diagnose_endpoint(endpoint, Access()))


def test_a_port_that_resets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "PROBE_TIMEOUT_S", 0.5)
    with http_server(reset, plain=b"") as endpoint:
        assert diagnose.diagnose_endpoint(endpoint, Access()) is None


def test_a_name_without_an_address_is_named() -> None:
    assert diagnose.unknown_host(["127.0.0.1:2379", "http://nowhere.invalid:2379"]) == (
        " (no address is known for nowhere.invalid)"
    )
    assert diagnose.unknown_host(["127.0.0.1:2379", "[::1]:2379"]) == ""
