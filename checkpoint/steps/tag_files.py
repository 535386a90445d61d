"""Reads and writes the files that each name one step of a checkpoint directory by a tag.

`tags/best.json` is a JSON object: the version of its format, the tag, the step, and the name of the
step's directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from elasticzero.checkpoint.format.names import (
    TAGS_DIRECTORY,
    step_directory,
    tag_file_name,
    tag_of_file,
)
from elasticzero.checkpoint.format.strict_json import reason, strict_json
from elasticzero.checkpoint.storage.base import Directory, read_small
from elasticzero.errors import CheckpointDamaged
from elasticzero.serialization import decode, encode

VERSION = 1
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFile:
    """Names the step of one tag."""

    version: int = VERSION
    tag: str
    step: int
    directory: str
    """Name of the step's directory, for scripts that read this file."""

    def __post_init__(self) -> None:
        if not 1 <= self.version <= VERSION:
            raise ValueError(f"its format version is {self.version}, and {VERSION} is known here")
        if self.step < 0 or self.directory != step_directory(self.step):
            raise ValueError(f"{self.directory!r} is not the directory of step {self.step}")


def read_tag(directory: Directory, tag: str) -> int | None:
    """Returns the step that a tag names, or None if there is no such tag.

    Raises `CheckpointDamaged` for a file that cannot be understood.
    """
    storage, name = directory.step(TAGS_DIRECTORY), tag_file_name(tag)
    where = f"{storage.where}/{name}"
    try:
        content = decode(TagFile, strict_json(read_small(storage, name, _LIMIT_BYTES)), "tag")
        if content.tag != tag:
            raise ValueError(f"it is of the tag {content.tag!r}")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{where} is damaged: {reason(error)}; remove it, or mend it"
        ) from None
    return content.step


def read_tags(
    directory: Directory, on_damage: Callable[[CheckpointDamaged], object] | None = None
) -> dict[str, int]:
    """Returns the step that each tag names, by tag.

    Args:
        directory: The checkpoint directory.
        on_damage: Takes the error of each file that cannot be understood; None: the error is
            raised.

    Raises:
        CheckpointDamaged: A file cannot be understood, and `on_damage` is None.
    """
    steps: dict[str, int] = {}
    for name in directory.step(TAGS_DIRECTORY).names():
        if (tag := tag_of_file(name)) is None:
            continue
        try:
            step = read_tag(directory, tag)
        except CheckpointDamaged as error:
            if on_damage is None:
                raise
            on_damage(error)
            continue
        if step is not None:
            steps[tag] = step
    return steps


def write_tag(directory: Directory, tag: str, step: int) -> None:
    """Makes a tag name this step, in one change that a reader sees whole or not at all.

    Args:
        directory: The checkpoint directory.
        tag: The tag, which replaces one of the same name.
        step: The step that it names from now on.
    """
    file = TagFile(tag=tag, step=step, directory=step_directory(step))
    data = json.dumps(encode(file)).encode() + b"\n"
    directory.make(TAGS_DIRECTORY).write(tag_file_name(tag), [data], size=len(data))
