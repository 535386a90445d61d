"""Verifies that the state that must be equal on all ranks is equal.

What must be: the strategy's replicas (parameters, optimizer state, the gradient's norm), the
optimizer's options, tracked objects, and the position in the data. Where every node holds all
shards of the state (`--shard node`), each shard must be equal on all nodes.

Rules:
 C1  A rank takes the digest of each of these at a boundary. The digest of all of them travels in
     the control word, with its complement; the maxima of both are each other's complement exactly
     if all ranks gave the same number.
 C2  The digest is taken `every` steps after the one before it, and where a snapshot is captured;
     the word of the next step has it. Where a checkpoint is captured, a generation ends by
     agreement, or training ends, the ranks compare at once: nothing is saved or handed over that
     was not verified.
 C3  Without an interval rank 0 chooses one, from how long a step and a digest take, with what the
     strategy compares after it, so that verifying takes SHARE of the time.
 C4  Where the digests differ the ranks exchange those of each tensor. A rank that differs from what
     more than half of the ranks have is quarantined. Where there is no such majority, all go back.
 C5  The ranks of a node give each other the digests of their shards, so that each has those of all
     shards. A rank whose shard differs thus makes its whole node differ.
Invariant: a snapshot is replaced only by one that was captured after the former was verified.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import NoReturn

import torch
from torch import Tensor

from elasticzero.comm.barriers import Call
from elasticzero.comm.control import ControlWord
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.differences import by_majority, difference, split
from elasticzero.errors import PeerSetAside, ReplicaMismatch, UserError
from elasticzero.ipc.assignment import Assignment
from elasticzero.parallel.mesh import Mesh
from elasticzero.serialization import encode
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.digests import combined, digests, of_value
from elasticzero.state.model import TRACKED

SHARE = 0.0003
"""Share of the time that verifying may take if rank 0 chooses the interval."""
FIRST_EVERY = 3
"""The interval in steps until rank 0 has chosen one; by then it has measured the time of a step."""
LONGEST_EVERY = 100_000
KEPT_TIMES = 9
OPTIONS, POSITION, GUARD = "optimizer/options", "position", "loss scale and losses"


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Holds the digests of one boundary's state."""

    step: int
    table: Mapping[str, int]
    digest: int
    """Digest of the whole table."""


@dataclass(slots=True)
class SigningInterval:
    """Chooses the steps from one digest to the next from measured times (rule C3)."""

    proposed: int = 0
    """The proposed interval in steps; 0: nothing is measured yet."""
    _digest_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    _last: tuple[int, float] | None = None
    """Step of the last digest, and the time when it was finished."""

    def digested(self, step: int, began_s: float, ended_s: float) -> None:
        """Records that the digest of the state of `step` was computed in this time.

        Args:
            step: The optimizer step of the state.
            began_s: Beginning of the computation, by the monotonic clock.
            ended_s: Its end, by the same clock.
        """
        last, self._last = self._last, (step, ended_s)
        self._digest_s.append(ended_s - began_s)
        if last is None or step <= last[0]:
            return
        self._step_s.append((began_s - last[1]) / (step - last[0]))
        step_s = max(median(self._step_s), 1e-9)
        self.proposed = min(
            LONGEST_EVERY, max(1, math.ceil(fmean(self._digest_s) / (SHARE * step_s)))
        )


class ReplicaVerifier:
    """Verifies one rank's replicas in one generation."""

    def __init__(
        self,
        groups: ProcessGroups | None,
        assignment: Assignment,
        replicas: Callable[[], Mapping[str, Tensor]],
        shards: Callable[[], tuple[Mesh, Mapping[str, Tensor]]],
        comparison_s: Callable[[], float] = float,
    ) -> None:
        """Takes what is verified; nothing is compared yet.

        Args:
            groups: The ranks' process groups; None: this rank is alone.
            assignment: This rank's place and settings.
            replicas: Returns the tensors that every rank has whole now.
            shards: Returns the rows of ranks, and the tensors that the replicas of this rank's
                shard have too.
            comparison_s: Returns the seconds that the strategy took, after the verification before,
                to compare values.
        """
        self._groups = groups
        self._assignment = assignment
        self._replicas = replicas
        self._shards = shards
        self._comparison_s = comparison_s
        self._every = assignment.verify_every
        self._interval = SigningInterval()
        self._digested = self.verified = 0
        self._pending: StateDigest | None = None
        """The digest that the next control word carries to be compared."""
        self._compared: StateDigest | None = None
        """The digest that was compared last."""

    @property
    def _enabled(self) -> bool:
        return self._assignment.world_size > 1 and self._assignment.verify_every != 0

    def enter_world(self, assignment: Assignment, step: int) -> None:
        """Goes on among the ranks of another world, whose states are those of this one; the next
        digest is due as in a generation that begins with it.

        Args:
            assignment: This rank's place in it.
            step: The boundary at which it was entered.
        """
        self._assignment = assignment
        self._digested, self._every, self._pending = step, assignment.verify_every, None

    def begin(self, step: int, *, verified: bool = True) -> None:
        """Begins with the state of this step.

        Args:
            step: The step.
            verified: Whether all ranks have just read it; False: the others have made it.
        """
        self._digested = step
        self.verified = step if verified else -1

    def with_digest(self, word: ControlWord) -> ControlWord:
        """Returns `word` with this rank's digest, for the step after a boundary."""
        if self._pending is None:
            return word
        chooses = self._assignment.rank == 0 and self._assignment.verify_every is None
        proposed = self._interval.proposed if chooses else 0
        return replace(word, digest=self._pending.digest, verify_every=proposed)

    def equal_at_exchange(self, word: ControlWord) -> bool:
        """Returns whether all ranks have the same digest, by a word that all have exchanged."""
        self._compared, self._pending = self._pending, None
        if self._compared is None:
            return True
        if self._assignment.verify_every is None:
            self._every = word.verify_every or self._every
        if equal := word.digests_equal:
            self.verified = max(self.verified, self._compared.step)
        return equal

    def compare_now(self, copy: BoundaryCopy, where: str) -> bool:
        """Returns whether all ranks have the same state at this boundary; all call this together.

        Args:
            copy: The small state at the boundary.
            where: This rank's place, for the message of an error.
        """
        if not self._enabled or self.verified == copy.step or self._groups is None:
            return True
        self._compared = self._take_digest(copy)
        equal = self._groups.all_equal(Call.VERIFY, self._compared.digest, where)
        if equal:
            self.verified = copy.step
        return equal

    def digest_if_due(self, copy: BoundaryCopy, *, captured: bool) -> None:
        """Computes the digest of this boundary's state if it is due.

        Args:
            copy: The small state at the boundary.
            captured: Whether a snapshot of the state was taken.
        """
        if not self._enabled or copy.step in (self.verified, self._digested):
            return
        every = FIRST_EVERY if self._every is None else self._every
        if captured or copy.step - self._digested >= every:
            self._pending = self._take_digest(copy)

    def raise_difference(self) -> NoReturn:
        """Raises this rank's error after the ranks were found to differ (rule C4)."""
        assert self._groups is not None and self._compared is not None
        state_digest, assignment = self._compared, self._assignment
        report = {
            "node": assignment.node,
            "table": {n: f"digest {d:016x}" for n, d in state_digest.table.items()},
        }
        reports = [json.loads(text) for text in self._groups.exchange(json.dumps(report).encode())]
        tables, nodes = [r["table"] for r in reports], [r["node"] for r in reports]
        verdict = by_majority(tables)
        where = f"after step {state_digest.step}"
        tracked = [name for name in verdict.names if name.startswith(TRACKED)]
        if verdict.names == (*tracked, OPTIONS) or verdict.names == (OPTIONS, *tracked):
            raise UserError(
                f"options of the optimizers' groups, as lr, are not the same on all ranks {where}: "
                f"{split(tables, nodes, OPTIONS)}. What sets them must not follow from a rank's "
                "own loss or samples: take session.loss, which is that of all ranks, what "
                "session.evaluate returns, or session.step_count"
            )
        if verdict.names and len(tracked) == len(verdict.names):
            name = verdict.names[0]
            raise UserError(
                f"a tracked object is not the same on all ranks {where}: of {name!r} "
                f"{split(tables, nodes, name)}. What session.track keeps must be equal on all "
                "ranks, for a restore gives each of them what rank 0 had; --verify-replicas 0 "
                "turns this check off"
            )
        if verdict.accepted is None:
            name = verdict.names[0]
            unnamed = f" (and {len(verdict.names) - 1} more differ)" if verdict.names[1:] else ""
            raise ReplicaMismatch(
                f"the ranks differ {where}, and none of their states is that of a majority: of "
                f"{name!r} {split(tables, nodes, name)}{unnamed}. They were equal at step "
                f"{self.verified}. A script does so that sets parameters or options after "
                "session.step() by what is a rank's own: its loss, its samples, random numbers. "
                "Where processors of different kinds round differently, "
                "--verify-replicas 0 turns this check off",
                verified=self.verified,
                odd=False,
            )
        texts = [difference(rank, tables, nodes, verdict.accepted) for rank in verdict.odd]
        if assignment.rank in verdict.odd:
            text = texts[verdict.odd.index(assignment.rank)]
            raise ReplicaMismatch(
                f"a rank differs from the others {where}: {text}. Its state is not used",
                verified=self.verified,
                odd=True,
            )
        raise PeerSetAside(f"a rank differs from the others {where}: {'; '.join(texts)}")

    def _take_digest(self, copy: BoundaryCopy) -> StateDigest:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        began_s = time.monotonic() - self._comparison_s()
        table = {**digests(self._replicas()), **digests(copy.tensors), **_values(copy)}
        table |= self._shard_digests()
        state_digest = StateDigest(copy.step, table, combined(table))
        self._interval.digested(copy.step, began_s, time.monotonic())
        self._digested = copy.step
        return state_digest

    def _shard_digests(self) -> dict[str, int]:
        """Returns the digests of all shards of the node, by name (C5); none where there is one row
        of ranks."""
        mesh, tensors = self._shards()
        if mesh.replicas == 1 or self._groups is None:
            return {}
        row = torch.zeros(mesh.shards, dtype=torch.int64)
        row[mesh.shard] = combined(digests(tensors))
        if mesh.shards > 1:
            row = self._groups.sum_of_row(row)
        return {f"shard {index}": number for index, number in enumerate(row.tolist())}


def _values(copy: BoundaryCopy) -> dict[str, int]:
    """Returns the digests of the values that are not tensors."""
    tracked = copy.json["tracked"]
    digests = {TRACKED + name: of_value(value) for name, value in tracked.items()}
    digests[OPTIONS] = of_value(copy.json["groups"])
    if "guard" in copy.json:
        digests[GUARD] = of_value(copy.json["guard"])
    # A rank of the release before keeps no global_batch there; `of_loop` compares it.
    position = replace(copy.position, global_batch=0)
    digests[POSITION] = of_value([copy.step, encode(position)])
    return digests
