"""Real worker processes at the store of rank 0: strangers at its port, and its end."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Finished
from tests.integration.training_harness import Pool

FOLDER = Path(__file__).parent
TRAINING = FOLDER / "training_exact.py"
WAITING = FOLDER / "scripts" / "waits_at_store.py"


@pytest.mark.parametrize("proofs", [True, False], ids=["ours", "torch's"])
def test_the_end_of_the_store_is_the_end_of_a_peer(pool: Pool, proofs: bool) -> None:
    """Whatever the store, a rank that waits at it when rank 0 is killed blames a lost peer."""
    running = pool.start(WAITING, ["2"], 3, proofs=proofs)
    running.until(running.ended)
    first, *others = running.workers
    assert first.exit_code == -9
    for worker in others:
        assert worker.last(Failed).blame == "peer", running.logs()


def test_strangers_keep_no_world_from_its_training(pool: Pool, tmp_path: Path) -> None:
    """200 connections say nothing, and 50 more speak HTTP, while rank 0 waits for rank 1."""
    told = [json.dumps({"strategy": "ddp", "steps": 4})]
    together = {"of": 2, "token": "meet", "password": "password"}
    with ExitStack() as strangers:
        first = pool.start(TRAINING, told, 1, **together)
        address = "127.0.0.1", first.assignments[0].master_port
        first.until(lambda: listens(address))
        for number in range(250):
            sock = strangers.enter_context(socket.create_connection(address, 10))
            if number % 5 == 0:
                with suppress(OSError):
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        memory = tmp_path / "other"
        memory.mkdir()
        place = {"rank": 1, "master_port": address[1], "node": "other", "group_rank": 1}
        second = pool.start(TRAINING, told, 1, snapshot_root=str(memory), **place, **together)
        for running in (first, second):
            running.until(running.ended)
            assert running.workers[0].exit_code == 0, running.logs()
            assert running.workers[0].last(Finished).step == 4


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 10).close()
    except ConnectionRefusedError:
        return False
    return True
