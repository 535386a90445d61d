"""Hosts that are lost: of one that is stopped the kernel takes connections, but nobody answers; of
one that is cut off nothing comes back at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Loss = Literal["stopped", "cut off"]
_ESTABLISHED, _SYN_SENT = "01", "02"


@dataclass(frozen=True, slots=True)
class LostHost:
    """Where it was, and whether anybody still turns to it."""

    port: int
    loss: Loss

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def is_asked(self) -> bool:
        """Whether somebody has a connection to it, or waits for one."""
        state = _ESTABLISHED if self.loss == "stopped" else _SYN_SENT
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(
            fields[2].endswith(f":{self.port:04X}") and fields[3] == state for fields in lines
        )


@contextmanager
def lost_host(loss: Loss) -> Iterator[LostHost]:
    """Such a host, on this machine."""
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        if loss == "cut off":  # with its queue full, what else comes is dropped
            filler.connect(listener.getsockname())
        yield LostHost(listener.getsockname()[1], loss)
