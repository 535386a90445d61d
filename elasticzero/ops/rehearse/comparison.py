"""Judges the runs of a rehearsal by their records. Pure.

Rules:
 RC1  A run that was refused or that failed is judged by its sentence, and by nothing else.
 RC2  The checks come in this order, and the first that fails decides: what lives at a boundary,
      the number of steps, the samples, the series of all values.
 RC3  A run is compared with the undisturbed one of its strategy and world; else of its world, else
      of its strategy. With 16-bit parameters ddp is compared with ddp only, and the others with
      each other, which have masters.
 RC4  While world and strategy are those of the undisturbed run, the series must be equal to the
      bit. This is judged only where two undisturbed runs are equal.
 RC5  A run that differs in the steps before its fault is not comparable: the fault is not why.
 RC6  From the first step in another world, or by another strategy, values may differ by rounding.
      Where the world is another, a run that draws at random or has BatchNorm is not comparable
      without `virtual_batch=`.
 RC7  Tracked values that differ between two undisturbed runs in which all else is equal, as
      measured times do, are compared with no undisturbed run. Nor are times that a Trainer of
      transformers logs, which may be equal by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticzero.ops.rehearse.causes import Reason, value_verdict, verdict
from elasticzero.ops.rehearse.checks import boundary, samples
from elasticzero.ops.rehearse.checks.changes import Change
from elasticzero.ops.rehearse.checks.exact import Difference, changes_at, first_difference
from elasticzero.ops.rehearse.checks.rounding import Comparison, Noise, noise_of
from elasticzero.ops.rehearse.checks.series import Key as SeriesKey
from elasticzero.ops.rehearse.checks.series import Series, first_whole, series_of, without
from elasticzero.ops.rehearse.results import (
    CONTROLS,
    NUDGED,
    REPEATED,
    UNDISTURBED,
    Key,
    Outcome,
    Verdict,
)
from elasticzero.options.wire import parse_wire
from elasticzero.rehearsal.records import RunResult
from elasticzero.text import count_text

TRACKED = "tracked"
"""The kind of value of which RC7 speaks."""
LOGGED_TIME = re.compile(r".*\['log_history'\].*(_runtime|_per_second|_time)'\]")
"""The names of times that a Trainer logs."""
LEFT = frozenset({0, 75, 130})
"""Exit codes of a run that was done, drained, or ended by its operator."""


@dataclass(frozen=True, slots=True)
class Run:
    """Holds a run and its records in order."""

    result: RunResult
    series: Series

    @property
    def ended_badly(self) -> bool:
        """Tells whether the run was refused or failed."""
        result = self.result
        return bool(result.refusal or result.failure) or result.exit_code not in LEFT


@dataclass(frozen=True, slots=True)
class Controls:
    """Holds what a run is compared with."""

    undisturbed: Run
    repeated: tuple[Run, Run] | None
    """Two undisturbed runs of one kind: those of the run's own kind, if there are two."""
    nudged: tuple[Run, Run] | None
    """An undisturbed run, and one of its kind with a nudged gradient."""


def compare(results: Sequence[RunResult]) -> Mapping[Key, Verdict]:
    """Returns the verdict on each run by strategy, fault and world.

    Of the runs without a fault there are verdicts only where they were refused or failed, and one
    on the undisturbed run where there are two to compare.
    """
    runs = [Run(result, series_of(result.records)) for result in results]
    unsteady = _unsteady(runs)
    steady = [replace(run, series=without(run.series, unsteady)) for run in runs]
    verdicts: dict[Key, Verdict] = {}
    for run, comparable in zip(runs, steady, strict=True):
        if _is_control(run):
            judged = _control_verdict(comparable, steady, unsteady)
        else:
            judged = _end(run) or boundary.check(run.series) or _verdict(comparable, steady)
        if judged is not None:
            verdicts[run.result.strategy, run.result.fault, run.result.world] = judged
    return verdicts


def samples_text(results: Sequence[RunResult]) -> str:
    """Returns in a few words whether the samples of all faulted runs are those of undisturbed ones.

    Runs that have no undisturbed one beside them are left out.
    """
    runs = [Run(result, series_of(result.records)) for result in results]
    pairs = [(run, _undisturbed(run, runs)) for run in runs if not _is_control(run)]
    compared = [(run, other) for run, other in pairs if other is not None]
    if not any(samples.has_samples(other.series) for _, other in compared):
        return "not recorded"
    checked = [samples.check(run.series, other.series) for run, other in compared]
    if any(result is not None and result.outcome is Outcome.DIFFERS for result in checked):
        return "DIFFER"
    return "each once" if not any(checked) else "not all recorded"


def _is_control(run: Run) -> bool:
    return run.result.fault in CONTROLS


def _unsteady(runs: Sequence[Run]) -> Mapping[SeriesKey, str]:
    """Returns the values that RC7 leaves out, each with the noun and the name for a sentence."""
    repeated = [pair for run in runs if (pair := _pair(REPEATED, run, runs)) and pair[0] is run]
    things: dict[SeriesKey, str] = {}
    for first, second in repeated:
        both = second.series, first.series
        common = sorted(both[0].steps.keys() & both[1].steps.keys())
        changes = [change for step in common for change in changes_at(step, *both)]
        if all(change.kind == TRACKED for change in changes):
            things |= {(change.kind, change.name): change.thing for change in changes}
    for run in runs:
        records = (record for ranks in run.series.steps.values() for record in ranks.values())
        for kind, name in {(v.kind, v.name) for record in records for v in record.live}:
            if kind == TRACKED and LOGGED_TIME.fullmatch(name):
                things.setdefault((kind, name), Change(kind, name, None, None).thing)
    return things


def _verdict(run: Run, runs: Sequence[Run]) -> Verdict:
    """Returns the verdict on a run that came back with all that is kept after its fault."""
    undisturbed = _undisturbed(run, runs)
    if undisturbed is None:
        mixed = run.result.half_parameters and any(map(_is_undisturbed, runs))
        return verdict(Reason.HALF_PARAMETERS if mixed else Reason.NO_REFERENCE)
    controls = Controls(
        undisturbed,
        _pair(REPEATED, undisturbed, runs),
        _pair(NUDGED, undisturbed, runs),
    )
    return _steps(run, controls) or _samples(run, controls) or _values(run, controls)


def _control_verdict(
    run: Run, runs: Sequence[Run], unsteady: Mapping[SeriesKey, str]
) -> Verdict | None:
    """Returns the verdict on a run without a fault; None: there is nothing to say of it.

    Args:
        run: The run.
        runs: All runs.
        unsteady: What no series has of those that are compared, as `_unsteady` returns it.
    """
    if run.ended_badly:
        return _end(run)
    pair = _pair(REPEATED, run, runs) if run.result.fault == UNDISTURBED else None
    if pair is None or pair[0] is not run:
        return None
    if (unequal := _repetition(pair)) is not None:
        return unequal
    if not unsteady:
        return Verdict(Outcome.EQUAL)
    first, others = next(iter(unsteady.values())), len(unsteady) - 1
    things = f"{first} and {count_text(others, 'other')}" if others else first
    return verdict(Reason.UNSTEADY_VALUES, things=things)


def _end(run: Run) -> Verdict | None:
    """Returns the verdict on a run that did not end as it should (RC1)."""
    if not run.ended_badly:
        return None
    result, steps = run.result, run.series.last_step
    generations = run.series.generations
    if generations and not generations[-1].steps and len(generations) > 1:
        place = f"generation {generations[-1].number}, before its first step"
    else:
        place = f"after {count_text(steps, 'step')}" if steps else "prepare"
    if result.refusal:
        return verdict(Reason.REFUSED, place=place, text=_one_line(result.refusal))
    failure = _one_line(result.failure) or f"exit code {result.exit_code}"
    return verdict(Reason.FAILED, place="start" if place == "prepare" else place, text=failure)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _undisturbed(run: Run, runs: Iterable[Run]) -> Run | None:
    """Returns the undisturbed run that a run is compared with (RC3); None: there is none."""
    result = run.result
    comparable = [
        other
        for other in runs
        if _is_undisturbed(other)
        and not (result.half_parameters and _has_masters(other) != _has_masters(run))
    ]
    return min(
        comparable,
        key=lambda other: (
            other.result.world != result.world,
            other.result.strategy != result.strategy,
        ),
        default=None,
    )


def _is_undisturbed(run: Run) -> bool:
    usable = not run.ended_badly and run.series.last_step > 0
    return usable and run.result.fault == UNDISTURBED


def _has_masters(run: Run) -> bool:
    return run.result.strategy != "ddp"


def _pair(fault: str, undisturbed: Run, runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Returns an undisturbed run and one of its kind with this name, those of the run that is given
    if there are two; None: there are none."""
    pairs = [
        (first, second)
        for first in runs
        if _is_undisturbed(first)
        for second in runs
        if second.result.fault == fault and not second.ended_badly and _same_kind(first, second)
    ]
    return min(pairs, key=lambda pair: pair[0] is not undisturbed, default=None)


def _same_kind(first: Run, second: Run) -> bool:
    kinds = [(run.result.strategy, run.result.world) for run in (first, second)]
    return kinds[0] == kinds[1]


def _steps(run: Run, controls: Controls) -> Verdict | None:
    """Returns the verdict on a run that has not all steps of the undisturbed one; None: it has."""
    series, undisturbed = run.series, controls.undisturbed.series
    if series.last_step != undisturbed.last_step:
        numbers = (series.last_step, undisturbed.last_step)
        steps, expected = (count_text(number, "step") for number in numbers)
        return verdict(Reason.STEPS, steps=steps, expected=expected)
    for step in sorted(undisturbed.steps.keys() - {0}):
        expects_values = bool(first_whole(undisturbed.steps[step]))
        if expects_values and not first_whole(series.steps.get(step, {})):
            return verdict(Reason.UNRECORDED_STEP, step=step)
    return None


def _samples(run: Run, controls: Controls) -> Verdict | None:
    pair = controls.repeated
    if pair is not None and samples.check(pair[1].series, pair[0].series) is not None:
        return None  # the script itself chooses others each time, which `_values` says
    return samples.check(run.series, controls.undisturbed.series)


def _values(run: Run, controls: Controls) -> Verdict:
    """Returns the verdict on the series of a run's values (RC4 to RC6)."""
    if controls.repeated is None:
        return verdict(Reason.NO_REPETITION)
    unequal = _repetition(controls.repeated)
    if unequal is not None:
        return unequal
    series, undisturbed = run.series, controls.undisturbed.series
    from_step = _first_other_step(run, controls.undisturbed)
    if from_step is None and (redrawn := _redrawn(run)) is not None:
        return redrawn
    difference = first_difference(series, undisturbed, _exact_steps(run, controls, from_step))
    if difference is not None:
        if difference.step <= series.undisturbed_steps:
            return verdict(Reason.BEFORE_FAULT, text=difference)
        return _wire(run, from_step) or _differs(difference)
    if from_step is None:
        return Verdict(Outcome.EQUAL)
    return (
        _wire(run, from_step) or _unexplained(run, controls) or _rounding(run, controls, from_step)
    )


def _wire(run: Run, from_step: int | None) -> Verdict | None:
    """Returns the verdict on a run whose ranks encode gradients, where others make steps than in
    the undisturbed run, or one has lost what it had not sent; None: neither is so.

    Args:
        run: The run.
        from_step: The first step that another world or strategy has made; None: there is none.
    """
    wire, loses = run.result.wire, run.result.strategy == "ddp"
    if not parse_wire(wire).is_lossy or (from_step is None and not loses):
        return None
    return verdict(Reason.WIRE, wire=wire)


def _exact_steps(run: Run, controls: Controls, from_step: int | None) -> list[int]:
    """Returns the steps of a run that must equal the undisturbed run's to the bit."""
    if run.result.strategy != controls.undisturbed.result.strategy:
        return []
    return [step for step in run.series.steps if from_step is None or step < from_step]


def _redrawn(run: Run) -> Verdict | None:
    """Returns the verdict on a run that draws from generators that begin anew; None: it does
    not."""
    rank = boundary.reseeded(run.series)
    if rank is None or run.result.virtual_batch or not _draws(run.series):
        return None
    return verdict(Reason.RESEEDED, rank=rank)


def _draws(series: Series) -> bool:
    return any(record.draws for records in series.steps.values() for record in records.values())


def _repetition(pair: tuple[Run, Run]) -> Verdict | None:
    """Returns the verdict on two undisturbed runs that differ; None: they are equal."""
    first, second = pair[0].series, pair[1].series
    difference = first_difference(second, first, other="the other")
    if difference is not None:
        return verdict(Reason.UNEQUAL_REPETITION, text=difference)
    counts = [count_text(series.last_step, "step") for series in (first, second)]
    if counts[0] != counts[1]:
        text = f"one made {counts[0]}, and the other {counts[1]}"
        return verdict(Reason.UNEQUAL_REPETITION, text=text)
    if samples.check(second, first) is not None:
        return verdict(Reason.UNEQUAL_REPETITION, text="their steps have other samples")
    return None


def _first_other_step(run: Run, undisturbed: Run) -> int | None:
    """Returns the first step that another world or strategy has made; None: there is none."""
    steps, others = run.series, undisturbed.series
    common = sorted(steps.steps.keys() & others.steps.keys() - {0})
    if run.result.strategy != undisturbed.result.strategy:
        return common[0] if common else None
    return next((s for s in common if steps.world_at(s) != others.world_at(s)), None)


def _unexplained(run: Run, controls: Controls) -> Verdict | None:
    """Returns the verdict on a run whose values depend on the world; None: they do not."""
    series, undisturbed = run.series, controls.undisturbed.series
    other = [
        step
        for step in series.steps.keys() & undisturbed.steps.keys() - {0}
        if series.world_at(step) != undisturbed.world_at(step)
    ]
    if not other or run.result.virtual_batch:
        return None
    if any(
        record.draws
        for records in (*series.steps.values(), *undisturbed.steps.values())
        for record in records.values()
    ):
        return verdict(Reason.DRAWS)
    return verdict(Reason.BATCH_NORM) if run.result.batch_norm else None


def _rounding(run: Run, controls: Controls, from_step: int) -> Verdict:
    """Returns the verdict on values that may differ by rounding."""
    noise = Noise(None, {})
    if controls.nudged is not None:
        noise = noise_of(*(control.series for control in controls.nudged))
    comparison = Comparison(
        run.series,
        controls.undisturbed.series,
        noise,
        from_step,
        same_strategy=run.result.strategy == controls.undisturbed.result.strategy,
    )
    if comparison.is_equal:
        return Verdict(Outcome.EQUAL)
    difference = comparison.first_difference()
    if difference is None:
        return Verdict(Outcome.WITHIN_ROUNDING)
    if noise.first_step is None:
        return verdict(Reason.NO_NUDGE, text=difference)
    return _differs(difference)


def _differs(difference: Difference) -> Verdict:
    return value_verdict(difference.kind, str(difference), lost=False)
