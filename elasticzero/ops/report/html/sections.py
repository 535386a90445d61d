"""Writes the sections of the page that have a picture. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from elasticzero.launcher.goodput import TIME_CLASSES
from elasticzero.ops.page.charts import stacked_bar
from elasticzero.ops.page.markup import element, escaped, legend, section, swatch, table
from elasticzero.ops.page.style import colour_name
from elasticzero.ops.report.html.charts import (
    ChangeMark,
    curve_chart,
    node_timeline,
    size_chart,
)
from elasticzero.ops.report.html.sentences import (
    PHASE_NAMES,
    TIME_MEANINGS,
    class_name,
    recovery_lead,
    story_lead,
    time_lead,
)
from elasticzero.ops.report.model import FaultSummary, GenerationSummary, RunSummary
from elasticzero.ops.report.notes import names_text
from elasticzero.ops.report.thinning import coarse, thinned
from elasticzero.ops.report.timeline import STATES
from elasticzero.text import many_text, share_text, span_text

MOST_NODES = 32
"""Maximum number of nodes with a row in the timeline."""
MOST_COLUMNS = 480
"""Maximum number of spans in a row of the timeline."""
MOST_ROWS = 40
"""Maximum number of rows in a table."""
MOST_LOG_TEXT = 600
"""Maximum number of characters of a text that comes from a log."""
_CULPRIT = re.compile(r"\brank \d+ on (\S+) (?:failed|hung)\b")
KIND_NAMES: Mapping[str, str] = {
    "fault": "fault",
    "left": "a node left",
    "joined": "a node joined",
    "planned": "planned change",
}
TIER_NAMES: Mapping[str, str] = {
    "fresh": "from the beginning",
    "ram": "from memory",
    "storage": "from storage",
    "live": "without a stop",
}


def log_text(text: str) -> str:
    """Returns the markup of a text from a log, cut if it is long."""
    short = text if len(text) <= MOST_LOG_TEXT else f"{text[:MOST_LOG_TEXT]}…"
    return element("div", escaped(short), class_="words")


def tag(kind: str, text: str) -> str:
    """Returns a small label in the colour of a kind of change."""
    return element("span", escaped(text), class_=f"tag k-{kind}")


def marks_of(summary: RunSummary) -> list[ChangeMark]:
    """Returns the changes between generations, for the charts over time."""
    return [
        ChangeMark(g.began_s, g.kind, f"generation {g.number}: {g.label} ({g.cause[:80]})")
        for g in summary.generations[1:]
    ]


def story(summary: RunSummary) -> str:
    """Returns the section that tells the generations and what each node did."""
    marks = marks_of(summary)
    nodes = shown_nodes(summary)
    states = {
        node: coarse(summary.states.get(node, ()), summary.wall_s, MOST_COLUMNS) for node in nodes
    }
    crosses = [
        (fault.at_s, node, f"{fault.label}: {fault.cause[:200]}")
        for fault in summary.faults[-200:]
        for node in _struck(fault)
    ]
    keys = [(name, text) for name, text in STATES.items()]
    kinds = {generation.kind for generation in summary.generations}
    changes = [
        element("span", element("b", "┆", class_=f"k-{kind}"), text, class_="key")
        for kind, text in KIND_NAMES.items()
        if kind in kinds
    ]
    if crosses:
        changes.append(
            element(
                "span",
                element("b", "✕", class_="k-fault"),
                "what the fault struck",
                class_="key",
            )
        )
    left_out = len(summary.nodes) - len(nodes)
    note = (
        f"{len(nodes)} of {len(summary.nodes):,} nodes are shown: those whose state changed most "
        "often."
    )
    sizes = thinned([(g.began_s, float(g.world_size)) for g in summary.generations], 1200)
    return section(
        "story",
        "What happened",
        escaped(story_lead(summary)),
        element("h3", "Nodes over time"),
        element("p", note, class_="lead") if left_out > 0 else "",
        node_timeline(states, STATES, summary.wall_s, marks, crosses),
        element("div", *(swatch(kind, text) for kind, text in keys), *changes, class_="legend"),
        element("h3", "World size"),
        size_chart(sizes, summary.wall_s, marks),
        element("h3", "Generations"),
        _generation_table(summary),
    )


def shown_nodes(summary: RunSummary) -> list[str]:
    """Returns the nodes with a row in the timeline, in their order."""
    if len(summary.nodes) <= MOST_NODES:
        return list(summary.nodes)
    busiest = sorted(summary.nodes, key=lambda node: -len(summary.states.get(node, ())))
    chosen = set(busiest[:MOST_NODES])
    return [node for node in summary.nodes if node in chosen]


def _struck(fault: FaultSummary) -> tuple[str, ...]:
    """Returns the nodes that a fault struck."""
    culprit = _CULPRIT.search(fault.cause)
    return fault.lost or ((culprit[1],) if culprit is not None else ())


def _generation_table(summary: RunSummary) -> str:
    head = ("#", "Began at", "Lasted", "Steps", "Ranks", "Where its time went", "Why it began")
    groups = neighbours(summary.generations, MOST_ROWS)
    kinds = _present_classes(summary)
    rows = [_generation_row(group) for group in groups]
    if before_s := sum(summary.before_first.values()):
        bar = _time_bar(summary.before_first, "Time before the first generation")
        why = element("span", "before the first generation", class_="muted")
        rows.insert(0, ("–", span_text(0.0), span_text(before_s), "", "", bar, why))
    keys = legend([(colour_name(kind), class_name(kind)) for kind in kinds])
    return keys + table(head, rows, numbers=(0, 1, 2, 3, 4))


def _time_bar(seconds: Mapping[str, float], label: str) -> str:
    parts = [
        (colour_name(kind), seconds[kind], _part(kind, seconds[kind])) for kind in _order(seconds)
    ]
    return stacked_bar(parts, sum(seconds.values()), "low", label)


def neighbours(
    generations: Sequence[GenerationSummary], most: int
) -> list[Sequence[GenerationSummary]]:
    """Returns the generations in at most `most` groups of neighbours, of equal size."""
    size = -(-len(generations) // most) or 1
    return [generations[i : i + size] for i in range(0, len(generations), size)]


def _generation_row(group: Sequence[GenerationSummary]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    seconds: dict[str, float] = {}
    for generation in group:
        for kind, s in generation.seconds.items():
            seconds[kind] = seconds.get(kind, 0.0) + s
    lasted_s = last.ended_s - first.began_s
    sizes = sorted({generation.world_size for generation in group})
    size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    steps = f"{first.resume_step:,} → {last.reached:,}"
    if len(group) == 1:
        number, why = str(first.number), _why(first)
    else:
        number = f"{first.number}–{last.number}"
        counts: dict[str, int] = {}
        for generation in group:
            counts[generation.label] = counts.get(generation.label, 0) + 1
        why = log_text(", ".join(f"{count:,} × {label}" for label, count in counts.items()))
    bar = _time_bar(seconds, f"Time of generation {number}")
    return (number, span_text(first.began_s), span_text(lasted_s), steps, size, bar, why)


def _why(generation: GenerationSummary) -> str:
    again = generation.steps_redone
    tier = TIER_NAMES.get(generation.tier, generation.tier)
    lost = f"; {many_text(again, 'step')} done again" if again else ""
    on = f"{names_text(generation.members)}; step {generation.resume_step:,} {tier}{lost}"
    label = "" if generation.kind == "start" else tag(generation.kind, generation.label) + " "
    cause = generation.cause[:MOST_LOG_TEXT]
    return element(
        "div",
        label,
        escaped(cause),
        element("div", escaped(on), class_="muted"),
        class_="words",
    )


def _order(seconds: Mapping[str, float]) -> list[str]:
    """Returns the classes of time that there are, in their usual order."""
    present = [kind for kind in TIME_CLASSES if seconds.get(kind, 0.0) > 0]
    return present + sorted(kind for kind in seconds if kind not in TIME_CLASSES)


def _present_classes(summary: RunSummary) -> list[str]:
    return _order(summary.seconds)


def _part(kind: str, seconds: float) -> str:
    return f"{class_name(kind)}: {span_text(seconds)}"


def time_section(summary: RunSummary) -> str:
    """Returns the section on where each second went."""
    whole_s = summary.wall_s
    kinds = _present_classes(summary)
    bar = stacked_bar(
        [
            (colour_name(kind), summary.seconds[kind], _part(kind, summary.seconds[kind]))
            for kind in kinds
        ],
        whole_s,
        "tall",
        "Where the time of the run went",
    )
    rows = [
        (
            swatch(colour_name(kind), class_name(kind)),
            escaped(TIME_MEANINGS.get(kind, ("", ""))[1]),
            span_text(summary.seconds.get(kind, 0.0)),
            f"{summary.seconds.get(kind, 0.0):,.2f}",
            escaped(share_text(summary.seconds.get(kind, 0.0) / whole_s)) if whole_s > 0 else "–",
        )
        for kind in dict.fromkeys([*TIME_CLASSES, *kinds])
    ]
    total = ("all", "from the beginning of the job to its end", span_text(whole_s))
    rows.append((*total, f"{whole_s:,.2f}", share_text(1.0) if whole_s > 0 else "–"))
    listed = table(("Class", "Meaning", "Time", "Seconds", "Share"), rows, numbers=(2, 3, 4))
    return section("time", "Where each second went", escaped(time_lead(summary)), bar, listed)


def training_section(summary: RunSummary) -> str:
    """Returns the section with the curves of loss and steps."""
    marks = marks_of(summary)
    parts = []
    if summary.losses:
        (_, first), (_, last) = summary.losses[0], summary.losses[-1]
        lead = f"The loss went from {first:.4g} to {last:.4g}."
        again = bool(summary.wasted_losses)
        lead += " Dots are steps that were done again." if again else ""
        loss = curve_chart(
            summary.losses, summary.wasted_losses, summary.wall_s, marks, ("loss", "Loss over time")
        )
        parts += [element("h3", "Loss"), loss]
    else:
        lead = "The script logged no number named loss by session.log."
    if summary.steps:
        names = ("step", "Steps over time")
        curve = curve_chart(summary.steps, (), summary.wall_s, marks, names)
        parts += [element("h3", "Steps"), curve]
        lead += " Where the curve of steps falls, steps were lost and are done again."
    else:
        lead += " No step was seen."
    return section("training", "Training", escaped(lead), *parts)


def recovery_section(summary: RunSummary) -> str:
    """Returns the section on the recoveries and their phases."""
    chosen = summary.recoveries
    note = ""
    if len(chosen) > MOST_ROWS:
        slowest = sorted(chosen, key=lambda recovery: -recovery.seconds)[:MOST_ROWS]
        chosen = tuple(sorted(slowest, key=lambda recovery: recovery.generation))
        note = f" The {MOST_ROWS} longest of {len(summary.recoveries):,} are shown."
    if not chosen:
        return section("recoveries", "Recoveries", escaped(recovery_lead(summary)))
    longest_s = max(recovery.seconds for recovery in chosen)
    colours = {"start": "startup", "first_step": "productive"}
    head = ["Gen.", "What happened", "Phases", "All", *(PHASE_NAMES.values()), "Steps lost"]
    rows = []
    for recovery in chosen:
        measured = [(phase, s) for phase, s in recovery.phases.items() if s is not None]
        bar = stacked_bar(
            [
                (colours.get(phase, phase), s, f"{PHASE_NAMES.get(phase, phase)}: {span_text(s)}")
                for phase, s in measured
            ],
            longest_s,
            "low",
            f"Phases of the recovery of generation {recovery.generation}",
        )
        phases = [recovery.phases.get(phase) for phase in PHASE_NAMES]
        rows.append(
            (
                str(recovery.generation),
                tag(recovery.kind, recovery.label),
                bar,
                span_text(recovery.seconds),
                *("–" if s is None else span_text(s) for s in phases),
                f"{recovery.steps_lost:,}",
            )
        )
    keys = legend((colours.get(phase, phase), name) for phase, name in PHASE_NAMES.items())
    numbers = (0, 3, *range(4, 4 + len(PHASE_NAMES) + 1))
    lead = escaped(recovery_lead(summary) + note)
    return section("recoveries", "Recoveries", lead, keys, table(head, rows, numbers))
