"""Writes the status of a job, as `/job` serves it, as the body of the status page. Pure.

Everything that comes from the job is escaped by `markup`. Times are in UTC, each with its Unix
time, of which the page's script makes those of the browser's time zone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticzero.ops.dashboard.body_charts import (
    generation_chart,
    goodput_chart,
    loss_chart,
    time_bar,
    time_legend,
)
from elasticzero.ops.dashboard.body_tables import (
    dot,
    event_list,
    generation_table,
    island_table,
    mood,
    node_table,
    rows_of,
    whole,
)
from elasticzero.ops.page.charts import stacked_bar
from elasticzero.ops.page.markup import element, escaped, moment, swatch, tile
from elasticzero.text import duration_text, many_text, number_text, share_text, span_text

PERIOD_MS = 1000
PERIOD_A_NODE_MS = 20
"""Milliseconds between two requests of a page, and those that are added for each node."""
OVER_PERIOD_MS = 5000
"""Milliseconds between two requests once the job is over."""
FOOT = "This page only reads. Times are those of the node that answers, in your time zone."


def status_page_body(document: Mapping[str, Any]) -> str:
    """Returns the body of the status page as one element. document: what `/job` serves."""
    step, nodes, over = document["step"], document["nodes"], document["done"] is not None
    past = document["history"]
    records = past.get("generations") or []
    period_ms = OVER_PERIOD_MS if over else PERIOD_MS + PERIOD_A_NODE_MS * len(nodes)
    return element(
        "div",
        _header(document),
        _banners(document),
        element("div", *_tiles(document), class_="tiles"),
        _curves(document),
        _rounds(document),
        _card(
            "Generations",
            element(
                "div",
                swatch("startup", "starts"),
                swatch("productive", "trains, as high as its ranks"),
                swatch("fault", "nothing trains"),
                class_="legend",
            ),
            generation_chart(document),
            generation_table(records, document["at"]),
        ),
        _card("Nodes", escaped(_state_counts(nodes)), *node_table(nodes)),
        _card("Events", _since(document), event_list(past.get("events") or [])),
        element("footer", escaped(FOOT)),
        id="status",
        data_title=document["job"] if step is None else f"step {step} · {document['job']}",
        data_wait_ms=period_ms,
    )


def _card(title: str, beside: str, *content: str, **attributes: object) -> str:
    """Returns a section. beside: markup at the right of its title."""
    head = element("div", element("h2", title), element("div", beside), class_="head")
    return element("section", head, *content, **attributes)


def _header(document: Mapping[str, Any]) -> str:
    state = document["state"]
    text = element("span", escaped(state), id="state")
    source = f"from {document['node']}{', which leads' if document['leads'] else ''} · "
    name = element(
        "div",
        element("h1", escaped(document["job"]), id="job"),
        element("span", dot(mood(state)), text, class_="chip"),
        class_="name",
    )
    beside = element("div", escaped(source), element("span", id="age"), id="source")
    return element(
        "header",
        element("div", name, beside, class_="top"),
        element("p", escaped(_generation_line(document)), id="line"),
        element("p", escaped(document["reason"]), id="reason"),
    )


def _generation_line(document: Mapping[str, Any]) -> str:
    if not document["generation"]:
        return "No generation yet"
    placed = sum(node["role"] != "spare" for node in document["nodes"])
    allowed, age_s = document["nnodes"], document["generation_age_s"]
    limits = f" ({allowed[0]} to {allowed[1]} allowed)" if allowed else ""
    began = f", began {_ago(age_s)}" if age_s is not None else ""
    start = "" if document["plain"] else f" at step {whole(document['resume_step'])}"
    return (
        f"Generation {document['generation']}: {many_text(document['world_size'], 'rank')} on "
        f"{many_text(placed, 'node')}{limits}{began}{start}"
    )


def _banners(document: Mapping[str, Any]) -> str:
    """Returns the sentences that a reader must know first; some are empty and hidden.

    The script of the page shows the one about an agent that does not answer.
    """
    done, node = document["done"], document["node"]
    over, look = "", ""
    if done is not None:
        outcome = "been stopped" if done["outcome"] == "stopped" else done["outcome"]
        over = f"The job has {outcome}: {done['reason']}"
        look = "bad" if done["outcome"] == "failed" else "good"
    alone = ""
    if not document["leads"] and done is None and document["generation"]:
        alone = f"No agent that leads the job answers {node}. This is what {node} has seen itself."
    asked = ", ".join(_wishes(document["control"]))
    banners = (
        ("lost", "", "bad"),
        ("alone", alone, ""),
        ("over", over, look),
        ("wishes", f"Operators asked for: {asked}" if asked else "", ""),
    )
    return "".join(
        element(
            "div",
            escaped(text),
            class_=f"banner {kind}".rstrip(),
            id=name,
            role="status" if name == "lost" else None,
            hidden=None if text else "",
        )
        for name, text, kind in banners
    )


def _wishes(control: Mapping[str, Any]) -> list[str]:
    """Returns what operators have asked for."""
    drains = [f"drain {drain['node']}" for drain in control["drain"]]
    scale = ["scale {}:{}".format(*control["nnodes"])] if control["nnodes"] else []
    return [*drains, *scale, *(["stop"] if control["stop"] else [])]


def _tiles(document: Mapping[str, Any]) -> list[str]:
    past, goodput, speed = document["history"], document["goodput"], document["steps_per_s"]
    losses = rows_of(past.get("loss"))
    lowest = f"lowest {number_text(min(row[2] for row in losses))}" if losses else ""
    return [
        _step_tile(document),
        tile(
            "Speed",
            _number(speed, digits=3) + element("small", " steps/s"),
            f"{span_text(1 / speed)} a step" if speed else "",
        ),
        tile("Loss", _number(document["loss"]), lowest),
        tile(
            "Goodput",
            escaped(share_text(goodput)) if goodput is not None else "–",
            "of the job's time" if goodput is not None else "",
        ),
        _saved_tile(document, "Checkpoint", document["checkpoint_step"], past.get("checkpoint")),
        _saved_tile(document, "Snapshot", None, past.get("snapshot")),
    ]


def _step_tile(document: Mapping[str, Any]) -> str:
    step, total, speed = document["step"], document["total_steps"], document["steps_per_s"]
    bar, note = "", ""
    if total:
        done = min(step or 0, total)
        text = f"{done / total:.0%} of the steps"
        bar = stacked_bar([("productive", done, text)], total, "progress", text)
        left_s = (total - done) / speed if speed else 0.0
        note = f"of {whole(total)}" + (f" · {duration_text(left_s)} to go" if left_s > 0 else "")
    if document["plain"]:
        note = "the script's steps are not seen"
    return tile("Step", element("span", whole(step), id="step"), note, above=bar)


def _saved_tile(
    document: Mapping[str, Any], name: str, step: int | None, saved: Mapping[str, Any] | None
) -> str:
    """Returns the tile of a checkpoint or snapshot.

    Args:
        document: what `/job` serves.
        name: Checkpoint or Snapshot.
        step: step of the newest one; None: `saved` has it, if there is one.
        saved: step and time of the newest one, as the history has them; None: it has none.
    """
    if saved is not None and step is None:
        step = saved["step"]
    note = "none yet" if step is None else ""
    if saved is not None:
        note = _ago(document["at"] - saved["at"])
    value = element("small", "step ") + whole(step) if step is not None else "–"
    return tile(name, value, note)


def _curves(document: Mapping[str, Any]) -> str:
    """Returns the card of the loss, and beside it the card of where the time went."""
    losses = rows_of(document["history"].get("loss"))
    caption = "mean and range over steps" if len(losses) > 1 else ""
    reading = element("span", caption, id="lossread", data_caption=caption)
    seconds = {k: s for k, s in (document["seconds"] or {}).items() if s is not None and s > 0}
    whole_s = sum(seconds.values())
    goodput = element(
        "div",
        element("h2", "Goodput over time"),
        element("div", element("span", id="goodread", data_caption="")),
        class_="head",
    )
    return element(
        "div",
        _card("Loss", reading, loss_chart(document), class_="grow"),
        _card(
            "Where the time went",
            span_text(whole_s) if whole_s else "not known to this node",
            time_bar(seconds, whole_s),
            time_legend(seconds, whole_s),
            goodput,
            goodput_chart(document),
        ),
        class_="pair",
    )


def _rounds(document: Mapping[str, Any]) -> str:
    """Returns the card of what this island and the others have averaged; empty: it is none."""
    rounds = document.get("rounds")
    if rounds is None:
        return ""
    parts = [f"round {whole(rounds['round'])}" + (", the last" if rounds["is_over"] else "")]
    if rounds["total"]:
        parts.append(f"{share_text(rounds['samples'] / rounds['total'])} of the samples")
    if rounds["given_back"]:
        parts.append(f"{many_text(rounds['given_back'], 'sample')} given back")
    return _card("Rounds of all islands", escaped(" · ".join(parts)), island_table(rounds))


def _state_counts(nodes: Sequence[Mapping[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node["state"]] = counts.get(node["state"], 0) + 1
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _since(document: Mapping[str, Any]) -> str:
    since = document["history"].get("since")
    if since is None:
        return ""
    return escaped(f"{document['node']} has seen the job since ") + moment(since, day=True)


def _ago(seconds: float) -> str:
    return f"{duration_text(max(0.0, seconds))} ago"


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else number_text(value, digits)
