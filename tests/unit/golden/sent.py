"""Makes what is sent: messages between agent and workers, numbers between ranks, and the JSON that
agents serve over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import HashStore

from elasticzero.checkpoint.storage.signed_requests import Credentials, SignedRequest
from elasticzero.comm.barriers import Call, marks
from elasticzero.comm.control import CONTROL_FLAGS, ControlWord, encode_word
from elasticzero.comm.control_tree import MaxTree, _proof, join
from elasticzero.comm.node_agreement import NodeAgreement
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.ipc.assignment import Assignment, WorkerSettings, torchrun_environment
from elasticzero.ipc.channel import Channel
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Logged, Message, Stepped
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.status import Latest, agent_status
from elasticzero.launcher.goodput import TimeSpent
from elasticzero.launcher.observability.job_status import (
    collect_status,
    job_in_view,
    phases_in_view,
)
from elasticzero.launcher.protocol.documents import Control, Done, Drain, Member, Report, World
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import GroupStage, View, WorkerGroupState
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.ops.dashboard.history import JobHistory
from elasticzero.ops.dashboard.service import job_document
from elasticzero.ops.trackers.node_scalars import NodeScalars
from elasticzero.options.settings import TrainingSettings
from elasticzero.security.proofs import run_secret
from elasticzero.serialization import encode
from tests.unit.golden.records import full, full_and_least, least, line

MESSAGES: tuple[type[Any], ...] = Message.__args__
PLACES: tuple[Literal["above", "below"], ...] = ("above", "below")
NOW_S = 1000.0
"""Time at which all clocks stand."""


CHOSEN: Mapping[type[Any], Mapping[str, Any]] = {Failed: {"blame": "killed"}}
"""Values that the types of the fields of a message do not tell: no worker sends all of `Blame`."""


def messages() -> dict[str, str]:
    """Returns each message between agent and worker as its channel sends it, and the variables that
    a worker gets with its assignment."""
    made: dict[str, str] = {}
    for kind in MESSAGES:
        made |= full_and_least(kind.__name__, kind, _on_the_wire, **CHOSEN.get(kind, {}))
    made |= full_and_least("launch", Launch, lambda launch: json.dumps(encode(launch)).encode())
    settings = full(WorkerSettings, devices=("4", "5"))
    for name, assignment in {
        "full": full(Assignment, local_rank=1, settings=settings),
        "least": least(Assignment),
    }.items():
        for variable, value in torchrun_environment(assignment).items():
            made[f"environment {name} {variable}"] = value
    return made


def _on_the_wire(message: Message) -> bytes:
    ours, there = socket.socketpair()
    with ours, there:
        Channel(ours).send(message)
        return there.recv(1 << 16)


def numbers(folder: Path) -> dict[str, str]:
    """Returns what ranks send each other up and down the control tree, and what the ranks of a node
    write down of a step."""
    control_words = {
        "least": ControlWord(),
        "full": full(ControlWord, flags=sum(CONTROL_FLAGS), asks=False),
        "asks": full(ControlWord, flags=CONTROL_FLAGS[0]),
    }
    made = {
        f"word {name}": json.dumps(encode_word(word, 3)) for name, word in control_words.items()
    }
    made |= {f"flag {number}": str(flag) for number, flag in enumerate(CONTROL_FLAGS)}
    made |= {f"marks {call.name}": json.dumps(marks(call, 3)) for call in Call}
    ours, there = socket.socketpair()
    with there:
        tree = MaxTree(ours, ())
        tree.submit(encode_word(control_words["full"], 3))
        made["tree message"] = line(there.recv(1 << 10))
        tree.close()
    made["tree hello"] = line(_hello())
    proving = RankInfo(rank=1, world_size=2, token="token", password="password")
    nonces = (bytes(32), bytes(range(32)))
    made |= {
        f"tree proof {place}": line(_proof(proving, place, (1, 0), nonces).hex().encode())
        for place in PLACES
    }
    signed = SignedRequest(method="GET", target="/x?y=1", byte_range="bytes=0-9", run="2")
    secret = run_secret("token", 2)
    credentials = Credentials("0" * 64, 3, signed.prove(secret, "0" * 64, 3))
    made["signed request"] = credentials.header()
    agreement = NodeAgreement(folder, "token")
    agreement.begin()
    agreement.offer(torch.tensor([1.5, -2.0], dtype=torch.float64))
    agreement.commit()
    agreement.close()
    [path] = folder.iterdir()
    made[f"agreement {path.name}"] = line(path.read_bytes())
    return made


def _hello() -> bytes:
    """Returns the first bytes that rank 1 sends to rank 0, above it in the tree."""
    info = full(RankInfo, rank=1, world_size=2, token="token", password="password")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = HashStore()
        store.set(f"{info.token}/tree/0", f"127.0.0.1 {listener.getsockname()[1]}")
        tree = join(info, store)
        connection, _ = listener.accept()
        with connection:
            received = connection.recv(1 << 10)
        tree.close()
    return received


def member(name: str, zone: str = "") -> Member:
    return Member(name, f"i-{name}", f"10.0.0.{ord(name)}", 9400, 29500, 2, zone)


A, B, C = (member(name) for name in "abc")
JOB_WORLD = full(
    World,
    generation=3,
    members=(A, B),
    time_spent=TimeSpent(until=NOW_S, seconds={"productive": 6.0, "idle": 2.0}, steps=((5, 6.0),)),
)
JOB_VIEW = View(
    me=A,
    members={m.node: m for m in (A, B, C)},
    world=JOB_WORLD,
    reports={m.node: Report(incarnation=m.incarnation, phase="restored") for m in (A, B)},
    control=Control(drain=(Drain(node="b", incarnation="i-b"),), nnodes=(1, 4)),
    workers=WorkerGroupState(generation=3, running=2, step=7, stage=GroupStage.RESTORED),
)
"""What the leader of a job of two nodes and a spare sees."""


def agent_options(folder: Path) -> AgentOptions:
    launch = Launch(
        target="t.py", is_module=False, arguments=(), environment={}, directory=str(folder)
    )
    return AgentOptions(
        job="job",
        node="a",
        policy=JobPolicy(min_nodes=1, max_nodes=2),
        nproc=2,
        launch=launch,
        log_dir=folder / "a",
        snapshot_dir=folder,
        training=TrainingSettings(checkpoint_dir=str(folder), checkpoint_every=50),
        flops_per_sample=1e9,
        peak_flops=1e12,
    )


def http(folder: Path) -> dict[str, str]:
    """Returns the documents of the agents' servers. The clocks stand at `NOW_S`."""
    latest = Latest(began_s=NOW_S - 60.0)
    made = {
        "/status least": json.dumps(
            agent_status(agent_options(folder), None, latest, leaving=False)
        )
    }
    latest.starting(NOW_S - 30.0)
    latest.reason, latest.seconds = "training", {"productive": 3.0, "idle": 1.0}
    for step in range(1, 5):
        stepped = full(Stepped, step=step, at_s=NOW_S - 5 + step, samples=8)
        latest.received(0, stepped)
        latest.received(1, replace(stepped, compute_s=0.5))
    latest.received(0, Logged(step=4, scalars={"loss": 1.5}))
    latest.snapshot_held(3)
    latest.saved(2)
    status = agent_status(agent_options(folder), JOB_VIEW, latest, leaving=True)
    made["/status full"] = json.dumps(status)
    done = full(Done)
    for name, view in {
        "none": None,
        "full": JOB_VIEW,
        "follower": replace(JOB_VIEW, me=B, members=None, reports=None),
        "done": replace(JOB_VIEW, done=done),
    }.items():
        statuses = {"a": status} if view is not None else {}
        job_status = collect_status(job_in_view("job", view), phases_in_view(view), statuses)
        document = job_document(
            job_status, _history(), at=NOW_S, node="a", leads=view is JOB_VIEW, doing="training"
        )
        made[f"/job {name}"] = json.dumps(document)
    made["/scalars"] = json.dumps(_scalars())
    return made


def _history() -> dict[str, Any]:
    """Returns what an agent remembers of a generation with a step, a save and an end."""
    history = JobHistory("a")
    world = {
        "members": ["a", "b"],
        "world_size": 2,
        "resume_step": 5,
        "tier": "ram",
        "reason": "node-2 is lost",
        "bad_steps": [],
        "skipped": None,
    }
    events: list[dict[str, Any]] = [
        {"event": "world", "generation": 1, **world},
        {"event": "start", "ranks": [0, 1]},
        {"event": "step", "generation": 1, "step": 6},
        {"event": "log", "rank": 0, "step": 6, "loss": 1.25},
        {"event": "kept", "error": None, "step": 6},
        {"event": "saved", "error": None, "step": 6, "seconds": 0.5},
        {"event": "round", "kind": "failure", "reason": "rank 1 failed", "generation": 1},
    ]
    for at, event in enumerate(events):
        history.take({"time": NOW_S + at, **event})
    history.goodput(NOW_S, 0.5)
    return history.values()


def _scalars() -> dict[str, Any]:
    """Returns what a node's workers have logged, as the leader asks for it."""
    scalars = NodeScalars(lambda: NOW_S)
    scalars.begin(3, 5, (0, 1))
    for rank in (0, 1):
        scalars.received(rank, Logged(step=6, scalars={"loss": 1.5 + rank}))
        for step in (6, 7, 8):
            scalars.received(rank, full(Stepped, step=step))
    return scalars.answer(0)
