"""Says in sentences what happened in a run. Pure; texts, not markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from elasticzero.ops.report.model import ChangeKind, FaultSummary, RunSummary
from elasticzero.text import list_text, many_text, share_text, span_text

TIME_MEANINGS: Mapping[str, tuple[str, str]] = {
    "productive": ("productive", "steps that count"),
    "startup": ("start-up", "workers start, import and build the model"),
    "data_wait": ("waiting for data", "a step waits for its batch"),
    "snapshot": ("snapshots", "training waits while its state is copied to memory"),
    "checkpoint": ("checkpoints", "training waits while its state is saved"),
    "wasted": ("steps done again", "steps that were lost, and done again later"),
    "detect": ("detecting faults", "from the last step until the agents know of the fault"),
    "regroup": ("regrouping", "the agents agree on the next generation"),
    "connect": ("connecting", "the workers set up their process group"),
    "restore": ("restoring", "the workers load their state"),
    "idle": ("waiting for nodes", "fewer nodes than the minimum are there"),
    "parked": ("waiting for able nodes", "nodes are there, but too few may take part"),
}
"""Name and meaning of each class of time."""
PHASE_NAMES: Mapping[str, str] = {
    "detect": "detect",
    "regroup": "regroup",
    "start": "start",
    "connect": "connect",
    "build": "build",
    "restore": "restore",
    "first_step": "first step",
}
"""Name of each phase of a recovery."""
MOST_REASON = 300
"""Maximum number of characters of the agents' reason in the headline."""


def headline(summary: RunSummary) -> str:
    """Returns one sentence that says what happened in the run."""
    span = span_text(summary.wall_s)
    because = f" ({summary.reason[:MOST_REASON]})" if summary.reason else ""
    if not summary.generations:
        return f"{_who(summary)} was there for {span} without a generation{because}."
    if summary.outcome != "failed":
        because = ""
    parts = []
    if summary.goodput is not None:
        parts.append(f"goodput was {share_text(summary.goodput)}")
    parts.append(_survived(summary))
    if summary.plain:
        parts.append("the steps of its script are not seen")
    else:
        again = summary.steps_redone
        verb = "were" if again > 1 else "was"
        parts.append(f"{many_text(again, 'step') if again else 'no step'} {verb} done again")
    colon = ";" if summary.outcome in ("running", "failed") else ":"
    start = f"{_outcome_text(summary)} on {node_range(summary)}"
    return f"{start}{because}{colon} {_joined(parts)}."


def _who(summary: RunSummary) -> str:
    """Returns what the report is about, as the beginning of a sentence."""
    if summary.averaged is None:
        return f"Job {summary.job}"
    return f"Island {summary.averaged.shown} of job {summary.job}"


def _outcome_text(summary: RunSummary) -> str:
    """Returns how the run ended, after how many steps and how long."""
    who, span = _who(summary), span_text(summary.wall_s)
    steps = _steps_text(summary)
    after = f"after {span}" if summary.plain else f"after {steps} and {span}"
    match summary.outcome:
        case "finished":
            return f"{who} finished {'' if summary.plain else steps + ' '}in {span}"
        case "stopped":
            return f"{who} was stopped {after}"
        case "failed":
            return f"{who} failed {after}"
        case "running":
            made = "" if summary.plain else f"it has made {steps} "
            return f"{who} is running: {made}in {span}"
        case _:
            return f"The logs of job {summary.job} end before the job did, {after}"


def _steps_text(summary: RunSummary) -> str:
    """Returns how many steps were made, and of how many."""
    done, total = summary.final_step, summary.total_steps
    if total and done >= total:
        return f"all {many_text(total, 'step')}"
    return f"{done:,} of {many_text(total, 'step')}" if total else many_text(done, "step")


def node_range(summary: RunSummary) -> str:
    """Returns the least and the greatest number of nodes that took part at one time."""
    counts = [len(generation.members) for generation in summary.generations]
    least, most = min(counts), max(counts)
    return many_text(most, "node") if least == most else f"{least} to {many_text(most, 'node')}"


def _survived(summary: RunSummary) -> str:
    survived = summary.survived
    before = "it had survived" if summary.outcome == "failed" else "it survived"
    if not survived:
        return "no fault struck" if len(summary.faults) == 0 else f"{before} no fault before"
    return f"{before} {many_text(len(survived), 'fault')} ({fault_kinds(survived)})"


def fault_kinds(faults: Sequence[FaultSummary]) -> str:
    """Returns how many faults there were of each kind."""
    counts = Counter(fault.label for fault in faults)
    return list_text((f"{count} × {label}" for label, count in counts.most_common()), 4)


def _joined(parts: Sequence[str]) -> str:
    """Returns the parts of a sentence with `and` before the last."""
    if len(parts) < 3:
        return " and ".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"


def time_lead(summary: RunSummary) -> str:
    """Returns the lead of the section on time."""
    whole_s = summary.wall_s
    if summary.goodput is None:
        return f"No step that counts was made in {span_text(whole_s)}."
    productive_s = summary.seconds.get("productive", 0.0)
    rest = sorted(
        ((s, kind) for kind, s in summary.seconds.items() if kind != "productive" and s > 0),
        reverse=True,
    )[:3]
    parts = [f"{class_name(kind)} ({span_text(s)})" for s, kind in rest]
    most = f" Most of the rest went into {_joined(parts)}." if parts else ""
    return (
        f"Of {span_text(whole_s)}, {span_text(productive_s)} ({share_text(summary.goodput)}) went "
        f"into steps that count; this share is the goodput.{most}"
    )


def class_name(kind: str) -> str:
    """Returns the name of a class of time for people."""
    return TIME_MEANINGS.get(kind, (kind.replace("_", " "), ""))[0]


def recovery_lead(summary: RunSummary) -> str:
    """Returns the lead of the section on recoveries."""
    recoveries = summary.recoveries
    if not recoveries:
        return "Training was never interrupted, as far as the logs go."
    seconds = sorted(recovery.seconds for recovery in recoveries)
    longest = max(recoveries, key=lambda recovery: recovery.seconds)
    middle = seconds[len(seconds) // 2]
    if len(recoveries) == 1:
        return (
            f"Training was interrupted once, for {span_text(middle)}. Times count from the last "
            "step before to the end of the first step after."
        )
    return (
        f"Training was interrupted {len(recoveries):,} times, for {span_text(sum(seconds))} in all."
        f" Half of the times it took {span_text(middle)} or less; the longest took "
        f"{span_text(longest.seconds)} (generation {longest.generation}). Times count from the "
        "last step before to the end of the first step after."
    )


def story_lead(summary: RunSummary) -> str:
    """Returns the lead of the section on generations."""
    counts = Counter(generation.kind for generation in summary.generations)
    causes: Mapping[ChangeKind, str] = {
        "fault": "a fault",
        "left": "a node that left",
        "joined": "a node that joined",
        "planned": "a planned change",
    }
    after = [f"{counts[kind]:,} after {text}" for kind, text in causes.items() if counts[kind]]
    later = f": {_joined(after)}" if after else ""
    total = many_text(len(summary.generations), "generation")
    return (
        f"The run had {total}{later}. Within a generation the nodes and their ranks are fixed; a "
        "change of the nodes begins the next one."
    )


def checkpoint_lead(summary: RunSummary) -> str:
    """Returns the lead of the section on checkpoints and snapshots."""
    saved = [c for c in summary.checkpoints if c.committed]
    parts = []
    if saved:
        mean_s = sum(checkpoint.seconds for checkpoint in saved) / len(saved)
        parts.append(
            f"{many_text(len(saved), 'checkpoint')} reached storage, the last one of step "
            f"{saved[-1].step:,}; a save took {span_text(mean_s)} on average, while training went "
            "on."
        )
    else:
        parts.append("No checkpoint was seen to reach storage.")
    if summary.snapshots:
        one = max(summary.snapshots, key=lambda snapshot: snapshot.count)
        about = "about " if one.estimated else ""
        every = f", one every {many_text(one.every, 'step')}" if one.every else ""
        parts.append(
            f"{one.node} took {about}{many_text(one.count, 'snapshot')} into memory{every}; "
            f"training waited {span_text(one.mean_stall_s)} for each, "
            f"{span_text(one.longest_stall_s)} for the longest."
        )
    else:
        parts.append("No snapshot was taken.")
    return " ".join(parts)


def step_times_lead(summary: RunSummary) -> str:
    """Returns the lead of the section on the step times of nodes."""
    slow = [times.node for times in summary.step_times if times.is_slow]
    why = (
        "All nodes wait for the slowest at each step, so their step times differ little. A node "
        "whose own forwards and backwards take longer than the others', or that waits long for its "
        "data, holds them up."
    )
    if not slow:
        spread = max(abs(times.ratio - 1) for times in summary.step_times)
        return f"No node was slow: step times differ from their mean by {spread:.1%} at most. {why}"
    verb = "was" if len(slow) == 1 else "were"
    return f"{list_text(slow, 8)} {verb} slower than the others, or waited longer for data. {why}"
