"""Shows what a job is doing, from the store and from the status that its agents serve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.cli.control import open_job_store, read_job
from elasticzero.launcher.cli.job_access import OperatorCredentials, access_for_operator
from elasticzero.launcher.cli.rounds_status import read_rounds, rounds_json, rounds_text
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import query_agents
from elasticzero.launcher.observability.job_status import Job, collect_status, page_address
from elasticzero.launcher.protocol.documents import Report
from elasticzero.launcher.protocol.failure_policy import AGAIN
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.job_token import HOW
from elasticzero.launcher.store.watch_cache import WORLD, reports_of
from elasticzero.serialization import RecordError
from elasticzero.text import (
    count_text,
    duration_text,
    list_text,
    print_error,
    print_result,
    table_text,
)

UNKNOWN = "?"
NAMES_SHOWN = 8


def status(
    name: str,
    endpoints: Sequence[str],
    access: Access,
    operator: OperatorCredentials,
    *,
    as_json: bool,
) -> ExitCode:
    """Prints what the job does now.

    Args:
        name: The job's name.
        endpoints: Members of etcd.
        access: TLS and user for etcd.
        operator: What the operator has given to read the job with.
        as_json: Whether to print JSON in place of lines for people.

    Raises:
        UserError: etcd has no such job.
    """
    with open_job_store(name, endpoints, access) as store:
        read = read_rounds(store)
        if read is not None and (read[1] or WORLD not in store.read(WORLD).entries):
            text = json.dumps(rounds_json(name, *read), indent=2) if as_json else None
            print_result(text or rounds_text(name, *read))
            return ExitCode.DONE
        job, phases, agents = read_stored_job(store, name, operator)
    for line in job.unreadable:
        print_error(line)
    if agents is None and job.done is None:
        print_error(f"the status of the nodes needs the job's token: give {HOW}")
    statuses = (
        query_agents(job.members.values(), agents)
        if job.done is None and agents is not None
        else {}
    )
    job_status = collect_status(job, phases, statuses)
    print_result(json.dumps(job_status, indent=2) if as_json else status_text(job_status))
    return ExitCode.DONE


def read_stored_job(
    store: Store, name: str, operator: OperatorCredentials
) -> tuple[Job, dict[str, str], AgentAccess | None]:
    """Reads a job, with what only its store has.

    Args:
        store: The job's store.
        name: The job's name.
        operator: What the operator has given to read the job with.

    Returns:
        The job, the phase that each member has reported, and how its agents are reached; None: the
        job's token is not known.

    Raises:
        UserError: etcd has no such job, or what the operator has given is not right.
    """
    job = read_job(store, name)
    access = access_for_operator(store, name, operator)
    reports = store.read(reports_of(job.world.generation)).entries if job.world is not None else {}
    phases = {}
    for key, entry in reports.items():
        with suppress(RecordError):  # an odd report counts as none
            phases[key.rpartition("/")[2]] = str(document(Report, entry.value).phase)
    return replace(job, scheme=access.scheme), phases, access.agents


def print_page_address(
    name: str, endpoints: Sequence[str], access: Access, operator: OperatorCredentials
) -> ExitCode:
    """Prints the address of the job's status page with the token in its fragment.

    Args:
        name: The job's name.
        endpoints: Members of etcd.
        access: TLS and user for etcd.
        operator: What the operator has given to read the job with.

    Raises:
        UserError: The job has ended, has no node, or its token is not known.
    """
    with open_job_store(name, endpoints, access) as store:
        job, _, agents = read_stored_job(store, name, operator)
    if job.leader is None:
        why = f"has ended: {job.done.reason}" if job.done is not None else "has no node now"
        raise UserError(f"job {name!r} {why}; agents serve the status page while they run")
    if agents is None:
        raise UserError(f"the status page needs the job's token, which etcd does not hold: {HOW}")
    print_result(page_address(job.leader, agents.token, scheme=job.scheme))
    return ExitCode.DONE


def status_text(job_status: Mapping[str, Any]) -> str:
    """Returns the status of the job as lines for people."""
    lines = [_headline(job_status), *_progress(job_status), *_networks(job_status["nodes"])]
    lines += _operator_requests(job_status)
    if job_status["done"] is not None:
        lines.append(f"{job_status['done']['outcome']}: {job_status['done']['reason']}")
    head = ("NODE", "ROLE", "RANKS", "STATE", "STEP", "LAST STEP", "UP", "ADDRESS")
    lines.append(table_text(head, [_row(node) for node in job_status["nodes"]]).rstrip("\n"))
    lines += [
        f"{node['node']} is set aside: {node['set_aside_for']}"
        for node in job_status["nodes"]
        if node["state"] == "set aside" and node["set_aside_for"] not in (None, AGAIN)
    ]
    if job_status["page"] is not None:
        lines.append(f"status page: {job_status['page']} (--url prints it with the token)")
    return "\n".join(lines)


def _headline(job_status: Mapping[str, Any]) -> str:
    size = job_status["world_size"]
    if not job_status["generation"]:
        return f"job {job_status['job']}: no generation yet: {job_status['reason']}"
    limits = job_status["nnodes"]
    of = f" ({limits[0]}:{limits[1]})" if limits else ""
    nodes = sum(node["role"] != "spare" for node in job_status["nodes"])
    age_s = job_status["generation_age_s"]
    began = f"began {duration_text(age_s)} ago" if age_s is not None else "began"
    at = "" if job_status["plain"] else f" at step {job_status['resume_step']}"
    return (
        f"job {job_status['job']}: generation {job_status['generation']}, "
        f"{count_text(size, 'rank')} on {count_text(nodes, 'node')}{of}, {began}{at}: "
        f"{job_status['reason']}"
    )


def _progress(job_status: Mapping[str, Any]) -> list[str]:
    """Returns a line on the progress of training, if an agent reports any."""
    step = job_status["step"]
    if job_status["plain"]:
        return ["no worker has called elasticzero.run: the script's steps are not seen"]
    if step is None:
        return []
    total, speed = job_status["total_steps"], job_status["steps_per_s"]
    goodput = job_status["goodput"]
    parts = [f"step {step}{f' of {total}' if total else ''}"]
    if speed is not None:
        parts.append(f"{speed:.3g} steps/s")
        if total:
            parts.append(f"{duration_text(max(0, total - step) / speed)} to go")
    if goodput is not None:
        parts.append(f"goodput {goodput:.1%}")
    if job_status["loss"] is not None:
        parts.append(f"loss {job_status['loss']:.4g}")
    if job_status["checkpoint_step"] is not None:
        parts.append(f"last checkpoint of step {job_status['checkpoint_step']}")
    return [", ".join(parts), *_time(job_status["seconds"] or {})]


def _time(seconds: Mapping[str, float]) -> list[str]:
    """Returns a line on where the job's time has gone, the largest part first."""
    whole_s = sum(seconds.values())
    if not isfinite(whole_s):
        return []
    parts = sorted(((s / whole_s, kind) for kind, s in seconds.items() if s > 0), reverse=True)
    shown = [f"{share:.1%} {kind.replace('_', ' ')}" for share, kind in parts if share >= 0.001]
    return [f"time {duration_text(whole_s)}: {', '.join(shown)}"] if shown else []


def _networks(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line on the network that NCCL takes between the nodes, if any node knows it."""
    by_network: dict[str, list[str]] = {}
    for node in nodes:
        if node["network"]:
            by_network.setdefault(node["network"], []).append(node["node"])
    if len(by_network) == 1:
        return [f"network between nodes: {next(iter(by_network))}"]
    parts = [f"{text} on {list_text(names, NAMES_SHOWN)}" for text, names in by_network.items()]
    return [f"network between nodes: {'; '.join(parts)}"] if parts else []


def _operator_requests(job_status: Mapping[str, Any]) -> list[str]:
    """Returns a line on what operators have requested, if anything."""
    control = job_status["control"]
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
