"""A rank's place in its world, as the agent assigned it."""

from __future__ import annotations

from dataclasses import fields

from elasticzero.comm.rendezvous import RankInfo
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
    assert info.local_rank == assignment.visible_local_rank == 0
