"""What becomes of the state at a boundary where ranks do not confirm what collectives gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticzero.comm.process_group import CLOSED
from elasticzero.comm.rendezvous import RankInfo
from elasticzero.comm.worlds.entering import KnownCaptures
from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.options.wire import EXACT
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.residual import Residual
from elasticzero.session import Session
from elasticzero.snapshots.kept_residual import KeptResidual
from elasticzero.snapshots.mirrored_shards import MirroredShards
from elasticzero.snapshots.requests import CheckpointRequests
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState, BoundaryCopy
from elasticzero.state.model import RankState
from elasticzero.training.preparation import Prepared
from elasticzero.training.step_tracker import StepTracker
from elasticzero.training.training_state import TrainingState
from elasticzero.training.worlds import parts
from elasticzero.training.worlds.parts import LaidModel
from elasticzero.training.worlds.rows import Rows
from elasticzero.training.worlds.starting_state import StartingState
from elasticzero.worker.generation import Generation

SAMPLES: Any = [1, 2]
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
    collective_count = None
    error: Exception | None = None

    def verify_collectives(self) -> None:
        if self.error is not None:
            raise self.error


class Crowded(StateStager):
    """Finds no room for captures at first."""

    error: RuntimeError | None = RuntimeError("can't start new thread")

    def begin(self, copy: BoundaryCopy, others: KnownCaptures | None = None) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        super().begin(copy)


def made(
    link: AgentClient,
    stager: StateStager,
    groups: Any = None,
    *,
    shards: int = 1,
    tracker: StepTracker | None = None,
) -> TrainingState:
    auxiliary = AuxiliaryState(torch.device("cpu"))
    strategy: Any = SimpleNamespace(
        shards=shards,
        apply=lambda: None,
        take_changes=lambda: None,
        norm=1.0,
        loss=0.0,
        residual=Residual(EXACT, Mesh.of_world(0, 1), None),
    )
    model = LaidModel(strategy=strategy, auxiliary=auxiliary, rows=Rows(Mesh.of_world(0, 1)))
    captures = parts.Captures(
        stager=stager,
        requests=CheckpointRequests(link, groups, stager),
        mirrored=MirroredShards(STANDALONE, "ddp", torch.device("cpu"), dict),
        start=StartingState(
            link=link,
            strategy="ddp",
            plan=BucketPlan,
            kept=KeptResidual(link, groups, strategy.residual),
        ),
    )
    return TrainingState(link, groups, model, captures, tracker or StepTracker())


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
    link, ranks = AgentClient(None, STANDALONE), Ranks()
    stager = StateStager(link, "ddp", RankState, shards=shards, saving=False)
    training = made(link, stager, ranks, shards=shards)
    if tracks:
        training.auxiliary.track("thing", Tracked())
    training.restore()
    training.apply()
    assert not training.at.clean
    ranks.no_collective_since_verified, ranks.error = untouched, error
    with pytest.raises(type(error)):
        training.at_boundary()
    assert training.at.clean == clean
    assert training.boundary_copy().step == (1 if clean else 0)


def test_a_restore_that_fails_at_its_end_may_be_tried_again() -> None:
    """The script is not told that it has restored twice, and cannot train on a state that no
    capture knows."""
    link = AgentClient(None, STANDALONE)
    generation = Generation(link)
    session = Session(generation)
    stager = Crowded(link, "ddp", RankState, shards=1, saving=False)
    training = made(link, stager, tracker=generation.tracker)
    generation.begin_training(Prepared(training=training, state_dict=dict))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        session.restore()
    with pytest.raises(UserError, match=r"call session.restore\(\) before session.batches"):
        session.batches(SAMPLES, global_batch=1, steps=1)
    assert not training.at.clean
    session.restore()
    assert training.at.clean
    with pytest.raises(UserError, match="restore was called twice"):
        session.restore()
