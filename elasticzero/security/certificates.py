"""Makes contexts of TLS for processes of a job, from a certificate that is held in memory.

A server asks for a client's certificate and does not require one: probes, browsers and Prometheus
have none. A client requires that the server's certificate is of the job's authorities, and looks at
no name in it: nodes come and go with their addresses, and only nodes of the job have such a
certificate.

A process makes the contexts of a certificate once (`contexts_of`). A context costs about a
millisecond, and the first one of a process three times as much, with the first handshake. So the
fork server makes them before a worker is needed, and its workers begin with them.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

_FLIGHTS = 8
"""Maximum number of times that each end of a trial sends something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Holds the certificate of a node with its key, and the authorities that it trusts, as PEM."""

    authorities: str
    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPair:
    """Holds the contexts that are made of one certificate."""

    credentials: Credentials
    server: ssl.SSLContext
    """For connections that a process accepts."""
    client: ssl.SSLContext
    """For connections to processes of the job."""

    def check(self) -> None:
        """Makes a connection in memory, which also has OpenSSL prepare what a connection needs.

        Raises:
            SSLError: One end refuses the other.
            ValueError: The server does not take the client's certificate.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            self.client.wrap_bio(to_client, to_server),
            self.server.wrap_bio(to_server, to_client, server_side=True),
        )
        for _ in range(_FLIGHTS):
            waiting = 0
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    waiting += 1
            if not waiting:
                break
        if not ends[1].getpeercert():
            raise ValueError("the client's certificate was not accepted")


@lru_cache(maxsize=1)
def contexts_of(credentials: Credentials) -> ContextPair:
    """Returns the contexts of a certificate: the same ones as long as no other one is asked for.

    No caller may change them, for other threads use them meanwhile. A renewed certificate is
    another one. Raises as `client_context` does.
    """
    return ContextPair(
        credentials=credentials,
        server=server_context(credentials),
        client=client_context(credentials.authorities, credentials),
    )


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
