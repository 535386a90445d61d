"""Logs in to etcd with user and password, and explains why etcd refuses a request or a login.

This file stands apart from `connection.py` because it calls no gRPC: it is tested without etcd.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from elasticzero.launcher.secrets import ETCD_PASSWORD
from elasticzero.launcher.store.etcd.access import Access, Endpoint

NOT_ENABLED = "authentication is not enabled"
NO_USERS_ENABLED = (
    "etcd at %s has no users enabled, so --etcd-user %s has no effect; its operator enables them "
    "with `etcdctl auth enable`"
)
_OLD_LOGIN = ("user name is empty", "invalid auth token", "revision of auth store is old")
"""Texts with which etcd refuses a request whose token it does not accept; nothing was done."""
_NOT_ALLOWED = "permission denied"


def is_old_login(detail: str) -> bool:
    """Returns whether etcd refused a request because it does not accept the token; `detail` is
    etcd's message."""
    return any(text in detail for text in _OLD_LOGIN)


def explain_refusal(where: Endpoint, access: Access, detail: str) -> str | None:
    """Returns what to do about a request that etcd refuses because of its user; None: it does not.

    Args:
        where: The endpoint that refuses it.
        access: The user, if any.
        detail: etcd's message.
    """
    if _NOT_ALLOWED in detail:
        who = "this certificate's user" if access.user is None else f"user {access.user!r}"
        return (
            f"etcd at {where}: {who} may not do this ({detail}); grant its role readwrite on the "
            "prefix /elasticzero/"
        )
    if access.user is None and is_old_login(detail):
        return (
            f"etcd at {where} admits only users ({detail}): give --etcd-user, and "
            f"--etcd-password-file or {ETCD_PASSWORD}"
        )
    return None


def explain_failed_login(where: Endpoint, access: Access) -> str:
    return (
        f"etcd at {where} refuses user {access.user!r} or its password; check --etcd-user, and "
        f"--etcd-password-file or {ETCD_PASSWORD}"
    )


class TokenCache:
    """Caches the token that etcd gives for user and password; gets a new one when it has expired or
    etcd no longer accepts it."""

    def __init__(self, authenticate: Callable[[], Awaitable[str]], life_s: float) -> None:
        """Creates an empty cache, for one event loop.

        Args:
            authenticate: Returns a new token; empty if none is needed.
            life_s: Seconds for which a token is used.
        """
        self._authenticate = authenticate
        self._life_s = life_s
        self._token: str | None = None
        self._since_s = 0.0
        self._lock = asyncio.Lock()

    async def token(self) -> str:
        """Returns the token to send now; raises what `authenticate` raises."""
        async with self._lock:
            now_s = time.monotonic()
            if self._token is None or now_s - self._since_s > self._life_s:
                self._token = await self._authenticate()
                self._since_s = now_s
            return self._token

    def invalidate(self, token: str) -> None:
        """Drops a token that etcd refuses; a newer one stays."""
        if self._token == token:
            self._token = None
