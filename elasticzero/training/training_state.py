"""Holds the training state between two steps, where ranks exchange words and captures begin."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial

from elasticzero.comm.barriers import Call
from elasticzero.comm.control import ControlExchange, ControlWord
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.rank_zero import SharedState, verify_unless_no_collective
from elasticzero.comm.worlds.entering import NewestStep
from elasticzero.comm.worlds.next_world import Offer
from elasticzero.consistency.replicas import ReplicaVerifier
from elasticzero.data.position import DataPosition, EpochEnd
from elasticzero.errors import NotFinite, PeerSetAside, UserError
from elasticzero.ipc.agent_client import AgentClient, GenerationEnded, RolledBack
from elasticzero.ipc.assignment import LeftOutBatch
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_LEAVE, FLAG_REASONS, Captured, Switched
from elasticzero.snapshots.requests import RankPlace, save_at_the_end
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.training.nonfinite_report import all_findings, own_findings, print_skipped
from elasticzero.training.step_machine import StepEvent, StepOutcome, StepState
from elasticzero.training.step_tracker import StepTracker
from elasticzero.training.worlds.change import PartsOfWorld, WorldChange
from elasticzero.training.worlds.parts import Captures, LaidModel


class TrainingState:
    """Manages the training state of one generation on one rank, from boundary to boundary."""

    def __init__(
        self,
        link: AgentClient,
        groups: ProcessGroups | None,
        model: LaidModel,
        captures: Captures,
        tracker: StepTracker,
    ) -> None:
        """Begins before the state is loaded.

        Args:
            link: The client of the agent.
            groups: The process groups; None for one process alone.
            model: The model as it is laid over the ranks.
            captures: What captures and loads the state.
            tracker: The state of the step that this rank works on.
        """
        self.strategy = model.strategy
        self.guard = model.guard
        self.auxiliary = model.auxiliary
        self.rows = model.rows
        self.gradients = model.gradients
        self.probe = model.probe
        self._objects = model.objects
        self._others = model.others
        self.values = model.values
        self._plan, self._change = model.plan, model.change
        self._fault_hold = model.fault_hold
        self.stager = captures.stager
        self.requests = captures.requests
        self.start = captures.start
        self._captures, self._newcomer = captures, captures.start.newcomer
        self._mirrors = bool(link.assignment.mirrors) and model.strategy.shards > 1
        """True if this rank keeps live copies of others' parts of the state."""
        self.step = 0
        """Number of global batches that are applied or skipped, by which a state is known."""
        self.position = DataPosition()
        """Position in the data at the last boundary."""
        self.next_position = DataPosition()
        """Position in the data after the current global batch."""
        self.copy: BoundaryCopy | None = None
        """Copy of the small state at the last boundary; None before the state is loaded."""
        self._stop_reason: str | None = None
        """Reason for which this rank's script ends training for all; None: it does not."""
        self.gradient_norm: float | None = None
        self.loss: float | None = None
        """Both are over all ranks, of the newest step that this generation has applied."""
        self._epoch_end: EpochEnd | None = None
        """The end of an epoch after the current global batch; None: no epoch ends there."""
        self._tracker = tracker
        self._link = link
        self._groups = groups
        self._exchange = ControlExchange(groups)
        self.script_exchanges = False
        """The script has called collectives between the restore and its first loop."""
        self._count_at_restore: tuple[int, int] | None = None
        """Number of collectives that had begun at the restore; None: a loop has begun since."""
        self._promised = False
        """The word of this step says that this rank is prepared for the next world."""
        self._shared = SharedState(groups, model.auxiliary, link)
        self._verifier = ReplicaVerifier(
            groups,
            link.assignment,
            lambda: self.strategy.replicas(),
            lambda: (self.rows.mesh, self.rows.own_shard(self.strategy)),
            lambda: self.strategy.comparison_s,
        )

    def restore(self) -> int:
        """Loads the state that the assignment names; returns the bytes read."""
        loaded = self.start.load(self.strategy, self.auxiliary, self.rows.mesh)
        self.step, self.position = loaded.step, loaded.position
        boundary = loaded.boundary
        if boundary is not None:
            newest = boundary.newest
            self.loss, self.gradient_norm = newest.loss, newest.gradient_norm
            self._tracker.note_optimizers(named=newest.names_optimizers)
            self.requests.go_on(self.position.tagging)
        elif loaded.stored:
            self.requests.resume(self.position.tagging, self.step)
        copy = self.copy_now()
        self.stager.begin(copy, None if boundary is None else boundary.captures)
        self._verifier.begin(self.step, verified=boundary is None)
        self._tracker.record(StepEvent.LOADED)
        self._count_at_restore = None if self._groups is None else self._groups.collective_count
        self.copy = copy  # last: where one of these fails, the state is not restored
        return loaded.bytes_read

    def first_world(self) -> int:
        """Returns the number of ranks with which the first loop over a loader has begun, or that of
        this world before it; also before the state is loaded."""
        first = self.position.first_world
        if self.copy is None:
            first = self.start.json().get("position", {}).get("first_world", 0)
        return first or self._link.assignment.world_size

    @property
    def at(self) -> StepState:
        """Returns the state of the step that this rank works on."""
        return self._tracker.now

    @property
    def step_count(self) -> int:
        """Returns the number of optimizer steps applied."""
        position = self.next_position if self.at.counted else self.position
        return self.step - len(position.skipped)

    @property
    def stopped(self) -> str | None:
        """Returns the reason for which all ranks have ended training early; None: they have not."""
        return self.position.stopped

    def begin_loop(self, position: DataPosition) -> None:
        """Begins a loop over batches."""
        self.position = position

    def begin_step(self, after: DataPosition, ends: EpochEnd | None) -> None:
        """Begins a global batch.

        Args:
            after: The position once its step is applied.
            ends: The work to do if it is an epoch's last; None: it is not.
        """
        self._epoch_end = ends
        if ends is not None and ends.run is None:
            after, self._epoch_end = ends.after, None
        self.next_position = replace(after, skipped=self.position.skipped)

    def begin_backward(self) -> None:
        """Submits the control word for the boundary of a global batch, at its first backward."""
        word = self.stager.control_word(self._flags(), asks=self.requests.waiting)
        if self._change is not None and not (self._exchange.submitted or self._promised):
            self._promised = self._change.promise(self.stager, self.auxiliary)
            word = replace(word, prepared=self._promised)
        self._exchange.submit(self._verifier.with_digest(word))

    def _flags(self) -> int:
        return self._link.flags | (FLAG_FINISH if self._stop_reason is not None else 0)

    def ask_to_stop(self, reason: str) -> None:
        """Has all ranks end training, with this reason, at the next point where they agree."""
        self._stop_reason = reason

    def agree_to_stop(self, call: Call) -> None:
        """Marks training as stopped if any rank's script ends it. All ranks call this together.

        Raises `UserError` if this rank makes another call than the rest.
        """
        asks = self._stop_reason is not None
        if self._groups is not None:
            with self._link.awaiting(self.at.left_at):
                asks = bool(self._groups.barrier(call, int(asks), self._where()))
        if asks:
            self._mark_stopped()

    def _where(self) -> str:
        """Returns this rank's place, for messages."""
        left = f", having left its loop at {self.at.left_at}" if self.at.left_at else ""
        return f" after step {self.step}{left}"

    def _mark_stopped(self) -> None:
        """Records that all ranks have agreed to end training, with the reason."""
        if self.stopped is not None:
            return
        groups = self._groups
        reason = (
            (self._stop_reason or "") if groups is None else groups.share_text(self._stop_reason)
        )
        self.position = replace(self.position, stopped=reason)
        self.copy = self.copy_now()

    def end_epoch(self, ends: EpochEnd) -> None:
        """Runs the script's `on_epoch_end`; the new state and position are the boundary's."""
        if ends.run is not None:
            with self._link.busy("on_epoch_end"):
                self.strategy.settle()
                self.values.watch(self.strategy.rank_state)
                ends.run()
            self.take_changes()
        at = self.position
        self.position = replace(ends.after, stopped=at.stopped, skipped=at.skipped)
        self.copy = self.copy_now()
        if ends.run is not None:
            self.agree_to_stop(Call.EPOCH_END)

    def copy_now(self) -> BoundaryCopy:
        """Returns a copy of the small state, with the parameters as they are for the boundary's."""
        self.values.mark()
        return self.requests.stamped(self.auxiliary.capture(self.step, self.position))

    def boundary_copy(self) -> BoundaryCopy:
        assert self.copy is not None
        return self.copy

    def apply(self) -> bool:
        """Lets the optimizer take its step, or skips it; the state is torn until the next boundary.

        Returns:
            Whether the step is applied.

        Raises:
            NotFinite: A norm or a loss ends training; nothing is changed.
            RolledBack: Training goes back to a held state; nothing is changed.
        """
        self._save_if_words_ask()
        self.rows.verify_gradients(self._verify_collectives)
        value, loss = self.strategy.norm, self.strategy.loss
        verdict = self.guard.judge(value, loss)
        if verdict.action == "stop":
            raise self._stopped_by(verdict.reason)
        if verdict.action != "apply":
            finding = "" if math.isfinite(value) else own_findings(self.strategy)
            if verdict.action == "rollback":
                raise self._rolled_back(verdict.reason, finding)
            self._skip(verdict.reason, finding)
            return False
        self.gradient_norm, self.loss = value, loss
        self._record_unless_shutting_down(StepEvent.CHANGE)
        self.strategy.apply()
        self._shared.share_after_step(compares=self.at.is_share)
        self._count_batch(StepEvent.APPLIED, self.position.skipped)
        return True

    def take_changes(self) -> None:
        """Takes in parameters that were moved; raises `UserError` for one of another kind."""
        if (refused := self.strategy.take_changes() or self._other_optimizer()) is not None:
            raise refused

    def _take_changes(self) -> UserError | None:
        """Takes what the script has changed of parameters; returns the error for what it may not
        change. No rank waits for another."""
        return self.strategy.take_changes() or self._objects.difference()

    def _other_optimizer(self) -> UserError | None:
        return None if self._others is None else self._others.difference()

    def share_buffers(self) -> None:
        """Gives all ranks rank 0's buffers and extra state; all ranks call this together."""
        self._shared.share()

    def _skip(self, reason: str, finding: str) -> None:
        """Leaves the global batch out; position, random generators and guard go on."""
        print_skipped(self._link.assignment.rank, self.step_under_way, reason, finding)
        self._record_unless_shutting_down(StepEvent.TEAR)
        self.strategy.discard()
        self.auxiliary.buffers.put(self.boundary_copy().buffers)
        self._shared.share_after_step()
        self._count_batch(StepEvent.SKIPPED, self._skipped_too())

    def pass_over(self) -> None:
        """Leaves the global batch out without a forward, on all ranks (Q6 in `step_guard`)."""
        self.begin_backward()
        self._save_if_words_ask()
        print_skipped(self._link.assignment.rank, self.step_under_way, "left out by a rollback")
        self._record_unless_shutting_down(StepEvent.TEAR)
        self.guard.passed_over()
        self._count_batch(StepEvent.SKIPPED, self._skipped_too())

    def _skipped_too(self) -> tuple[LeftOutBatch, ...]:
        assert self.at.batch is not None
        return self.position.skipped_with(self.at.batch)

    def _count_batch(self, event: StepEvent, skipped: tuple[LeftOutBatch, ...]) -> None:
        """Counts the global batch, once, however often optimizers are stepped by themselves.

        Args:
            event: Whether it is applied or skipped.
            skipped: What is left out so far, unless some optimizer has been stepped with the batch
                before.
        """
        if self.at.outcome is not StepOutcome.APPLIED:
            self.next_position = replace(self.next_position, skipped=skipped)
        self.step = self.step_under_way
        self._tracker.record(event)

    @property
    def step_under_way(self) -> int:
        """Returns the number that the global batch has."""
        return self.step if self.at.counted else self.step + 1

    def _rolled_back(self, reason: str, finding: str) -> RolledBack:
        """Returns the error by which training goes back, once all ranks will raise it."""
        self._record_unless_shutting_down(StepEvent.TEAR)  # so that this state is not handed over
        if self._groups is not None:
            self._groups.control_tree.allreduce_max(0)
        batch = self._skipped_too()[-1]
        return RolledBack(reason, finding, replace(batch, step=self.step_under_way))

    def _stopped_by(self, reason: str) -> NotFinite:
        """Returns the error that ends training, once all ranks have saved the boundary's state.

        A state that is not finite is not saved.

        Args:
            reason: Completes the sentence; empty where numbers are not finite.
        """
        step = self.step_under_way
        text, advice = f"step {step} was not applied: {reason}", NotFinite.ADVICE
        if not reason:
            findings = all_findings(self.strategy, self._groups, self._link.assignment, step)
            if findings.state:
                self._tracker.record(StepEvent.TEAR)
            text, advice = findings.sentence(), findings.advice()
        copy = self.boundary_copy() if self.at.clean else None
        with self._link.busy(f"saving the state of step {self.step}"), self.values.in_place():
            saved = save_at_the_end(self._link, self._groups, self.stager, copy)
        return NotFinite(f"{text}; {saved}; {advice}")

    def _verify_collectives(self) -> None:
        """Raises, as collectives do, if a peer is lost; otherwise their results are right."""
        if self._groups is not None:
            self._groups.verify_collectives()

    def _record_unless_shutting_down(self, event: StepEvent) -> None:
        """Moves the state of the step, unless another thread hands over the boundary's state."""
        self._link.unless_shutting_down(lambda: self._tracker.record(event))

    def finish_pending_step(self) -> None:
        """Takes the boundary of a loop that the script left by `break`."""
        if self.at.counted:
            self.at_boundary(last=True)

    def at_boundary(self, *, last: bool = False) -> None:
        """Runs a boundary: copies the small state, exchanges control words, captures what is due.

        Where the script ends training, `stopped` says so from here on. A lost peer raises torch's
        error; the state is clean then too.

        Args:
            last: Whether no boundary of this loop follows.

        Raises:
            GenerationEnded: A flag was raised or the generation is over; the state is clean.
        """
        applied = self.at.counted
        self._tracker.record(StepEvent.REACH)
        refused = self._take_changes()
        lost = self._complete_step() if applied else None
        self.copy = self.copy_now()
        self._tracker.record(StepEvent.BOUNDARY)
        self._link.check()
        self.stager.check()
        if lost is not None:
            raise lost
        if refused is not None:
            raise refused
        word_here = replace(self.stager.control_word(self._flags()), prepared=self._promised)
        word = self._exchange.collect(word_here)
        self._promised = False
        if word is not None:
            self._follow_word(word, last=last)
        ends = self._epoch_end
        if applied and ends is not None:
            self._epoch_end = None
            self.end_epoch(ends)
        if applied and self.probe is not None:
            self.probe.record(self.step)
        self._capture_due(applied=applied, last=last, tell=ends is not None)
        self.values.copy()
        if applied and self.probe is not None:
            self.probe.hold(self.step, self.stager.is_idle)
        if self._fault_hold is not None:
            self._fault_hold.hold(self.step)

    def _complete_step(self) -> RuntimeError | None:
        """Takes what rank 0 shares once a step is applied; returns the error of a lost peer."""
        lost = self._shared.lost
        if lost is None and (self.auxiliary.tracked or self.strategy.shards > 1):
            lost = verify_unless_no_collective(self._groups)
        self.position = self.next_position
        self.auxiliary.take_shared()
        return lost or self._shared.share_at_boundary()

    def _follow_word(self, word: ControlWord, *, last: bool) -> None:
        """Does what the word that all ranks have exchanged says; raises `GenerationEnded` where it
        ends the generation.

        Args:
            word: The word.
            last: Whether no boundary of this loop follows.
        """
        self._raise_unless_equal(self._verifier.equal_at_exchange(word))
        self.stager.after_exchange(word)
        self.requests.after_exchange(word)
        if self._change is not None:
            began_s, parts = time.monotonic(), self._parts_of_world()
            admits = partial(self._state_for_others, last=last)
            offer = self._change.decide(word, parts, admits)
            if offer is not None:
                self._go_over(self._change, offer, parts, began_s)
        if word.flags & FLAG_FINISH:
            self._mark_stopped()
        if not word.flags & ~FLAG_FINISH:
            return
        self.copy = self.requests.agree(self.boundary_copy(), self._place(Call.CHECKPOINT))[1]
        self._verify()
        if self._groups is not None:
            self._groups.drain_sends()
        self.start.kept.sum_up()
        self.stager.stop_agreed()
        self._mirrors = False  # each rank hands over its own part
        if self.probe is not None:
            self.probe.record(self.step)
        reasons = [text for flag, text in FLAG_REASONS.items() if word.flags & flag]
        raise GenerationEnded(" and ".join(reasons))

    def _parts_of_world(self) -> PartsOfWorld:
        return PartsOfWorld(
            self.strategy,
            self._plan,
            self.auxiliary,
            self.stager,
            self._verifier,
            self._shared,
            self._record_unless_shutting_down,
        )

    def _newest_step(self) -> NewestStep:
        return NewestStep(
            step=self.step,
            loss=self.loss,
            gradient_norm=self.gradient_norm,
            names_optimizers=self.at.names_optimizers,
        )

    def _state_for_others(self, *, last: bool) -> BoundaryCopy | None:
        """Returns the small state with which others can come into the next world at this boundary;
        None: they cannot (WC2). All ranks call this together.

        Args:
            last: Whether no boundary of this loop follows.
        """
        if last or self._epoch_end is not None or self._checkpoint_due or self.stager.copies:
            return None
        place = self._place(Call.CHECKPOINT)
        asked, self.copy = self.requests.agree(self.boundary_copy(), place)
        if asked:
            self.copy = self.requests.save(self.boundary_copy(), self._verify)
        return None if asked else self.copy

    @property
    def _checkpoint_due(self) -> bool:
        every = self._link.assignment.checkpoint_every
        return every > 0 and self.step % every == 0

    def come_in(self) -> None:
        """Has this rank take part in the world that it comes into inside of the others' loops, as
        its own goes on; nothing where it does."""
        at_restore, self._count_at_restore = self._count_at_restore, None
        if at_restore is not None and self._groups is not None:
            self.script_exchanges |= self._groups.collective_count != at_restore
        if self._newcomer is not None and self._newcomer.join():
            self.strategy.connect()
            self._call_functions()

    def _go_over(
        self, change: WorldChange, offer: Offer, parts: PartsOfWorld, began_s: float
    ) -> None:
        """Goes over to the next world, or ends this rank's part where it is not in it (WC3 to WC7
        in `worlds/change.py`).

        Args:
            change: Enters the world.
            offer: The world.
            parts: What depends on the world.
            began_s: When the word of all ranks was there, by the monotonic clock.

        Raises:
            GenerationEnded: This rank leaves.
        """
        place = self._place(Call.CHECKPOINT)
        asked, self.copy = self.requests.agree(self.boundary_copy(), place)
        change.tell_others(offer, self.stager, self._newest_step())
        change.bring_state(offer, parts)
        if offer.assignment is None:
            self.stager.stop_agreed()
            raise GenerationEnded(FLAG_REASONS[FLAG_LEAVE], switched=offer.token)
        self.rows = change.enter(offer, self.step, parts)
        self.copy = replace(self.copy, rng=self.auxiliary.generators())
        self.values.mark()  # parameters may lie elsewhere now
        seconds = time.monotonic() - began_s
        self._link.send(Switched(token=offer.token, step=self.step, seconds=seconds))
        self._call_functions()
        if asked:
            self.copy = self.requests.save(self.boundary_copy(), self._verify)

    def _call_functions(self) -> None:
        if self._change is not None and self._change.call_functions():
            self.take_changes()
            self.copy = self.copy_now()

    def _capture_due(self, *, applied: bool, last: bool, tell: bool) -> None:
        """Captures what is due at this boundary, or was asked for.

        Args:
            applied: Whether a global batch was applied or skipped since the last boundary.
            last: Whether no boundary of this loop follows.
            tell: Whether the ranks tell each other here what scripts have asked for.
        """
        ends = last or self.stopped is not None
        due = ends or (applied and self._checkpoint_due)
        if ends:
            self._verify()
        copy = self.boundary_copy()
        kind = self.stager.due(copy, checkpoint=due)
        tell = tell or last or kind != "nothing" or self._exchange.alone
        place = self._place(Call.CHECKPOINT) if tell else None
        kind, self.copy = self.requests.capture(copy, kind, place, self._verify)
        if kind != "nothing":
            self._captures.release()
        self._verifier.digest_if_due(self.copy, captured=kind == "snapshot")

    def _save_if_words_ask(self) -> None:
        """Saves the last boundary's state if the words of this step ask for it."""
        if not self.at.counted and self._exchange.asks():
            with self.values.in_place():
                self.copy = self.requests.exchange_and_save(self.boundary_copy(), self._verify)
            self._captures.release()

    def finish(self) -> None:
        """Saves the state at the end of the training function, if it is not saved; what the script
        has then made of the model for another use, as in another dtype, is not of it."""
        self.strategy.take_changes()
        self.requests.finish(self.boundary_copy(), self._place(Call.FINISH))

    def _place(self, call: Call) -> RankPlace:
        return RankPlace(call=call, where=self._where(), left_at=self.at.left_at)

    def _verify(self) -> None:
        """Raises if the ranks' states differ at this boundary; all ranks call this together."""
        with self._link.awaiting(self.at.left_at):
            self.strategy.settle()
            equal = self._verifier.compare_now(self.boundary_copy(), self._where())
            self._raise_unless_equal(equal)

    def _raise_unless_equal(self, equal: bool) -> None:
        """Raises unless the ranks are equal; only the state of a majority is handed over."""
        if equal:
            return
        self._tracker.record(StepEvent.TEAR)
        try:
            self._verifier.raise_difference()
        except PeerSetAside:
            if self.stager.replicated:
                self._tracker.record(StepEvent.KEPT)
            raise
        except UserError:
            self._tracker.record(StepEvent.KEPT)
            raise

    def close(self) -> None:
        """Releases what the generation holds besides its objects."""
        self.stager.close()
        self.rows.close()

    def snapshot(self) -> Captured:
        """Captures the state of the last boundary for the stop protocol, and that of mirrors."""
        self.values.put_back()
        captured = self.stager.capture_at_stop(self.boundary_copy())
        if self._mirrors:
            self._captures.mirrored.capture(self.boundary_copy())
        return captured

    def can_stop_with_state(self) -> bool:
        """Returns whether memory is free for the state as it is now, and has a use for it."""
        return self._mirrors or self.stager.can_stop_with_state()
