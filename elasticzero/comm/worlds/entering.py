"""Tells ranks that come into a world inside of the others' loops what they must know, at the store
at which its ranks meet.

Rules:
 EN1  Rank 0 of the world is one that trains. Before the ranks connect it tells what must be equal
      on all of them. A rank that differs does not connect, so that nobody is prepared.
 EN2  Once the ranks that train are bound to go over at a boundary, rank 0 tells at which. Those
      that come in wait for that, restore its state, and go to the loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from elasticzero.comm.rendezvous import ClosableStore
from elasticzero.comm.store.addressed import AddressedStore
from elasticzero.serialization import decode, encode, parse_json
from elasticzero.torch_internals.groups import PrefixStore

SCRIPT, BOUNDARY = "script", "boundary"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCaptures:
    """Holds what ranks know alike of their captures when a world is entered."""

    every: int
    """Number of steps from one snapshot to the next; 0: none are taken."""
    back: int
    """Step of the newest state that every node holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestStep:
    """Holds what all ranks have alike of the newest step."""

    step: int
    loss: float | None
    gradient_norm: float | None
    names_optimizers: bool
    """True once a backward of this generation was for some of the script's optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Describes the boundary at which the ranks that train have gone over to a world."""

    newest: NewestStep
    """The step of the boundary."""
    captures: KnownCaptures
    """The schedule of captures goes on from them."""
    checkpoint_every: int
    snapshot_every: int | None
    verify_every: int | None
    loop: Mapping[str, str]
    """The description of the loop that they are in."""

    def encoded(self) -> str:
        return json.dumps(encode(self))

    @classmethod
    def decoded(cls, text: str) -> Boundary:
        """Returns what a text says; raises `RecordError` for another text."""
        return decode(cls, parse_json(text.encode(), "the boundary"), "the boundary")


def tell(store: ClosableStore | AddressedStore, token: str, key: str, text: str) -> None:
    """Tells those that come into a world.

    Args:
        store: The store of the world.
        token: Its token.
        key: SCRIPT or BOUNDARY.
        text: What is told.
    """
    _board(store, token).set(key, text)


def told(store: ClosableStore | AddressedStore, token: str, key: str, limit_s: float) -> str:
    """Returns what is told, once it is; raises torch's error of a store that is lost, or late.

    Args:
        store: The store of the world.
        token: Its token.
        key: SCRIPT or BOUNDARY.
        limit_s: Seconds for which this waits.
    """
    board = _board(store, token)
    board.wait([key], timedelta(seconds=limit_s))
    return bytes(board.get(key)).decode()


def _board(store: ClosableStore | AddressedStore, token: str) -> PrefixStore:
    return PrefixStore(f"{token}/entering", store)
