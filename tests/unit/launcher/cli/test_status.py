"""What `elasticzero status` makes of what the store and the agents say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.cli.status import status_text
from elasticzero.launcher.observability.job_status import Job, collect_status
from elasticzero.launcher.protocol.documents import Control, Done, Drain, Member, NodeStrikes, World
from elasticzero.text import duration_text


def member(name: str, nproc: int = 2) -> Member:
    return Member(name, f"i-{name}", "10.0.0.1", 9400, 29500, nproc)


A, B, C, D = (member(name) for name in ("node-a", "node-b", "c", "d"))
WORLD = World(
    generation=3,
    token="secret",
    members=(A, B),
    strategy="ddp",
    resume=Resume(tier="ram", step=120, generation=2),
    reason="c left",
    strikes=(NodeStrikes(node="d", count=4),),
)
JOB = Job(
    name="my-run",
    members={m.node: m for m in (D, A, B, C)},
    world=WORLD,
    done=None,
    control=Control(),
    control_revision=0,
)
Statuses = dict[str, dict[str, Any]]

TRAINING: dict[str, Any] = {
    "step": 345,
    "total_steps": 1000,
    "steps_per_s": 2.5,
    "goodput": 0.972,
    "step_age_s": 0.24,
    "generation_age_s": 90.0,
    "up_s": 4000.0,
    "checkpoint_step": 300,
    "loss": 2.5,
    "nnodes": [1, 3],
    "set_aside_s": {"d": 45.0},
    "leaving": False,
}
WAITING: dict[str, Any] = {"step": 120, "step_age_s": 9.0, "up_s": 12.0, "leaving": False}
SAID: Statuses = {"node-a": TRAINING, "c": WAITING, "d": WAITING}
PHASES = {"node-a": "restored", "node-b": "restored"}


def lines(job: Job = JOB, statuses: Statuses = SAID, phases: dict[str, str] = PHASES) -> list[str]:
    return status_text(collect_status(job, phases, statuses)).splitlines()


def test_a_job_at_work() -> None:
    headline, progress, head, *rows, page = lines()
    assert headline == (
        "job my-run: generation 3, 4 ranks on 2 nodes (1:3), began 90 s ago at step 120: c left"
    )
    assert progress == (
        "step 345 of 1000, 2.5 steps/s, 4 min to go, goodput 97.2%, loss 2.5, last checkpoint of "
        "step 300"
    )
    columns = ["NODE", "ROLE", "RANKS", "STATE", "STEP", "LAST", "UP", "ADDRESS"]
    starts = [head.index(word) for word in columns]
    cells = [
        [row[i:j].strip() for i, j in zip(starts, [*starts[1:], None], strict=True)] for row in rows
    ]
    address = "10.0.0.1:9400"
    aside = "set aside after 4 failures, 45 s more"
    assert cells == [
        ["node-a", "leader", "0-1", "training", "345", "0.2 s ago", "67 min", address],
        ["node-b", "member", "2-3", "training", "?", "?", "?", address],
        ["d", "spare", "-", aside, "-", "-", "12 s", address],
        ["c", "spare", "-", "waiting", "-", "-", "12 s", address],
    ]
    assert page == "status page: http://10.0.0.1:9400/ (--url prints it with the token)"


def test_where_the_time_has_gone_is_one_line() -> None:
    seconds = {"productive": 86.0, "data_wait": 8.0, "detect": 5.96, "idle": 0.04, "wasted": 0.0}
    statuses = {**SAID, "node-a": TRAINING | {"seconds": seconds}}
    assert (
        lines(statuses=statuses)[2] == "time 100 s: 86.0% productive, 8.0% data wait, 6.0% detect"
    )


def test_a_silent_agent_is_shown_as_such() -> None:
    row = next(line for line in lines() if line.startswith("node-b"))
    assert row.split()[4:7] == ["?", "?", "?"]
    assert collect_status(JOB, PHASES, {})["step"] is None
    assert not any(line.startswith("step ") for line in lines(statuses={}))


def test_what_a_node_is_set_aside_for_is_shown() -> None:
    why = "rank 4 failed where others did not (ImportError: no)"
    job = replace(JOB, world=replace(WORLD, strikes=(NodeStrikes(node="d", count=3, why=why),)))
    assert lines(job)[-2] == f"d is set aside: {why}"
    assert "set aside, 45 s more" in next(line for line in lines(job) if line.startswith("d  "))


def test_a_node_of_another_build_is_set_aside() -> None:
    """BD1: both versions, and what to do."""
    torch = "2.13.0+cpu"
    members = [replace(m, release="0.2.0", torch=torch) for m in (A, B)]
    odd = replace(C, release="0.3.0", torch=torch)
    world = replace(WORLD, strikes=(), members=tuple(members), release="0.2.0", torch=torch)
    job = replace(JOB, world=world, members={m.node: m for m in (*members, odd, D)})
    assert states(job)["c"] == "set aside"
    assert states(job)["d"] == "waiting", "it states no versions"
    (line,) = (line for line in lines(job) if line.startswith("c is set aside"))
    assert line.startswith("c is set aside: c has ElasticZero 0.3.0, and node-a has ElasticZero")
    row = next(line for line in lines(job) if line.startswith("c  "))
    assert "failures" not in row


def test_the_network_of_nccl_is_shown() -> None:
    infiniband, sockets = "InfiniBand with GPUDirect RDMA (NCCL 2.27.5)", "sockets (NCCL 2.27.5)"
    both = {node: TRAINING | {"network": infiniband} for node in ("node-a", "node-b")}
    assert f"network between nodes: {infiniband}" in lines(statuses=both)
    both["node-b"] = TRAINING | {"network": sockets}
    line = f"network between nodes: {infiniband} on node-a; {sockets} on node-b"
    assert line in lines(statuses=both)
    assert not any(line.startswith("network") for line in lines())


def states(job: Job, statuses: Statuses = SAID) -> dict[str, str]:
    return {node["node"]: node["state"] for node in collect_status(job, PHASES, statuses)["nodes"]}


def test_states() -> None:
    assert states(JOB) == {
        "node-a": "training", "node-b": "training", "d": "set aside", "c": "waiting"
    }  # fmt: skip
    gone = replace(JOB, members={m.node: m for m in (B, C)})
    assert states(gone)["node-a"] == "gone"
    assert collect_status(gone, PHASES, SAID)["leader"] == "node-b"
    drained = replace(JOB, control=Control(drain=(Drain(node="node-b", incarnation="i-node-b"),)))
    assert states(drained)["node-b"] == "leaving"
    assert states(JOB, SAID | {"c": WAITING | {"leaving": True}})["c"] == "leaving"
    assert states(replace(JOB, control=Control(stop=True)))["node-a"] == "stopping"
    done = Done(outcome="stopped", step=400, reason="stopped by an operator")
    over = replace(JOB, members={}, done=done)
    assert set(states(over, {}).values()) == {"stopped"}


def test_the_whole_picture_before_and_after_a_world() -> None:
    early = replace(JOB, world=None)
    first = lines(early, {}, {})
    assert first[0] == "job my-run: no generation yet: waiting for nodes"
    assert collect_status(early, {}, {})["leader"] == "d", "the oldest registration"
    done = Done(outcome="stopped", step=400, reason="stopped by an operator")
    assert "stopped: stopped by an operator" in lines(replace(JOB, members={}, done=done), {})


def test_what_operators_asked_for_is_shown() -> None:
    control = Control(drain=(Drain(node="c", incarnation="i-c"),), nnodes=(1, 2), stop=True)
    shown = lines(replace(JOB, control=control))
    assert "requested by operators: drain c, scale 1:2, stop" in shown
    assert "(1:2)" in shown[0]


def test_a_drain_of_a_node_that_has_left_is_not_shown() -> None:
    control = Control(drain=(Drain(node="c", incarnation="former"),))
    assert not any(line.startswith("requested") for line in lines(replace(JOB, control=control)))


def test_no_secret_is_shown() -> None:
    assert "secret" not in str(collect_status(JOB, PHASES, SAID))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (45, "45 s"), (150, "2 min"), (9000, "2 h"), (400000, "5 days")],
)
def test_spans(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


ODD: tuple[Any, ...] = (None, True, -1, 1.5, float("nan"), 1 << 300, "text", [], {}, {"d": None})


@pytest.mark.parametrize("field", [*TRAINING, "seconds", "compute_s", "workers", "generation"])
def test_an_odd_answer_of_an_agent_is_silence_at_worst(field: str) -> None:
    """It ended the command in a traceback; another release, or another program, may answer."""
    for odd in ODD:
        assert lines(statuses=SAID | {"node-a": TRAINING | {field: odd}})
        assert lines(statuses=SAID | {"node-a": TRAINING | {field: {"productive": odd}}})


def test_an_answer_of_another_form_is_silence() -> None:
    status = collect_status(JOB, PHASES, SAID | {"node-a": TRAINING | {"step": "many"}})
    by_name = {node["node"]: node for node in status["nodes"]}
    assert by_name["node-a"]["silent"] and not by_name["c"]["silent"]
    assert by_name["node-a"]["step"] is None
