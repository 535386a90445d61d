"""What becomes of the calls of `session.checkpoint` in one process, with an agent that is not
there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticzero.comm.barriers import Call
from elasticzero.comm.control import ControlWord
from elasticzero.data.position import DataPosition
from elasticzero.data.tag_requests import TagRequest
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.snapshots.requests import CheckpointRequests, RankPlace
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.rng import RngState
from tests.unit.checkpoint.cases import draft_of, elements, simple_layout, write_step

PLACE = RankPlace(call=Call.CHECKPOINT, where="", left_at="")
LAYOUT = simple_layout(numel=40)


class Link(AgentClient):
    """Keeps what it is asked to tag."""

    def __init__(self, directory: Path | None) -> None:
        where = None if directory is None else str(directory)
        super().__init__(None, replace(STANDALONE, checkpoint_dir=where, world_size=2))
        self.tagged: list[tuple[int, tuple[str, ...]]] = []

    @property
    def standalone(self) -> bool:
        return False

    def tag(self, step: int, tags: tuple[str, ...]) -> None:
        self.tagged.append((step, tags))


class Ranks:
    """Two ranks, of which the other asks for the same as this one, and for `others`."""

    def __init__(self, *others: str) -> None:
        self.calls: list[Call] = []
        self.control_tree = SimpleNamespace(allreduce_max=lambda number: number)
        self._others = list(others)

    def barrier(self, call: Call, number: int, where: str) -> int:
        self.calls.append(call)
        return max(number, int(bool(self._others)))

    def exchange(self, ours: bytes) -> list[bytes]:
        theirs = str(self._others).replace("'", '"').encode()
        return [ours, theirs]


class Stager:
    def __init__(self, *, saves: bool = True) -> None:
        self.saves = saves
        self.saving: int | None = None
        self.newest_save = "none"
        self.captured: list[tuple[int, tuple[TagRequest, ...]]] = []
        self.snapshots: list[int] = []
        self.abandoned = 0

    def has_captured(self, step: int) -> bool:
        return any(step <= captured_step for captured_step, _ in self.captured)

    def capture(self, copy: BoundaryCopy, kind: str, verify: Any) -> None:
        if kind == "checkpoint":
            verify()
            self.captured.append((copy.step, copy.position.tagging))
        if kind == "snapshot":
            self.snapshots.append(copy.step)

    def end_save(self) -> None:
        self.saving = None

    def abandon_save(self) -> None:
        self.abandoned += 1


def boundary(step: int) -> BoundaryCopy:
    rng = RngState.capture(torch.device("cpu"))
    position = DataPosition()
    return BoundaryCopy(step=step, position=position, rng=rng, json={}, tensors={})


def made(
    directory: Path | None,
    groups: Ranks | None = None,
    stager: Stager | None = None,
    *,
    same_release: bool = True,
) -> tuple[CheckpointRequests, Link, Any]:
    link, used = Link(directory), stager or Stager()
    requests = CheckpointRequests(link, groups, used, same_release=same_release)  # type: ignore[arg-type]
    return requests, link, used


def nothing() -> None:
    pass


def test_without_a_directory_the_option_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    requests, _, _ = made(None)
    for _ in range(3):
        requests.ask("best")
        requests.reach_boundary()
    assert not requests.waiting
    assert caplog.text.count("give --checkpoint-dir DIR") == 1


def test_a_directory_that_rank_0_lacks_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests, _, _ = made(tmp_path, stager=Stager(saves=False))
    for _ in range(2):
        requests.ask(None)
    assert caplog.text.count("rank 0's node has no --checkpoint-dir") == 1
    assert requests.agree(boundary(1), PLACE)[0] is False


def test_ranks_of_two_releases_ask_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks("best")
    requests, _, _ = made(tmp_path, ranks, same_release=False)
    for _ in range(2):
        requests.ask("best")
    requests.reach_boundary()
    assert not requests.waiting and requests.agree(boundary(1), PLACE)[0] is False
    assert not ranks.calls, "the other release makes no such call"
    assert caplog.text.count("saves nothing while ranks run different releases") == 1


def test_a_call_asks_for_the_boundary_after_it(tmp_path: Path) -> None:
    requests, _, _ = made(tmp_path)
    requests.ask("best")
    assert not requests.waiting
    requests.reach_boundary()
    requests.ask("next")
    assert requests.waiting
    requests.exchange_and_save(boundary(4), nothing)
    assert not requests.waiting
    requests.reach_boundary()
    assert requests.waiting


def test_calls_of_all_ranks_are_one_save_with_all_tags(tmp_path: Path) -> None:
    requests, link, stager = made(tmp_path, Ranks("best", "last"))
    for tag in ("best", "best", None):
        requests.ask(tag)
    kind, copy = requests.capture(boundary(5), "nothing", PLACE, nothing)
    asked = (TagRequest(5, ("best", "last")),)
    assert (kind, stager.captured, copy.position.tagging) == ("checkpoint", [(5, asked)], asked)
    assert not link.tagged, "its manifest has the tags"


def test_a_call_without_a_tag_is_a_save_without(tmp_path: Path) -> None:
    requests, _, stager = made(tmp_path, Ranks())
    requests.ask(None)
    requests.capture(boundary(5), "snapshot", PLACE, nothing)
    assert stager.captured == [(5, ())]


def test_what_was_captured_before_is_tagged_alone(tmp_path: Path) -> None:
    requests, link, stager = made(tmp_path, Ranks())
    stager.captured.append((5, ()))
    requests.ask("best")
    kind, _ = requests.capture(boundary(5), "snapshot", PLACE, nothing)
    assert link.tagged == [(5, ("best",))] and len(stager.captured) == 1
    assert kind == "snapshot" and stager.snapshots == [5], "what is due besides is not left out"


@pytest.mark.parametrize("lost", [False, True])
def test_a_save_that_runs_is_waited_for(
    tmp_path: Path, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    requests, _, stager = made(tmp_path, Ranks())
    requests.ask("first")
    requests.capture(boundary(5), "nothing", PLACE, nothing)
    stager.saving, stager.newest_save = 5, "lost" if lost else "none"
    requests.ask("second")
    _, copy = requests.capture(boundary(7), "nothing", PLACE, nothing)
    assert stager.saving is None and stager.captured[-1][0] == 7
    assert copy.position.tagging == (TagRequest(7, ("second",)),)
    told = caplog.text
    assert ("the checkpoint of step 5 was not saved, so its tag first stays" in told) == lost


def test_what_is_saved_is_forgotten(tmp_path: Path) -> None:
    requests, _, _ = made(tmp_path, Ranks())
    requests.ask("best")
    requests.capture(boundary(5), "nothing", PLACE, nothing)
    requests.after_exchange(ControlWord(saved=4))
    assert requests.stamped(boundary(6)).position.tagging
    requests.after_exchange(ControlWord(saved=5))
    assert requests.stamped(boundary(6)).position.tagging == ()


def test_a_checkpoint_that_exists_gets_its_tag_at_the_next_start(tmp_path: Path) -> None:
    """Its writer was killed between the manifest and the tag."""
    write_step(tmp_path, draft_of(LAYOUT, step=5), elements(LAYOUT.tensors))
    requests, link, _ = made(tmp_path, Ranks())
    requests.resume((TagRequest(5, ("best",)),), 8)
    requests.reach_boundary()
    assert link.tagged == [(5, ("best",))] and not requests.waiting
    assert requests.stamped(boundary(8)).position.tagging == ()


@pytest.mark.parametrize("step", [5, 8])
def test_a_checkpoint_that_is_lost_is_made_of_the_state_there_is(
    tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests, link, stager = made(tmp_path, Ranks())
    requests.resume((TagRequest(5, ("best",)),), step)
    asked = requests.stamped(boundary(step)).position.tagging
    assert asked == (TagRequest(5, ("best",)),), "it is not lost if this generation ends at once"
    assert requests.waiting
    copy = requests.exchange_and_save(boundary(step), nothing)
    assert copy.position.tagging == (TagRequest(step, ("best",)),)
    assert stager.captured == [(step, copy.position.tagging)] and not link.tagged
    told = caplog.text
    assert ("of step 5 with the tag best was lost; the state of step 8 is saved" in told) == (
        step == 8
    )


def test_a_start_with_nodes_of_another_release_says_what_is_not_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests, link, _ = made(tmp_path, Ranks(), same_release=False)
    requests.resume((TagRequest(5, ("best",)),), 8)
    assert requests.stamped(boundary(8)).position.tagging == () and not link.tagged
    assert "step 5 does not get the tag best" in caplog.text


def test_the_end_of_training_tells_what_was_asked_after_the_loop(tmp_path: Path) -> None:
    ranks = Ranks()
    finished: list[BoundaryCopy] = []
    stager = Stager()
    stager.finish = finished.append  # type: ignore[attr-defined]
    requests, link, _ = made(tmp_path, ranks, stager)
    stager.captured.append((9, ()))
    requests.ask("best")
    requests.finish(boundary(9), replace(PLACE, call=Call.FINISH))
    assert ranks.calls == [Call.FINISH] and link.tagged == [(9, ("best",))]
    requests, link, _ = made(tmp_path, Ranks(), stager)
    requests.ask("best")
    requests.finish(boundary(12), replace(PLACE, call=Call.FINISH))
    assert not link.tagged and finished[-1].position.tagging == (TagRequest(12, ("best",)),)
