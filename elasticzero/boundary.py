"""The boundary between two steps: the state is whole, small state is copied, words are exchanged,
what is due is captured; and the end of a generation is found here.
"""

from __future__ import annotations

from elasticzero.captures import Captures
from elasticzero.collectives import ControlWord, Groups
from elasticzero.data import Position
from elasticzero.errors import is_peer_error
from elasticzero.link import AgentLink, GenerationEnded
from elasticzero.messages import FLAG_GROW, FLAG_LEAVE, FLAG_STOP, Captured
from elasticzero.parallel import Strategy
from elasticzero.restoring import load, open_source
from elasticzero.state import BoundaryCopy, SmallState

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
        groups: Groups | None,
        strategy: Strategy,
        small: SmallState,
        captures: Captures,
    ) -> None:
        self.strategy = strategy
        self.small = small
        self.captures = captures
        self.step = 0
        """Optimizer steps applied."""
        self.position = Position()
        """In the data, at the last boundary."""
        self.next_position = Position()
        """After the global batch that is being worked on."""
        self.copy: BoundaryCopy | None = None
        """Of the last boundary; None before the state is in place."""
        self.clean = False
        """Nothing has changed the state since the last boundary."""
        self._applied = False
        """A step was, since the last boundary."""
        self._link = link
        self._groups = groups
        self._control = ControlWord(groups)

    def restore(self) -> int:
        """Put the state in place that the assignment says; returns the bytes read."""
        assignment, bytes_read = self._link.assignment, 0
        if assignment.resume.tier != "fresh":
            checkpoint = open_source(assignment)
            self.position = load(checkpoint, self.strategy, self.small, assignment.rank)
            self.step, bytes_read = checkpoint.manifest.step, checkpoint.bytes_read
        self.copy = self.small.capture(self.step, self.position)
        self.captures.begin(self.copy)
        self.clean = True
        return bytes_read

    def copied(self) -> BoundaryCopy:
        assert self.copy is not None
        return self.copy

    def apply(self) -> None:
        """Have the optimizer take its step: the state is torn until the next boundary."""
        self._confirm()  # the gradients
        self._link.change(self._tear)
        self.strategy.apply()
        self._applied = True
        self.step += 1

    def _confirm(self) -> None:
        """What collectives gave is right; raises, as they do, where a peer is gone."""
        if self._groups is not None:
            self._groups.confirm()

    def _confirm_unless_untouched(self) -> RuntimeError | None:
        """Parameters of other ranks and what the script made of collectives are right; else raises.
        Where there is none of it, returns the error that tells of a peer's end."""
        untouched = self._groups is not None and self._groups.untouched
        try:
            self._confirm()
        except RuntimeError as error:
            if not untouched or not is_peer_error(error):
                raise
            return error
        return None

    def _tear(self) -> None:
        self.clean = False

    def settle(self) -> None:
        """Take the boundary of a loop that the script left by `break`."""
        if self._applied:
            self.reach(last=True)

    def reach(self, *, last: bool = False) -> None:
        """Between two steps: copy what a forward may move, exchange words with all ranks, capture
        what is due.

        last: no boundary follows. Raises `GenerationEnded` when a flag was raised or the generation
        is over, and the error that tells of a peer's end; the state is clean then too.
        """
        applied, self._applied = self._applied, False
        lost = None
        if applied:
            if self.small.tracked or not self.strategy.replicated:
                lost = self._confirm_unless_untouched()
            self.position = self.next_position
            lost = lost or self._sync_buffers()
        self.copy = self.small.capture(self.step, self.position)
        self.clean = True
        self._link.check()
        if lost is not None:
            raise lost
        word = self._control.exchange(self.captures.word(self._link.flags), last=last)
        if word is not None:
            self.captures.heard(word)
            if word.flags:
                if self._groups is not None:
                    self._groups.part()
                self.captures.agreed_to_stop()
                reasons = [text for flag, text in FLAG_REASONS.items() if word.flags & flag]
                raise GenerationEnded(" and ".join(reasons))
        every = self._link.assignment.checkpoint_every
        due = last or (applied and every > 0 and self.step % every == 0)
        self.captures.at_boundary(self.copy, checkpoint=due)

    def snapshot(self) -> Captured:
        """The stop protocol's: the state of the last boundary."""
        return self.captures.at_stop(self.copied())

    def _sync_buffers(self) -> RuntimeError | None:
        """Take rank 0's buffers; returns the error that tells of a peer's end.

        This rank's own are then left, and stand for the step as well as any: a snapshot with all
        state in it keeps one rank's, and of a divided one rank 0's are kept.
        """
        buffers = self.small.buffers
        if self._groups is None or not buffers or self._link.aborted is not None:
            return None
        try:
            self._groups.broadcast(buffers)
        except RuntimeError as error:
            if not is_peer_error(error) and self._link.aborted is None:
                raise
            return error
        return None
