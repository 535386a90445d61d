"""Makes the status of a whole job, of the documents in the store and what agents serve. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any
from urllib.parse import quote

from elasticzero.launcher.observability.compute_time import compute_ratios, worker_times
from elasticzero.launcher.protocol.documents import Control, Done, Drain, Member, World
from elasticzero.launcher.protocol.failure_policy import QUARANTINE_STRIKES, quarantine_reason
from elasticzero.launcher.protocol.placement import build_of, fits, unlike
from elasticzero.launcher.protocol.rounds.summary import RoundsSummary
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.secrets import Secret
from elasticzero.serialization import RecordError, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """Lists what is read of an agent's status, as `agent_status` makes it."""

    generation: int = 0
    generation_age_s: float | None = None
    nnodes: tuple[int, int] | None = None
    total_steps: int | None = None
    steps_per_s: float | None = None
    goodput: float | None = None
    seconds: Mapping[str, float] | None = None
    compute_s: Mapping[str, float] | None = None
    workers: Mapping[str, Any] | None = None
    loss: float | None = None
    leaving: bool = False
    set_aside_s: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    step_age_s: float | None = None
    checkpoint_step: int | None = None
    network: str | None = None
    up_s: float | None = None
    rounds: RoundsSummary | None = None


AgentStatuses = Mapping[str, Mapping[str, Any]]
"""Status that each agent serves, by node; a silent agent is missing."""
UNKNOWN_PHASE = "?"
"""Phase of a member whose reports are not known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Holds a job as the store shows it at one time."""

    name: str
    members: Mapping[str, Member]
    """Registrations, oldest first."""
    world: World | None
    done: Done | None
    control: Control
    control_revision: int
    unreadable_done_revision: int = 0
    """Revision of what the store holds at `done` if that cannot be read, so that the job counts as
    going on; 0: no such thing is there."""
    unreadable: tuple[str, ...] = ()
    """A line on each document that cannot be read."""
    scheme: str = "http"
    """Scheme of what its agents serve: http, or https."""

    @property
    def placed(self) -> Sequence[Member]:
        return self.world.members if self.world is not None else ()

    @property
    def waiting(self) -> list[str]:
        """Returns the registered nodes that are not members of the world."""
        world = self.world
        return [n for n, m in self.members.items() if world is None or not world.names(m)]

    @property
    def nodes(self) -> dict[str, Member]:
        """Returns every node of the job by name, members of the world first.

        A registration that exists replaces the member of the same name, whose own may have lapsed.
        """
        return {member.node: member for member in self.placed} | dict(self.members)

    @property
    def leader(self) -> Member | None:
        """Returns the node that leads the job, as far as the store shows it."""
        if self.done is not None:
            return None
        registered = [m for m in self.placed if m.node in self.members]
        return next(iter(registered or self.members.values()), None)


def page_address(member: Member, token: Secret | None = None, *, scheme: str = "http") -> str:
    """Returns the address of the status page that a node's agent serves.

    Args:
        member: The agent's registration.
        token: The job's token, which comes after the address as its fragment; browsers send none to
            servers.
        scheme: Scheme of what the job's agents serve.
    """
    fragment = f"#token={quote(token.reveal, safe='')}" if token is not None else ""
    return f"{scheme}://{member.address}/{fragment}"


def pending_drains(job: Job) -> tuple[Drain, ...]:
    """Returns the drains of nodes that have not left yet."""
    present = {(m.node, m.incarnation) for m in (*job.placed, *job.members.values())}
    return tuple(d for d in job.control.drain if (d.node, d.incarnation) in present)


def job_in_view(name: str, view: View | None) -> Job:
    """Returns the job as one agent sees it; registrations that it does not watch count as there."""
    if view is None:
        none: Mapping[str, Member] = {}
        return Job(
            name=name, members=none, world=None, done=None, control=Control(), control_revision=0
        )
    placed = view.world.members if view.world is not None else ()
    members = view.members
    if members is None:
        members = {m.node: m for m in placed} | {view.me.node: view.me}
    return Job(
        name=name,
        members=members,
        world=view.world,
        done=view.done,
        control=view.control,
        control_revision=0,
    )


def phases_in_view(view: View | None) -> dict[str, str]:
    """Returns the phase that each member has reported in this generation, as one agent sees it."""
    if view is None or view.world is None:
        return {}
    if view.reports is not None:
        return {node: report.phase for node, report in view.reports.items()}
    phases = dict.fromkeys(view.world.nodes, UNKNOWN_PHASE)
    if view.my_report is not None:
        phases[view.me.node] = view.my_report.phase
    return phases


def collect_status(job: Job, phases: Mapping[str, str], statuses: AgentStatuses) -> dict[str, Any]:
    """Returns the status of the job as plain values, as `elasticzero status --json` prints it.

    Args:
        job: What the store has of the job.
        phases: The phase that each member has reported, by node.
        statuses: The answers of the agents, by node. One of another form counts as silence.
    """
    statuses = {node: status for node, status in statuses.items() if _is_status(status)}
    world, leader = job.world, job.leader
    leader_node = leader.node if leader is not None else None
    member_statuses = [statuses[node] for node in job.members if node in statuses]
    leader_status = statuses.get(leader_node or "", member_statuses[0] if member_statuses else {})
    requested = job.control.nnodes
    nodes = _nodes(job, leader_node, phases, statuses, leader_status)
    return {
        "job": job.name,
        "state": _job_state(job, [n["state"] for n in nodes if n["role"] != "spare"]),
        "generation": world.generation if world is not None else 0,
        "generation_age_s": leader_status.get("generation_age_s"),
        "world_size": world.world_size if world is not None else 0,
        "nnodes": list(requested) if requested is not None else leader_status.get("nnodes"),
        "resume_step": world.resume.step if world is not None else 0,
        "reason": world.reason if world is not None else "waiting for nodes",
        "leader": leader_node,
        "page": page_address(leader, scheme=job.scheme) if leader is not None else None,
        "step": _greatest(member_statuses, "step"),
        "total_steps": leader_status.get("total_steps"),
        "steps_per_s": leader_status.get("steps_per_s"),
        "goodput": leader_status.get("goodput"),
        "seconds": leader_status.get("seconds"),
        "plain": bool((leader_status.get("workers") or {}).get("plain")),
        "checkpoint_step": _greatest(member_statuses, "checkpoint_step"),
        "loss": leader_status.get("loss"),
        "rounds": leader_status.get("rounds"),
        "control": encode(replace(job.control, drain=pending_drains(job))),
        "nodes": nodes,
        "done": encode(job.done, complete=True) if job.done is not None else None,
    }


def _is_status(status: Mapping[str, Any]) -> bool:
    """Returns whether an agent's answer has the form that is read here: another release, or none of
    our agents, may have sent it."""
    try:
        read = decode(AgentStatus, status)
    except RecordError:
        return False
    times_s = (read.steps_per_s, read.step_age_s, read.generation_age_s, read.up_s, read.goodput)
    mappings = (read.compute_s or {}, read.set_aside_s)
    values = [*times_s, *(value for mapping in mappings for value in mapping.values())]
    return all(value is None or isfinite(value) for value in values)


def _nodes(
    job: Job,
    leader: str | None,
    phases: Mapping[str, str],
    statuses: AgentStatuses,
    leader_status: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns a row for each node.

    `compute_s` is the time in a step that the slowest worker of the node needs for itself, where
    its agent reports that time for each rank on the node. `compute_ratio` is its multiple of the
    median worker's time, for the slowest nodes.

    Args:
        job: What the store has of the job.
        leader: The leader's node; None: there is none.
        phases: The phase that each member has reported, by node.
        statuses: The answers of the agents, by node.
        leader_status: The answer of the leader's agent.
    """
    placed = {member.node: index for index, member in enumerate(job.placed)}
    row = job.world.strikes if job.world is not None else ()
    struck = {s.node: s.count for s in row}
    aside = {s.node: quarantine_reason(row, s.node) for s in row if s.count >= QUARANTINE_STRIKES}
    aside |= _odd_builds(job)
    members = {node: status for node, status in statuses.items() if node in placed}
    ratios = _slowest_ratios(job.world.generation, members) if job.world is not None else {}
    nodes = []
    for node, member in job.nodes.items():
        status, index = statuses.get(node, {}), placed.get(node)
        training = status if index is not None else {}
        speed = training.get("steps_per_s")
        nodes.append(
            {
                "node": node,
                "role": "spare" if index is None else "leader" if node == leader else "member",
                "address": member.address if node in job.members else None,
                "ranks": _ranks(job, index),
                "state": _state(job, member, phases.get(node), node in aside, status),
                "strikes": struck.get(node, 0),
                "set_aside_s": leader_status.get("set_aside_s", {}).get(node),
                "set_aside_for": aside.get(node),
                "step": training.get("step"),
                "step_age_s": training.get("step_age_s"),
                "step_s": 1 / speed if speed else None,
                "compute_s": max((training.get("compute_s") or {}).values(), default=None),
                "compute_ratio": ratios.get(node),
                "up_s": status.get("up_s"),
                "network": training.get("network"),
                "silent": node in job.members and node not in statuses and job.done is None,
            }
        )
    return nodes


def _slowest_ratios(generation: int, statuses: AgentStatuses) -> dict[str, float]:
    """Returns the own time of the slowest worker of each of the slowest members, as a multiple of
    the median of all workers."""
    ratios: dict[str, float] = {}
    for (node, _), ratio in compute_ratios(worker_times(generation, statuses)).items():
        ratios[node] = max(ratio, ratios.get(node, 0.0))
    return ratios


def _job_state(job: Job, states: Sequence[str]) -> str:
    """Returns in a word what the job does.

    Args:
        job: What the store has of the job.
        states: States of the members of the world.
    """
    if job.done is not None:
        return job.done.outcome
    if job.world is None:
        return "waiting"
    if job.control.stop:
        return "stopping"
    if any(state in ("stopping", "stopped") for state in states):
        return "regrouping"
    if "starting" in states:
        return "starting"
    return next((s for s in ("training", "finished", "stalled") if s in states), UNKNOWN_PHASE)


def _greatest(statuses: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return max((status[key] for status in statuses if status.get(key) is not None), default=None)


def _ranks(job: Job, index: int | None) -> str:
    if index is None or job.world is None:
        return "-"
    ranks = job.world.ranks(index)
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _odd_builds(job: Job) -> dict[str, str]:
    """Returns the nodes that wait and have another build than the world, and why they are set
    aside, by node (L14)."""
    if job.world is None:
        return {}
    first = job.world.members[0]
    waiting = [job.members[node] for node in job.waiting]
    return {m.node: unlike(m, first) for m in waiting if not fits(m, build_of(first))}


def _state(
    job: Job, member: Member, phase: str | None, aside: bool, status: Mapping[str, Any]
) -> str:
    """Returns in words what a node does.

    Args:
        job: What the store has of the job.
        member: The node.
        phase: Phase that it has reported; None: it has not reported in this generation.
        aside: Whether it is set aside, if it is in no world.
        status: Answer of its agent.
    """
    if job.done is not None:
        return job.done.outcome
    if member.node not in job.members:
        return "gone"
    if job.control.drains(member) or status.get("leaving"):
        return "leaving"
    if job.world is None or job.world.find(member.node, member.incarnation) is None:
        return "set aside" if aside else "waiting"
    if job.control.stop:
        return "stopping"
    return {"restored": "training", "alive": "stopping", None: "starting"}.get(phase, str(phase))
