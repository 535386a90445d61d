"""gRPC, told to keep its own log to itself: a failed handshake would print a line at each try, and
our errors say what is to be done about it.

It reads the variable when it is imported; processes that are started later must not inherit it.
"""

from __future__ import annotations

import os
from typing import Any

_VARIABLE = "GRPC_VERBOSITY"
_before = os.environ.get(_VARIABLE)
os.environ.setdefault(_VARIABLE, "NONE")

import grpc  # noqa: E402

if _before is None:
    del os.environ[_VARIABLE]

LOOK_UP_S = 10.0
"""A thread that waits for the next message of a stream looks up so often by itself. With gRPC's own
tenth of a second an agent at rest does hardly anything else; Python 3 needs none of it to see
signals."""
_common: Any = getattr(grpc, "_common", None)
if hasattr(_common, "MAXIMUM_WAIT_TIMEOUT"):
    _common.MAXIMUM_WAIT_TIMEOUT = LOOK_UP_S

__all__ = ["grpc"]
