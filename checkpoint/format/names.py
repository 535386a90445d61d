"""Makes and parses the names of steps, shards, manifests and snapshots.

Pure. Both directions are here, so that writers and readers agree on every name.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import SupportsIndex

from elasticzero.errors import UserError

MANIFEST_NAME = "manifest.json"
SUMS_SUFFIX = ".sums"
TAGS_DIRECTORY = "tags"
"""Name of the folder, beside the steps, of the files that each name a step by a tag."""
OWNER_DIRECTORY = ".owner"
"""Name of the folder, beside the steps, of the record that names the job which writes there. Other
releases pass over names that begin with a dot."""
MAX_STEP = 10**18 - 1
"""Largest step number that the name of a step's directory has room for."""
_STEP_DIRECTORY = re.compile(r"step-(\d{12,18})")
_GENERATION_DIRECTORY = re.compile(r"gen-(\d{1,18})")
_TOKEN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
_TOKEN_OF_JOB = re.compile(r"g(\d{6,18})-[0-9a-f]{16}")
_RANK = r"rank-(\d{5,9})-of-(\d{5,9})"
_SNAPSHOT_MANIFEST = re.compile(rf"manifest-{_RANK}\.json")
_SNAPSHOT_DRAFT = re.compile(rf"draft-{_RANK}\.json")
_SNAPSHOT_SHARD = re.compile(rf"{_RANK}-[A-Za-z0-9_-]{{1,64}}\.safetensors(\.sums)?")
_SUMS_OF_SAVE = re.compile(rf"{_RANK}-({_TOKEN})\.safetensors\.sums")
_FILE_OF_SAVE = re.compile(
    rf"\.?rank-\d{{5,9}}-of-\d{{5,9}}-({_TOKEN})\.safetensors(\.sums)?"
    r"(\.[0-9a-f-]+\.partial)?"
)
MAX_TAG_CHARACTERS = 64
_TAG = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_TAG_CHARACTERS - 1}}}")
_TAG_SUFFIX = ".json"
_PARTIAL = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.partial")


def shard_file_name(rank: int, world_size: int, token: str) -> str:
    """Returns the name of one rank's shard file; its checksum file has the same name + `.sums`.

    Args:
        rank: The rank that wrote the file.
        world_size: World size of the checkpoint.
        token: Token of the save, which tells its files from those of another save of the step.
    """
    return f"rank-{rank:05d}-of-{world_size:05d}-{token}.safetensors"


def snapshot_manifest_name(rank: int, world_size: int) -> str:
    """Returns the name of one rank's own manifest in a snapshot."""
    return f"manifest-rank-{rank:05d}-of-{world_size:05d}.json"


def checked_step(step: object) -> int:
    """Returns a step's number as an int, from any kind of integer.

    Raises `UserError` for a number that no step can have.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise UserError(f"step {step!r} must be a whole number")
    number = operator.index(step)
    if not 0 <= number <= MAX_STEP:
        raise UserError(f"step {number} must be between 0 and {MAX_STEP}")
    return number


def step_directory(step: int) -> str:
    """Returns the name of the directory of one step."""
    return f"step-{step:012d}"


def step_of(directory: str) -> int | None:
    """Returns the step in a directory's name, or None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(directory)
    return int(match[1]) if match and step_directory(int(match[1])) == directory else None


def is_tag(text: str) -> bool:
    """Returns whether a step may have this tag, which becomes the name of a file."""
    return _TAG.fullmatch(text) is not None


def tag_file_name(tag: str) -> str:
    """Returns the name of the file that names the step of a tag."""
    return tag + _TAG_SUFFIX


def tag_of_file(name: str) -> str | None:
    """Returns the tag of such a file, or None for any other name."""
    tag = name.removesuffix(_TAG_SUFFIX)
    return tag if is_tag(tag) and name == tag_file_name(tag) else None


def snapshot_draft_name(rank: int, world_size: int) -> str:
    """Returns the name of the draft that a worker writes beside a shard that is not sealed yet."""
    return f"draft-rank-{rank:05d}-of-{world_size:05d}.json"


def rank_of_snapshot_manifest(name: str) -> tuple[int, int] | None:
    """Returns (rank, world size) of a snapshot's manifest, or None for any other name."""
    return _ranks_in(name, _SNAPSHOT_MANIFEST, snapshot_manifest_name)


def rank_of_snapshot_draft(name: str) -> tuple[int, int] | None:
    """Returns (rank, world size) of a snapshot's draft, or None for any other name."""
    return _ranks_in(name, _SNAPSHOT_DRAFT, snapshot_draft_name)


def _ranks_in(
    name: str, pattern: re.Pattern[str], canonical: Callable[[int, int], str]
) -> tuple[int, int] | None:
    match = pattern.fullmatch(name)
    if match is None or name != canonical(int(match[1]), int(match[2])):
        return None
    return int(match[1]), int(match[2])


def is_snapshot_file(name: str) -> bool:
    """Returns whether a sealed snapshot may have a file of this name."""
    return bool(_SNAPSHOT_SHARD.fullmatch(name) or _SNAPSHOT_MANIFEST.fullmatch(name))


def generation_directory(generation: int) -> str:
    """Returns the name of the directory of one generation's snapshots."""
    return f"gen-{generation}"


def generation_of(directory: str) -> int | None:
    """Returns the generation in a directory's name, or None for any other name."""
    match = _GENERATION_DIRECTORY.fullmatch(directory)
    return int(match[1]) if match else None


def is_token(text: str) -> bool:
    """Returns whether a save may have this token, which becomes part of its files' names."""
    return re.fullmatch(_TOKEN, text) is not None


def token_generation(token: str) -> int | None:
    """Returns the generation that a token names; None for a token of a checkpoint saved by hand."""
    match = _TOKEN_OF_JOB.fullmatch(token)
    return int(match[1]) if match else None


def token_of_file(name: str) -> str | None:
    """Returns the token in the name of a complete or partial shard or checksum file; None for other
    names."""
    match = _FILE_OF_SAVE.fullmatch(name)
    return match[1] if match else None


def is_whole_save(names: Iterable[str], token: str) -> bool:
    """Returns whether these files have the checksum file of every rank of a save: then only its
    manifest is missing.

    Args:
        names: Names of the files of one step.
        token: Token of the save.
    """
    sums = (_SUMS_OF_SAVE.fullmatch(name) for name in names)
    parts = {(int(match[1]), int(match[2])) for match in sums if match and match[3] == token}
    return bool(parts) and all(len(parts) == world_size for _, world_size in parts)


def is_partial(name: str) -> bool:
    """Returns whether this is the name of a file that its writer has not completed."""
    return name.startswith(".") and name.endswith(".partial")


def is_own_partial(name: str) -> bool:
    """Returns whether this is a partial name of this package's writers, with process and random
    number.

    A user's directory may hold other names that end in `.partial`.
    """
    return _PARTIAL.fullmatch(name) is not None
