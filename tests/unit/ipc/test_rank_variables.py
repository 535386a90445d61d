"""Which looks at the environment are looks at variables that a process has no value for yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.assignment import torchrun_environment
from elasticzero.ipc.rank_variables import (
    ALL_VARIABLES,
    WORLD_VARIABLES,
    leave_world_variables,
    watch_world_variables,
)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The variables that were looked at, in their order."""
    for name in WORLD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    looked: list[str] = []
    watch_world_variables(looked.append)
    yield looked
    leave_world_variables()


def fails(look: Callable[[], object]) -> None:
    with pytest.raises(KeyError):
        look()


LOOKS: dict[str, Callable[[], object]] = {
    "get": lambda: os.environ.get("RANK"),
    "getenv": lambda: os.getenv("RANK", "0"),
    "item": lambda: fails(lambda: os.environ["RANK"]),
    "in": lambda: "RANK" in os.environ,
    "setdefault": lambda: os.environ.setdefault("RANK", "0"),
    "set": lambda: os.environ.__setitem__("RANK", "0"),
    "update": lambda: os.environ.update(RANK="0"),
    "pop": lambda: os.environ.pop("RANK", None),
    "bytes": lambda: os.environb.get(b"RANK"),
    "getenvb": lambda: os.getenvb(b"RANK"),
    "delete": lambda: fails(lambda: os.environ.__delitem__("RANK")),
}
WHOLE: dict[str, Callable[[], object]] = {
    "copy": lambda: os.environ.copy(),
    "dict": lambda: dict(os.environ),
    "unpacked": lambda: {**os.environ},
    "or": lambda: os.environ | {"a": "b"},
    "items": lambda: list(os.environ.items()),
    "values": lambda: list(os.environ.values()),
    "keys": lambda: list(os.environ.keys()),
    "equal": lambda: os.environ == {},
    "copy of bytes": lambda: os.environb.copy(),
}


@pytest.mark.parametrize("way", LOOKS)
def test_each_way_to_ask_for_a_variable_is_seen(way: str, looks: list[str]) -> None:
    LOOKS[way]()
    assert looks and set(looks) == {"RANK"}


@pytest.mark.parametrize("way", WHOLE)
def test_each_way_to_take_all_is_seen(way: str, looks: list[str]) -> None:
    WHOLE[way]()
    assert looks and looks[0] == ALL_VARIABLES


def test_other_looks_are_none(looks: list[str]) -> None:
    """Packages go through the names at their import; a local rank does not follow from a world."""
    assert [name for name in os.environ if name.startswith("FSSPEC_NO_SUCH_")] == []
    os.environ["NO_SUCH_VARIABLE"] = "1"
    assert os.environ.pop("NO_SUCH_VARIABLE") == "1"
    os.environ.get("LOCAL_RANK")
    assert looks == [] and len(os.environ) > 0


def test_a_watch_ends(looks: list[str]) -> None:
    leave_world_variables()
    assert os.environ.get("RANK") is None and isinstance(os.environ.copy(), dict)
    assert looks == []


def test_all_variables_of_a_world_are_watched() -> None:
    """What a worker has besides is of its node."""
    of_node = STANDALONE.node_place.environment()
    assert torchrun_environment(STANDALONE).keys() - of_node.keys() == WORLD_VARIABLES
