"""The manifest: its layout's two views agree, its JSON comes back, and what is wrong is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, from_json, to_json
from elasticzero.checkpoint.format.names import MAX_STEP, checked_step, step_directory, step_of
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.spans import Span
from tests.unit.checkpoint.cases import draft_of, layouts, simple_layout
from tests.unit.checkpoint.damage_cases import sign, signed


def whole(layout: Layout, **rest: Any) -> Manifest:
    draft = draft_of(layout, **rest)
    files = (ShardFile(draft.file_name(r), 1 << 20, "0" * 32) for r in range(layout.world_size))
    return replace(draft, files=tuple(files))


def test_only_a_later_run_is_stated() -> None:
    """So a release without runs writes the same bytes in the first run."""
    first = whole(simple_layout())
    assert b'"run"' not in to_json(first)
    assert from_json(to_json(first), "here").run == 1
    second = replace(first, run=2)
    assert from_json(to_json(second), "here") == second


@given(layouts())
def test_every_element_and_every_empty_tensor_lies_with_one_rank(
    layout: Layout,
) -> None:
    """It lies with exactly one."""
    seen: dict[str, list[int]] = {name: [] for name in layout.tensors}
    owners: dict[str, int] = dict.fromkeys(layout.tensors, 0)
    for rank in range(layout.world_size):
        for name, span in layout.spans(rank).items():
            seen[name] += range(span.start, span.stop)
            owners[name] += 1
    for name, spec in layout.tensors.items():
        assert sorted(seen[name]) == list(range(spec.numel))
        assert spec.numel or owners[name] == 1


@given(layouts())
def test_holders_say_what_spans_say(layout: Layout) -> None:
    spans_by_rank = [layout.spans(rank) for rank in range(layout.world_size)]
    for name in layout.tensors:
        held = [(rank, spans[name]) for rank, spans in enumerate(spans_by_rank) if name in spans]
        assert layout.holders(name) == held


def test_more_ranks_than_rows_or_than_elements_of_a_parameter() -> None:
    layout = Layout(
        world_size=5,
        tensors={"rows": TensorSpec("F32", (2, 3)), "small": TensorSpec("F32", (3,))},
        groups=(Group("fsdp_rows", ("rows",)), Group("even", ("small",))),
    )
    assert layout.holders("rows") == [(0, Span(0, 3)), (1, Span(3, 6))]
    assert layout.holders("small") == [(0, Span(0, 1)), (1, Span(1, 2)), (2, Span(2, 3))]
    assert layout.spans(4) == {}


@given(layouts())
def test_a_manifest_survives_json(layout: Layout) -> None:
    manifest = whole(layout, state={"loss": float("inf"), "names": ["ü", "\ud800"]})
    assert from_json(to_json(manifest), "here") == manifest


def test_a_manifest_grows_with_tensors_plus_ranks_not_product() -> None:
    def size(world_size: int, tensors: int) -> int:
        specs = {f"t{i}": TensorSpec("F32", (1000, 10)) for i in range(tensors)}
        groups = (Group("even", tuple(specs)),)
        layout = Layout(world_size=world_size, tensors=specs, groups=groups)
        return len(to_json(whole(layout)))

    base = size(1, 1)
    ranks, tensors = size(100, 1) - base, size(1, 100) - base
    assert size(100, 100) - base < 1.1 * (ranks + tensors)


@given(layouts(), layouts())
def test_digests_are_equal_exactly_for_equal_layouts(a: Layout, b: Layout) -> None:
    assert (a.digest() == b.digest()) == (a == b)
    again = from_json(to_json(whole(a)), "here").layout
    assert again.digest() == a.digest()


def test_names_of_steps() -> None:
    assert step_directory(1200) == "step-000000001200"
    assert step_of("step-000000001200") == 1200
    for other in ("step-1200", "step-00000000120x", "step-0000000001200", "steps", "tmp"):
        assert step_of(other) is None


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda v: b"", "does not end in its own digest"),
    "not JSON": (lambda v: sign(b"{]"), "is damaged: not JSON .Expecting property name"),
    "not text": (lambda v: sign(b"\xff\xfe]"), "can't decode"),
    "nested without end": (lambda v: sign(b"[" * 100_000), "recursion|RecursionError"),
    "not an object": (lambda v: b"[]", "does not end in its own digest"),
    "no version": (lambda v: v | {"version": None}, "format version"),
    "of the future": (lambda v: v | {"version": 99}, "format version is 99.*newer"),
    "no layout": (lambda v: {k: v[k] for k in v if k != "layout"}, "layout is missing"),
    "no files": (lambda v: v | {"files": []}, "names no files"),
    "a file too few": (lambda v: v | {"files": v["files"][:1]}, "1 files for a world of 2"),
    "a file twice": (lambda v: v | {"files": [v["files"][0]] * 2}, "file 1 is 'rank-00000"),
    "path traversal": (
        lambda v: v | {"files": [v["files"][0] | {"name": "../../etc/passwd"}, v["files"][1]]},
        "file 0 is '../../etc/passwd'",
    ),
    "traversal by token": (lambda v: v | {"token": "../x"}, "token '../x'"),
    "negative step": (lambda v: v | {"step": -1}, "step -1"),
    "world of none": (lambda v: with_layout(v, world_size=0), "world size 0"),
    "unknown dtype": (
        lambda v: with_layout(v, tensors={"x": {"dtype": "F31", "shape": []}}),
        "'F31' is not one of",
    ),
    "negative shape": (
        lambda v: with_layout(v, tensors={"x": {"dtype": "F32", "shape": [-1]}}),
        "negative size",
    ),
    "unknown rule": (lambda v: with_group(v, rule="odd"), "'odd' is not one of"),
    "tensor in no group": (lambda v: with_group(v, tensors=["model/w"]), "'model/b' is in no"),
    "tensor in two groups": (
        lambda v: with_layout(v, groups=[v["layout"]["groups"][0]] * 2),
        "'model/w' is in the groups twice",
    ),
    "group of unknown tensor": (lambda v: with_group(v, tensors=["y"]), "'y', which is not"),
    "rank outside": (lambda v: with_group(v, 1, ranks=[2]), "outside 0..1"),
    "ranks for even": (lambda v: with_group(v, ranks=[0]), "names 0 ranks, not 1"),
}


def with_layout(value: dict[str, Any], **change: Any) -> dict[str, Any]:
    return value | {"layout": value["layout"] | change}


def with_group(value: dict[str, Any], index: int = 0, **change: Any) -> dict[str, Any]:
    groups = list(value["layout"]["groups"])
    groups[index] = groups[index] | change
    return with_layout(value, groups=groups)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_manifest_is_refused_with_its_place_and_reason(name: str) -> None:
    damage, complaint = DAMAGE[name]
    value = damage(json.loads(to_json(whole(simple_layout()))))
    data = value if isinstance(value, bytes) else signed(value)
    with pytest.raises(CheckpointDamaged, match=complaint) as caught:
        from_json(data, "/ckpt/manifest.json")
    assert re.match("/ckpt/manifest.json(: | is damaged: not JSON)", str(caught.value))


def test_a_key_that_stands_twice_is_refused() -> None:
    data = to_json(whole(simple_layout())).replace(b'{"version":1,', b'{"version":1,"step":1,')
    data = sign(data[: data.rindex(b',"digest"')] + b"}")
    with pytest.raises(CheckpointDamaged, match="key 'step' appears twice"):
        from_json(data, "here")


def test_any_integer_that_can_name_a_directory_is_a_step() -> None:
    step = checked_step(np.int32(7))
    assert step == 7 and type(step) is int
    assert step_of(step_directory(checked_step(MAX_STEP))) == MAX_STEP
    for wrong in (True, 1.0, "1", None, -1, MAX_STEP + 1):
        with pytest.raises(UserError, match=f"step {wrong!r}"):
            checked_step(wrong)
