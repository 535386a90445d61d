"""A node is away while its job ends and is begun again: it changes nothing of the new run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from elasticzero.checkpoint.format.names import MANIFEST_NAME
from elasticzero.errors import ExitCode
from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.job_run import RUN
from elasticzero.launcher.store.watch_cache import DONE, MEMBERS, WORLD
from elasticzero.processes import descendants
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.etcd_relay import Relay
from tests.integration.test_elastic_training import check_weights

TTL_S = 2
BOTH_S = 30.0
"""One of two nodes that are started at once may take longer than the other."""
CUT_S = 34.0
"""Longer than any request to etcd and its pauses."""
STEPS = {"first": 34, "second": 102}
EPOCHS = {"first": 1, "second": 3}
SAVE_EVERY = 10
SAVING = ("--checkpoint-every", str(SAVE_EVERY), "--keep", "1")


def job_arguments(
    run: str, checkpoints: Path, nodes: str, *, ttl_s: int = TTL_S, settle_s: float = 0.5
) -> list[str]:
    """Options of a run: the second one has more steps, and another directory.

    settle_s: how long the first world is waited for after a node, where all nodes are to be in it.
    """
    return [
        *("--nnodes", nodes, "--settle", str(settle_s), "--lease-ttl", str(ttl_s)),
        *("--checkpoint-dir", str(checkpoints / run)),
        *(["--restart"] if run == "second" else []),
        *(str(REGRESSION), "--pause", "0.05", "--epochs", str(EPOCHS[run])),
    ]


def stored(etcd: EtcdServer, job: str) -> dict[str, Any]:
    """What the store has of the job, by key."""
    with EtcdStore([etcd.endpoint], job_prefix(job)) as store:
        entries = store.read("").entries
    return {key: json.loads(entry.value) for key, entry in entries.items()}


def freeze(node: Node, *, whole: bool) -> list[int]:
    """Stops the processes of a node, or its agent alone; returns which."""
    pids = [node.process.pid, *(descendants(node.process.pid) if whole else ())]
    send(pids, signal.SIGSTOP)
    return pids


def captured(told: Story, *, rank: int) -> bool:
    """Whether a rank has captured what becomes a checkpoint."""
    return any(event["rank"] == rank and event["checkpoint"] for event in told.of("captured"))


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def files_in(directory: Path) -> dict[Path, int]:
    """Every file, with the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def finish_without(told: Story, away: Node) -> None:
    """The job ends, and no node of it is registered any more."""
    (other,) = (node for node in told.cluster.running() if node is not away)
    told.wait("the end of the first run", lambda: not other.running)
    assert other.process.returncode == 0, told.logs()


def begin_again(told: Story, checkpoints: Path, nodes: str) -> Node:
    """Starts the node that has ended anew, as an operator would."""
    first = list(told.cluster.command)
    shared = first[: first.index("--nnodes")]
    told.cluster.command = [*shared, *job_arguments("second", checkpoints, nodes)]
    (ended,) = (node.name for node in told.cluster.nodes.values() if not node.running)
    return told.cluster.start_node(ended)


def check_gave_way(told: Story, away: Node) -> None:
    """The node has said which run has taken the place of its own, and has written nothing."""
    told.wait("the end of the node that was away", lambda: not away.running)
    assert away.process.returncode == ExitCode.SUPERSEDED, told.logs()
    assert "run 2 of the job has taken the place of run 1" in away.log.read_text()
    events = [event for name, event in told.told if name == away.name]
    assert not [event for event in events if event["event"] == "store_recovery"], told.logs()


def come_back(
    told: Story,
    etcd: EtcdServer,
    checkpoints: Path,
    away: Node,
    wake: Callable[[], None],
    pause_s: float = 0.3,
) -> None:
    """The job ends and is begun again; then the node that was away wakes, and gives way.

    pause_s: that of the second run's steps, which must outlast the absence.
    """
    job = told.cluster.job
    told.pause(0.0)
    finish_without(told, away)
    told.pause(pause_s)
    begin_again(told, checkpoints, "1:2")
    before = len(told.told)

    def steps() -> int:
        return sum(event["event"] == "step" for _, event in told.told[before:])

    told.wait("steps of the second run", lambda: steps() > 3)
    old_files = files_in(checkpoints / "first")
    wake()
    check_gave_way(told, away)
    documents = stored(etcd, job)
    assert documents[WORLD]["run"] == 2 and DONE not in documents
    assert f"{MEMBERS}{away.name}" not in documents
    codes = told.wait_for_end()
    assert sorted(codes.values()) == [0, ExitCode.SUPERSEDED], told.logs()
    documents = stored(etcd, job)
    assert documents[RUN] == {"number": 2}
    assert documents[DONE]["run"] == 2 and documents[DONE]["step"] == STEPS["second"]
    assert files_in(checkpoints / "first") == old_files, "no saver of the first run went on"


def begin_a_save(holds: Path) -> list[str]:
    """Arguments by which rank 1 stays within the first save until `holds` has no file of it."""
    holds.mkdir()
    (holds / "save-1").write_text("1")
    return ["--holds", str(holds), "--save-every", str(SAVE_EVERY)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "frozen",
    [
        "node",
        pytest.param("agent", marks=pytest.mark.slow),
        pytest.param("leader", marks=pytest.mark.slow),
        pytest.param("leader in a save", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_was_away_leaves_the_next_run_alone(
    frozen: Literal["node", "agent", "leader", "leader in a save"],
    tmp_path: Path,
    job: str,
    etcd: EtcdServer,
    reference: dict[str, Tensor],
) -> None:
    """It took the new run for lost data, wrote the old one over it, and ended the job as done. A
    leader also commits checkpoints: it is frozen while it waits for the other node's part."""
    first = job_arguments("first", tmp_path, "1:2", settle_s=BOTH_S)
    holds = tmp_path / "holds"
    if frozen == "leader in a save":
        first = [*SAVING, *first, *begin_a_save(holds)]
    with story(tmp_path, etcd.endpoint, job, first, nodes=2) as told:
        told.wait_for_step(5)
        if frozen == "leader in a save":
            told.wait("rank 1 in a save", (holds / "save-1-at-1").exists)
            told.wait("rank 0's part of it", lambda: captured(told, rank=0))
        away = told.cluster.nodes[told.of("world")[0]["members"][0 if "leader" in frozen else 1]]
        pids = freeze(away, whole=frozen != "agent")
        committed = [*(tmp_path / "first").glob(f"*/{MANIFEST_NAME}")]
        assert frozen != "leader in a save" or not committed
        (holds / "save-1").unlink(missing_ok=True)
        come_back(told, etcd, tmp_path, away, lambda: send(pids, signal.SIGCONT))
    check_weights(tmp_path / "second", reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_cut_off_from_etcd_leaves_the_next_run_alone(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """It trained on with the other, finished, and took what it then found in etcd for lost data."""
    first = job_arguments("first", tmp_path, "1:2", ttl_s=3)
    with (
        closing(Relay(etcd.endpoint)) as relay,
        story(tmp_path, etcd.endpoint, job, first, nodes=1) as told,
    ):
        told.pause(1.0)
        told.wait_for_first_step(1)
        direct = list(told.cluster.command)
        told.cluster.command = [relay.endpoint if w == etcd.endpoint else w for w in direct]
        away = told.cluster.start_node()
        told.cluster.command = direct
        told.wait("both", lambda: any(len(e["members"]) == 2 for e in told.of("world")))
        told.wait_for_first_step(told.generation)
        relay.freeze()
        cut_s = time.monotonic()

        def mend() -> None:
            told.wait("the cut's end", lambda: time.monotonic() > cut_s + CUT_S)
            relay.thaw()

        come_back(told, etcd, tmp_path, away, mend, pause_s=0.6)
    check_weights(tmp_path / "second", reference)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_that_was_away_is_not_taken_into_the_next_run(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """The new run waits for a second node when it wakes; it joined with the options of the old."""
    first = job_arguments("first", tmp_path, "1:2", settle_s=BOTH_S)
    with story(tmp_path, etcd.endpoint, job, first, nodes=2) as told:
        told.wait_for_step(5)
        away = told.cluster.nodes[told.of("world")[0]["members"][1]]
        pids = freeze(away, whole=True)
        finish_without(told, away)
        again = begin_again(told, tmp_path, "2:2")
        told.wait("the second run", lambda: f"{MEMBERS}{again.name}" in stored(etcd, job))
        send(pids, signal.SIGCONT)
        check_gave_way(told, away)
        documents = stored(etcd, job)
        assert documents[RUN] == {"number": 2} and WORLD not in documents
        joined = told.cluster.start_node()
        told.wait("a world of the second run", lambda: WORLD in stored(etcd, job))
        names = {row[0] for row in stored(etcd, job)[WORLD]["members"]}
        codes = told.wait_for_end()
    assert names == {again.name, joined.name}
    assert codes[away.name] == ExitCode.SUPERSEDED
    assert codes[again.name] == codes[joined.name] == 0, told.logs()
    assert stored(etcd, job)[DONE]["step"] == STEPS["second"]
    check_weights(tmp_path / "second", reference)
