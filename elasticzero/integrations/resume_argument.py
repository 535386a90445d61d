"""Says what becomes of the argument by which a framework's script resumes from its own files."""

from __future__ import annotations

from elasticzero.errors import UserError
from elasticzero.ipc.assignment import Assignment


def resume_note(argument: str, assignment: Assignment) -> str:
    """Returns the line that says that the argument has no effect, because the job has a state.

    Args:
        argument: the call with the argument, as a script writes it.
        assignment: what this generation goes on from.

    Raises:
        UserError: the job has no state of its own, so that training would begin at step 0.
    """
    if assignment.resume.tier == "fresh" and assignment.generation == 1:
        raise UserError(
            f"{argument}: there is no state to go on from, and training would begin at step 0: "
            "leave it out, and to begin with the weights of a file or folder load the model from "
            "it. A job goes on by itself, from the newest state of --checkpoint-dir"
        )
    return f"{argument} has no effect: training goes on from step {assignment.resume.step}"
