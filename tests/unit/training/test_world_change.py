"""When a rank says that it can go over to the next world, and at which word it does."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elasticzero.comm.control import ControlWord
from elasticzero.comm.rank_zero import SharedState
from elasticzero.comm.worlds.next_world import Offer
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_GROW
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.snapshots.restore import seeded_generators
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.rng import preserve_rng
from elasticzero.training.step_machine import StepEvent
from elasticzero.training.worlds import change
from elasticzero.training.worlds.change import PartsOfWorld, WorldChange, obstacle
from tests.support.fake_groups import fake_group


class Next:
    """The next world, whose groups are connected."""

    offered, joins, place = True, False, None

    def __init__(self) -> None:
        self.promised, self.entered, self.reason = False, False, ""

    def promise(self) -> bool:
        self.promised = True
        return True

    def decide(self, *, enters: bool) -> None:
        self.entered = enters

    def give_up(self, reason: str) -> None:
        self.reason = reason


def world_change(following: Any) -> WorldChange:
    nothing: Any = None
    return WorldChange(nothing, nothing, following, [], nothing)


@pytest.mark.parametrize(
    ("saving", "newest_save", "awaits", "groups", "prepared"),
    [
        (None, "none", False, [], True),
        (None, "lost", False, [], True),
        (7, "none", False, [], False),
        (None, "pending", False, [], False),
        (None, "none", True, [], False),
        (None, "none", False, ["of the script"], False),
    ],
)
def test_a_rank_is_prepared_only_where_nothing_of_the_old_world_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
    saving: int | None,
    newest_save: str,
    awaits: bool,
    groups: list[str],
    prepared: bool,
) -> None:
    monkeypatch.setattr(change, "script_groups", lambda: groups)
    stager: Any = SimpleNamespace(saving=saving, newest_save=newest_save)
    auxiliary: Any = SimpleNamespace(awaits_rank_zero=awaits)
    following = Next()
    assert world_change(following).promise(stager, auxiliary) == following.promised == prepared


@pytest.mark.parametrize(
    ("word", "enters"),
    [
        (ControlWord(prepared=True), True),
        (ControlWord(), False),
        (ControlWord(prepared=True, flags=FLAG_GROW), False),
        (ControlWord(prepared=True, flags=FLAG_FINISH), False),
        (ControlWord(prepared=True, asks=True), False),
    ],
)
def test_a_world_is_entered_by_a_word_that_says_nothing_else(
    word: ControlWord, enters: bool
) -> None:
    following = Next()
    whole: Any = SimpleNamespace(strategy=SimpleNamespace(may_be_tied=False))
    world_change(following).decide(word, whole, lambda: None)
    assert following.entered == enters


@pytest.mark.parametrize(
    ("why", "others", "reason"), [("", 0, ""), ("kept", 0, "kept"), ("", 1, "")]
)
def test_ranks_stay_where_the_script_of_any_keeps_rows(why: str, others: int, reason: str) -> None:
    """The one whose script does so says why the world is not entered."""
    following = Next()
    rows: Any = SimpleNamespace(may_be_tied=True, tied_to_world=lambda growth: why)
    tree = SimpleNamespace(allreduce_max=lambda number: max(number, others))
    nothing: Any = None
    groups: Any = SimpleNamespace(control_tree=tree)
    change = WorldChange(nothing, groups, cast(Any, following), [], nothing)
    parts: Any = SimpleNamespace(strategy=rows)
    change.decide(ControlWord(prepared=True), parts, lambda: None)
    assert following.entered is not (bool(why) or bool(others))
    assert following.reason == reason


def test_what_stands_in_the_way_is_said() -> None:
    rolls_back = replace(STANDALONE, on_nonfinite="rollback")
    assert obstacle(STANDALONE, rehearses=False) == ""
    assert "snapshot" in obstacle(rolls_back, rehearses=False)
    assert "rehearsal" in obstacle(STANDALONE, rehearses=True)


@pytest.mark.parametrize(("rank", "shards"), [(0, 1), (1, 2)])
def test_what_depends_on_the_world_is_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch, rank: int, shards: int
) -> None:
    """With what ranks have agreed on in this one, and generators as a restore would set them. A
    state that is divided is torn while it is laid over the ranks."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = torch.get_rng_state()
    seen: list[Any] = []
    present = replace(STANDALONE, checkpoint_every=5, snapshot_every=7, verify_every=9)
    following = replace(STANDALONE, generation=2, token="next", rank=rank, world_size=2, store_fd=3)
    link = AgentClient(None, present)
    groups: Any = SimpleNamespace(enter=seen.append, world=fake_group(2))
    stager = SimpleNamespace(
        enter_world=lambda step, shards: seen.append((step, shards)), strategy="zero1"
    )
    strategy = SimpleNamespace(
        enter_world=lambda mesh, plan: seen.append(mesh), shards=shards, divides=shards > 1
    )
    parts = PartsOfWorld(
        strategy=cast(Any, strategy),
        plan=BucketPlan,
        auxiliary=AuxiliaryState(torch.device("cpu")),
        stager=cast(Any, stager),
        verifier=cast(Any, SimpleNamespace(enter_world=lambda a, step: seen.append(a))),
        shared=SharedState(None, AuxiliaryState(torch.device("cpu")), link),
        record=seen.append,
    )
    nothing: Any = None
    connected: Any = "the next groups"
    offer = Offer(token="next", assignment=following, groups=connected)
    with preserve_rng(torch.device("cpu")):
        rows = WorldChange(link, groups, nothing, [], nothing).enter(offer, 11, parts)
        state = torch.get_rng_state()
    entered = link.assignment
    laid = [rows.mesh, entered, (11, shards)]
    torn = [StepEvent.TEAR, *laid, StepEvent.KEPT] if shards > 1 else laid
    assert seen == [connected, *torn]
    assert (rows.mesh.rank, rows.mesh.world_size, rows.mesh.world_group) == (rank, 2, groups.world)
    assert entered == replace(
        following,
        resume=Resume(tier="live", step=11, generation=1),
        store_fd=None,
        trained=True,
        checkpoint_every=5,
        snapshot_every=7,
        verify_every=9,
    )
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), "2")
    expected = seeded_generators(rank, 11, torch.device("cpu")).torch_cpu if rank else before
    assert torch.equal(state, expected)
