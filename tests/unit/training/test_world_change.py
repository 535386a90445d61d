"""When a rank says that it can go over to the next world, and at which word it does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elasticzero.comm.control import ControlWord
from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.messages import FLAG_FINISH, FLAG_GROW
from elasticzero.training.worlds import change
from elasticzero.training.worlds.change import WorldChange, obstacle


class Next:
    """The next world, whose groups are connected."""

    offered = True

    def __init__(self) -> None:
        self.promised, self.entered = False, False

    def promise(self) -> bool:
        self.promised = True
        return True

    def decide(self, *, enters: bool) -> None:
        self.entered = enters


def world_change(following: Any) -> WorldChange:
    nothing: Any = None
    return WorldChange(nothing, nothing, following, [])


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
    world_change(following).decide(word)
    assert following.entered == enters


def test_what_stands_in_the_way_is_said() -> None:
    whole: Any = SimpleNamespace(enter_world=lambda mesh: None)
    divided: Any = SimpleNamespace(enter_world=None)
    rolls_back = replace(STANDALONE, on_nonfinite="rollback")
    assert obstacle(STANDALONE, whole, rehearses=False) == ""
    assert "divides the state" in obstacle(STANDALONE, divided, rehearses=False)
    assert "snapshot" in obstacle(rolls_back, whole, rehearses=False)
    assert "rehearsal" in obstacle(STANDALONE, whole, rehearses=True)
