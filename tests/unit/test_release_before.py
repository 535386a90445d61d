"""What ranks of this release and of the one before compare is the same to both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticzero.checkpoint.format.manifest import ShardFile, to_json
from elasticzero.comm.barriers import Call, marks
from elasticzero.comm.control import ControlWord, encode_word
from elasticzero.data.position import DataPosition, Mark
from elasticzero.ipc.assignment import LeftOutBatch, Resume
from elasticzero.launcher.protocol.documents import Member, World, to_bytes
from elasticzero.serialization import encode
from tests.support.releases import unpack_release_before
from tests.unit.checkpoint.cases import draft_of, simple_layout

USED: dict[str, Any] = {"dataset": 1, "epoch": 3, "offset": 5, "order": [20, 0, False]}
SKIPPED: dict[str, Any] = {"dataset": 0, "epoch": 1, "start": 16, "stop": 32}
NOW: dict[str, Any] = {"loop": 2, "epoch": 1, "offset": 64, "steps": 9, "order": [330, 0, True]}
WORD: dict[str, Any] = {"flags": 10, "ready": True, "held": 7, "saved": 5, "unsaved": 3, "every": 4}
CALLS = ("STEP", "VERIFY", "EPOCH_END", "LOOP", "EVALUATE", "STATE_DICT", "PREPARE", "FINISH")
SCRIPT = f"""
import json
from elasticzero.comm.barriers import Call, marks
from elasticzero.comm.control import ControlWord, encode_word
from elasticzero.data.sampling import DataPosition, Mark, SkippedBatch
from elasticzero.serialization import encode
print(json.dumps(encode_word(ControlWord(**{WORD}), 3)))
print(json.dumps([marks(Call[name], 70000) for name in {CALLS}]))
position = DataPosition(**{NOW}, others=(Mark(**{USED}),), skipped=(SkippedBatch(**{SKIPPED}),))
print(json.dumps(encode(position)))
"""

READER = """
import sys
from elasticzero.checkpoint.format.manifest import from_json
print(from_json(bytes.fromhex(sys.argv[1]), "there").step)
"""


MEMBERS = """
import sys
from elasticzero.launcher.protocol.documents import Member, world_from_bytes
from elasticzero.serialization import decode
import json
member, world = (bytes.fromhex(text) for text in sys.argv[1:])
print(decode(Member, json.loads(member)).node, [m.node for m in world_from_bytes(world).members])
"""


@pytest.fixture(scope="module")
def environment(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That in which Python imports the release before."""
    return os.environ | unpack_release_before(root, tmp_path_factory.mktemp("before"))


def run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def before(environment: dict[str, str]) -> list[Any]:
    """What a rank of the release before sends."""
    return [json.loads(line) for line in run(environment, SCRIPT).splitlines()]


def test_the_release_before_reads_a_manifest_with_tags(environment: dict[str, str]) -> None:
    layout = simple_layout()
    draft = draft_of(layout, step=12)
    files = (ShardFile(draft.file_name(r), 1 << 20, "0" * 32) for r in range(layout.world_size))
    manifest = replace(draft, files=tuple(files), tags=("best",))
    assert run(environment, READER, to_json(manifest).hex()) == "12\n"


def test_the_release_before_reads_registrations_and_worlds_with_versions(
    environment: dict[str, str],
) -> None:
    """It knows none, and takes no notice of them."""
    release, torch = "0.2.0", "2.13.0+cpu"
    member = Member("a", "i", "10.0.0.1", 9400, 29500, 1, release=release, torch=torch)
    world = World(
        generation=1,
        token="t",
        members=(member,),
        strategy="ddp",
        resume=Resume(tier="fresh"),
        reason="r",
        release=release,
        torch=torch,
    )
    documents = (to_bytes(member).hex(), to_bytes(world).hex())
    assert run(environment, MEMBERS, *documents) == "a ['a']\n"


def test_control_words_are_the_same_to_both_releases(before: list[Any]) -> None:
    """No word asks for a checkpoint while ranks of both are there."""
    assert before[0] == encode_word(ControlWord(**WORD), 3)


def test_calls_have_the_same_marks_in_both_releases(before: list[Any]) -> None:
    assert before[1] == [list(marks(Call[name], 70000)) for name in CALLS]


def test_positions_are_the_same_to_both_releases(before: list[Any]) -> None:
    """Ranks compare a digest of the encoded position; one that differs is set aside."""
    used, skipped = Mark(**USED), LeftOutBatch(**SKIPPED)
    position = DataPosition(**NOW, others=(used,), skipped=(skipped,))
    assert before[2] == encode(position)
