"""Runs one generation in a worker's process, from the rendezvous of its ranks to its end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike

import torch
from torch import Tensor

from elasticzero.comm.barriers import Call
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.worlds.next_world import NextWorld
from elasticzero.consistency.configuration import Comparison
from elasticzero.errors import EntryRefused, UserError, is_peer_error, one_line
from elasticzero.ipc.agent_client import AgentClient, park
from elasticzero.ipc.messages import CPU, Finished, Restored
from elasticzero.parallel.parameter_changes import refused_operation
from elasticzero.training.preparation import Place, Prepared
from elasticzero.training.step_machine import StepPhase
from elasticzero.training.step_tracker import StepTracker
from elasticzero.training.training_state import TrainingState
from elasticzero.training.worlds.change import WorldChange, obstacle
from elasticzero.training.worlds.newcomer import Newcomer
from elasticzero.worker.collective_watchdog import watch_for_stuck_collective
from elasticzero.worker.join import (
    agree_on_checkpointing,
    begin_unconnected,
    check_introduction,
    introduction,
    join_world,
)
from elasticzero.worker.process_reuse import EndedGeneration
from elasticzero.worker.single_process import LocalLink
from elasticzero.worker.stop_protocol import StopState, run_stop_protocol


class Generation:
    """Holds a generation's client of the agent, its process groups, and its training state.

    The order of calls: `enter`, then the training function, which makes `training`, then `finish`
    and `close`; or, after an error anywhere, `end`.
    """

    def __init__(self, link: AgentClient, framework: str = "") -> None:
        """Begins before the ranks have met.

        Args:
            link: The client of the agent.
            framework: The framework that trains, and keeps what follows from the number of ranks;
                empty: the script trains.
        """
        self.link = link
        self.device = torch.device("cpu")
        self.saving = True
        """True if checkpoints are written, which needs a directory for them."""
        self.tracker = StepTracker()
        """The state of the step that the script works on."""
        self._prepared: Prepared | None = None
        self.began_s = self.entered_s = time.monotonic()
        self.obstacle_of_joins = ""
        """Says which call of the script outside of loops needs all ranks; empty: none."""
        self.groups: ProcessGroups | None = None
        """The process groups; None without an agent."""
        self.on_world_change: list[Callable[[], object]] = []
        """The script's functions that are called once another world was entered in a loop."""
        self._framework = framework
        self._newcomer: Newcomer | None = None
        """Brings this rank into a world that others enter inside of their loops; None: all begin in
        it."""
        self._comparison: Comparison | None = None
        self._next: NextWorld | None = None
        """The next world; None: planned changes begin all loops anew."""

    @property
    def training(self) -> TrainingState | None:
        """Returns the training state; None before `session.prepare`."""
        return None if self._prepared is None else self._prepared.training

    def begin_training(self, prepared: Prepared) -> None:
        """Takes over what `session.prepare` has made."""
        self._prepared = prepared

    def whole_state(self) -> dict[str, Tensor]:
        """Returns the whole model's state on rank 0; all ranks call this together."""
        assert self._prepared is not None
        return self._prepared.state_dict()

    def enter(self) -> None:
        """Joins the other ranks of the generation, or begins where these enter it later."""
        if self.link.assignment.enters_inside:
            self._begin_alone()
            return
        self.device, groups = join_world(self.link)
        if groups is not None:
            self.groups = groups
            self.link.on_abort(lambda: self._abort(groups))
            self.saving = agree_on_checkpointing(self.link, groups)
            self._begin_changes()
        self.entered_s = time.monotonic()

    def _begin_alone(self) -> None:
        """Begins without a connection to the ranks that enter the generation inside of their
        loops."""
        self.groups = groups = begin_unconnected(self.link)
        self.device = groups.device
        if why := self._obstacle_of_process():
            raise EntryRefused(why)
        self.link.on_abort(lambda: self._abort(groups))
        self.saving = self.link.assignment.checkpoint_dir is not None
        self._newcomer = Newcomer(self.link, groups, self._check_introduction)
        self._begin_changes()
        self.entered_s = time.monotonic()

    def _begin_changes(self) -> None:
        if self.link.assignment.changes_inside and self.link.assignment.one_release:
            self._next = NextWorld(self.link, self.device, self._obstacle_of_process())
            self.link.on_change(self._next.receive)

    def _obstacle_of_joins(self) -> str:
        """Returns why no rank can come into this world inside of a loop; empty: it can."""
        exchanges = self.training is not None and self.training.script_exchanges
        text = "the script calls collectives of its own between session.restore and its loop"
        return self.obstacle_of_joins or (text if exchanges else "")

    def _digests(self) -> Sequence[int]:
        return () if self._comparison is None else self._comparison.digests

    def _check_introduction(self, text: str) -> None:
        device = self.device.type
        check_introduction(self.link.assignment, self._digests(), device, text)

    def _introduce(self, token: str) -> AbstractContextManager[str]:
        """Returns what rank 0 tells the ranks that come into a world of this token."""
        a, device = self.link.assignment, self.device.type
        return introduction(a, self._digests(), token, device, saves=self.saving)

    def _obstacle_of_process(self) -> str:
        """Returns why this process can enter no world in a loop, whatever it trains; empty: it
        can."""
        if self.device.type == "cuda" and not self.link.assignment.changes_with_nccl:
            return "its ranks use NCCL, and --changes-inside is not on"
        return f"{self._framework} trains" if self._framework else ""

    def place(
        self,
        comparison: Comparison,
        *,
        cpu_offload: bool,
        load: str | PathLike[str] | None,
        load_optimizer: bool,
    ) -> Place:
        """Returns what the model is to be laid over.

        Args:
            comparison: Compares the configuration of the ranks' scripts.
            cpu_offload: Whether zero3 keeps its part of the state in host memory.
            load: Files with the model's first values; None: the model has them.
            load_optimizer: Whether these files also have the optimizer's first state.

        Raises:
            UserError: The optimizer's state is asked for, and no files are.
        """
        self._comparison = comparison
        if self._newcomer is not None:
            comparison.expected_loop = self._newcomer.check_loop
        if load_optimizer and load is None:
            raise UserError("session.prepare got load_optimizer=True without load=: name the files")
        return Place(
            link=self.link,
            groups=self.groups,
            comparison=comparison,
            tracker=self.tracker,
            device=self.device,
            cpu_offload=cpu_offload,
            load=load,
            load_optimizer=load_optimizer,
            saving=self.saving,
            change=self._world_change(comparison),
            newcomer=self._newcomer,
            save=self.link.save if isinstance(self.link, LocalLink) else None,
        )

    def _world_change(self, comparison: Comparison) -> WorldChange | None:
        if self._next is None or self.groups is None:
            return None
        functions = self.on_world_change
        return WorldChange(self.link, self.groups, self._next, functions, comparison)

    def note_call(self, call: str) -> None:
        """Notes a call that all ranks make together: outside of loops a rank that comes in later
        would make it alone."""
        if self.training is not None and not self.training.at.in_loop:
            self.obstacle_of_joins = f"the script calls {call} outside of its loops"

    def report_restored(self, began_s: float, bytes_read: int) -> None:
        """Tells the agent that the state is in place, and what the time until now has gone to.

        Args:
            began_s: When the restore began, by the monotonic clock.
            bytes_read: Bytes that it has read.
        """
        assert self.training is not None
        if self._next is not None:
            rehearses = self.training.probe is not None
            why = obstacle(self.link.assignment, rehearses=rehearses)
            self._next.admit(why, self._introduce, self._obstacle_of_joins)
        self.link.send(
            Restored(
                step=self.training.step,
                tier=self.link.assignment.resume.tier,
                connect_s=self.entered_s - self.began_s,
                build_s=began_s - self.entered_s,
                restore_s=time.monotonic() - began_s,
                bytes_read=bytes_read,
                device=_device_text(self.device),
            )
        )

    def finish(self) -> None:
        """Saves the unsaved state after the training function, and waits until all ranks have done
        so."""
        training = self.training
        if training is not None and training.copy is not None:
            training.finish_pending_step()
            training.agree_to_stop(Call.FINISH)
            with self.link.busy("writing the last checkpoint"):
                training.finish()
        elif self.groups is not None:
            self.groups.barrier(Call.FINISH)
        if self.groups is not None:
            self.groups.control_tree.allreduce_max(0)
        self.link.check()
        step, reason = (training.step, training.stopped) if training is not None else (0, None)
        self.link.send(Finished(step=step, reason=reason or ""))

    def close(self) -> None:
        """Closes the groups once all ranks have finished; the script continues alone."""
        self._close_next()
        if self.groups is not None:
            self.groups.close()

    def end(self, error: BaseException) -> EndedGeneration:
        """Runs the stop protocol; returns only if the process may be used again, and never if
        another thread runs it."""
        if not self.link.claim_shutdown():
            park()
        code = run_stop_protocol(self.link, self.explained(error), self._stop_state())
        traceback.clear_frames(error.__traceback__)  # they refer to the script's objects
        if self.training is not None:
            self.training.close()
        self._close_next()
        return EndedGeneration(code, self.groups)

    def _close_next(self) -> None:
        if self._next is not None:
            self._next.close()

    def explained(self, error: BaseException) -> BaseException:
        """Returns the error, or the one that tells the script's author what it means."""
        if self.training is None:
            return error
        if self._newcomer is not None and self._newcomer.is_on_its_way:
            return _refused_entry(error)
        if isinstance(error, StopIteration) and not self.tracker.now.in_loop:
            ended = UserError(
                "the script's next(…) has come to the end of an iterator. A loop over "
                "session.batches gives the batches that training has not passed, which are fewer "
                "after a restore: go over it with `for`, and count by session.step_count"
            )
            ended.__cause__ = error
            return ended.with_traceback(error.__traceback__)
        return refused_operation(error, self.training.strategy.model.parameters())

    def _abort(self, groups: ProcessGroups) -> None:
        """Shuts the groups after the agent has ended the generation."""
        groups.shut()
        if self._newcomer is not None:
            self._newcomer.shut()
        if self._next is not None:
            self._next.abandon()
        watch_for_stuck_collective(self.link, self._stop_state, lambda: groups.awaits_gpu)

    def _stop_state(self) -> StopState:
        """Returns the state that the stop protocol reports and saves."""
        shut = self.groups.shut if self.groups is not None else lambda: None
        resume, training = self.link.assignment.resume, self.training
        if training is None or training.copy is None:
            bad_step = resume.step if resume.tier == "storage" else None
            return StopState(bad_step=bad_step, shut=shut)
        at = self.tracker.now
        # Between two steps the names are of what the last one has taken in.
        changed = () if at.phase is StepPhase.BETWEEN else training.strategy.changed_names()
        clean = at.clean and training.can_stop_with_state() and training.values.are_there(changed)
        return StopState(
            step=training.step,
            clean=clean,
            complete=training.strategy.shards == 1,
            results_suspect=self.groups is not None and self.groups.results_suspect,
            halved=at.halved,
            save=training.snapshot if clean else None,
            keep=partial(_keep_residual, training) if clean else None,
            settle=training.stager.settle,
            shut=shut,
        )


def _keep_residual(training: TrainingState) -> None:
    """Keeps what this rank alone has, unless all ranks leave at this boundary, each with its own or
    with the sum."""
    if not training.stager.has_agreed:
        training.start.kept.write(training.step, len(training.position.skipped))


def _refused_entry(error: BaseException) -> BaseException:
    """Returns the error of a rank that was on its way into its loop, while the others wait for it:
    what the script does there by itself, it may do well where all ranks do it together."""
    if isinstance(error, EntryRefused) or is_peer_error(error) or not isinstance(error, Exception):
        return error
    refused = EntryRefused(f"this rank cannot come in inside of the loop: {one_line(error)}")
    refused.__cause__ = error
    return refused.with_traceback(error.__traceback__)


def _device_text(device: torch.device) -> str:
    """Returns a device in words: the name of a GPU, or `the CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
