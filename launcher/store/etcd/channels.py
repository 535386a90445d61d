"""Opens a gRPC channel to each endpoint of etcd.

This file stands apart from `connection.py`, which takes any channels: a crowd of agents in one
process shares those that this opens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from elasticzero.launcher.store.etcd.access import (
    Access,
    Endpoint,
    read_certificates,
)
from elasticzero.launcher.store.etcd.protobuf import grpc

log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # etcd ends connections that ping more than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # no back-off shared with another store
    ("grpc.enable_http_proxy", 0),
)


def open_channels(endpoints: Sequence[Endpoint], access: Access) -> list[Any]:
    """Opens a channel to each endpoint, in the event loop that uses them.

    Raises:
        UserError: The certificates are invalid.
    """
    credentials = None
    if any(endpoint.tls for endpoint in endpoints):
        pems = read_certificates(access)
        credentials = grpc.ssl_channel_credentials(pems.cacert, pems.key, pems.cert)
    bare = next((endpoint for endpoint in endpoints if not endpoint.tls), None)
    if access.user is not None and bare is not None:
        log.warning(
            "the password of user %s goes to etcd at %s without TLS and can be read on the way; "
            "write https://",
            access.user,
            bare,
        )
    return [
        grpc.aio.secure_channel(endpoint.address, credentials, options=_OPTIONS)
        if endpoint.tls
        else grpc.aio.insecure_channel(endpoint.address, options=_OPTIONS)
        for endpoint in endpoints
    ]
