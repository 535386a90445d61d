"""Finds out why etcd cannot be reached, and what is to be changed.

gRPC reports a failed handshake only as "unavailable". So `diagnose_endpoint` opens one connection
of its own and turns its error into advice: a wrong CA, a missing client certificate, a port without
TLS.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable

from elasticzero.launcher.store.etcd.access import (
    Access,
    Endpoint,
    _reason,
    parse_endpoint,
    tls_context,
)

PROBE_TIMEOUT_S = 3.0
"""Maximum seconds for the connection that finds out why an endpoint does not answer."""


def diagnose_endpoint(endpoint: Endpoint, access: Access) -> str | None:
    """Returns what must be changed for this endpoint to answer; None: nothing that a connection
    shows."""
    try:
        with _connect(endpoint) as sock:
            if not endpoint.tls:
                return _why_not_plain(sock, endpoint)
            with tls_context(access).wrap_socket(sock, server_hostname=endpoint.host) as tls:
                tls.recv(1)  # in TLS 1.3 a refused certificate is told of here
    except ssl.SSLError as error:
        return _why_no_tls(error, endpoint, access)
    except OSError:  # a port without TLS may also reset the connection, or keep it waiting
        return _why_plain(endpoint) if endpoint.tls and _speaks_plainly(endpoint) else None
    return None


def unknown_host(endpoints: Iterable[str]) -> str:
    """Returns a note on the first endpoint whose name no address belongs to, for the end of a
    sentence; empty: all have one.

    Args:
        endpoints: Members of etcd, as the user wrote them.
    """
    for text in endpoints:
        endpoint = parse_endpoint(text, Access())
        try:
            socket.getaddrinfo(endpoint.host, endpoint.port)
        except OSError:
            return f" (no address is known for {endpoint.host})"
    return ""


def _connect(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), timeout=PROBE_TIMEOUT_S)


def _why_no_tls(error: ssl.SSLError, endpoint: Endpoint, access: Access) -> str | None:
    where, reason = f"etcd at {endpoint}", _reason(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        by = f"--etcd-cacert {access.cacert}" if access.cacert else "the system's authorities"
        return (
            f"{where}: its certificate is not accepted by {by} ({error.verify_message}); give the "
            "PEM file of the authority that signed it, and name etcd as the certificate does"
        )
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        if access.cert is None:
            return f"{where} wants to see a certificate ({reason}): give --etcd-cert and --etcd-key"
        return (
            f"{where} refuses --etcd-cert {access.cert} ({reason}): give one that is signed by the "
            "authority that etcd trusts (its --trusted-ca-file)"
        )
    if _speaks_plainly(endpoint):
        return _why_plain(endpoint)
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return None
    return f"{where}: no TLS with it ({reason}); see etcd's own log"


def _why_plain(endpoint: Endpoint) -> str:
    return (
        f"etcd at {endpoint} does not speak TLS: leave out https://, --etcd-cacert and "
        "--etcd-cert, or start etcd with --cert-file and --key-file"
    )


def _speaks_plainly(endpoint: Endpoint) -> bool:
    """Returns whether a request without TLS is answered."""
    try:
        with _connect(endpoint) as sock:
            sock.sendall(f"GET /version HTTP/1.0\r\nHost: {endpoint}\r\n\r\n".encode())
            return b" 200 " in sock.recv(64)
    except OSError:
        return False


def _why_not_plain(sock: socket.socket, endpoint: Endpoint) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the question is only whether it speaks TLS at all
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(sock).close()
    except ssl.SSLError as error:
        if "alert" not in _reason(error):
            return None
    return (
        f"etcd at {endpoint} speaks TLS: write https://{endpoint}, and give --etcd-cacert FILE if "
        "its certificate is signed by an authority of your own"
    )
