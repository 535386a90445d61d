"""What a tester sees of a job in its agents' logs: its worlds, and what each has done and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.observability.lineage import Lineage
from tests.integration.clusters import Story


class Seen:
    """Reads each event once; `wait` reads on."""

    def __init__(self, told: Story, *, divided: bool) -> None:
        """divided: the strategy goes on from snapshots, not from what any survivor has."""
        self.told = told
        self.lineage = Lineage()
        self.worlds: dict[int, dict[str, Any]] = {}
        self.rounds: dict[int, set[str]] = {}
        """By generation: the nodes that know of its end."""
        self.captured: dict[tuple[int, int], set[int]] = {}
        """By generation and step: the ranks that have captured their part of a checkpoint."""
        self.checkpoint = 0
        """The newest step that is committed to storage; 0: none."""
        self._divided = divided
        self._kept: dict[tuple[int, str], set[int]] = {}
        self._said: dict[str, set[str]] = {}
        self._read = 0

    def wait(self, what: str, so: Callable[[], Any], patience_s: float = 90.0) -> Any:
        """What `so` returns once that is true."""

        def seen() -> Any:
            for node, event in self.told.told[self._read :]:
                self._take(node, event)
            self._read = len(self.told.told)
            return so()

        return self.told.wait(what, seen, patience_s)

    @property
    def generation(self) -> int:
        return max(self.worlds, default=0)

    @property
    def members(self) -> list[str]:
        """Of the newest world, in its order."""
        return list(self.worlds[self.generation]["members"]) if self.worlds else []

    def all_reported(self, word: str, nodes: Iterable[Node]) -> bool:
        """Whether all these nodes have come so far: `serving`, `registered`, `leads` or `start
        GENERATION`."""
        return all(word in self._said.get(node.name, ()) for node in nodes)

    def reached(self, generation: int) -> int:
        """The last step that a generation finished; 0: none."""
        return self.lineage.reached.get(generation, 0)

    def cost(self, generation: int) -> int:
        """Steps of the generation before that are done again in this one."""
        if generation - 1 not in self.worlds:
            return 0
        before = max(self.reached(generation - 1), int(self.worlds[generation - 1]["resume_step"]))
        return max(0, before - int(self.worlds[generation]["resume_step"]))

    def held(self, generation: int) -> int:
        """The newest step that a divided generation is bound to be gone on from: one of which every
        node has said that it keeps its part; else the one it started from.

        A snapshot may give way to a checkpoint before the ranks know that it is kept everywhere;
        while a checkpoint is being kept, the one before it counts.
        """
        world = self.worlds[generation]
        everywhere = set.intersection(
            *(self._kept.get((generation, name), set()) for name in world["members"])
        )
        kept = [int(world["resume_step"]), *sorted(everywhere)]
        newest = max((s for g, s in self.captured if g == generation), default=0)
        return max(kept[0], kept[-2] if newest > kept[-1] and everywhere else kept[-1])

    def trains(self, members: set[str], after: int, beyond: int = 0) -> bool:
        """Whether the newest world, of a generation after `after`, has these members, and has made
        progress that stays; beyond: a step that is to be passed."""
        generation = self.generation
        if generation <= after or set(self.members) != members:
            return False
        start = max(beyond, int(self.worlds[generation]["resume_step"]))
        newest = self.reached(generation)
        kept = self.held(generation) if self._divided else newest
        return newest >= start + 2 and kept > start

    def _take(self, node: str, event: dict[str, Any]) -> None:
        self.lineage.take(event)
        match event["event"]:
            case "world":
                self.worlds[event["generation"]] = event
            case "round":
                self.rounds.setdefault(event["generation"], set()).add(node)
            case "kept" if event["error"] is None:
                self._kept.setdefault((event["generation"], node), set()).add(event["step"])
            case "captured" if event["checkpoint"]:
                place = (event["generation"], event["step"])
                self.captured.setdefault(place, set()).add(event["rank"])
            case "checkpoint":
                self.checkpoint = max(self.checkpoint, event["step"])
            case "serving" | "registered" as word:
                self._said.setdefault(node, set()).add(word)
            case "start":
                self._said.setdefault(node, set()).add(f"start {event['generation']}")
            case "reason" if event["reason"].endswith("for more"):
                self._said.setdefault(node, set()).add("leads")
            case _:
                pass
