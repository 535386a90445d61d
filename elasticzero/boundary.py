"""The boundary between two steps: the state is whole, small state is copied, words are exchanged,
what is due is captured; and the end of a generation is found here.
"""

from __future__ import annotations

from elasticzero.captures import Captures
from elasticzero.collectives import ControlWord
from elasticzero.data import Position
from elasticzero.errors import is_peer_error
from elasticzero.evaluation import sync_buffers
from elasticzero.messages import FLAG_GROW, FLAG_LEAVE, FLAG_STOP, Captured
from elasticzero.parallel import Strategy
from elasticzero.restoring import load, open_source
from elasticzero.state import BoundaryCopy, SmallState
from elasticzero.worker import AgentLink, GenerationEnded

FLAG_REASONS = {
    FLAG_LEAVE: "a node leaves",
    FLAG_GROW: "the world grows",
    FLAG_STOP: "the job is stopped",
}


class Boundary:
    """The training state of one generation on one rank, from boundary to boundary."""

    def __init__(
        self,
        link: AgentLink,
        control: ControlWord,
        strategy: Strategy,
        small: SmallState,
        captures: Captures,
    ) -> None:
        self.strategy = strategy
        self.small = small
        self.captures = captures
        self.copy: BoundaryCopy | None = None
        """Of the last boundary; None before the state is in place."""
        self._link = link
        self._control = control

    def restore(self) -> tuple[BoundaryCopy, int]:
        """Put the state in place that the assignment says; returns its copy and the bytes read."""
        assignment, bytes_read = self._link.assignment, 0
        step, position = 0, Position()
        if assignment.resume.tier != "fresh":
            checkpoint = open_source(assignment)
            position = load(checkpoint, self.strategy, self.small, assignment.rank)
            step, bytes_read = checkpoint.manifest.step, checkpoint.bytes_read
        self.copy = self.small.capture(step, position)
        self.captures.begin(self.copy)
        return self.copy, bytes_read

    def copied(self) -> BoundaryCopy:
        assert self.copy is not None
        return self.copy

    def reach(self, step: int, position: Position, *, stepped: bool) -> RuntimeError | None:
        """The state of `step` is whole: copy what a forward may move.

        Returns the error that tells of a peer's end, for the state is clean all the same.
        """
        lost = self._sync_buffers() if stepped else None
        self.copy = self.small.capture(step, position)
        return lost

    def meet(self, *, due: bool, last: bool) -> None:
        """Exchange words with all ranks, and capture what is due.

        due: a checkpoint is. last: no boundary follows. Raises `GenerationEnded` when a flag was
        raised.
        """
        word = self._control.exchange(self.captures.word(self._link.flags), last=last)
        if word is not None:
            self.captures.heard(word)
            if word.flags:
                self.captures.agreed_to_stop()
                reasons = [text for flag, text in FLAG_REASONS.items() if word.flags & flag]
                raise GenerationEnded(" and ".join(reasons))
        self.captures.at_boundary(self.copied(), checkpoint=due)

    def snapshot(self) -> Captured:
        """The stop protocol's: the state of the last boundary."""
        return self.captures.at_stop(self.copied())

    def _sync_buffers(self) -> RuntimeError | None:
        """Take rank 0's buffers; returns the error that tells of a peer's end.

        This rank's own are then left, and stand for the step as well as any: a snapshot with all
        state in it keeps one rank's, and of a divided one rank 0's are kept.
        """
        buffers = self.small.buffers
        if self._link.assignment.world_size == 1 or not buffers or self._link.aborted is not None:
            return None
        try:
            sync_buffers(buffers)
        except RuntimeError as error:
            if not is_peer_error(error) and self._link.aborted is None:
                raise
            return error
        return None
