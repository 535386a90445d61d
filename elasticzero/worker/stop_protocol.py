"""Implements the stop protocol, by which a worker ends its part in a generation for any cause.

Rules:
 S0  A worker that is told to stop while it connects or restores has nothing to hand over. It exits
     at once, for what it reads from may be gone and never answer.
 S1  After an exception, of this rank or caused by a peer, the worker first shuts the group's
     sockets, so that the peers notice at once. Then it sends `Failed` with the blame. An interrupt
     is sent before the sockets are shut. A boundary with a raised flag needs neither.
 S2  It sends `Stopping`: the step, whether the state is clean, whether this worker has all of it.
 S3  It awaits `SaveState`, for SAVE_WAIT_S at most. If the state is clean the worker keeps what it
     alone has, whichever rank writes the state, unless all ranks have agreed to leave; if it is
     wanted too, it writes the snapshot and sends `Captured`. If it cannot write it, it sends
     `Failed`, so that the stop does not count as a clean one.
 S4  It exits at once; nothing of the script runs any more. But where the agent keeps processes, and
     this generation ended at a boundary or by a peer or a rollback, `process_reuse` takes over.
 S5  All ranks raise a rollback together, when none waits for another any more. Each sends `Failed`,
     and leaves the sockets as they are. Its state is torn, so that it hands none over.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from elasticzero.errors import (
    CheckpointDamaged,
    ElasticZeroError,
    EntryRefused,
    ExitCode,
    LastSaveFailed,
    OperatorError,
    PeerSetAside,
    ReplicaMismatch,
    StorageError,
    UserError,
    is_final,
    is_peer_error,
    one_line,
    same_error,
    script_traceback,
)
from elasticzero.ipc.agent_client import AgentClient, GenerationEnded, RolledBack, exit_now
from elasticzero.ipc.failure import Blame, Failed
from elasticzero.ipc.messages import Captured, Stopping
from elasticzero.ipc.thread_location import mistake_place
from elasticzero.log_output import reported
from elasticzero.text import count_text, print_foreign

SAVE_WAIT_S = 30.0
MAX_MEMORY_TEXT = 160
"""Characters of torch's own message that are repeated where memory did not suffice."""
ADVICE = "; use another step"
"""Advice in the message of a damaged checkpoint, which is removed here because the job follows it
itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopState:
    """Holds the state of a worker whose generation ends."""

    step: int = 0
    clean: bool = False
    complete: bool = False
    """True if this worker alone holds the whole state."""
    results_suspect: bool = False
    """True if results of collectives may be wrong; see `ProcessGroups.results_suspect`."""
    bad_step: int | None = None
    """Step of the checkpoint on storage that the worker was to load."""
    halved: int | None = None
    """Samples of a micro-batch of half the size; None: its size is not to change."""
    save: Callable[[], Captured] | None = None
    """Writes the snapshot of the stop."""
    keep: Callable[[], None] | None = None
    """Keeps what this worker alone has."""
    settle: Callable[[], None] = lambda: None
    """Waits a moment for a capture under way, which would be lost with the process."""
    shut: Callable[[], None] = lambda: None
    """Breaks the connections of the process groups."""


def run_stop_protocol(
    link: AgentClient, error: BaseException, state: StopState, *, may_keep: bool = True
) -> int:
    """Runs the stop protocol in the thread that has claimed it; ends the process unless it may be
    used again.

    Args:
        link: The client of the agent.
        error: What ends this worker's part in the generation.
        state: The state of the worker.
        may_keep: Whether the process may be used for another generation; by default the agent
            decides.

    Returns:
        The exit code of the process if it is not used again after all.
    """
    code, is_cause = _explain(link, error, state)
    kept = False
    try:
        switched = error.switched if isinstance(error, GenerationEnded) else ""
        reason = str(error) or type(error).__name__
        answered = _hand_over(link, reason, state, switched)
        kept = may_keep and answered and not is_cause and link.assignment.keep
    except BaseException as lost:  # noqa: BLE001 - the end of the process: what is left is to say so
        code = _report_lost_state(link, lost, state.step)
    finally:
        if not kept:
            try:
                state.settle()
            finally:
                exit_now(code)
    return code


def _report_lost_state(link: AgentClient, error: BaseException, step: int) -> int:
    """Reports that the snapshot could not be written.

    Args:
        link: The client of the agent.
        error: The error of the write.
        step: The step of the state.

    Returns:
        The exit code.
    """
    if isinstance(error, UserError):  # an optimizer that keeps what no state holds, for example
        _explain(link, error, StopState(step=step))
        return 1
    text = f"the state of step {step} could not be kept in memory: {one_line(error)}"
    trace = "" if isinstance(error, OperatorError) else script_traceback(error)
    print_foreign(reported(f"error: {text}\n{trace}"), end="")
    link.send(Failed(step=step, blame="environment", message=text, traceback=trace))
    return 1


def _report_memory(
    link: AgentClient, error: BaseException, step: int, halved: int
) -> tuple[int, bool]:
    """Reports that memory did not suffice for a micro-batch.

    Args:
        link: The client of the agent.
        error: The error of torch.
        step: The newest step.
        halved: Number of samples of a micro-batch from now on.

    Returns:
        The same as `_explain`.
    """
    text = f"out of memory; micro-batches have at most {count_text(halved, 'sample')} from now on"
    text += f" ({one_line(error)[:MAX_MEMORY_TEXT]})"
    link.send(
        Failed(
            step=step,
            blame="memory",
            message=text,
            traceback=script_traceback(error),
            micro_batch=halved,
        )
    )
    print_foreign(reported(f"error: {text}"), end="")
    return 1, True


def _report_rollback(link: AgentClient, error: RolledBack, step: int) -> tuple[int, bool]:
    """Reports that training goes back to a held state (S5).

    Args:
        link: The client of the agent.
        error: The reason, with the global batch that is left out.
        step: The newest step.

    Returns:
        The same as `_explain`.
    """
    text = str(error)
    link.send(
        Failed(step=step, blame="rollback", message=text, traceback="", left_out=error.left_out)
    )
    print_foreign(text)
    return ExitCode.LEFT, False


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device, or the machine, had no memory for a tensor."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _explain(link: AgentClient, error: BaseException, state: StopState) -> tuple[int, bool]:
    """Sends why this worker stops, and shuts the sockets where peers are to notice (S1).

    Args:
        link: The client of the agent.
        error: What ends this worker's part in the generation.
        state: The state of the worker.

    Returns:
        (exit code, whether the failure is this rank's own)
    """
    if isinstance(error, RolledBack):
        return _report_rollback(link, error, state.step)
    if isinstance(error, GenerationEnded):
        if error.aborted:
            state.shut()
        return ExitCode.LEFT if error.aborted else 0, False
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted by SIGINT (KeyboardInterrupt)"
        link.send(
            Failed(step=state.step, blame="killed", message=text, traceback=script_traceback(error))
        )
        state.shut()
        print_foreign(reported(script_traceback(error)), end="")
        return ExitCode.INTERRUPTED, True
    state.shut()
    from_agent = link.aborted is not None
    unread = (CheckpointDamaged, StorageError)
    place = mistake_place(error)
    if state.halved is not None and is_out_of_memory(error):
        return _report_memory(link, error, state.step, state.halved)
    message = Failed(
        step=state.step,
        blame=_blame(error, from_agent=from_agent, results_suspect=state.results_suspect),
        message=one_line(error).removesuffix(ADVICE) + place,
        traceback="" if isinstance(error, OperatorError) else script_traceback(error),
        final=is_final(error),
        bad_step=state.bad_step if isinstance(error, unread) else None,
        odd=isinstance(error, ReplicaMismatch) and error.odd,
        verified=error.verified if isinstance(error, ReplicaMismatch) else None,
    )
    link.send(message)
    if message.blame == "checkpoint" and message.bad_step is not None:
        return 1, True  # the agent prints it, once for all ranks
    if message.blame == "peer":
        tells = isinstance(error, (PeerSetAside, EntryRefused))
        text = str(error) if tells else "a peer is gone"
        print_foreign(f"{text}; this worker stops at step {state.step}")
        return ExitCode.LEFT, False
    if isinstance(error, ElasticZeroError):
        trace = message.traceback if place else ""
        print_foreign(reported(f"error: {error}{place}\n{trace}"), end="")
        return 1, True
    earlier = [k for k in link.assignment.known_errors if same_error(k.message, message.message)]
    if earlier:
        where = f"generation {earlier[-1].generation} on {earlier[-1].node}"
        print_foreign(reported(f"error: {message.message}; the same as in {where}"), end="")
    else:
        print_foreign(reported(message.traceback), end="")
    return 1, True


def _blame(error: BaseException, *, from_agent: bool, results_suspect: bool) -> Blame:
    if isinstance(error, CheckpointDamaged):
        return "checkpoint"
    if isinstance(error, LastSaveFailed):
        return "storage"
    if isinstance(error, UserError):
        return "user"
    if is_peer_error(error) or (from_agent and isinstance(error, RuntimeError)):
        return "peer"
    if isinstance(error, OperatorError):
        return "environment"
    return "peer" if results_suspect else "user"


def _hand_over(link: AgentClient, reason: str, state: StopState, switched: str) -> bool:
    """Announces the stop, and writes the snapshot if the agent asks for it (S2, S3).

    Args:
        link: The client of the agent.
        reason: Why the worker stops, of which the first line is sent.
        state: The state of the worker.
        switched: Token of the world that the other ranks have gone over to; empty: none.

    Returns:
        False if no answer came.
    """
    clean = state.clean and state.save is not None
    link.send(
        Stopping(
            step=state.step,
            clean=clean,
            complete=clean and state.complete,
            reason=reason.splitlines()[0],
            switched=switched,
        )
    )
    try:
        write = link.saves.get(timeout=SAVE_WAIT_S).write
    except queue.Empty:
        return False
    if clean and state.keep is not None:
        state.keep()
    if write and clean and state.save is not None:
        link.send(state.save())
    return True
