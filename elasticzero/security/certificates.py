"""Makes contexts of TLS for processes of a job, from a certificate that is held in memory.

A server asks for a client's certificate and does not require one: probes, browsers and Prometheus
have none. A client requires that the server's certificate is of the job's authorities, and looks at
no name in it: nodes come and go with their addresses, and only nodes of the job have such a
certificate.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Holds the certificate of a node with its key, and the authorities that it trusts, as PEM."""

    authorities: str
    certificate: str
    key: str = field(repr=False)


def client_context(authorities: str, credentials: Credentials | None = None) -> ssl.SSLContext:
    """Returns the context for connections to processes whose certificates these authorities sign.

    Args:
        authorities: Certificates as PEM.
        credentials: What the client shows of itself; None: nothing.

    Raises:
        ValueError: There is no certificate in the authorities.
        SSLError: The certificate and its key do not go together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=authorities)
    if credentials is not None:
        _show(context, credentials)
    return context


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """Returns the context for connections that a process accepts; raises as `client_context`
    does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection shows its certificate anew
    context.load_verify_locations(cadata=credentials.authorities)
    context.verify_mode = ssl.CERT_OPTIONAL
    _show(context, credentials)
    return context


def _show(context: ssl.SSLContext, credentials: Credentials) -> None:
    with _memory_file(f"{credentials.certificate}\n{credentials.key}") as path:
        # An empty password: a key that needs one is refused, not asked for at the terminal.
        context.load_cert_chain(path, password="")


@contextmanager
def _memory_file(text: str) -> Iterator[str]:
    """Yields the path of a file in memory alone, since OpenSSL's interface in Python takes a
    certificate from files only."""
    descriptor = os.memfd_create("elasticzero-certificate", os.MFD_CLOEXEC)
    try:
        data = text.encode()
        while data:
            data = data[os.write(descriptor, data) :]
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
