"""How a job ends before its training has: given up, or stopped by an operator.

Pure. Rules:
 E1  Where trying again is useless, the job has failed: the input is bad on all nodes, or on so many
     that fewer than MIN are without the mistake (exit code 64); the error is the script's for
     certain (B3 in `blame`); or --max-restarts failures in a row came no further (70).
 E2  An operator's stop waits until the newest whole state in memory is a checkpoint, if there is a
     directory; what cannot be saved in time is said, and the job ends all the same.
 E3  Behind a committed checkpoint that is damaged the job goes on from the newest good one, and its
     world's reason says so; not where --strict-checkpoint is given, nor where none is good.
"""

from __future__ import annotations

from elasticzero.launcher.actions import Decision, WriteDone, wait
from elasticzero.launcher.blame import Cause, is_the_scripts, likeness, recurs
from elasticzero.launcher.view import Limits, View
from elasticzero.launcher.world import Done, World
from elasticzero.messages import Resume

SAVE_PATIENCE_S = 10.0
"""A save that is over, of which storage shows nothing for so long after the stop, has failed."""


def given_up(
    following: World, cause: Cause | None, limits: Limits, *, excused: bool = False
) -> Decision | None:
    """The end of a job that it is useless to try again; None: it may be. excused: the failure is of
    nodes that are set aside for it (B6 in `blame`), or of one that leaves."""
    if cause is None:
        return None
    node, failure = cause
    row = following.setbacks
    sure = bool(row) and row[-1].generation == following.generation - 1 and is_the_scripts(row)
    final = failure.final and not excused
    if not (final or sure or (not excused and following.fruitless > limits.max_restarts)):
        return None
    reason = f"rank {failure.rank} on {node} failed: {failure.message}"
    step = following.resume.step
    if not (final or sure):
        past = max(step, row[-1].step) if recurs(row[:-1], row[-1], step) else step
        reason += f"; {following.fruitless} times in a row without progress past step {past}"
    if sure or not final:
        alike = likeness(row)
        reason += f"; {alike}" if alike else ""
    row = row if sure or not final else ()
    done = Done(outcome="failed", step=step, reason=reason, failure=failure, setbacks=row)
    return Decision((WriteDone(done),), reason)


def stop(view: View, resume: Resume, waited_s: float, limits: Limits) -> Decision:
    """The end that an operator asked for, once the newest state in memory is a checkpoint."""
    if resume.tier != "ram" or resume.step <= (view.storage_step or 0):
        return stop_from_storage(view)
    step = resume.step
    if view.storage_pending is not None and waited_s < limits.save_s:
        return wait(view.storage_pending)
    if not view.can_save:
        why = "there is no --checkpoint-dir, so its state is not kept; --restart begins anew"
        return _stopped(step, f"stopped after step {step} by an operator; {why}")
    tried = view.saved_held == (resume.generation, step)
    patience_s = SAVE_PATIENCE_S if tried else limits.save_s
    if view.saving or waited_s < patience_s:
        return wait(f"an operator stops the job: saving step {step} from memory")
    then = _from_storage(view.storage_step)
    return _stopped(view.storage_step or 0, f"step {step} could not be saved; {then}")


def stop_from_storage(view: View) -> Decision:
    """The same where storage has the newest state, or nothing has."""
    if view.storage_pending is not None:
        return wait(view.storage_pending)
    return _stopped(view.storage_step or 0, _from_storage(view.storage_step))


def _from_storage(step: int | None) -> str:
    if step is None:
        return "stopped by an operator; there is no checkpoint, --restart begins anew"
    return f"stopped by an operator; --restart goes on from the checkpoint of step {step}"


def _stopped(step: int, reason: str) -> Decision:
    return Decision((WriteDone(Done(outcome="stopped", step=step, reason=reason)),), reason)


def too_damaged(view: View, resume: Resume, limits: Limits) -> Decision | None:
    """The end of a job that would have to begin behind a damaged checkpoint, where that is not
    allowed, or where there is no good one (E3); None: it may go on from `resume`."""
    damage = view.damage
    if damage is None or (resume.step >= damage.step and resume.tier != "fresh"):
        return None
    if resume.tier == "fresh":
        then = "no other is good; mend it, or give an empty --checkpoint-dir to begin anew"
    elif limits.strict_checkpoint:
        then = (
            f"--strict-checkpoint forbids going on from step {resume.step}; mend it, or run again "
            "with --restart and without --strict-checkpoint"
        )
    else:
        return None
    reason = f"the checkpoint of step {damage.step} is damaged: {damage.reason}; {then}"
    done = Done(outcome="failed", step=resume.step, reason=reason)
    return Decision((WriteDone(done),), reason)


def passed_over(view: View, resume: Resume) -> str:
    """The end of a world's reason, where a damaged checkpoint is passed over."""
    damage = view.damage
    if damage is None or resume.step >= damage.step:
        return ""
    return f"; the checkpoint of step {damage.step} is damaged: {damage.reason}"
