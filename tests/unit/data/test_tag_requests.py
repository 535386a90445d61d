"""What a script has asked to be tagged, against a plain dict from tags to steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticzero.data.position import DataPosition
from elasticzero.data.tag_requests import TagRequest, TagRequests, after_save, tags_of, with_tags
from elasticzero.serialization import decode, encode

Ask = tuple[int, frozenset[str]]
asks = st.tuples(st.integers(0, 9), st.frozensets(st.sampled_from("abc"), max_size=3))


def as_dict(requests: TagRequests) -> dict[str, int]:
    pairs = [(tag, request.step) for request in requests for tag in request.tags]
    assert len(dict(pairs)) == len(pairs) and all(request.tags for request in requests)
    assert len({request.step for request in requests}) == len(requests)
    return dict(pairs)


@given(events=st.lists(st.one_of(asks, st.integers(0, 9)), max_size=12))
def test_a_tag_is_at_the_step_that_asked_last(events: list[Ask | int]) -> None:
    """A number is a step whose save has ended."""
    requests: TagRequests = ()
    plain: dict[str, int] = {}
    for event in events:
        if isinstance(event, int):
            requests = after_save(requests, event)
            plain = {tag: step for tag, step in plain.items() if step > event}
        else:
            step, tags = event
            requests = with_tags(requests, step, tags)
            plain |= dict.fromkeys(tags, step)
        assert as_dict(requests) == plain
        for step in range(10):
            expected = sorted(tag for tag, other in plain.items() if other == step)
            assert list(tags_of(requests, step)) == expected


def test_a_position_says_only_what_was_asked_for() -> None:
    """The release before does not know the field, and compares digests of positions."""
    assert "tagging" not in encode(DataPosition(loop=1))
    asked = DataPosition(tagging=(TagRequest(7, ("best",)),))
    assert decode(DataPosition, encode(asked)) == asked
