"""Orders the records of a run: its generations, and the steps of it that count. Pure.

A step counts as the newest generation has made it: a generation that went back makes steps again,
and those that the older one had made beyond that boundary are undone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from elasticzero.rehearsal.records import LiveValue, Moment, StepRecord

BY_RANK = "generator"
"""The kind of value of which each rank has its own."""

ByRank = Mapping[int, StepRecord]
Key = tuple[str, str]
"""The kind and the name of a value."""
Values = Mapping[Key, LiveValue]


@dataclass(frozen=True, slots=True)
class Generation:
    """Holds the records of one generation."""

    number: int
    starts: ByRank
    """Records from before the first step, by rank."""
    steps: Mapping[int, ByRank]
    """Records of boundaries, by the number of steps made and by rank."""

    @property
    def start_step(self) -> int:
        """The number of steps that were made before this generation."""
        if self.starts:
            return next(iter(self.starts.values())).step
        return min(self.steps) - 1


@dataclass(frozen=True, slots=True)
class Series:
    """Holds the records of a run."""

    generations: tuple[Generation, ...]
    steps: Mapping[int, ByRank]
    """Records of the boundaries that count. Where the run began at no step, 0 has what was there
    before the first one."""

    @property
    def last_step(self) -> int:
        """The number of steps that the run has made."""
        return max(self.steps, default=0)

    @property
    def undisturbed_steps(self) -> int:
        """The number of steps that count of what the first generation made."""
        starts = [generation.start_step for generation in self.generations[1:]]
        return min(starts, default=self.last_step)

    def generation_of(self, step: int) -> int:
        """Returns the generation that a boundary's records are of."""
        return next(iter(self.steps[step].values())).generation

    def world_at(self, step: int) -> int:
        """Returns the number of ranks that made a step."""
        return next(iter(self.steps[step].values())).world_size


def series_of(records: Iterable[StepRecord]) -> Series:
    """Orders the records of a run."""
    starts: dict[int, dict[int, StepRecord]] = defaultdict(dict)
    boundaries: dict[int, dict[int, dict[int, StepRecord]]] = defaultdict(dict)
    for record in records:
        if record.moment is Moment.START:
            starts[record.generation][record.rank] = record
        else:
            of_step = boundaries[record.generation].setdefault(record.step, {})
            of_step[record.rank] = record
    generations = tuple(
        Generation(number, _sorted(starts[number]), _by_rank(boundaries[number]))
        for number in sorted({*starts, *boundaries})
    )
    return Series(generations, _counted(generations))


def without(series: Series, keys: Collection[Key]) -> Series:
    """Returns a series that has no values of these keys in the boundaries that count."""
    if not keys:
        return series
    steps = {
        step: {rank: _record_without(record, keys) for rank, record in by_rank.items()}
        for step, by_rank in series.steps.items()
    }
    return replace(series, steps=steps)


def _record_without(record: StepRecord, keys: Collection[Key]) -> StepRecord:
    return replace(record, live=tuple(v for v in record.live if (v.kind, v.name) not in keys))


def _sorted(records: Mapping[int, StepRecord]) -> ByRank:
    return dict(sorted(records.items()))


def _by_rank(steps: Mapping[int, Mapping[int, StepRecord]]) -> Mapping[int, ByRank]:
    return {step: _sorted(records) for step, records in sorted(steps.items())}


def _counted(generations: tuple[Generation, ...]) -> Mapping[int, ByRank]:
    """Returns the records of the boundaries that count, in their order."""
    counted: dict[int, ByRank] = {}
    if generations and generations[0].starts and generations[0].start_step == 0:
        counted[0] = generations[0].starts
    for generation in generations:
        start = generation.start_step
        counted = {step: records for step, records in counted.items() if step <= start}
        counted |= {step: records for step, records in generation.steps.items() if step > start}
    return dict(sorted(counted.items()))


def whole_values(record: StepRecord) -> Values:
    """Returns the values of a record that are those of the whole job."""
    return {(v.kind, v.name): v for v in record.live if v.kind != BY_RANK}


def rank_values(record: StepRecord) -> Values:
    """Returns the values of a record that its rank alone has."""
    return {(v.kind, v.name): v for v in record.live if v.kind == BY_RANK}


def first_whole(records: ByRank) -> Values:
    """Returns the whole job's values as the lowest rank has them that has some."""
    return next(filter(None, map(whole_values, records.values())), {})
