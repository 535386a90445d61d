"""Describes a checkpoint directory or one step as tables and as JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import MANIFEST_NAME, step_of
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.steps.tag_files import read_tags
from elasticzero.checkpoint.storage.base import Directory, Readable, out_of_reach
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError
from elasticzero.serialization import encode
from elasticzero.text import age_text, count_text, print_error, shown, size_text, table_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Describes a step by its manifest and its files' sizes, without reading its tensors."""

    where: str
    manifest: Manifest
    error: str | None
    """Damage of the step; None: it is whole, judged by the sizes of its files."""
    unreadable: bool = False
    """True if the error says nothing about the bytes: permission is missing, or storage gives no
    answer."""
    written_s: float | None
    """Time at which the manifest's file was written, by the clock of its file system; None: not
    known."""
    tags: tuple[str, ...] = ()
    """The tags that name the step."""

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as JSON values, for scripts."""
        about: dict[str, Any] = {"path": self.where, "whole": self.error is None}
        if self.error is not None:
            about["reason"] = self.error
            about["unreadable"] = self.unreadable
        if self.written_s is not None:
            about["written"] = _date(self.written_s)
        return {**about, **encode(self.manifest, complete=True), "tags": list(self.tags)}


def tags_in(directory: Directory) -> dict[str, int]:
    """Returns the step that each tag in a checkpoint directory names; prints which are damaged."""
    return read_tags(directory, lambda error: print_error(f"warning: {error}"))


def tags_around(where: str) -> dict[str, int]:
    """Returns the same for the directory that holds a step's directory."""
    above, _, name = where.rstrip("/").rpartition("/")
    return {} if step_of(name) is None else tags_in(open_directory(above or "/"))


def summarize(storage: Readable, named: Mapping[str, int] | None = None) -> StepSummary:
    """Summarizes a step.

    Args:
        storage: The step's files.
        named: The step that each tag names; None: tags are left out.

    Raises:
        CheckpointDamaged: The manifest is missing or wrong.
    """
    manifest = catalog.read_manifest(storage)
    error = catalog.step_error(storage)
    return StepSummary(
        where=storage.where,
        manifest=manifest,
        error=None if error is None else str(error),
        unreadable=error is not None and out_of_reach(error),
        written_s=_written_s(storage),
        tags=_tags_of(manifest.step, named or {}),
    )


def _tags_of(step: int, named: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(tag for tag, other in named.items() if other == step))


def row_of(info: catalog.StepInfo, named: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns the row of one step in a list, with the fields that can be read.

    Args:
        info: The step.
        named: The step that each tag names; None: tags are left out.
    """
    storage, tags = info.storage, list(_tags_of(info.step, named or {}))
    row: dict[str, Any] = {"step": info.step, "path": storage.where, "tags": tags}
    try:
        seen = summarize(storage)
    except ElasticZeroError as error:
        return row | {"whole": False, "reason": str(error), "unreadable": out_of_reach(error)}
    row["whole"] = seen.error is None
    if seen.error is not None:
        row |= {"reason": seen.error, "unreadable": seen.unreadable}
    if seen.written_s is not None:
        row["written"] = _date(seen.written_s)
        row["age"] = age_text(time.time() - seen.written_s)
    return row | {
        "generation": seen.manifest.generation,
        "strategy": seen.manifest.strategy,
        "ranks": seen.manifest.layout.world_size,
        "tensors": len(seen.manifest.layout.tensors),
        "bytes": sum(file.bytes for file in seen.manifest.files),
    }


def steps_text(where: str, rows: Sequence[Mapping[str, Any]], uncommitted: Sequence[str]) -> str:
    """Formats the steps of a directory as a table for people.

    Args:
        where: Path or URL of the directory.
        rows: Rows of the committed steps, as `row_of` returns them.
        uncommitted: Names of the step directories without a manifest.
    """
    measures = ("generation", "strategy", "ranks", "tensors", "size")
    columns = ("step", "written", *measures, "tags", "state")
    lines = []
    for row in rows:
        line = [str(row.get(column, "-")) for column in columns]
        line[1] = row.get("age", "-")
        line[6] = size_text(row["bytes"]) if "bytes" in row else "-"
        line[7] = ", ".join(row["tags"]) or "-"
        line[8] = "whole" if row["whole"] else _trouble_text(row["unreadable"], row["reason"])
        lines.append(line)
    text = table_text(columns, lines) if lines else f"{shown(where)} holds no checkpoint\n"
    left = (
        f"{shown(name)}: never committed (a save that failed, or is going on)\n"
        for name in uncommitted
    )
    return text + "".join(left)


def step_text(seen: StepSummary) -> str:
    """Formats one step for people: an overview, then its ranks, kinds of tensors, and each
    tensor."""
    manifest = seen.manifest
    tensors = manifest.layout.tensors
    elements = sum(spec.nbytes for spec in tensors.values())
    facts = [
        ("step", str(manifest.step)),
        ("generation", f"{manifest.generation} (token {manifest.token})"),
        ("strategy", manifest.strategy),
        ("world", _world_text(manifest)),
        ("tensors", f"{len(tensors)}, {size_text(elements)}"),
        ("written", _written_text(seen.written_s)),
        (
            "health",
            _trouble_text(seen.unreadable, seen.error)
            if seen.error
            else "whole by its files' sizes (`verify` reads the bytes)",
        ),
    ]
    if seen.tags:
        facts.append(("tags", ", ".join(seen.tags)))
    if manifest.state:
        facts.append(("state", f"{', '.join(manifest.state)} (`--json` shows it)"))
    width = max(len(name) for name, _ in facts) + 2
    ranks = [[str(r), size_text(f.bytes), f.name] for r, f in enumerate(manifest.files)]
    return "\n".join(
        [
            shown(seen.where),
            *(name.ljust(width) + shown(text) for name, text in facts),
            "",
            table_text(("rank", "size", "file"), ranks),
            table_text(("kind", "tensors", "size"), _kind_rows(manifest)),
            table_text(("tensor", "dtype", "shape", "size", "dealt"), _tensor_rows(manifest)),
        ]
    )


def _world_text(manifest: Manifest) -> str:
    text = count_text(manifest.layout.world_size, "rank")
    if manifest.layout.replicas > 1:
        text += f" on {manifest.layout.replicas} nodes, each of which had the whole state"
    return text


def _trouble_text(unreadable: bool, reason: str) -> str:
    return f"{'UNREADABLE' if unreadable else 'DAMAGED'}: {reason}"


def _kind_rows(manifest: Manifest) -> list[list[str]]:
    kinds: dict[str, tuple[int, int]] = {}
    for name, spec in manifest.layout.tensors.items():
        count, total = kinds.get(name.split("/")[0], (0, 0))
        kinds[name.split("/")[0]] = (count + 1, total + spec.nbytes)
    return [[kind, str(count), size_text(total)] for kind, (count, total) in kinds.items()]


def _tensor_rows(manifest: Manifest) -> list[list[str]]:
    rows = []
    for group in manifest.layout.groups:
        for index, name in enumerate(group.tensors):
            spec = manifest.layout.tensors[name]
            holder = f"rank {group.ranks[index]}" if group.rule == "whole" else group.rule
            shape = "x".join(map(str, spec.shape)) or "scalar"
            rows.append([name, spec.dtype, shape, size_text(spec.nbytes), holder])
    return rows


def _written_s(storage: Readable) -> float | None:
    """Returns when the manifest was written, if it is a file on this machine."""
    try:
        return os.stat(os.path.join(storage.where, MANIFEST_NAME)).st_mtime
    except OSError:
        return None


def _written_text(written_s: float | None) -> str:
    if written_s is None:
        return "not known here"
    return f"{_date(written_s)}, {age_text(time.time() - written_s)}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
