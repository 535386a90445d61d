"""`compare`: the same state in other shapes is the same, and each difference is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.rewrite.diff import Difference, compare
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshard
from elasticzero.checkpoint.rewrite.step_copy import CopyOptions
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import CheckpointDamaged
from elasticzero.spans import STRATEGIES
from tests.unit.checkpoint.cases import draft_of, elements, flip, layouts, simple_layout, write_step

LAYOUT = simple_layout()
CONTENTS = elements(LAYOUT.tensors)


def step(path: Path, contents: dict[str, bytes] = CONTENTS, **fields: object) -> DiskStorage:
    return write_step(path, draft_of(LAYOUT, **fields), contents)  # type: ignore[arg-type]


@settings(max_examples=25)
@given(layouts(), st.integers(1, 7), st.sampled_from(STRATEGIES), st.data())
def test_a_resharded_checkpoint_is_the_same_until_a_bit_is_not(
    layout: Layout, world: int, strategy: str, data: st.DataObject
) -> None:
    contents = elements(layout.tensors)
    with tempfile.TemporaryDirectory() as directory:
        a = write_step(Path(directory) / "a", draft_of(layout), contents)
        shape = TargetShape(world_size=world, strategy=strategy)
        done = reshard(a, DiskDirectory(Path(directory) / "b"), shape)
        result = compare(a, open_storage(done.where))
        assert result.same and result.equal_tensors == len(contents)
        full = [name for name in contents if contents[name]]
        if not full:
            return
        name = data.draw(st.sampled_from(full))
        at = data.draw(st.integers(0, len(contents[name]) - 1))
        spoiled = bytearray(contents[name])
        spoiled[at] ^= 1
        c = write_step(Path(directory) / "c", draft_of(layout), contents | {name: bytes(spoiled)})
        spec = layout.tensors[name]
        first = at // (spec.nbytes // spec.numel)
        result = compare(open_storage(done.where), c)
        assert result.tensors == (Difference(name=name, first=first, count=1, of=spec.numel),)
        assert not result.same and result.equal_tensors == len(contents) - 1


def test_elements_are_counted_across_chunks_of_any_length(tmp_path: Path) -> None:
    tensors = {"t": TensorSpec("I16", (3_000_000,))}
    layouts_of = [
        Layout(world_size=n, tensors=tensors, groups=(Group("even", ("t",)),)) for n in (1, 3)
    ]
    data = bytearray(6_000_000)
    a = write_step(tmp_path / "a", draft_of(layouts_of[0]), {"t": bytes(data)})
    for index in (1_000_001, 1_500_000, 2_999_999):
        data[2 * index] = data[2 * index + 1] = 1
    b = write_step(tmp_path / "b", draft_of(layouts_of[1]), {"t": bytes(data)})
    small = CopyOptions(buffer_bytes=4 << 20)
    assert compare(a, b, copy_options=small).tensors == (
        Difference(name="t", first=1_000_001, count=3, of=3_000_000),
    )


def test_names_specs_and_state(tmp_path: Path) -> None:
    a = step(tmp_path / "a", state={"step": 7, "lr": [1, 2], "only": None, "same": {"x": 1}})
    tensors = {
        "model/w": TensorSpec("F64", (10, 100)),
        "model/b": LAYOUT.tensors["model/b"],
        "model/new": TensorSpec("F32", ()),
    }
    layout = Layout(world_size=1, tensors=tensors, groups=(Group("even", tuple(tensors)),))
    state = {"step": 7.0, "lr": [1, 3], "same": {"x": 1}, "more": 1}
    contents = {
        "model/w": CONTENTS["model/w"],
        "model/b": CONTENTS["model/b"],
        "model/new": b"1234",
    }
    b = write_step(tmp_path / "b", draft_of(layout, state=state), contents)
    result = compare(a, b)
    assert result.only_a == ("optimizer/w/step",)
    assert result.only_b == ("model/new",)
    assert result.specs == (("model/w", "F64[100, 10]", "F64[10, 100]"),)
    assert result.tensors == ()
    assert result.state == ("step", "lr/1", "only", "more")
    assert result.equal_tensors == 1


def test_the_model_only(tmp_path: Path) -> None:
    a = step(tmp_path / "a")
    b = step(tmp_path / "b", CONTENTS | {"optimizer/w/step": b"1234"}, state={"other": 1})
    assert not compare(a, b).same
    assert compare(a, b, model_only=True).same


def test_a_damaged_side_is_an_error_and_no_difference(tmp_path: Path) -> None:
    a, b = step(tmp_path / "a"), step(tmp_path / "b")
    flip(b.path / draft_of(LAYOUT).file_name(1), -1)
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        compare(a, b)
