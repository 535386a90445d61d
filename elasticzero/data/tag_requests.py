"""Records which checkpoints a script has asked for under tags, as a part of the training state.

Pure. The state of a later step has them too until they are saved: a generation that goes on from
there has what was lost with the one before saved again. No two requests have a tag in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TagRequest:
    """Names the step whose checkpoint a script has asked for under tags."""

    step: int
    tags: tuple[str, ...]


TagRequests = tuple[TagRequest, ...]


def with_tags(requests: TagRequests, step: int, tags: Iterable[str]) -> TagRequests:
    """Returns the requests once a step is asked for under these tags, which leave other steps.

    Args:
        requests: The requests so far.
        step: The step that is asked for.
        tags: The tags that are to name it, besides those under which it was asked for before.
    """
    new = set(tags)
    extended = TagRequest(step, tuple(sorted(new | set(tags_of(requests, step)))))
    others = [
        TagRequest(request.step, tuple(tag for tag in request.tags if tag not in new))
        for request in requests
        if request.step != step
    ]
    return tuple(request for request in (*others, extended) if request.tags)


def tags_of(requests: TagRequests, step: int) -> tuple[str, ...]:
    """Returns the tags under which a step was asked for."""
    return next((request.tags for request in requests if request.step == step), ())


def after_save(requests: TagRequests, step: int) -> TagRequests:
    """Returns the requests that are left once the save of this step, or a later one, has ended."""
    return tuple(request for request in requests if request.step > step)
