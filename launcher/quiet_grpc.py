"""gRPC, told to keep its own log to itself: a failed handshake would print a line at each try, and
our errors say what is to be done about it.

It reads the variable when it is imported; processes that are started later must not inherit it.
"""

from __future__ import annotations

import os

_VARIABLE = "GRPC_VERBOSITY"
_before = os.environ.get(_VARIABLE)
os.environ.setdefault(_VARIABLE, "NONE")

import grpc  # noqa: E402

if _before is None:
    del os.environ[_VARIABLE]

__all__ = ["grpc"]
