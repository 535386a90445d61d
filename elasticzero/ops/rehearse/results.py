"""Defines what the comparison of a rehearsal's runs says, and what is told beside it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

UNDISTURBED = "none"
"""The name of a run without a fault, with which the others are compared."""
REPEATED = "none again"
"""The name of a second run without a fault: it tells whether two such runs are equal."""
NUDGED = "nudged"
"""The name of a run whose gradients were changed in their last bit: it tells what rounding does."""
CONTROLS = frozenset({UNDISTURBED, REPEATED, NUDGED})
"""The runs without a fault."""


class Outcome(enum.Enum):
    """Names the result of one run, in the word that a user reads."""

    EQUAL = "equal"
    WITHIN_ROUNDING = "within rounding"
    DIFFERS = "DIFFERS"
    NOT_COMPARABLE = "not comparable"
    REFUSED = "refused"
    FAILED = "FAILED"


TROUBLE = frozenset({Outcome.DIFFERS, Outcome.FAILED})
"""The outcomes by which a rehearsal is not passed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds the judgement of one run."""

    outcome: Outcome
    note: str = ""
    """One sentence that says why; empty where the outcome says it all."""
    docs: str = ""
    """The page and the paragraph that the note is explained in; empty without a note."""


Key = tuple[str, str, int]
"""A run's strategy, fault, and number of ranks at the beginning."""
Verdicts = Mapping[Key, Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Holds what a reader is told of a rehearsal besides its verdicts."""

    script: str
    steps: int
    """Steps of a run that nothing ends early."""
    wall_s: float
    """Seconds that all runs took together."""
    remarks: tuple[str, ...] = ()
    """Sentences about the rehearsal as a whole, such as files that the script has left."""


def is_passed(verdicts: Verdicts) -> bool:
    """Tells whether no run differs or failed. A strategy that refuses the script does neither; but
    one at least must train it."""
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    return not outcomes & TROUBLE and not is_refused(verdicts)


def is_refused(verdicts: Verdicts) -> bool:
    """Tells whether every strategy refuses the script, so that no fault was rehearsed."""
    return {verdict.outcome for verdict in verdicts.values()} == {Outcome.REFUSED}
