"""Says what an agent serves at a path: what answers a request, and who may ask.

The server itself serves only what it streams from files, events and snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

ServedTo = Literal["everyone", "status readers", "token holders", "other agents"]
"""Says who gets an answer: `status readers` need the job's token too, unless `--open-status` is
given; `other agents` prove the secret of this run of the job."""
TEXT = "text/plain; charset=utf-8"
HEALTH = "/healthz"
"""Path at which an agent says `ok`, or why not. It is served to everybody and under every name of
the server, since a probe that was refused would end the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Holds the response to one request."""

    content: bytes
    kind: str = TEXT
    """Content-Type."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers besides those of every response."""
    status: HTTPStatus = HTTPStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Says what is served at one path."""

    answer: Callable[[str], Answer]
    """Makes the response, in a thread of the server. Its argument is the query of the request:
    what follows the `?` of its path; empty where the head of the response is all that is asked
    for."""
    served_to: ServedTo


def json_answer(value: Any, *, indent: int | None = None, end: str = "\n") -> Answer:
    """Returns a value as an answer in JSON.

    Args:
        value: What `json.dumps` takes.
        indent: Spaces of indentation; None: it is all on one line.
        end: Text after the JSON.
    """
    text = json.dumps(value, indent=indent) + end
    return Answer(content=text.encode(), kind="application/json")
