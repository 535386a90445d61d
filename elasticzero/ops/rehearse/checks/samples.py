"""Compares the samples of each step that counts with those of an undisturbed run. Pure.

Rules:
 RS1  A step has the samples that the undisturbed run's same step has, each as often, in any world.
 RS2  A step of which a rank has left no record cannot be judged.
 RS3  Where the undisturbed run has no indices, as with a stream, nothing is compared.
"""

from __future__ import annotations

from collections import Counter

from elasticzero.ops.rehearse.causes import Reason, verdict
from elasticzero.ops.rehearse.checks.series import ByRank, Series
from elasticzero.ops.rehearse.results import Verdict
from elasticzero.text import named_text

SAMPLES_SHOWN = 3
RANKS_SHOWN = 4


def has_samples(series: Series) -> bool:
    """Tells whether the records of a run have the indices of samples."""
    return any(record.samples for records in series.steps.values() for record in records.values())


def check(series: Series, undisturbed: Series) -> Verdict | None:
    """Returns the verdict on the first step with other samples; None: there is none."""
    if not has_samples(undisturbed):
        return None
    unrecorded = None
    for step in sorted(series.steps.keys() & undisturbed.steps.keys() - {0}):
        records = series.steps[step]
        absent = sorted(set(range(series.world_at(step))) - records.keys())
        if absent:
            ranks = named_text("rank", absent, RANKS_SHOWN)
            unrecorded = unrecorded or verdict(Reason.SAMPLES_UNRECORDED, step=step, ranks=ranks)
            continue
        text = _difference(_counts(records), _counts(undisturbed.steps[step]))
        if text:
            generation = series.generation_of(step)
            return verdict(Reason.SAMPLES, generation=generation, step=step, samples=text)
    return unrecorded


def _counts(records: ByRank) -> Counter[int]:
    return Counter(sample for record in records.values() for sample in record.samples)


def _difference(actual: Counter[int], expected: Counter[int]) -> str:
    """Returns which samples differ; an empty text: none does."""
    missing, surplus = (
        sorted((expected - actual).elements()),
        sorted((actual - expected).elements()),
    )
    lost, used = _named(missing), _named(surplus)
    if missing and surplus:
        return f"{lost} missing, and {used} in {'its' if len(missing) == 1 else 'their'} place"
    if missing:
        return f"{lost} missing"
    return f"{used} counted once too often" if surplus else ""


def _named(samples: list[int]) -> str:
    verb = "is" if len(samples) == 1 else "are"
    return f"{named_text('sample', samples, SAMPLES_SHOWN)} {verb}"
