"""What an operator asks of a running job, and is told of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from elasticzero.errors import ExitCode, StoreUnavailable, UserError
from elasticzero.launcher.etcd import EtcdStore
from elasticzero.launcher.observe import DONE, MEMBERS, WORLD, members_of, reports_of
from elasticzero.launcher.store import Store, job_prefix
from elasticzero.launcher.world import world_from_bytes


def status(job: str, endpoints: Sequence[str], *, as_json: bool) -> ExitCode:
    """Print what the job does now; raises `UserError` when etcd knows no such job."""
    store = EtcdStore(endpoints, job_prefix(job))
    try:
        found = _look(store)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"etcd at {','.join(endpoints)} does not answer: {error}") from None
    finally:
        store.close()
    if not found["nodes"] and found["generation"] == 0 and found["done"] is None:
        raise UserError(f"etcd at {','.join(endpoints)} knows no job {job!r}; check --job")
    print(json.dumps(found, indent=2) if as_json else _table(job, found))
    return ExitCode.DONE


def _look(store: Store) -> dict[str, Any]:
    members = members_of(store.read(MEMBERS))
    done = store.read(DONE).entries.get(DONE)
    entry = store.read(WORLD).entries.get(WORLD)
    world = world_from_bytes(entry.value) if entry is not None else None
    reports = store.read(reports_of(world.generation)).entries if world is not None else {}
    placed = {m.node: i for i, m in enumerate(world.members)} if world is not None else {}
    phases = {key.rpartition("/")[2]: json.loads(e.value)["phase"] for key, e in reports.items()}
    nodes = [
        {
            "node": node,
            "address": members[node].address if node in members else None,
            "ranks": _ranks(world, placed.get(node)),
            "state": "done"
            if done is not None
            else _state(node in members, node in placed, phases.get(node)),
        }
        for node in [*placed, *(name for name in members if name not in placed)]
    ]
    return {
        "generation": world.generation if world is not None else 0,
        "world_size": world.world_size if world is not None else 0,
        "resume_step": world.resume.step if world is not None else 0,
        "reason": world.reason if world is not None else "waiting for nodes",
        "nodes": nodes,
        "done": json.loads(done.value) if done is not None else None,
    }


def _ranks(world: Any, index: int | None) -> str:
    if index is None:
        return "-"
    first = world.first_rank(index)
    last = first + world.members[index].nproc - 1
    return str(first) if first == last else f"{first}-{last}"


def _state(registered: bool, placed: bool, phase: str | None) -> str:
    if not registered:
        return "gone"
    if not placed:
        return "waiting"
    return {"restored": "training", None: "starting"}.get(phase, str(phase))


def _table(job: str, found: dict[str, Any]) -> str:
    lines = [
        f"job {job}: generation {found['generation']}, {found['world_size']} "
        f"rank{'s' * (found['world_size'] != 1)}, began at step {found['resume_step']} "
        f"({found['reason']})"
    ]
    if found["done"] is not None:
        lines.append(f"done: {found['done']['reason']}")
    width = max([4, *(len(node["node"]) for node in found["nodes"])])
    lines.append(f"{'NODE':<{width}}  {'RANKS':<7}  {'STATE':<9}  ADDRESS")
    lines += [
        f"{n['node']:<{width}}  {n['ranks']:<7}  {n['state']:<9}  {n['address'] or '-'}"
        for n in found["nodes"]
    ]
    return "\n".join(lines)
