"""Draws the states of a worker, a group of them, a step and a next world from their tables.

A page has a picture between two markers; `tools.reference` writes it anew.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elasticzero.comm.worlds import next_world
from elasticzero.launcher.workers import group_lifecycle, lifecycle
from elasticzero.training import step_machine
from tools import source

_BLOCK = re.compile(
    r"(<!-- The states of (?P<name>[a-z ]+), which `make reference` draws\. -->\n)"
    r".*?(<!-- End of the states\. -->)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A table of transitions, and the module whose docstrings describe it."""

    path: str
    events: type[Enum]
    transitions: Mapping[tuple[Enum, Enum], Enum]


def _moves(table: Mapping[Any, object]) -> dict[tuple[Enum, Enum], Enum]:
    """The entries that lead to a state, and refuse nothing."""
    return {key: entry for key, entry in table.items() if isinstance(entry, Enum)}


MACHINES = {
    "a worker": Machine(
        path="launcher/workers/lifecycle.py",
        events=lifecycle.Event,
        transitions=_moves(lifecycle.TRANSITIONS),
    ),
    "a worker group": Machine(
        path="launcher/workers/group_lifecycle.py",
        events=group_lifecycle.GroupEvent,
        transitions=_moves(group_lifecycle.GROUP_TRANSITIONS),
    ),
    "a step": Machine(
        path="elasticzero/training/step_machine.py",
        events=step_machine.StepEvent,
        transitions=_moves(step_machine.TRANSITIONS),
    ),
    "a next world": Machine(
        path="elasticzero/comm/worlds/next_world.py",
        events=next_world.Event,
        transitions=_moves(next_world.STAGES),
    ),
}


def with_pictures(page: str) -> str:
    """Returns the page with its pictures of states drawn anew."""

    def drawn(block: re.Match[str]) -> str:
        return f"{block[1]}```mermaid\n{picture(MACHINES[block['name']])}\n```\n{block[3]}"

    return _BLOCK.sub(drawn, page)


def picture(machine: Machine) -> str:
    """Returns the states as a diagram of Mermaid, one box for each part."""
    titles = _titles(machine.path)
    labels = _labels(machine)
    kinds = list(dict.fromkeys(type(state) for state, _ in machine.transitions))
    lines = ["stateDiagram-v2", "    direction LR"]
    for kind in kinds:
        moves = {
            (state, event): after
            for (state, event), after in machine.transitions.items()
            if isinstance(state, kind) and after is not state
        }
        lines.append(f'    state "{titles[kind.__name__]}" as {kind.__name__} {{')
        lines += [f"        {line}" for line in _box(kind, moves, labels)]
        lines.append("    }")
    return "\n".join(lines)


def _box(
    kind: type[Enum], moves: Mapping[tuple[Enum, Enum], Enum], labels: Mapping[Enum, str]
) -> list[str]:
    """The lines for one part: an arrow for each pair of states, and a note for events that lead
    from all other states to one."""
    states = list(kind)
    from_all = {
        event: target
        for (_, event), target in moves.items()
        if len(states) > 3
        and all(moves.get((state, event)) is target for state in states if state is not target)
    }
    arrows: dict[tuple[Enum, Enum], list[str]] = defaultdict(list)
    for (state, event), after in moves.items():
        if event not in from_all:
            arrows[state, after].append(labels[event])
    lines = [f"[*] --> {states[0].name}"]
    lines += [
        f"{before.name} --> {after.name}: {', or '.join(texts)}"
        for (before, after), texts in arrows.items()
    ]
    notes: dict[Enum, list[str]] = defaultdict(list)
    for event, target in from_all.items():
        notes[target].append(labels[event])
    for target, texts in notes.items():
        joined = "<br>".join(texts)
        lines.append(f"note right of {target.name}: from every other state<br>{joined}")
    return lines


def _titles(path: str) -> dict[str, str]:
    """What a module's docstring says of each part, by the name of its class."""
    text = ast.get_docstring(source.module(path)) or ""
    titles = re.findall(r"^ (\w+) {2,}(\S.*?)(?=\. |\.?$)", text, re.MULTILINE)
    return {name: title.replace("`", "") for name, title in titles}


def _labels(machine: Machine) -> dict[Enum, str]:
    """The first clause of each event's docstring."""
    node = source.class_named(machine.events.__name__, machine.path)
    described = {field.name: field.text for field in source.fields(node)}
    return {event: _clause(described[event.name]) for event in machine.events}


def _clause(text: str) -> str:
    clause = re.split(r"[,;:]|\.(?: |$)", text.replace("`", ""))[0]
    first = clause.split()[0]
    return clause if "." in first else clause[0].lower() + clause[1:]
