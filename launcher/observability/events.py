"""Lists every event of an agent's event log, with its fields.

mypy checks the names that the agent writes against `EventName`; `docs/reference/events.md` is made
from `EVENTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EventName = Literal[
    "serving",
    "registered",
    "notice",
    "control",
    "reason",
    "round",
    "waiting",
    "writes",
    "world",
    "start",
    "started",
    "standing",
    "attached",
    "plain",
    "network",
    "restored",
    "recovery",
    "data_changed",
    "shares_changed",
    "residual_lost",
    "averaged",
    "step",
    "log",
    "tracker",
    "looked",
    "paced",
    "captured",
    "kept",
    "memory_short",
    "saved",
    "checkpoint",
    "save_failed",
    "tagged",
    "prepares",
    "withdrawn",
    "switched",
    "stopping",
    "failed",
    "ended",
    "outlasted",
    "stuck_at_exit",
    "store_trouble",
    "store_recovery",
    "loop_error",
    "events_lost",
    "exit",
    "error",
]


@dataclass(frozen=True, slots=True)
class EventSpec:
    """Says when an event is written, and what its fields hold."""

    when: str
    fields: Mapping[str, str] = field(default_factory=dict)
    open_fields: str = ""
    """Meaning of further fields, whose names the script chooses."""


_GENERATION = "number of the generation"
_RANK = "rank of the worker"
_STEP = "optimizer step"
_SAVED = {
    "step": "step of the checkpoint",
    "generation": "generation whose workers asked for the save",
    "seconds": "duration of the save on this node",
    "bytes": "bytes that this node wrote",
    "committed": "true on the node that wrote the manifest",
    "error": "why the save failed; null if it did not",
    "notes": "what retention removed, or could not remove",
    "tags": "tags that this node has made to name the step",
}

EVENTS: Mapping[EventName, EventSpec] = {
    "serving": EventSpec(
        "The agent's HTTP server listens.",
        {
            "port": "port of the server",
            "host": "address under which other nodes reach this one",
            "scheme": "https where the job has TLS, else http",
        },
    ),
    "registered": EventSpec(
        "The node is registered in etcd.",
        {
            "incarnation": "identifier of this start of the agent",
            "run": "number of the job's run: 1, and one more with each `--restart`",
        },
    ),
    "notice": EventSpec(
        "This node is to leave.",
        {
            "reason": "why: a signal, a preemption notice, or an operator",
            "left_s": "seconds until the machine is gone; null if that is not known",
        },
    ),
    "control": EventSpec(
        "An operator has changed what the whole job is to do.",
        {
            "nnodes": "fewest and most nodes that the operator asked for, or null",
            "stop": "whether the job is to stop",
        },
    ),
    "reason": EventSpec(
        "The agent's decision has another reason than the one before.",
        {"reason": "one sentence that says what the agent does and why"},
    ),
    "round": EventSpec(
        "The generation ends, and the nodes agree on the next one.",
        {
            "generation": "generation that ends",
            "kind": (
                "`failure`, `hang`, `lapse`, `leave`, `grow`, `stop` or `silence`; `boundary` if "
                "all workers stopped at the end of a step"
            ),
            "reason": "why the generation ends",
        },
    ),
    "waiting": EventSpec(
        "No workers run, and what the job waits for has changed.",
        {
            "why": "`idle`: for nodes, of which fewer than MIN are registered; `parked`: for nodes "
            "that may take part, of which fewer than MIN are registered; `regroup`: until the "
            "nodes agree",
        },
    ),
    "writes": EventSpec(
        "This agent is the leader and writes the next generation to etcd.",
        {"generation": "number of the generation that it writes"},
    ),
    "world": EventSpec(
        "The agent has read a new generation from etcd.",
        {
            "generation": _GENERATION,
            "members": "names of the nodes, in the order of their ranks",
            "world_size": "number of ranks",
            "resume_step": "step from which training goes on",
            "tier": "where the state is: `fresh`, `ram` or `storage`; `live`: the workers have "
            "entered the generation without a stop",
            "reason": "why the generation was formed",
            "bad_steps": "steps whose checkpoints were found damaged",
            "skipped": "the damaged checkpoint that `reason` tells of: `step`, `message`, and "
            "`cause`, the reason without it; or null",
            "time_spent": "where the job's time has gone until the generation was written: "
            "`until` (Unix time), `seconds` by class, and `steps`, groups of the last steps with "
            "their productive seconds; or null",
        },
    ),
    "start": EventSpec(
        "The agent starts its workers for a generation.",
        {
            "generation": _GENERATION,
            "index": "place of this node among the members, from 0",
            "ranks": "ranks of this node's workers",
        },
    ),
    "started": EventSpec(
        "The workers' processes exist.",
        {
            "pids": "their process ids",
            "kept": "number of workers that go on in a process of the generation before",
            "stood_by": "number of workers that go on in a process that stood by for them",
        },
    ),
    "standing": EventSpec(
        "A process stands by for a worker of this node, or none will for this script.",
        {
            "local_rank": "local rank of the worker",
            "seconds": "time from the process's fork to `elasticzero.run`",
            "private_bytes": "memory that it shares with no other process",
            "refused": "why none will; empty: this one does",
            "message": "the same in a sentence",
        },
    ),
    "attached": EventSpec(
        "A worker has called `elasticzero.run`; written once for an agent.", {"rank": _RANK}
    ),
    "plain": EventSpec(
        "The script trains without calling `elasticzero.run`, so the agent sees no steps of it.",
        {"generation": _GENERATION},
    ),
    "network": EventSpec(
        "The first worker of this node has read in NCCL's log which network NCCL takes between "
        "nodes.",
        {
            "network": "InfiniBand, RoCE, EFA, TCPXO, sockets, or NCCL's own name for another one",
            "version": "version of NCCL; empty: not stated",
            "gpu_direct": "whether the network reads and writes the GPUs' memory by itself; null "
            "if no connection of the worker goes over it",
            "warning": "that the machine has a faster network; empty: it has none",
        },
    ),
    "restored": EventSpec(
        "The first worker of this node has its state and begins to train.",
        {
            "generation": _GENERATION,
            "step": "step of the state",
            "tier": "where the state came from: `fresh`, `ram` or `storage`",
            "connect_s": "seconds to set up the process group",
            "build_s": "seconds from there to `session.restore()`",
            "restore_s": "seconds of `session.restore()`",
            "bytes_read": "bytes of state that the worker read",
            "device": "name of the GPU that the worker computes on, or `the CPU`",
        },
    ),
    "recovery": EventSpec(
        "A worker of this node has finished the first step after a round. Each phase is null if "
        "this agent did not see it.",
        {
            "generation": _GENERATION,
            "kind": "kind of the round, as in `round`",
            "reason": "why the generation before ended",
            "steps_lost": "finished steps that are done again",
            "seconds": "sum of the phases",
            "detect_s": "seconds from the last step until the round opened",
            "regroup_s": "seconds until the workers' processes were started",
            "start_s": "seconds until a worker had called `elasticzero.run`",
            "connect_s": "seconds to set up the process group",
            "build_s": "seconds from there to `session.restore()`",
            "restore_s": "seconds of `session.restore()`",
            "first_step_s": "seconds of the first step",
        },
    ),
    "data_changed": EventSpec(
        "A loop of the script goes on with another batch size or other data than before; the agent "
        "of rank 0 writes it.",
        {
            "step": "number of global batches until then",
            "allowed": "changes that needed `--allow-data-change`: `batch`, `dataset`",
            "message": "what has changed, and where the loop goes on",
        },
    ),
    "shares_changed": EventSpec(
        "Ranks have other parts of each global batch than before, by `--on-straggler balance`; the "
        "agent of rank 0 writes it.",
        {
            "step": "number of global batches until then",
            "message": "which ranks have how much",
        },
    ),
    "averaged": EventSpec(
        "A round of the job's islands was committed (`--strategy diloco`); each island writes it.",
        {
            "history": "1, and one more each time that all islands were lost, and rounds with them",
            "fragment": "number of the part of the model",
            "round": "number of the round",
            "contributors": "`island`, `samples`, and `staleness`: the rounds that were committed "
            "since the one that its contribution differs from",
        },
    ),
    "residual_lost": EventSpec(
        "Training goes on without what lost ranks had not sent of gradients yet, by `--wire`; the "
        "agent of rank 0 writes it.",
        {
            "step": "number of global batches until then",
            "ranks": "number of these ranks",
            "norm": "about the norm of what is lost; null: not known",
            "message": "what is lost",
        },
    ),
    "step": EventSpec(
        "The first worker of this node has finished a step. `time` is the end of the step.",
        {
            "step": _STEP,
            "generation": _GENERATION,
            "at_s": "end of the step by the machine's monotonic clock",
            "step_s": "duration of the step in seconds",
            "data_wait_s": "seconds of it in which the worker waited for its batch",
            "samples": "samples in the global batch",
            "total": "steps of the whole run; 0 if that is not known",
            "gradient_norm": "norm of the gradient before clipping; null if no step was applied",
            "compute_s": "seconds of the forwards and backwards of the node's slowest worker, "
            "without waits for data or collectives: the median of its last 32 steps; null if that "
            "is not known",
            "slowest_local_rank": "rank of that worker on its node",
            "held": "newest step whose snapshot all nodes hold, or the one that the generation "
            "started from; null where snapshots do not decide how many steps a lost node costs",
        },
    ),
    "log": EventSpec(
        "The script has called `session.log`.",
        {"rank": _RANK, "step": _STEP},
        open_fields="each number that the script logged, under its own name",
    ),
    "tracker": EventSpec(
        "A tracker of `--log-to` was opened, or has failed; the leading agent writes it.",
        {
            "opened": "a sentence that says which run it writes to; null if it has failed",
            "error": "what has failed; null if nothing has",
        },
    ),
    "looked": EventSpec(
        "The agent has examined a worker that makes no step.",
        {
            "generation": _GENERATION,
            "rank": _RANK,
            "blame": "`hung` if the worker is to be replaced; otherwise the kind of its failure",
            "message": "what the agent found",
            "step": "last step of the worker",
            "final": "whether the same input would fail in the same way again",
            "bad_step": "step of a damaged checkpoint, or null",
            "traceback": "end of the worker's traceback",
            "odd": "whether this rank's state differs from that of a majority",
            "verified": "newest step at which all ranks had the same state, or null",
            "micro_batch": "samples of the next micro-batches where memory was short, or null",
            "left_out": "the global batch that a rollback leaves out from now on, or null",
        },
    ),
    "paced": EventSpec(
        "Rank 0 has chosen another interval between snapshots.",
        {
            "every": "steps from one snapshot to the next",
            "cost_s": "seconds for which training waits for one",
            "step_s": "seconds of a step",
        },
    ),
    "captured": EventSpec(
        "A worker has copied its part of the state to shared memory.",
        {
            "step": "step of the state",
            "generation": _GENERATION,
            "rank": "rank whose part it is",
            "local_rank": "local rank of the worker",
            "world_size": "world size of the snapshot; 1 if one rank holds the whole state",
            "seconds": "seconds for which training waited",
            "bytes": "bytes that were copied",
            "replicate": "whether another node holds a copy of this part",
            "checkpoint": "whether the state is to become a checkpoint",
            "direct": "whether memory was short and the part went to storage instead",
            "manifest": "the part's own manifest if `direct`; otherwise empty",
        },
    ),
    "kept": EventSpec(
        "This node holds its part of a snapshot, or could not take it.",
        {
            "step": "step of the snapshot",
            "generation": _GENERATION,
            "error": "why the node could not take it; null if it holds it",
            "not_finite": "whether the reason is a NaN or an infinity in the state",
        },
    ),
    "memory_short": EventSpec(
        "Shared memory has no room for this node's snapshots.",
        {
            "needed_bytes": "bytes that the snapshots of this node need",
            "free_bytes": "bytes that are free",
        },
    ),
    "saved": EventSpec("This node's part of a save has ended.", _SAVED),
    "checkpoint": EventSpec("This node has committed a checkpoint.", _SAVED),
    "save_failed": EventSpec(
        "A save of the newest state has failed and is tried again.",
        {
            "step": "step of the state",
            "generation": _GENERATION,
            "error": "why the save failed",
            "newest": "step of the newest good checkpoint, or null",
            "pause_s": "seconds until the next try",
        },
    ),
    "tagged": EventSpec(
        "This node has made tags name a step that was saved before, or could not.",
        {
            "step": "step of the checkpoint",
            "generation": _GENERATION,
            "tags": "the tags",
            "error": "why they do not name the step; null if they do",
        },
    ),
    "prepares": EventSpec(
        "The agent has its workers prepare for a generation that they may enter without a stop.",
        {
            "generation": "number of that generation",
            "leavers": "names of the nodes without which the others go on",
        },
    ),
    "withdrawn": EventSpec(
        "The workers are to forget that generation; the change stops their loops.",
        {"reason": "why"},
    ),
    "switched": EventSpec(
        "A worker has entered the next generation inside its loop. `world` follows.",
        {
            "generation": "number of that generation",
            "rank": "rank of the worker in it",
            "step": "boundary at which all ranks entered it",
            "seconds": "seconds for which training waited",
        },
    ),
    "stopping": EventSpec(
        "A worker has left its training loop because its generation ends.",
        {
            "rank": _RANK,
            "step": "last step of the worker",
            "clean": "whether its state is whole and can be saved",
            "complete": "whether this worker alone holds the whole state",
            "reason": "why it stops",
            "switched": "token of the generation that the others have entered without this worker; "
            "empty: none",
        },
    ),
    "failed": EventSpec(
        "An exception has left the training function of a worker.",
        {
            "rank": _RANK,
            "step": "last step of the worker",
            "blame": "`user`, `peer`, `checkpoint`, `storage`, `environment`, `memory`, "
            "`rollback` or `killed`",
            "message": "the error in one line",
            "traceback": "its traceback",
            "final": "whether the same input would fail in the same way again",
            "bad_step": "step of a damaged checkpoint, or null",
            "odd": "whether this rank's state differs from that of a majority",
            "verified": "newest step at which all ranks had the same state, or null",
            "micro_batch": "samples of the next micro-batches where memory was short, or null",
            "left_out": "the global batch that a rollback leaves out from now on, or null",
        },
    ),
    "ended": EventSpec(
        "A worker's process has ended.",
        {
            "rank": _RANK,
            "pid": "its process id",
            "code": "its exit code; below 0, the negative number of the signal that ended it",
        },
    ),
    "outlasted": EventSpec(
        "Workers of this node have finished, and other workers of the job still run.",
        {"ranks": "ranks that have finished"},
    ),
    "stuck_at_exit": EventSpec(
        "A worker's script has ended and its process has not, so the agent kills it.",
        {"rank": _RANK, "exit_code": "exit code of the script, which counts"},
    ),
    "store_trouble": EventSpec(
        "A request to etcd has failed; the agent tries again.", {"message": "the error"}
    ),
    "store_recovery": EventSpec(
        "etcd has lost its data, or an agent has written to it again what it had lost.",
        {"message": "what happened"},
    ),
    "loop_error": EventSpec(
        "An unexpected error has ended a turn of the agent's loop, or one of the machine that may "
        "pass, such as too many open files.",
        {
            "message": "the error",
            "failures": "turns that have failed by an unexpected error so far; 0: it may pass",
        },
    ),
    "events_lost": EventSpec(
        "Events could not be written before this one, as on a full disk.",
        {"count": "how many", "error": "why the last of them could not be written"},
    ),
    "exit": EventSpec(
        "The agent ends; only `error` may follow.",
        {
            "code": "exit code of the agent, or null",
            "outcome": "`finished`, `stopped` or `failed`; null if the job goes on",
            "reason": "why the job ended",
            "end_reason": "why the script ended training early, by `session.stop`; or empty",
            "seconds": "where the job's time has gone, by class; null if this agent has not seen "
            "all of it",
        },
    ),
    "error": EventSpec(
        "The agent ends with an error, which it also prints.",
        {
            "message": "the error",
            "details": "further lines that the agent prints after it; or empty",
            "traceback": "the worker's traceback, if it helps; or empty",
        },
    ),
}
"""Events in the order in which they usually appear."""
