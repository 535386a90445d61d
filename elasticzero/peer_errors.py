"""Tells whether an exception means that another rank has gone away.

torch has types for these errors, all of them under `torch.distributed.DistError`. Gloo alone raises
a plain `RuntimeError`, whose message begins with the C++ file that raised it ("[…/third_party/gloo/
gloo/transport/tcp/pair.cc:553] Connection closed by peer"), and NCCL does so in some wrappers. So
for a `RuntimeError` the words of the message decide. No other file reads the words of a message.

Check after an upgrade of torch:
 - `DistError` is still the base class of `DistBackendError`, `DistNetworkError` and
   `DistStoreError`;
 - what `all_reduce`, `recv`, `broadcast` and a backward of DistributedDataParallel raise when a
   peer is killed (tests/integration/test_elastic_training.py kills ranks under gloo, tests/gpu
   under NCCL): a type under `DistError`, or a message with one of WORDS.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from elasticzero.errors import RetryError

WORDS = ("gloo", "nccl", "connection closed", "connection reset", "connection aborted")
"""Words in lower case; one of them is in the message of a `RuntimeError` that a lost peer
causes."""


def is_peer_error(error: BaseException) -> bool:
    """Returns whether this exception, or one of its causes, comes from the end of another rank."""
    return any(_is_peer_error(each) for each in _causes(error))


def _is_peer_error(error: BaseException) -> bool:
    if isinstance(error, (RetryError, *_torch_errors())):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in WORDS)


def _torch_errors() -> tuple[type[BaseException], ...]:
    """Returns torch's class of these errors; nothing in a process that has not imported torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "DistError", None)
    return () if kind is None else (kind,)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
