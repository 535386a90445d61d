"""The settings of strategy diloco, and their text."""

from __future__ import annotations

import pytest

from elasticzero.errors import UserError
from elasticzero.options.diloco import DiLoCo, diloco_of, island_nodes_of


def test_names_are_those_of_the_class() -> None:
    assert diloco_of("--diloco", "") == DiLoCo()
    text = "every=20,outer-lr=0.5,outer_momentum=0.8,fragments=2,overlap=3,quorum=0.5"
    assert diloco_of("--diloco", text) == DiLoCo(
        every=20, outer_lr=0.5, outer_momentum=0.8, fragments=2, overlap=3, quorum=0.5
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("evry=20", "'evry=20' is none of every, outer-lr, "),
        ("every", "every is ''; a number of inner steps"),
        ("every=0", "diloco has every=0; a number of inner steps"),
        ("every=2.5", "every is '2.5'; a number of inner steps"),
        ("outer-lr=0", "diloco has outer_lr=0.0; a number above 0 is expected"),
        ("quorum=1.5", "diloco has quorum=1.5; a number above 0, and 1 at most, is expected"),
        ("every=4,fragments=5", "diloco has fragments=5; a number from 1 to"),
        ("every=10,fragments=2,overlap=5", "diloco has overlap=5; a number of inner steps below"),
        ("inner=auto", "diloco has inner=auto; one of ddp, zero1, zero2, zero3 is expected"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        diloco_of("--diloco", text)
    assert str(caught.value).startswith(f"--diloco {text}: ")
    assert named in str(caught.value)


@pytest.mark.parametrize(("text", "nodes"), [(None, None), ("4", (1, 4)), ("2:4", (2, 4))])
def test_an_island_has_so_many_nodes(text: str | None, nodes: tuple[int, int] | None) -> None:
    assert island_nodes_of("--island-nodes", text) == nodes


@pytest.mark.parametrize("text", ["0", "3:2", "0:2", "two", "", "1:2:3"])
def test_a_wrong_number_of_nodes_is_named(text: str) -> None:
    with pytest.raises(UserError, match=f"^--island-nodes {text}: a number of nodes, or MIN:MAX"):
        island_nodes_of("--island-nodes", text)
