"""Plans against the dumb alternative: put the shards together, then slice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.checkpoint.format.layout import Layout, itemsize
from elasticzero.checkpoint.format.plan import plan
from elasticzero.errors import CheckpointMismatch
from elasticzero.spans import Span
from tests.unit.checkpoint.cases import cut, elements, layouts, simple_layout


@given(st.data(), layouts())
def test_a_plan_fills_what_is_wanted_from_what_each_rank_holds(
    data: st.DataObject, layout: Layout
) -> None:
    whole = elements(layout.tensors)
    shards = [
        {n: cut(whole[n], layout.tensors[n].dtype, span) for n, span in layout.spans(r).items()}
        for r in range(layout.world_size)
    ]
    targets = {}
    for name, spec in layout.tensors.items():
        ends = sorted(data.draw(st.tuples(*[st.integers(0, spec.numel)] * 2)))
        targets[name] = Span(*ends)
    filled = {n: bytearray(len(s) * itemsize(layout.tensors[n].dtype)) for n, s in targets.items()}
    times = {n: [0] * len(s) for n, s in targets.items()}
    for copy in plan(layout, targets):
        dtype = layout.tensors[copy.name].dtype
        part = cut(shards[copy.rank][copy.name], dtype, copy.span_in_shard)
        start = copy.offset_in_target * itemsize(dtype)
        filled[copy.name][start : start + len(part)] = part
        assert part == cut(whole[copy.name], dtype, copy.span_in_tensor)
        for i in range(len(copy.span_in_tensor)):
            times[copy.name][copy.offset_in_target + i] += 1
    for name, span in targets.items():
        assert filled[name] == cut(whole[name], layout.tensors[name].dtype, span)
        assert all(count == 1 for count in times[name])


def test_a_plan_for_what_is_not_there_is_refused() -> None:
    layout = simple_layout(numel=100)
    with pytest.raises(CheckpointMismatch, match="no tensor 'model/x'"):
        plan(layout, {"model/x": Span(0, 1)})
    with pytest.raises(CheckpointMismatch, match=r"'model/b'.*nobody holds elements \[100, 101\)"):
        plan(layout, {"model/b": Span(90, 101)})
