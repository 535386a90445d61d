"""Which device a worker gets, what torch is told of NCCL, and when its collectives count; no GPU is
needed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticzero.comm import nccl
from elasticzero.comm.control_tree import MaxTree
from elasticzero.comm.nccl import device_of
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.errors import OperatorError
from tests.support.fake_groups import fake_group

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
NCCL2 = "TORCH_DIST_USE_NCCL2"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return monkeypatch


def test_each_worker_has_a_gpu_of_its_own(two_gpus: pytest.MonkeyPatch) -> None:
    assert [device_of(rank).index for rank in (0, 1)] == [0, 1]
    with pytest.raises(
        OperatorError, match=r"worker 2 of this node has no GPU .* --nproc-per-node 2"
    ):
        device_of(2)
    two_gpus.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert device_of(2).index == 0


@pytest.mark.parametrize(
    ("signers", "shut", "right"),
    [(3, False, True), (2, False, False), (0, False, False), (3, True, False)],
)
def test_every_rank_countersigns_or_none_goes_on(
    monkeypatch: pytest.MonkeyPatch, signers: int, shut: bool, right: bool
) -> None:
    """Of three ranks so many gave this time's number, and two the time before's."""
    seen: list[int] = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        assert group == "all ranks"
        value = int(tensor.item())
        tensor.copy_(
            torch.tensor([signers * value + (3 - signers) * (seen[-1] if seen else value)])
        )
        seen.append(value)
        if shut:
            groups.shut()

    place = RankInfo(rank=0, world_size=3, token="t")
    groups = ProcessGroups(place, torch.device("cpu"), MaxTree(None, []), fake_group(3))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(3))
    groups.verify_with_peers()
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    seen.append(1)  # of another time
    if right:
        groups.verify_with_peers()
        groups.verify_with_peers()
        assert len(set(seen)) == len(seen)
    else:
        with pytest.raises(dist.DistBackendError, match="closed"):
            groups.verify_with_peers()


def test_without_a_gpu_workers_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(3).type == "cpu"


def test_nobody_else_aborts_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {HANDLING: "3", DUMP: "1", NCCL2: "1"})
    nccl.disable_torch_watchdog()
    assert os.environ[HANDLING] == os.environ[NCCL2] == "0"
    assert os.environ[DUMP] == "1"  # a matter of taste
