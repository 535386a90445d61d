"""Decides how a job ends before its training does: because it has failed, or an operator stops it.

Pure. Rules:
 E1  If trying again is useless, the job has failed: the input is bad on all nodes, or on so many
     that fewer than MIN are without the mistake (exit code 64); the error is certainly the script's
     (B3 in `failure_policy`); or --max-restarts failures in a row made no progress (70).
 E2  An operator's stop waits until the newest whole state in memory is a checkpoint, if there is a
     directory. The reason names what cannot be saved in time, and the job ends all the same.
 E3  If a committed checkpoint is damaged, the job goes on from the newest good one behind it, and
     the world's reason says so; not with --strict-checkpoint, nor if none is good.
 E4  Before a job ends as failed, or stopped, the newest whole state in memory becomes a checkpoint,
     if there is a directory. Saves are tried again for --save-timeout, and the reason says what
     became of the state.
 E5  If the last checkpoint could not be written, no generation begins before it is on storage:
     nothing else is left to do. If memory lacks a part of its step, members that are away are
     waited for, unless they are known to be gone: one of them may hold it. The job fails if that
     takes too long.
 E6  If ranks differ without a majority, and no state of a step at which they were equal is held,
     the job has failed: it does not begin anew.
 E7  A node that comes after the end, of the launch that ended (--launch-id), exits as the others
     did: with the code of the end. One of another launch needs --restart, or another job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.actions import Decision, WriteDone, wait
from elasticzero.launcher.protocol.documents import Done, Failure, Report, SkippedCheckpoint, World
from elasticzero.launcher.protocol.failure_policy import (
    Cause,
    is_the_scripts,
    recurs,
    repeated_failure_note,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.resume import verified_step
from elasticzero.launcher.protocol.view import View
from elasticzero.text import list_text


def exit_code_of(done: Done) -> ExitCode:
    """Returns the exit code of an agent whose job has ended like this."""
    if done.outcome != "failed":
        return ExitCode.DONE
    final = done.failure is not None and done.failure.final
    return ExitCode.USAGE if final else ExitCode.FAILED


def fail_job(
    following: World, cause: Cause | None, policy: JobPolicy, *, excused: bool = False
) -> Decision | None:
    """Returns the end of a job for which another try is useless; None: it may be tried again.

    Args:
        following: World that would come next, with the attribution of this round's failure.
        cause: Node and failure that ended the generation; None: it did not fail.
        policy: Limits and times, of which `max_restarts` counts.
        excused: Whether the failure is of nodes that are set aside for it (B6 in `failure_policy`),
            or of one that leaves.
    """
    if cause is None:
        return None
    node, failure = cause
    row = following.setbacks
    sure = bool(row) and row[-1].generation == following.generation - 1 and is_the_scripts(row)
    final = failure.final and not excused
    if not (final or sure or (not excused and following.fruitless > policy.max_restarts)):
        return None
    reason = f"rank {failure.rank} on {node} failed: {failure.message}"
    step = following.resume.step
    if not (final or sure):
        past = max(step, row[-1].step) if recurs(row[:-1], row[-1], step) else step
        times = f"{following.fruitless} times in a row " if following.fruitless > 1 else ""
        reason += f"; {times}without progress past step {past}"
    if sure or not final:
        alike = repeated_failure_note(row)
        reason += f"; {alike}" if alike else ""
    row = row if sure or not final else ()
    done = Done(outcome="failed", step=step, reason=reason, failure=failure, setbacks=row)
    return Decision((WriteDone(done),), reason)


def fail_for_unwritten_checkpoint(view: View, cause: Cause | None) -> Decision | None:
    """Returns the end of a job whose last checkpoint could not be written (E5).

    None: it was another failure, or storage has that step by now.
    """
    if cause is None or cause[1].blame != "storage":
        return None
    node, failure = cause
    if (view.storage_step or 0) >= failure.step:
        return None
    reason = f"rank {failure.rank} on {node} failed: {failure.message}"
    done = Done(outcome="failed", step=view.storage_step or 0, reason=reason, failure=failure)
    return Decision((WriteDone(done),), reason)


def await_holders(
    view: View,
    resume: Resume,
    cause: Cause | None,
    away: Sequence[str],
    waited_s: float,
    policy: JobPolicy,
) -> Decision | None:
    """Waits for members that may hold a part of the last step, which is on no storage (E5).

    None: memory has the whole step, there is no place for it, none is away, or the time is up.

    Args:
        view: What this agent sees.
        resume: The newest whole state.
        cause: Node and failure that ended the generation: the last checkpoint was not written.
        away: Members that do not answer now, and may come back as they were.
        waited_s: Seconds since the round was opened.
        policy: Limits and times, of which `save_timeout_s` counts.
    """
    if cause is None or not away or resume.step >= cause[1].step:
        return None
    if not view.can_save or waited_s >= policy.save_timeout_s:
        return None
    return wait(f"waiting for {list_text(away, 4)}: memory lacks a part of step {cause[1].step}")


def end_once_saved(
    view: View, resume: Resume, decision: Decision, waited_s: float, policy: JobPolicy
) -> Decision:
    """Returns the end that `decision` holds, once the newest state in memory is a checkpoint or its
    time is up (E4).

    Args:
        view: What this agent sees.
        resume: The newest whole state.
        decision: Decision that only writes the end.
        waited_s: Seconds since the round was opened.
        policy: Limits and times, of which `save_timeout_s` counts.
    """
    if (saving := wait_until_saved(view, resume, waited_s, policy)) is not None:
        return saving
    (write,) = decision.actions
    assert isinstance(write, WriteDone)
    reason = decision.reason + _fate(view, resume, write.done.failure, policy)
    return Decision((WriteDone(replace(write.done, reason=reason)),), reason)


def only_in_memory(view: View, resume: Resume) -> bool:
    """Returns whether only memory has the newest state."""
    return resume.tier == "ram" and resume.step > (view.storage_step or 0)


def wait_until_saved(
    view: View, resume: Resume, waited_s: float, policy: JobPolicy
) -> Decision | None:
    """Waits until the newest state in memory is a checkpoint (E4).

    None: it is one, there is no place for it, or its time is up.

    Args:
        view: What this agent sees.
        resume: The newest whole state.
        waited_s: Seconds since the round was opened.
        policy: Limits and times, of which `save_timeout_s` counts.
    """
    if not only_in_memory(view, resume) or not view.can_save or waited_s >= policy.save_timeout_s:
        return None
    return wait(f"saving step {resume.step} from memory before the job ends")


def _fate(view: View, resume: Resume, failure: Failure | None, policy: JobPolicy) -> str:
    """Returns the end of a reason: what became of the newest state, where storage did not have
    it.

    Args:
        view: What this agent sees.
        resume: The newest whole state.
        failure: Failure that ends the job; None: it does not end by a worker's failure.
        policy: Limits and times, of which `save_timeout_s` is named.
    """
    unwritten = failure.step if failure is not None and failure.blame == "storage" else 0
    held = resume.step if resume.tier == "ram" else 0
    newest, reached = view.storage_step or 0, max(held, unwritten)
    finished = max(reached, _last_finished_step(view, failure))
    if finished == 0:
        return ""
    if not view.can_save:
        return f"; there is no --checkpoint-dir, so the state of step {finished} is lost"
    if newest >= finished:
        return f"; the checkpoint of step {newest} has all that was done" if reached else ""
    text = ""
    if newest < reached and held < reached:
        text = f"; step {reached} is not saved, and no node that is left holds all of it"
    elif newest < reached:
        limit = f"{policy.save_timeout_s:g} s (--save-timeout)"
        text = f"; step {reached} could not be saved within {limit}"
    if view.storage_pending is not None:
        return f"{text}; what storage holds is not known: {view.storage_pending}"
    first = newest + 1
    steps = f"steps {first} to {finished} are" if first < finished else f"step {finished} is"
    have = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint"
    return f"{text}{':' if text else ';'} {steps} lost, {have}"


def _last_finished_step(view: View, failure: Failure | None) -> int:
    """Returns the last step that any node has finished in the generation that ends.

    Memory may hold less of it: the failure may have torn the state since the last snapshot.
    """
    reported = (report.final_step or 0 for report in (view.reports or {}).values())
    return max(failure.step if failure is not None else 0, *reported, 0)


def stop_job(view: View, resume: Resume, waited_s: float, policy: JobPolicy) -> Decision:
    """Returns the end that an operator asked for, once the newest state in memory is a
    checkpoint.

    Args:
        view: What this agent sees.
        resume: The newest whole state.
        waited_s: Seconds since the round was opened.
        policy: Limits and times, of which `save_s` and `save_timeout_s` count.
    """
    if not only_in_memory(view, resume):
        return stop_from_storage(view)
    step = resume.step
    if view.storage_pending is not None and waited_s < policy.save_s:
        return wait(view.storage_pending)
    if not view.can_save:
        why = "there is no --checkpoint-dir, so its state is not kept; --restart begins anew"
        return _stopped(step, f"stopped after step {step} by an operator; {why}")
    if (saving := wait_until_saved(view, resume, waited_s, policy)) is not None:
        return saving
    then = _from_storage(view.storage_step)
    return _stopped(view.storage_step or 0, f"step {step} could not be saved; {then}")


def stop_from_storage(view: View) -> Decision:
    """Returns the same end where storage has the newest state, or neither has any."""
    if view.storage_pending is not None:
        return wait(view.storage_pending)
    return _stopped(view.storage_step or 0, _from_storage(view.storage_step))


def _from_storage(step: int | None) -> str:
    if step is None:
        return "stopped by an operator; there is no checkpoint, --restart begins anew"
    return f"stopped by an operator; --restart goes on from the checkpoint of step {step}"


def _stopped(step: int, reason: str) -> Decision:
    return Decision((WriteDone(Done(outcome="stopped", step=step, reason=reason)),), reason)


def refuse_damaged_checkpoint(view: View, resume: Resume, policy: JobPolicy) -> Decision | None:
    """Returns the end of a job that would have to begin behind a damaged checkpoint (E3).

    None: it may go on from `resume`, for that is allowed and a good checkpoint exists.

    Args:
        view: What this agent sees; its damage is of the newest committed checkpoint.
        resume: State that the next generation would start from.
        policy: Limits and times, of which `strict_checkpoint` counts.
    """
    damage = view.damage
    if damage is None or (resume.step >= damage.step and resume.tier != "fresh"):
        return None
    if resume.tier == "fresh":
        then = "no other is good; mend it, or give an empty --checkpoint-dir to begin anew"
    elif policy.strict_checkpoint:
        then = (
            f"--strict-checkpoint forbids going on from step {resume.step}; mend it, or run again "
            "with --restart and without --strict-checkpoint"
        )
    else:
        return None
    reason = f"the checkpoint of step {damage.step} is damaged: {damage.reason}; {then}"
    done = Done(outcome="failed", step=resume.step, reason=reason)
    return Decision((WriteDone(done),), reason)


def refuse_unverified_state(
    reports: Mapping[str, Report], resume: Resume, cause: Cause | None
) -> Decision | None:
    """Returns the end of a job whose ranks differ, where no state is left that was shown to be
    equal (E6).

    None: there is such a state, or the ranks do not differ.

    Args:
        reports: Reports by node, of the nodes whose workers have stopped.
        resume: State that the next generation would start from.
        cause: Node and failure that ended the generation; None: it did not fail.
    """
    verified = verified_step(reports)
    if verified is None or cause is None or resume.tier != "fresh" or verified == 0:
        return None
    node, failure = cause
    reason = (
        f"rank {failure.rank} on {node} failed: {failure.message}; neither memory nor storage has "
        f"the state of step {verified} or of one before it; with --checkpoint-dir there is one"
    )
    done = Done(outcome="failed", step=0, reason=reason, failure=failure)
    return Decision((WriteDone(done),), reason)


def skipped_checkpoint_note(view: View, resume: Resume) -> str:
    """Returns the end of a world's reason, where a damaged checkpoint is passed over."""
    damage = view.damage
    if damage is None or resume.step >= damage.step:
        return ""
    return f"; the checkpoint of step {damage.step} is damaged: {damage.reason}"


def skipped_checkpoint(
    view: View, resume: Resume, cause: str, failure: Failure | None = None
) -> SkippedCheckpoint | None:
    """Returns the damaged checkpoint that a world's reason mentions; None: it mentions none.

    Args:
        view: What this agent sees.
        resume: State that the world starts from.
        cause: The reason without the damage.
        failure: Failure of the rank that found the damage; None: what the leader itself sees
            counts.
    """
    if failure is not None and failure.bad_step is not None:
        step, message = failure.bad_step, failure.message
    elif view.damage is not None:
        step, message = view.damage.step, view.damage.reason
    else:
        return None
    if resume.step >= step:
        return None
    return SkippedCheckpoint(step=step, message=message, cause=cause)
