"""Makes the screen of `elasticzero top` from the status of a job.

Pure: the screen depends on nothing but its arguments. Lines that do not fit are cut, so the screen
has at most as many rows as the terminal. The names and messages in a status may come from anywhere;
what would not be seen as itself in them is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from elasticzero.launcher.observability.compute_time import STRAGGLER_RATIO
from elasticzero.ops.dashboard.history import downsampled
from elasticzero.text import count_text, duration_text, shown

STYLES = {
    "productive": "green",
    "data_wait": "yellow",
    "snapshot": "bright_blue",
    "checkpoint": "blue",
    "wasted": "red",
    "detect": "bright_red",
    "regroup": "dark_orange",
    "connect": "magenta",
    "restore": "bright_magenta",
    "startup": "plum3",
    "idle": "grey50",
    "parked": "grey37",
}
"""Colours of the classes of time."""
STATES = {"training": "green", "finished": "green", "waiting": "dim", "?": "dim"}
BAD_STATES = {"gone": "red", "failed": "red", "set aside": "red"}
LEVELS = {"warning": "yellow", "error": "red"}
LABEL_WIDTH = 9
LEGEND_ROWS = 2
LEAST_EVENTS = 4
"""Rows that are kept for events where there are many nodes."""
MOST_EVENTS = 12
COLUMNS = (
    ("NODE", 0),
    ("ROLE", 60),
    ("RANKS", 50),
    ("STATE", 0),
    ("STEP", 0),
    ("LAST STEP", 50),
    ("STEP TIME", 70),
    ("COMPUTE", 80),
    ("UP", 100),
    ("ADDRESS", 110),
)
"""Columns of the table of nodes, and the width of the screen from which on each is shown."""
RIGHT = ("STEP", "LAST STEP", "STEP TIME", "COMPUTE", "UP")
BLOCKS = "▁▂▃▄▅▆▇█"
NONE, UNKNOWN = "-", "?"


def job_screen(
    status: Mapping[str, Any],
    *,
    width: int,
    height: int | None,
    clock: Callable[[float], str],
    notes: Sequence[str] = (),
) -> RenderableType:
    """Returns the screen for a job.

    Args:
        status: what `/job` serves; without a history the curves and events are left out.
        width: number of characters in a row.
        height: maximum number of rows; None: any number, and the screen names no key.
        clock: returns a Unix time as text.
        notes: sentences that a reader must know first, such as that etcd does not answer.
    """
    past = status.get("history") or {}
    rows: list[RenderableType] = [_title(status, width, clock), _reason(status, width, height)]
    rows += [_cut(note, "bold yellow") for note in (*notes, *_notes(status))]
    rows += [Text(), *_progress(status, past, width), *_time(status, width), _saved(status, past)]
    rows.append(Text())
    nodes, lines = status["nodes"], list(past.get("events") or [])
    events, for_nodes = min(MOST_EVENTS, len(lines)), len(nodes) + 1
    if height is not None:
        left = max(4, height - len(rows))
        kept = min(events, LEAST_EVENTS) + 1 if events else 0
        for_nodes = max(3, min(for_nodes, left - kept))
        events = max(0, min(events, left - for_nodes - 1))
    rows += _nodes(nodes, width, for_nodes)
    if events:
        rows += [Text(), *(_event(line, clock) for line in lines[-events:])]
    return Group(*rows)


def _reason(status: Mapping[str, Any], width: int, height: int | None) -> RenderableType:
    key = Text("q quits" if height is not None else "", "dim")
    return _two(Text(shown(status["reason"]), "dim"), key, width)


def _title(status: Mapping[str, Any], width: int, clock: Callable[[float], str]) -> RenderableType:
    state = status["state"]
    text = Text.assemble((shown(status["job"]), "bold"), "  ", ("● ", _style(state)), state)
    if status["generation"]:
        nodes = sum(node["role"] != "spare" for node in status["nodes"])
        limits = status["nnodes"]
        of = f" ({limits[0]}:{limits[1]})" if limits else ""
        age_s = status["generation_age_s"]
        age = f", {duration_text(age_s)}" if age_s is not None else ""
        text.append(
            f"  generation {status['generation']}{age}  {count_text(status['world_size'], 'rank')} "
            f"on {count_text(nodes, 'node')}{of}"
        )
    time = clock(status["at"]) if status.get("at") is not None else ""
    return _two(text, Text(time, "dim"), width)


def _two(left: Text, right: Text, width: int) -> Text:
    """Returns a line with one text at its left end and another at its right end.

    Args:
        left: text that is cut where there is no room for both.
        right: text that is never cut.
        width: number of characters in the line.
    """
    left.truncate(max(0, width - right.cell_len - 2), overflow="ellipsis")
    return Text.assemble(left, " " * max(2, width - left.cell_len - right.cell_len), right)


def _notes(status: Mapping[str, Any]) -> list[str]:
    notes = []
    if (done := status["done"]) is not None:
        notes.append(f"{done['outcome']}: {done['reason']}")
    elif not status.get("leads", True) and status["generation"]:
        node = status["node"]
        notes.append(f"no agent that leads the job answers {node}; this is what {node} has seen")
    control = status["control"]
    parts = [f"drain {drain['node']}" for drain in control["drain"]]
    parts += ["scale {}:{}".format(*control["nnodes"])] if control["nnodes"] else []
    parts += ["stop"] if control["stop"] else []
    return [*notes, *([f"operators asked for: {', '.join(parts)}"] if parts else [])]


def _progress(
    status: Mapping[str, Any], past: Mapping[str, Any], width: int
) -> list[RenderableType]:
    if status["plain"]:
        return [_labelled("step", "the script has not called elasticzero.run: no step is seen")]
    step, total, speed = status["step"], status["total_steps"], status["steps_per_s"]
    position = NONE if step is None else f"{step:,}{f' of {total:,}' if total else ''}"
    after = f"{speed:.3g} steps/s" if speed else ""
    if speed and total and step is not None and total > step:
        after += f", {duration_text((total - step) / speed)} to go"
    line = _labelled("step", position)
    if total and step is not None:
        done = min(1.0, step / total)
        room = max(8, width - line.cell_len - len(after) - 11)
        cells = round(done * room)
        line.append("  ").append("━" * cells, "cyan").append("─" * (room - cells), "dim")
        line.append(f"  {done:4.0%}")
    line.append(f"  {after}")
    rows: list[RenderableType] = [line]
    loss = status["loss"]
    if loss is not None:
        line = _labelled("loss", f"{loss:<8.4g}")
        values = [row[1] for row in past.get("loss") or []]
        line.append("  ").append(sparkline(values, max(8, width - line.cell_len - 2)), "cyan")
        rows.append(line)
    if (rounds := status.get("rounds")) is not None:
        rows.append(_rounds(rounds, width))
    return rows


def _rounds(rounds: Mapping[str, Any], width: int) -> Text:
    """Returns a line on what the islands have averaged last, which is cut where it is too long."""
    line = _labelled("rounds", f"{rounds['round']:,}")
    if rounds["total"]:
        line.append(f"  {rounds['samples'] / rounds['total']:.0%} of the samples", "dim")
    for island in rounds["islands"]:
        samples, late = island["samples"], island["staleness"]
        text = NONE if samples is None else f"{samples:,}" + (f", {late} late" if late else "")
        style = "yellow" if samples is None or late else "green"
        line.append("  ").append(f"{shown(island['island'])} ").append(text, style)
    line.truncate(width, overflow="ellipsis")
    return line


def sparkline(values: list[float], most: int) -> str:
    """Returns a curve of at most `most` characters; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    values = downsampled(values, most)
    low, high = min(values), max(values)
    steps = len(BLOCKS) - 1
    scale = steps / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


def bar_cells(shares: Sequence[float], width: int) -> list[int]:
    """Returns how many characters each share of a bar gets; they add up to `width`.

    The shares with the largest remainders get one character more.

    Args:
        shares: parts of 1, which add up to 1.
        width: number of characters in the bar.
    """
    exact = [share * width for share in shares]
    cells = [int(part) for part in exact]
    rest = sorted(range(len(cells)), key=lambda i: exact[i] - cells[i], reverse=True)
    for i in rest[: width - sum(cells)]:
        cells[i] += 1
    return cells


def _time(status: Mapping[str, Any], width: int) -> list[RenderableType]:
    """Returns the bar of the time by class, and its legend."""
    seconds = status["seconds"] or {}
    whole_s = sum(seconds.values())
    if whole_s <= 0:
        return []
    parts = sorted(((s / whole_s, kind) for kind, s in seconds.items() if s > 0), reverse=True)
    goodput = status["goodput"]
    line = _labelled("goodput", f"{goodput:<8.1%}" if goodput is not None else f"{NONE:<8}")
    after = f"  of {duration_text(whole_s)}"
    line.append("  ")
    room = max(8, width - line.cell_len - len(after))
    cells = bar_cells([share for share, _ in parts], room)
    for count, (_, kind) in zip(cells, parts, strict=True):
        line.append("█" * count, STYLES[kind])
    line.append(after, "dim")
    return [line, *_legend(parts, width)]


def _legend(parts: Sequence[tuple[float, str]], width: int) -> list[RenderableType]:
    rows: list[RenderableType] = []
    line = Text(" " * LABEL_WIDTH)
    for share, kind in parts:
        if share < 0.0005:
            break
        item = Text.assemble(("■ ", STYLES[kind]), f"{kind.replace('_', ' ')} {share:.1%}")
        if line.cell_len + item.cell_len + 2 > width:
            if len(rows) + 1 == LEGEND_ROWS:
                break
            rows.append(line)
            line = Text(" " * LABEL_WIDTH)
        line.append(item).append("  ")
    line.rstrip()
    return [*rows, line]


def _saved(status: Mapping[str, Any], past: Mapping[str, Any]) -> RenderableType:
    texts = []
    for what in ("checkpoint", "snapshot"):
        saved = past.get(what)
        if saved is not None:
            age = duration_text(max(0.0, status["at"] - saved["at"]))
            texts.append(f"{what} of step {saved['step']:,}, {age} ago")
        elif what == "checkpoint" and status["checkpoint_step"] is not None:
            texts.append(f"{what} of step {status['checkpoint_step']:,}")
    return _labelled("saved", "   ".join(texts) if texts else "nothing yet")


def _nodes(nodes: Sequence[Mapping[str, Any]], width: int, most: int) -> list[RenderableType]:
    """Returns the table of nodes.

    Where there are too many, those that do not train come first, and a line counts the rest.

    Args:
        nodes: the nodes as `/job` serves them.
        width: number of characters in a row, on which it depends which columns are shown.
        most: maximum number of rows, with the heads and the line that counts.
    """
    computes = any(node.get("compute_s") is not None for node in nodes)
    heads = [head for head, least in COLUMNS if width >= least and (computes or head != "COMPUTE")]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        justify: JustifyMethod = "right" if head in RIGHT else "left"
        table.add_column(head, no_wrap=True, overflow="ellipsis", justify=justify)
    listed = list(nodes)
    if len(listed) + 1 > most:
        listed = sorted(listed, key=lambda node: node["state"] == "training")[: most - 2]
    for node in listed:
        table.add_row(*(_cell(node, head) for head in heads))
    if len(listed) == len(nodes):
        return [table]
    return [table, Text(f"and {count_text(len(nodes) - len(listed), 'more node')}", "dim")]


def _cell(node: Mapping[str, Any], head: str) -> Text:
    missing = UNKNOWN if node["silent"] else NONE
    state, aside_s = node["state"], node["set_aside_s"]
    if head == "STATE":
        remaining = f", {duration_text(aside_s)} more" if state == "set aside" and aside_s else ""
        return Text(f"{state}{remaining}", _style(state))
    keys = {"LAST STEP": "step_age_s", "STEP TIME": "step_s", "COMPUTE": "compute_s", "UP": "up_s"}
    if head in keys:
        value = node.get(keys[head])
        text = _short if head in ("STEP TIME", "COMPUTE") else duration_text
        ratio = node["compute_ratio"] if head == "COMPUTE" else None
        if value is not None and ratio is not None and ratio > STRAGGLER_RATIO:
            return Text(f"{text(value)} {ratio:.1f}x", "yellow")
        return Text(missing if value is None else text(value))
    if head == "STEP":
        return Text(missing if node["step"] is None else f"{node['step']:,}")
    value = node[head.lower()]
    return Text(shown(str(value)) if value is not None else NONE)


def _event(line: Sequence[Any], clock: Callable[[float], str]) -> Text:
    at, level, text = line
    row = Text.assemble((f"{clock(at)}  ", "dim"), (shown(text), LEVELS.get(level, "")))
    row.no_wrap, row.overflow = True, "ellipsis"
    return row


def _cut(text: str, style: str) -> Text:
    return Text(shown(text), style, no_wrap=True, overflow="ellipsis")


def _labelled(label: str, text: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(f"{label:<{LABEL_WIDTH}}", "dim").append(text)


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else duration_text(seconds)


def _style(state: str) -> str:
    return BAD_STATES.get(state) or STATES.get(state, "yellow")
