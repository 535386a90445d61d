"""Says what a difference means: its sentence, and the paragraph of the docs that explains it.

Data: the checks choose a reason, or the kind of value that differs, and fill in its sentence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elasticzero.ops.rehearse.results import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Names a paragraph of the docs."""

    page: str
    """The page's path, below the repository's root."""
    heading: str

    def __str__(self) -> str:
        return f'{self.page}, "{self.heading}"'


TRAINING = "docs/training.md"
REHEARSE = "docs/rehearse.md"
HOLDS = Paragraph(TRAINING, "What holds")
MODULES = Paragraph(TRAINING, "What is kept of modules and generators")
OPTIMIZERS = Paragraph(TRAINING, "What is kept of optimizers")
CHANGES = Paragraph(TRAINING, "Parameters that the script changes")
WORLDS = Paragraph(TRAINING, "What differs by world size")
SLICES = Paragraph(TRAINING, "The same numbers at every world size")
WORDS = Paragraph(REHEARSE, "How to read the words")
NOT_KEPT = Paragraph(REHEARSE, "Where all came back, and numbers differ")
UNEQUAL = Paragraph(REHEARSE, "Where two undisturbed runs differ")
COMPARED = Paragraph(REHEARSE, "What is compared")
WIRES = Paragraph("docs/slow-networks.md", "What to know")
SAMPLES = Paragraph("docs/data.md", "What a resume reads again")


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Describes one kind of value that a record holds."""

    noun: str
    lost: Paragraph
    """Explains a value that did not come back after a fault."""
    moved: Paragraph
    """Explains a value that came back, and differs from the undisturbed run's later: most often
    something else was kept nowhere."""


VALUE_KINDS = {
    "tracked": ValueKind("tracked value", MODULES, NOT_KEPT),
    "buffer": ValueKind("buffer", MODULES, NOT_KEPT),
    "extra state": ValueKind("extra state", MODULES, NOT_KEPT),
    "generator": ValueKind("generator", MODULES, SLICES),
    "loss": ValueKind("loss", WORLDS, NOT_KEPT),
    "gradient norm": ValueKind("gradient norm", WORLDS, NOT_KEPT),
    "optimizer attribute": ValueKind("optimizer attribute", OPTIMIZERS, NOT_KEPT),
    "optimizer": ValueKind("optimizer", OPTIMIZERS, NOT_KEPT),
    "parameter": ValueKind("parameter", CHANGES, NOT_KEPT),
}
"""Kinds of values. Of those that differ in the same step, the one that stands first here is named:
causes stand before what follows from them."""
UNNAMED_KIND = ValueKind("value", HOLDS, HOLDS)
"""Describes a kind that is not in the table."""


class Reason(enum.Enum):
    """Names what a verdict rests on where that is not one value."""

    REFUSED = "refused"
    FAILED = "failed"
    NO_GENERATION = "no generation began after the fault"
    NO_RECORD = "no record of a boundary"
    STEPS = "another number of steps"
    UNRECORDED_STEP = "no record of a step"
    SAMPLES = "other samples"
    SAMPLES_UNRECORDED = "no record of a step's samples"
    NO_REFERENCE = "no undisturbed run"
    HALF_PARAMETERS = "no undisturbed run with masters"
    NO_REPETITION = "no second undisturbed run"
    UNEQUAL_REPETITION = "two undisturbed runs differ"
    UNSTEADY_VALUES = "tracked values differ between two undisturbed runs"
    BEFORE_FAULT = "differs before the fault"
    DRAWS = "draws at random"
    RESEEDED = "draws from generators that begin anew"
    BATCH_NORM = "statistics of a batch"
    WIRE = "gradients are encoded"
    NO_NUDGE = "no measure of rounding"


@dataclass(frozen=True, slots=True)
class Cause:
    """Describes what a reason makes of a run."""

    outcome: Outcome
    sentence: str
    """The note; names in braces are filled in."""
    paragraph: Paragraph


CAUSES = {
    Reason.REFUSED: Cause(Outcome.REFUSED, "{place}: {text}", HOLDS),
    Reason.FAILED: Cause(Outcome.FAILED, "{place}: {text}", WORDS),
    Reason.NO_GENERATION: Cause(
        Outcome.FAILED, "no generation began after the fault, so that nothing was compared", WORDS
    ),
    Reason.NO_RECORD: Cause(
        Outcome.FAILED,
        "generation {generation}: no rank has recorded the whole state {moment}, so that nothing "
        "was compared",
        WORDS,
    ),
    Reason.STEPS: Cause(
        Outcome.DIFFERS,
        "the run ended after {steps}, and the undisturbed run after {expected}",
        COMPARED,
    ),
    Reason.UNRECORDED_STEP: Cause(
        Outcome.FAILED, "step {step}: no rank has recorded the whole state", WORDS
    ),
    Reason.SAMPLES: Cause(
        Outcome.DIFFERS, "generation {generation}, step {step}: {samples}", SAMPLES
    ),
    Reason.SAMPLES_UNRECORDED: Cause(
        Outcome.NOT_COMPARABLE,
        "step {step}: {ranks} left no record, so that its samples are not known",
        COMPARED,
    ),
    Reason.NO_REFERENCE: Cause(
        Outcome.NOT_COMPARABLE, "there is no undisturbed run to compare with", COMPARED
    ),
    Reason.HALF_PARAMETERS: Cause(
        Outcome.NOT_COMPARABLE,
        "16-bit parameters have 32-bit masters under zero1 to zero3 alone, and there is no "
        "undisturbed run of the same kind to compare with",
        COMPARED,
    ),
    Reason.NO_REPETITION: Cause(
        Outcome.NOT_COMPARABLE,
        "there is no second undisturbed run, which would tell whether two are equal",
        COMPARED,
    ),
    Reason.UNEQUAL_REPETITION: Cause(
        Outcome.NOT_COMPARABLE, "two undisturbed runs differ: {text}", UNEQUAL
    ),
    Reason.UNSTEADY_VALUES: Cause(
        Outcome.EQUAL,
        "two undisturbed runs are equal but for {things}, of which no other comparison is made",
        UNEQUAL,
    ),
    Reason.BEFORE_FAULT: Cause(
        Outcome.NOT_COMPARABLE, "the run differs before the fault: {text}", UNEQUAL
    ),
    Reason.DRAWS: Cause(
        Outcome.NOT_COMPARABLE,
        "the forward or the data draws at random; give session.batches virtual_batch= to compare",
        SLICES,
    ),
    Reason.RESEEDED: Cause(
        Outcome.NOT_COMPARABLE,
        "the generators of rank {rank} begin anew, and the forward or the data draws from them; "
        "give session.batches virtual_batch= to compare",
        MODULES,
    ),
    Reason.BATCH_NORM: Cause(
        Outcome.NOT_COMPARABLE,
        "BatchNorm's statistics are of one rank's samples; give session.batches virtual_batch= to "
        "compare",
        WORLDS,
    ),
    Reason.WIRE: Cause(
        Outcome.NOT_COMPARABLE,
        "with --wire {wire} other ranks leave out other parts of gradients, and a lost one's are "
        "lost under ddp",
        WIRES,
    ),
    Reason.NO_NUDGE: Cause(
        Outcome.NOT_COMPARABLE,
        "no run with a nudged gradient tells what rounding does: {text}",
        COMPARED,
    ),
}
"""The cause by reason: it says what the reason makes of a run."""


def verdict(reason: Reason, **values: object) -> Verdict:
    """Returns the verdict of a reason, with its sentence filled in."""
    cause = CAUSES[reason]
    return Verdict(cause.outcome, _ended(cause.sentence.format(**values)), str(cause.paragraph))


def value_verdict(kind: str, text: str, *, lost: bool) -> Verdict:
    """Returns the verdict of a value that differs.

    Args:
        kind: The value's kind.
        text: Where the value differs, and how.
        lost: True: it did not come back; False: it became another one later.
    """
    described = VALUE_KINDS.get(kind, UNNAMED_KIND)
    paragraph = described.lost if lost else described.moved
    return Verdict(Outcome.DIFFERS, _ended(text), str(paragraph))


def _ended(sentence: str) -> str:
    """Returns the sentence with a stop at its end."""
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
