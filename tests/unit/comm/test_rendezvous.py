"""A rank's place in its world, as the agent assigned it, and how it waits for rank 0's store."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace

import pytest

from elasticzero.comm.rendezvous import RankInfo, rendezvous
from elasticzero.errors import RetryError
from elasticzero.ipc.assignment import Assignment, Resume, WorkerSettings
from elasticzero.security.certificates import Credentials


def test_rank_info_takes_every_field_of_the_assignment() -> None:
    assignment = Assignment(
        job="j",
        node="n",
        generation=3,
        token="t",
        rank=5,
        local_rank=1,
        world_size=6,
        local_world_size=2,
        group_rank=2,
        master_address="10.0.0.1",
        master_port=1234,
        store_fd=7,
        strategy="ddp",
        resume=Resume(tier="fresh"),
        snapshot_root="/dev/shm/x",
        host="10.0.0.2",
        connect_timeout_s=1.0,
        start_timeout_s=2.0,
        collective_timeout_s=3.0,
        password="p",
        proofs=False,
        tls=Credentials(authorities="a", certificate="c", key="k"),
        settings=WorkerSettings(devices=("4", "5")),
    )
    info = RankInfo.from_assignment(assignment)
    for field in fields(RankInfo):
        if field.name != "local_rank":
            assert getattr(info, field.name) == getattr(assignment, field.name) != field.default
    assert info.local_rank == assignment.node_place.visible_local_rank == 0


def test_a_store_that_takes_connections_and_is_slow_is_waited_for() -> None:
    """On a busy machine rank 0's store answered late, and a rank gave it up after 10 s."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10.0)  # it fails where no rank comes any more
    port = listener.getsockname()[1]
    info = RankInfo(
        rank=1, world_size=2, master_port=port, connect_timeout_s=0.2, start_timeout_s=120.0
    )
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(rendezvous, info)
        for _ in range(4):  # each is given up in 0.2 s, and so they take longer than that together
            connection = listener.accept()[0]
            with closing(connection):
                assert connection.recv(1) == b""
        # The kernel takes what comes until the store listens again, and says nothing.
        first = pool.submit(rendezvous, replace(info, rank=0, store_fd=listener.detach()))
        for result in (first, other):
            result.result(120.0).close()


def test_a_service_that_never_says_anything_is_given_up_with_its_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        info = RankInfo(
            rank=1, world_size=2, master_port=port, connect_timeout_s=0.2, start_timeout_s=0.5
        )
        with pytest.raises(RetryError, match="takes connections, and does not answer yet"):
            rendezvous(info)
