"""Replicas pulled over real HTTP, while the world changes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, get_args

import pytest
import torch

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.storage import http
from elasticzero.ipc.messages import Captured, SnapshotHeld
from elasticzero.launcher.http.server import AgentServer, listen
from elasticzero.launcher.observability.event_log import EventLog
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.replicator import SnapshotReplicator
from elasticzero.launcher.snapshots.roles import CapturedStep, ReplicaSource, SnapshotRole
from tests.lost_hosts import Loss, lost_host
from tests.support.deadlines import patience

TOKEN = "the job's token"
LONG_S = 60.0
"""What has not come by then was kept from coming."""
LAYOUT = Layout(
    world_size=2, tensors={"w": TensorSpec("F64", (1000,))}, groups=(Group("even", ("w",)),)
)


@pytest.fixture
def buddy(tmp_path: Path) -> Iterator[tuple[str, SnapshotStore]]:
    """Another node: the address of its server, and its snapshots."""
    store = SnapshotStore(tmp_path / "buddy")
    with AgentServer(
        listen("127.0.0.1", 0),
        routes={},
        snapshots=store,
        events=EventLog(tmp_path).newest,
        token=lambda: Secret(TOKEN),
    ) as server:
        yield f"127.0.0.1:{server.port}", store


def capture(store: SnapshotStore, generation: int, step: int, rank: int) -> None:
    """What a worker leaves in memory."""
    manifest = Manifest(
        step=step,
        generation=generation,
        token=f"g{generation:06d}-x",
        strategy="zero2",
        layout=LAYOUT,
        state={},
    )
    span = LAYOUT.spans(rank)["w"]
    weights = torch.arange(1000, dtype=torch.float64)[span.start : span.stop]
    SharedMemoryStager(store.root, 0).write(manifest, rank, [TensorPiece("w", weights)], set())


def captured(generation: int, step: int, owner: str) -> CapturedStep:
    """This node has rank 0 of two; owner: the address that rank 1's shard is pulled from."""
    role = SnapshotRole(
        generation=generation,
        token=f"g{generation:06d}-x",
        world_size=2,
        ranks=(0,),
        replica_source=ReplicaSource(address=owner, ranks=(1,)),
        password=TOKEN,
    )
    message = Captured(step=step, generation=generation, rank=0, world_size=2, replicate=True)
    return CapturedStep(role=role, number=step, captured={0: message})


@pytest.mark.parametrize("loss", get_args(Loss))
def test_a_new_generation_does_not_wait_for_a_pull_from_a_lost_node(
    tmp_path: Path, buddy: tuple[str, SnapshotStore], loss: Loss
) -> None:
    address, theirs = buddy
    store, told = SnapshotStore(tmp_path / "mine"), queue.SimpleQueue[SnapshotHeld]()
    replicator = SnapshotReplicator(store, told.put, silence_s=2 * LONG_S)
    with lost_host(loss) as host:
        capture(store, 1, 5, 0)
        replicator.captured(captured(1, 5, host.address))
        deadline_s = time.monotonic() + patience(LONG_S)
        while not host.is_asked():
            assert time.monotonic() < deadline_s, "nothing was pulled"
            time.sleep(0.01)
        replicator.begin()
        capture(store, 2, 7, 0)
        capture(theirs, 2, 7, 1)
        theirs.seal(ShardName(2, 7, 1, 2))
        replicator.captured(captured(2, 7, address))
        assert told.get(timeout=LONG_S) == SnapshotHeld(generation=2, step=7, error=None)
        assert store.sealed(ShardName(2, 7, 1, 2))
    replicator.close()
    assert told.empty(), "of a generation that is over nothing is told"


def test_steps_are_pulled_over_one_connection(
    tmp_path: Path, buddy: tuple[str, SnapshotStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question for a shard that was not sealed yet took a connection, and each step."""
    connect, connected = http._CancellableConnection.connect, list[object]()

    def counting(connection: http._CancellableConnection) -> None:
        connected.append(connection)
        connect(connection)

    monkeypatch.setattr(http._CancellableConnection, "connect", counting)
    address, theirs = buddy
    store, told = SnapshotStore(tmp_path / "mine"), queue.SimpleQueue[SnapshotHeld]()
    asked = threading.Event()
    open_file = theirs.open_file

    def opening(generation: int, step: int, name: str) -> BinaryIO:
        try:
            return open_file(generation, step, name)
        except FileNotFoundError:
            asked.set()
            raise

    monkeypatch.setattr(theirs, "open_file", opening)
    replicator = SnapshotReplicator(store, told.put, silence_s=LONG_S)
    for step in (5, 6, 7):
        asked.clear()
        capture(store, 1, step, 0)
        replicator.captured(captured(1, step, address))
        assert asked.wait(LONG_S), "it is pulled before it is sealed"
        capture(theirs, 1, step, 1)
        theirs.seal(ShardName(1, step, 1, 2))
        assert told.get(timeout=LONG_S) == SnapshotHeld(generation=1, step=step, error=None)
    replicator.close()
    assert len(connected) == 1
