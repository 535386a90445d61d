"""What becomes of the state at a boundary where ranks do not confirm what collectives gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticzero.comm.process_group import CLOSED
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.parallel.mesh import Mesh
from elasticzero.snapshots.mirrored_shards import MirroredShards
from elasticzero.snapshots.requests import CheckpointRequests
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.training.rows import Rows
from elasticzero.training.step_machine import StepTracker
from elasticzero.training.training_state import Captures, LaidModel, TrainingState

GONE = dist.DistBackendError(CLOSED)
CUDA = RuntimeError("CUDA error: an illegal memory access was encountered")


class Tracked:
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


class Ranks:
    """This rank's groups; `error` is raised where all are to confirm."""

    rank_info = RankInfo(rank=0, world_size=2)
    control_tree = None
    no_collective_since_verified = True
    error: Exception | None = None

    def verify_collectives(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("shards", "tracks", "untouched", "error", "clean"),
    [
        pytest.param(1, True, True, GONE, True, id="nothing was begun since"),
        pytest.param(1, True, False, GONE, False, id="the tracked may be of an aborted one"),
        pytest.param(2, False, False, GONE, False, id="parameters were gathered"),
        pytest.param(1, True, True, CUDA, False, id="the GPU fails"),
    ],
)
def test_a_peer_that_does_not_confirm(
    shards: int, tracks: bool, untouched: bool, error: Exception, clean: bool
) -> None:
    link, ranks, auxiliary = (
        AgentClient(None, STANDALONE),
        Ranks(),
        AuxiliaryState(torch.device("cpu")),
    )
    strategy: Any = SimpleNamespace(shards=shards, apply=lambda: None)
    stager = StateStager(link, "ddp", lambda: None, shards=shards, saving=False)  # type: ignore[arg-type, return-value]
    groups: Any = ranks
    model = LaidModel(strategy=strategy, auxiliary=auxiliary, rows=Rows(Mesh.of_world(0, 1)))
    captures = Captures(
        stager=stager,
        requests=CheckpointRequests(link, groups, stager),
        mirrored=MirroredShards(STANDALONE, "ddp", torch.device("cpu"), dict),
    )
    training = TrainingState(link, groups, model, captures, StepTracker())
    if tracks:
        auxiliary.track("thing", Tracked())
    training.restore()
    training.apply(torch.tensor(1.0))
    assert not training.at.clean
    ranks.no_collective_since_verified, ranks.error = untouched, error
    with pytest.raises(type(error)):
        training.at_boundary()
    assert training.at.clean == clean
    assert training.boundary_copy().step == (1 if clean else 0)
