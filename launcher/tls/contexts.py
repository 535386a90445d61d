"""Holds the contexts with which an agent accepts and opens connections, as its certificate
changes."""

from __future__ import annotations

import logging
import ssl
import threading

from elasticzero.errors import UserError
from elasticzero.launcher.tls.credentials import CredentialsSource
from elasticzero.security.certificates import ContextPair, Credentials, contexts_of

log = logging.getLogger(__name__)


class TlsContexts:
    """Returns the contexts of the credentials that count now; any thread may call it."""

    def __init__(self, source: CredentialsSource) -> None:
        """Makes the first contexts; raises `UserError` if no connection can be made with them.

        Args:
            source: Returns the credentials.
        """
        self._source = source
        self._lock = threading.Lock()
        self._latest = source()
        """The credentials that were looked at last."""
        self._pair = context_pair(self._latest)

    def server(self) -> ssl.SSLContext:
        """Returns the context for a connection that this node accepts."""
        return self._current().server

    def client(self) -> ssl.SSLContext:
        """Returns the context for a connection that this node opens to another one."""
        return self._current().client

    @property
    def credentials(self) -> Credentials:
        """Returns what counts now, for this node's workers."""
        return self._current().credentials

    def _current(self) -> ContextPair:
        with self._lock:
            credentials = self._source()
            if credentials is not self._latest:
                self._latest = credentials
                try:  # a new pair: OpenSSL lets no thread change a context that others use
                    self._pair = context_pair(credentials)
                except UserError as error:
                    log.warning("TLS goes on with the certificate before: %s", error)
            return self._pair


def context_pair(credentials: Credentials) -> ContextPair:
    """Returns the contexts of a certificate, with which a connection has been tried.

    Raises `UserError` if they cannot be made, or do not accept each other.
    """
    try:
        pair = contexts_of(credentials)
        pair.check()
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"no TLS connection can be made with the certificate, its key and the authorities "
            f"({_reason(error)}); PEM is expected, a key without a password, and a certificate "
            "for servers and clients that one of the authorities has signed"
        ) from None
    return pair


def _reason(error: BaseException) -> str:
    verification = getattr(error, "verify_message", None)
    reason = verification or getattr(error, "reason", None) or str(error)
    return str(reason).lower().replace("_", " ")
