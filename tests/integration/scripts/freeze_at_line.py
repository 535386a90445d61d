"""Saves one step from memory, in a process that stops itself (SIGSTOP) at a line of its commit.

An order is `[checkpoint directory, memory, report, line, whether the step is known to be damaged]`.
A line is `[file, number, function]`, and the process stops when it comes there first; null: it does
not stop.
The report is JSON: the lines that were met, in order, and what became of the save.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps import commit, loose_files, owner, retention, tag_files, tags
from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.checkpoint.storage import disk, multipart, object_store
from elasticzero.launcher.snapshots import checkpoint_saver
from elasticzero.launcher.snapshots.checkpoint_saver import CheckpointSaver
from elasticzero.launcher.snapshots.roles import SnapshotRole
from elasticzero.launcher.snapshots.save_events import SaveFailed, SaveFinished
from tests.integration.scripts.processes import fork, serve
from tests.unit.checkpoint.cases import draft_of, write_snapshot

GENERATION, STEP, TAG = 5, 100, "best"
TOKEN = f"g{GENERATION:06d}-aaaaaaaaaaaaaaaa"
LIMIT_S = 60.0
"""Generous: only a save that hangs lasts so long."""
PARTS_S = 0.1
"""Seconds that a save waits for parts that the next run has removed; its agent ends it in life."""
JOB = OwnerRecord(job="job", cluster="c")
LAYOUT = Layout(
    world_size=1, tensors={"a": TensorSpec("F32", (8,))}, groups=(Group("even", ("a",)),)
)
LAST = RetentionPolicy(last=1)
MODULES = (
    *(commit, checkpoint_saver, tags, tag_files, retention, loose_files, owner),
    *(disk, object_store, multipart),
)
"""A step begins, exists, gets its tag and has others removed in these; their lines are met."""
FILES = {str(module.__file__): Path(str(module.__file__)).name for module in MODULES}
IDLE = frozenset({"_run", "tick", "__init__", "close", "events", "begin", "_add_event"})
"""Functions of these modules that do no part of a save."""
Line = tuple[str, int, str]


class Lines:
    """Notes each line when a thread comes there first, and stops the process at one of them."""

    def __init__(self, at: Line | None) -> None:
        self.met: dict[Line, None] = {}
        self._at = at
        self._names: dict[CodeType, str | None] = {}

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Is `threading.settrace`'s function: follows the functions of a save in the saver's own
        threads, and not those of the packages that reach an object store."""
        if not threading.current_thread().name.startswith("elasticzero"):
            sys.settrace(None)
            return None
        code = frame.f_code
        if code not in self._names:
            name = FILES.get(code.co_filename)
            self._names[code] = name if code.co_name not in IDLE else None
        return self._line if self._names[code] is not None else None

    def _line(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        code = frame.f_code
        line = (self._names[code] or "", frame.f_lineno, code.co_name)
        if event == "line" and line not in self.met:
            self.met[line] = None
            if line == self._at:
                os.kill(os.getpid(), signal.SIGSTOP)
        return self._line


def prepare(memory: Path) -> None:
    """The sealed snapshot that is saved."""
    draft = draft_of(LAYOUT, generation=GENERATION, token=TOKEN, step=STEP, tags=(TAG,))
    piece = TensorPiece("a", torch.arange(8, dtype=torch.float32))
    write_snapshot(memory, draft, 0, [piece])


def save(directory: str, memory: str, report: str, line: Line | None, *, damaged: bool) -> None:
    checkpoint_saver.COMMIT_WAIT_S = PARTS_S
    lines = Lines(line)
    threading.settrace(lines.trace)
    saver = CheckpointSaver(SnapshotStore(Path(memory)), directory, LAST, lambda: None, owner=JOB)
    bad = frozenset({STEP}) if damaged else frozenset()
    role = SnapshotRole(generation=GENERATION, token=TOKEN, world_size=1, ranks=(0,), bad_steps=bad)
    saver.begin(role)
    saver.save_held([ShardName(GENERATION, STEP, 0, 1)])
    events: list[object] = []
    deadline_s = time.monotonic() + LIMIT_S
    while not any(isinstance(event, SaveFailed | SaveFinished) for event in events):
        assert time.monotonic() < deadline_s, "the save does not end"
        time.sleep(0.002)
        events += saver.events()
    (event,) = (event for event in events if isinstance(event, SaveFailed | SaveFinished))
    saver.close(at_once=True)
    outcome = {
        "met": list(lines.met),
        "error": event.error,
        "committed": isinstance(event, SaveFinished) and event.committed,
        "notes": event.notes if isinstance(event, SaveFinished) else (),
    }
    Path(report).write_text(json.dumps(outcome))


def start(directory: str, memory: str, report: str, line: Any, damaged: bool) -> list[int]:
    at = (str(line[0]), int(line[1]), str(line[2])) if line is not None else None
    return [fork(partial(save, directory, memory, report, at, damaged=damaged))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.setswitchinterval(0.001)
    serve(start)
