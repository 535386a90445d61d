"""Keeps what a rank has not sent of gradients while its generation ends by a lost peer (EF5).

Where a rank or a node holds the whole state, the next generation begins with one of these states
for all, and each local rank of a node takes what its predecessor has kept: a file in the shared
memory of the node, which names the boundaries that it is of. A survivor may be one step behind
another, with all that this step has taken from it: then its file has the residuals of both.
Where ranks divide all state, the residuals are in that; the file then says only how large they
were.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import one_line
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.messages import ResidualLost
from elasticzero.parallel.wire.residual import Residual, Squares
from elasticzero.text import count_text

_KEY = "boundary"
"""Name of the file's metadata that have what `_Boundary` has, as JSON."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Holds what one rank has kept of a boundary."""

    world_size: int
    """Number of ranks of the generation that has ended."""
    squares: Squares | None
    parts: Mapping[str, Tensor]
    """The residual by parameter; empty: it is in the state itself."""


class KeptResidual:
    """Writes and reads the file of one rank."""

    def __init__(self, link: AgentClient, groups: ProcessGroups | None, residual: Residual) -> None:
        """Touches no file yet.

        Args:
            link: The client of the agent.
            groups: The process groups; None for one process alone.
            residual: That of this rank.
        """
        self._link, self._groups, self._residual = link, groups, residual
        self._may_exist = residual.is_kept and not link.standalone

    @property
    def _path(self) -> Path:
        a = self._link.assignment
        return Path(a.snapshot_root) / f"residual-{a.local_rank}.safetensors"

    def sum_up(self) -> None:
        """Sums the residuals where all ranks leave at this boundary, and all hold the same state;
        all ranks call this together.

        Raises:
            DistBackendError: A rank is lost; then each keeps its own.
        """
        if self._groups is not None and self._residual.differs_among_replicas:
            self._residual.sum_up()
            self._groups.verify_collectives()
            self._groups.control_tree.allreduce_max(0)

    def write(self, step: int, skipped: int) -> None:
        """Writes the residual of a boundary, and that of the next one where it is known. Where no
        room is left for it, it is lost.

        Args:
            step: The boundary.
            skipped: Number of global batches that were skipped until then.
        """
        a, residual = self._link.assignment, self._residual
        if not residual.is_kept or not (
            residual.differs_among_replicas or a.mirrored_by is not None
        ):
            return
        boundary: dict[str, Any] = {"run": a.run, "generation": a.generation, "ranks": a.world_size}
        draft = self._path.with_suffix(".draft")
        self._may_exist = True
        try:
            if (squares := residual.squares()) is not None:
                boundary |= {"square": squares.of_rank, "square of all": squares.of_all}
            parts = {step: residual.present()} if residual.differs_among_replicas else {}
            if parts and residual.is_complete and _are_finite(following := residual.following()):
                parts[step + 1] = following
            boundary |= {"step": step, "skipped": skipped, "has next": step + 1 in parts}
            tensors = {f"{s}/{n}": t.contiguous() for s in parts for n, t in parts[s].items()}
            save_file(tensors, draft, {_KEY: json.dumps(boundary)})
            draft.replace(self._path)
        except Exception as error:  # noqa: BLE001 - the state itself is worth more than this
            draft.unlink(missing_ok=True)
            log.warning(f"parts of gradients that were not sent yet are lost: {one_line(error)}")

    def take(self, step: int, skipped: int, *, is_stored: bool) -> None:
        """Takes over what this rank's predecessor has kept, and has rank 0 say what is lost. All
        ranks that begin together call this together.

        Args:
            step: The boundary that they begin at.
            skipped: Number of global batches that were skipped until then.
            is_stored: Whether the state itself has residuals.
        """
        if not self._residual.is_kept or self._groups is None:
            return
        a = self._link.assignment
        kept = self._read(a, step, skipped)
        if kept is not None and not is_stored:
            self._residual.put(kept.parts)
        numbers = [0.0] * 4
        if kept is not None:
            squares = kept.squares or Squares(of_rank=math.nan, of_all=math.nan)
            numbers = [1.0, kept.world_size, squares.of_rank, squares.of_all]
        totals = self._groups.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        holders, sizes, held_square, squares_of_all = totals
        if holders and (lost := round(sizes / holders - holders)) > 0 and a.rank == 0:
            self._tell(step, lost, max(squares_of_all / holders - held_square, 0.0))

    def _tell(self, step: int, ranks: int, square: float) -> None:
        """Says what is lost.

        Args:
            step: The boundary at which training goes on.
            ranks: Number of ranks that had it.
            square: The square of its norm, about; NaN: not known.
        """
        norm = None if math.isnan(square) else math.sqrt(square)
        about = f" (norm about {norm:.3g})" if norm is not None else ""
        who = count_text(ranks, "lost rank")
        text = f"parts of gradients that {who} had not sent yet are lost{about}"
        self._link.send(ResidualLost(step=step, ranks=ranks, norm=norm, message=text))

    def _read(self, assignment: Assignment, step: int, skipped: int) -> _Kept | None:
        """Returns what lies in this rank's file of a boundary; None: it is of none, or of another.

        Args:
            assignment: The assignment of a generation that begins.
            step: The boundary.
            skipped: Number of global batches that were skipped until then.
        """
        place = (assignment.run, assignment.resume.generation)
        try:
            with safe_open(self._path, "pt") as file:
                boundary = json.loads((file.metadata() or {})[_KEY])
                which = _serves(boundary, step, skipped)
                if which is None or place != (boundary["run"], boundary["generation"]):
                    return None
                start = f"{which}/"
                names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118
                parts = {name.removeprefix(start): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None
        squares = None
        if "square" in boundary:
            squares = Squares(of_rank=boundary["square"], of_all=boundary["square of all"])
        return _Kept(world_size=boundary["ranks"], squares=squares, parts=parts)

    def release(self) -> None:
        """Removes the file, and those of local ranks that the node has no more."""
        if not self._may_exist:
            return
        self._may_exist, a = False, self._link.assignment
        self._path.unlink(missing_ok=True)
        if a.local_rank == 0:
            for path in self._path.parent.glob("residual-*"):
                number = path.stem.removeprefix("residual-")
                if number.isdecimal() and int(number) >= a.local_world_size:
                    path.unlink(missing_ok=True)


def _serves(boundary: Mapping[str, Any], step: int, skipped: int) -> int | None:
    """Returns the boundary whose residual in a file serves for another one; None: none does.

    Args:
        boundary: What the file says of itself.
        step: The boundary at which training goes on.
        skipped: Number of global batches that were skipped until then.
    """
    before = boundary["step"]
    if step == before + 1 and skipped > boundary["skipped"]:
        return int(before)  # others have skipped the step that this rank had not ended
    has_next = step == before + 1 and boundary["has next"]
    return step if step == before or has_next else None


def _are_finite(parts: Mapping[str, Tensor]) -> bool:
    """Returns whether all of these numbers are finite."""
    return all(math.isfinite(float(torch.linalg.vector_norm(t))) for t in parts.values())
