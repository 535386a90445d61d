"""What the grammar is made of: pieces of scripts, each of which does one thing that users do.

Text of an element names the module that has its parts `self`, and `OWNER` outside of it: the model
itself, or a part of the model. `h` is what goes through the network, and `n` the number of steps
that are done. `D` is the dtype of parameters, and `SINCE` the step after which changes begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ALL = "*"
"""Stands for every strategy in `Element.limits`."""


Kind = Literal["exact", "refused", "wrong", "failed", "hung", "invalid"]
"""What comes of a script. exact: as by plain torch; refused: in a sentence before a second step;
wrong: another result; failed: another end than those; hung: no end in time; invalid: plain torch
cannot run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A piece of a script; each text is one line or more, and may be empty."""

    name: str
    top: str = ""
    """Definitions of the module."""
    init: str = ""
    """In `__init__` of the owner."""
    hidden: str = ""
    """In the forward of the owner, which may change `h`, and has the indices `i` of the samples."""
    made: str = ""
    """Once `model` is made, before `prepare`; each generation runs it."""
    prepared: str = ""
    """After `prepare` and before `restore`; has `model`, `optimizer` and `session`, which is None
    in plain torch. What later text needs is put into the dict `KEPT`."""
    begin: str = ""
    """At the start of the loop's body; has `model` and `optimizer`."""
    losses: str = ""
    """Between a forward and its loss; has `model`, `x`, `i`, `output` and `losses` by sample."""
    touched: str = ""
    """Between a forward and its backward; has `model`."""
    graded: str = ""
    """Between a backward and its step; has `model`."""
    stepped: str = ""
    """After each step; has `model`, `optimizer` and `session`."""
    epoch_end: str = ""
    """At the end of each epoch, in `on_epoch_end`; has `model`, `optimizer` and `session`."""
    between: str = ""
    """After each loop, where each epoch has one; has `model`, `optimizer` and `session`."""
    finish: str = ""
    """After the loop; has `model` and `optimizer`."""
    rest: str = ""
    """Puts into the dict `rest` what is to be compared besides the model's state and buffers."""
    sources: tuple[str, ...] = ()
    """Names of classes and functions of `tests.support.kept_state`, whose source is put before
    `top`."""
    whole: bool = False
    """True if it needs one micro-batch in each step, as what counts forwards does."""
    twice: bool = False
    """True if the model's forward runs again before the backward of the first."""
    tolerance: float = 1e-9
    """Difference that other sums of a gradient may make."""
    narrow: bool = True
    """False if it cannot be computed in 16 bits, or magnifies their rounding."""
    odds: int = 4
    """How often it is drawn, beside others."""
    since: int = 0
    """Number of steps that are made before a refusal can come at the earliest."""
    takes_ranks: bool = False
    """True if a refusal needs ranks that compare what they have: one alone cannot know it."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Why a strategy promises nothing for it, by strategy: such a draw is not made."""
    excludes: tuple[str, ...] = ()
    """Names of elements that plain torch cannot run with this one."""

    def limit(self, strategy: str) -> str | None:
        """Returns why the element is not drawn with a strategy."""
        return self.limits.get(strategy) or self.limits.get(ALL)
