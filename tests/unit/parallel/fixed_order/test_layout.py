"""Whole parameters in messages: each with one owner, evenly dealt, aligned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticzero.parallel.fixed_order import layout
from elasticzero.parallel.fixed_order.layout import deal_whole, owners_of

SIZES = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from([torch.float32, torch.float64])), min_size=1
)


@given(SIZES, st.integers(1, 6))
def test_each_parameter_travels_in_one_message_of_its_owner(
    drawn: list[tuple[int, torch.dtype]], world_size: int
) -> None:
    parameters = {str(i): nn.Parameter(torch.randn(n, dtype=d)) for i, (n, d) in enumerate(drawn)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MESSAGE_BYTES", 1000)
        rounds = deal_whole(parameters, {}, world_size)
    messages = [message for round_messages in rounds for message in round_messages]
    assert sorted(n for m in messages for n in m.names) == sorted(parameters)
    owners = owners_of(parameters, world_size)
    for round_messages in rounds:
        assert len({message.owner for message in round_messages}) == len(round_messages)
    for message in messages:
        assert {owners[name] for name in message.names} == {message.owner}
        assert len({p.dtype for p in message.parameters}) == 1
        assert all(offset % layout.ALIGNMENT == 0 for offset in message.offsets)
        values = [p.detach() for p in message.parameters]
        unpacked = message.unpack(message.pack(values))
        assert all(torch.equal(a, b) for a, b in zip(unpacked, values, strict=True))
        assert message.empty().numel() == message.numel


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 8))
def test_no_rank_has_more_than_the_others_by_more_than_a_parameter(
    sizes: list[int], world_size: int
) -> None:
    parameters = {str(i): nn.Parameter(torch.empty(n)) for i, n in enumerate(sizes)}
    owners = owners_of(parameters, world_size)
    loads = [sum(sizes[int(n)] for n, o in owners.items() if o == r) for r in range(world_size)]
    assert max(loads) - min(loads) <= max(sizes)
