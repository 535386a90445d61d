"""Makes the result of a step's last collective that of all ranks of a node, or of none of them.

A peer that dies in an all-reduce can leave some ranks with the result and others without it. The
former would apply the step, the latter not, and the ranks of a node would hold shards of two steps.
A file in the node's shared memory decides: the ranks of one node read and write it under a lock.

Rules:
 N1  A rank that has the result commits it before the step changes anything, unless the file says
     that the step is given up; then the rank gives it up too.
 N2  A rank whose collective has failed takes what another rank has committed, and goes on as if it
     had not failed. If none has, it writes that the step is given up.
Every rank took part in the collective if one rank has its result. So a rank that learns the result
has all of its own gradients.
Invariant: of all ranks of a node that live, either all apply a step or none does.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

PREFIX = "agreement-"
_HEAD = struct.Struct("<qqq")
"""Number of the global batch, the decision on it, and the number of values."""
_COMMITTED, _GIVEN_UP = 1, 2


class NodeAgreement:
    """Decides about the global batches of one generation, on one rank."""

    def __init__(self, root: Path, token: str) -> None:
        """Opens the file, and removes those of earlier generations.

        Args:
            root: A directory in shared memory.
            token: The token of the generation.
        """
        path = root / f"{PREFIX}{token}"
        for old in root.glob(f"{PREFIX}*"):
            if old != path:
                old.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._batch = 0
        self._offered: Tensor | None = None
        """The result that this rank has; None: it has none, or another rank has committed it."""

    def begin(self) -> None:
        """Begins another global batch; all ranks count them alike."""
        self._batch += 1
        self._offered = None

    def offer(self, values: Tensor) -> None:
        """Takes the result that this rank has received.

        Args:
            values: The result, 1-D, of 64-bit floats.
        """
        self._offered = values

    def commit(self) -> None:
        """Binds the ranks of the node to the result that was offered, if one was (N1).

        Raises:
            DistBackendError: The step was given up.
        """
        if self._offered is None:
            return
        with self._locked() as (decision, _):
            if decision == 0:
                self._write(_COMMITTED, self._offered.detach().cpu())
        if decision == _GIVEN_UP:
            raise dist.DistBackendError("a rank of this node has lost a peer in this step")

    def learn(self) -> Tensor | None:
        """Returns the committed result; None: there is none, and the step is given up (N2)."""
        with self._locked() as (decision, count):
            if decision == 0:
                self._write(_GIVEN_UP, torch.empty(0, dtype=torch.float64))
            if decision != _COMMITTED:
                return None
            data = bytearray(os.pread(self._fd, 8 * count, _HEAD.size))
        return torch.frombuffer(data, dtype=torch.float64)

    def close(self) -> None:
        os.close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        """Yields (decision, number of values) of this global batch; 0: there is no decision."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            head = os.pread(self._fd, _HEAD.size, 0)
            batch, decision, count = _HEAD.unpack(head) if head else (0, 0, 0)
            yield (decision, count) if batch == self._batch else (0, 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _write(self, decision: int, values: Tensor) -> None:
        """Writes the decision last: a process may be killed here."""
        os.pwrite(self._fd, values.numpy().tobytes(), _HEAD.size)
        os.pwrite(self._fd, _HEAD.pack(self._batch, decision, values.numel()), 0)
