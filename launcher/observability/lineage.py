"""Finds which steps count: the lineage of generations, read off an agent's events.

Pure, and therefore apart from the console that prints. Step s of generation g is committed when the
newest generation goes on from it: when s is not above the resume step of the generation that began
from a state of g, and that one is committed. That is the next generation, but for one that begins
from a checkpoint which an older generation has completed late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any


@dataclass(slots=True)
class Lineage:
    """Finds which steps of which generation count: those up to the next generation's resume
    step."""

    resume_steps: dict[int, int] = field(default_factory=dict)
    """Step that each generation starts from."""
    reached: dict[int, int] = field(default_factory=dict)
    """Last step that each generation finished."""
    from_storage: set[int] = field(default_factory=set)
    """Generations that start from a checkpoint."""
    saved_by: dict[int, int] = field(default_factory=dict)
    """The generation whose state of a step was committed as a checkpoint last."""

    def world(self, generation: int, resume_step: int) -> None:
        self.resume_steps[generation] = resume_step

    def stepped(self, generation: int, step: int) -> None:
        self.reached[generation] = max(step, self.reached.get(generation, 0))

    def is_committed(self, generation: int, step: int) -> bool:
        """Returns whether this generation's step is part of the final result."""
        last = self._last_steps().get(generation)
        return last is not None and step <= last

    def _last_steps(self) -> dict[int, float]:
        """Returns the last step that counts, of each generation from which the newest one goes on,
        itself or through others."""
        steps: dict[int, float] = {}
        last = inf
        left = sorted(self.resume_steps.keys() | self.reached.keys())
        while left:
            generation = left.pop()
            steps[generation] = last
            last = min(last, self.resume_steps.get(generation, inf))
            saver = self.saved_by.get(int(last)) if generation in self.from_storage else None
            if saver in left:
                del left[left.index(saver) + 1 :]
        return steps

    def lost(self, generation: int) -> int:
        """Returns the number of steps that were done before `generation` began and are done again
        in it.

        They are those up to the end of the generation before: what earlier ones did beyond it was
        lost when others followed them. Steps before the start of all of them are not known here.
        """
        earlier = [g for g in self.resume_steps.keys() | self.reached.keys() if g < generation]
        if not earlier:
            return 0
        before = max(earlier)
        starts = {g: self.resume_steps.get(g, 0) for g in earlier}
        end = max(starts[before], self.reached.get(before, 0))
        return max(0, end - max(self.resume_steps[generation], min(starts.values())))

    @property
    def recomputed(self) -> int:
        return sum(self.lost(generation) for generation in self.resume_steps)

    def take(self, event: Mapping[str, Any]) -> None:
        """Takes in one event of any agent's log."""
        if event["event"] == "world":
            self.world(event["generation"], event["resume_step"])
            if event.get("tier") == "storage":
                self.from_storage.add(event["generation"])
        elif event["event"] == "checkpoint":
            self.saved_by[event["step"]] = event["generation"]
        elif event["event"] == "step":
            self.stepped(event["generation"], event["step"])


def committed(
    lineage: Lineage, traces: Iterable[tuple[int, int, list[int]]]
) -> dict[int, list[int]]:
    """Returns the samples of each committed step.

    Args:
        lineage: Which steps count.
        traces: (generation, step, samples of the global batch) as any rank saw them; the ranks of
            one step agree.

    Raises:
        ValueError: Two ranks do not agree.
    """
    steps: dict[int, list[int]] = {}
    for generation, step, samples in traces:
        if not lineage.is_committed(generation, step):
            continue
        if steps.setdefault(step, samples) != samples:
            raise ValueError(f"step {step}: two committed versions with different samples")
    return steps
