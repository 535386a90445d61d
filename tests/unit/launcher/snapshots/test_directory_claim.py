"""Whether the job that has a checkpoint directory is gone."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps import owner as owner_record
from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import UserError
from elasticzero.launcher.snapshots.directory_claim import (
    claim_directory,
    nodes_are_gone,
    this_network,
)

JOB = OwnerRecord(job="second", cluster="b2", etcd=("10.0.0.9:2379",), network=this_network())


def other(endpoint: str, **fields: str) -> OwnerRecord:
    record = OwnerRecord(job="first", cluster="a1", etcd=(endpoint,), network=JOB.network)
    return replace(record, **fields)  # type: ignore[arg-type]


def has_nodes(_: str) -> bool:
    return True


def has_none(_: str) -> bool:
    return False


@pytest.mark.parametrize("shown", ["127.0.0.1:{}", "http://127.0.0.1:{}", "localhost:{}"])
def test_an_etcd_that_refuses_connections_is_gone_with_its_job(shown: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = shown.format(server.getsockname()[1])
        assert not nodes_are_gone(other(endpoint), JOB, has_none)
        assert not nodes_are_gone(other(endpoint, job="second"), JOB, has_none)
        elsewhere = other(endpoint, network="another machine")
        assert not nodes_are_gone(elsewhere, JOB, has_none)
        assert nodes_are_gone(replace(elsewhere, job="second"), JOB, has_none)
    assert nodes_are_gone(other(endpoint), JOB, has_nodes)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "host:port"])
def test_an_address_that_means_nothing_tells_nothing(endpoint: str) -> None:
    assert not nodes_are_gone(other(endpoint), JOB, has_none)
    assert nodes_are_gone(other(endpoint, job="second"), JOB, has_none)


def test_the_nodes_of_a_job_in_the_same_etcd_are_counted() -> None:
    for record in (other("10.0.0.8:2379", cluster="b2"), other("10.0.0.9:2379")):
        assert nodes_are_gone(record, JOB, has_none)
        assert not nodes_are_gone(record, JOB, has_nodes)


def test_a_job_waits_for_the_nodes_of_another_to_be_gone(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    first = other("10.0.0.8:2379", cluster="b2")
    claim_directory(directory, first, has_none, lambda _: None, 0.0)
    lines: list[str] = []
    with pytest.raises(UserError, match="'first'"):
        claim_directory(directory, JOB, has_nodes, lines.append, 0.01)
    assert lines == [f"job first has {tmp_path}; waiting for its nodes to be gone"]
    answers = iter([True, True, False, False])
    claim_directory(directory, JOB, lambda _: next(answers), lines.append, 60.0)
    assert owner_record.read_owner(directory)[0] == JOB
