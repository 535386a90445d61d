"""Shows what a job is doing, from the store and from the status that its agents serve."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticzero.errors import ExitCode
from elasticzero.launcher.cli.control import Job, open_job_store, pending_drains, read_job
from elasticzero.launcher.http.status_client import query_agents
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.protocol.failure_policy import (
    AGAIN,
    QUARANTINE_STRIKES,
    quarantine_reason,
)
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.job_token import HOW, token_for_operator
from elasticzero.launcher.store.watch_cache import reports_of
from elasticzero.serialization import encode
from elasticzero.text import count_text, duration_text, print_result, table_text

UNKNOWN = "?"
AgentStatuses = Mapping[str, Mapping[str, Any]]
"""Status that each agent serves, by node; a silent agent is missing."""


def status(
    name: str, endpoints: Sequence[str], access: Access, given: Secret | None, *, as_json: bool
) -> ExitCode:
    """Prints what the job does now; raises `UserError` if etcd has no such job.

    given: the job's token, if the operator has it.
    """
    with open_job_store(name, endpoints, access) as store:
        job = read_job(store, name)
        token = token_for_operator(store, given)
        reports = (
            store.read(reports_of(job.world.generation)).entries if job.world is not None else {}
        )
    phases = {key.rpartition("/")[2]: json.loads(e.value)["phase"] for key, e in reports.items()}
    if token is None and job.done is None:
        print(f"the status of the nodes needs the job's token: give {HOW}", file=sys.stderr)
    statuses = (
        query_agents(job.members.values(), token) if job.done is None and token is not None else {}
    )
    found = collect_status(job, phases, statuses)
    print_result(json.dumps(found, indent=2) if as_json else status_text(found))
    return ExitCode.DONE


def collect_status(job: Job, phases: Mapping[str, str], statuses: AgentStatuses) -> dict[str, Any]:
    """Returns the status of the job as plain values, as --json prints it."""
    world, leader = job.world, _leader(job)
    here = [statuses[node] for node in job.members if node in statuses]
    words = statuses.get(leader or "", here[0] if here else {})
    placed = {member.node: index for index, member in enumerate(job.placed)}
    given = job.control.nnodes
    struck = {s.node: s.count for s in world.strikes} if world is not None else {}
    row = world.strikes if world is not None else ()
    aside = {s.node: quarantine_reason(row, s.node) for s in row if s.count >= QUARANTINE_STRIKES}
    nodes = []
    for node, member in job.nodes.items():
        own, index = statuses.get(node, {}), placed.get(node)
        nodes.append(
            {
                "node": node,
                "role": "spare" if index is None else "leader" if node == leader else "member",
                "address": member.address if node in job.members else None,
                "ranks": _ranks(job, index),
                "state": _state(job, member, phases.get(node), struck.get(node, 0), own),
                "strikes": struck.get(node, 0),
                "set_aside_s": words.get("set_aside_s", {}).get(node),
                "set_aside_for": aside.get(node),
                "step": own.get("step") if index is not None else None,
                "step_age_s": own.get("step_age_s") if index is not None else None,
                "up_s": own.get("up_s"),
                "silent": node in job.members and node not in statuses and job.done is None,
            }
        )
    return {
        "job": job.name,
        "generation": world.generation if world is not None else 0,
        "generation_age_s": words.get("generation_age_s"),
        "world_size": world.world_size if world is not None else 0,
        "nnodes": list(given) if given is not None else words.get("nnodes"),
        "resume_step": world.resume.step if world is not None else 0,
        "reason": world.reason if world is not None else "waiting for nodes",
        "leader": leader,
        "step": _greatest(here, "step"),
        "total_steps": words.get("total_steps"),
        "steps_per_s": words.get("steps_per_s"),
        "goodput": words.get("goodput"),
        "seconds": words.get("seconds"),
        "plain": bool((words.get("workers") or {}).get("plain")),
        "checkpoint_step": _greatest(here, "checkpoint_step"),
        "loss": words.get("loss"),
        "control": encode(replace(job.control, drain=pending_drains(job))),
        "nodes": nodes,
        "done": encode(job.done) if job.done is not None else None,
    }


def _greatest(found: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return max((own[key] for own in found if own.get(key) is not None), default=None)


def _leader(job: Job) -> str | None:
    """Returns the node that leads the job, as far as the store shows it."""
    if job.done is not None:
        return None
    candidates = [m.node for m in job.placed if m.node in job.members] or list(job.members)
    return candidates[0] if candidates else None


def _ranks(job: Job, index: int | None) -> str:
    if index is None or job.world is None:
        return "-"
    ranks = job.world.ranks(index)
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _state(
    job: Job, member: Member, phase: str | None, strikes: int, own: Mapping[str, Any]
) -> str:
    if job.done is not None:
        return job.done.outcome
    if member.node not in job.members:
        return "gone"
    if job.control.drains(member) or own.get("leaving"):
        return "leaving"
    if job.world is None or job.world.find(member.node, member.incarnation) is None:
        return "set aside" if strikes >= QUARANTINE_STRIKES else "waiting"
    if job.control.stop:
        return "stopping"
    return {"restored": "training", "alive": "stopping", None: "starting"}.get(phase, str(phase))


def status_text(found: Mapping[str, Any]) -> str:
    """Returns the status of the job as lines for people."""
    lines = [_headline(found), *_progress(found), *_operator_requests(found)]
    if found["done"] is not None:
        lines.append(f"{found['done']['outcome']}: {found['done']['reason']}")
    head = ("NODE", "ROLE", "RANKS", "STATE", "STEP", "LAST STEP", "UP", "ADDRESS")
    lines.append(table_text(head, [_row(node) for node in found["nodes"]]).rstrip("\n"))
    lines += [
        f"{node['node']} is set aside: {node['set_aside_for']}"
        for node in found["nodes"]
        if node["state"] == "set aside" and node["set_aside_for"] not in (None, AGAIN)
    ]
    return "\n".join(lines)


def _headline(found: Mapping[str, Any]) -> str:
    size = found["world_size"]
    if not found["generation"]:
        return f"job {found['job']}: no generation yet: {found['reason']}"
    limits = found["nnodes"]
    of = f" ({limits[0]}:{limits[1]})" if limits else ""
    nodes = sum(node["role"] != "spare" for node in found["nodes"])
    age_s = found["generation_age_s"]
    began = f"began {duration_text(age_s)} ago" if age_s is not None else "began"
    at = "" if found["plain"] else f" at step {found['resume_step']}"
    return (
        f"job {found['job']}: generation {found['generation']}, {count_text(size, 'rank')} on "
        f"{count_text(nodes, 'node')}{of}, {began}{at}: "
        f"{found['reason']}"
    )


def _progress(found: Mapping[str, Any]) -> list[str]:
    """Returns a line on the progress of training, if an agent reports any."""
    step = found["step"]
    if found["plain"]:
        return ["no worker has called elasticzero.run: the script's steps are not seen"]
    if step is None:
        return []
    total, speed, goodput = found["total_steps"], found["steps_per_s"], found["goodput"]
    parts = [f"step {step}{f' of {total}' if total else ''}"]
    if speed is not None:
        parts.append(f"{speed:.3g} steps/s")
        if total:
            parts.append(f"{duration_text(max(0, total - step) / speed)} to go")
    if goodput is not None:
        parts.append(f"goodput {goodput:.1%}")
    if found["loss"] is not None:
        parts.append(f"loss {found['loss']:.4g}")
    if found["checkpoint_step"] is not None:
        parts.append(f"last checkpoint of step {found['checkpoint_step']}")
    return [", ".join(parts), *_time(found["seconds"] or {})]


def _time(seconds: Mapping[str, float]) -> list[str]:
    """Returns a line on where the job's time has gone, the largest part first."""
    whole_s = sum(seconds.values())
    parts = sorted(((s / whole_s, kind) for kind, s in seconds.items() if s > 0), reverse=True)
    shown = [f"{share:.1%} {kind.replace('_', ' ')}" for share, kind in parts if share >= 0.001]
    return [f"time {duration_text(whole_s)}: {', '.join(shown)}"] if shown else []


def _operator_requests(found: Mapping[str, Any]) -> list[str]:
    """Returns a line on what operators have requested, if anything."""
    control = found["control"]
    parts = [f"drain {drain['node']}" for drain in control["drain"]]
    if control["nnodes"]:
        parts.append("scale {}:{}".format(*control["nnodes"]))
    if control["stop"]:
        parts.append("stop")
    return [f"requested by operators: {', '.join(parts)}"] if parts else []


def _row(node: Mapping[str, Any]) -> tuple[str, ...]:
    silent = UNKNOWN if node["silent"] else "-"
    step, age_s, up_s, aside_s = (node[k] for k in ("step", "step_age_s", "up_s", "set_aside_s"))
    state = node["state"]
    if state == "set aside":
        often = node["set_aside_for"] in (None, AGAIN)
        state += f" after {node['strikes']} failures" if often else ""
        state += f", {duration_text(aside_s)} more" if aside_s is not None else ""
    return (
        node["node"],
        node["role"],
        node["ranks"],
        state,
        silent if step is None else str(step),
        silent if age_s is None else f"{duration_text(age_s)} ago",
        silent if up_s is None else duration_text(up_s),
        node["address"] or "-",
    )
