"""Writes a job's scalars to one tracker, in a process of its own: `python -m` this module.

Trackers' packages are large, wait for servers and disks, and may end the process that uses them;
the agent must not suffer from that. It sends objects, one a line, and gets one as an answer:

| it sends | the answer |
|---|---|
| nothing: the process starts | where: the run; or error |
| rows: steps, each with its time and its scalars | written: the last step; or error |
| outcome: that of the job, or null | closed |

A row of a step that the run holds already is left out: it was done again. After an error the
process ends, and the agent starts another one, which finds out what the run holds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.ops.trackers.averages import Row
from elasticzero.ops.trackers.tracker import Tracker, open_tracker


def write_requests(tracker: Tracker, requests: TextIO, answers: TextIO) -> None:
    """Writes what is asked for, until the requests end; raises any error of the tracker.

    Args:
        tracker: the open run.
        requests: a JSON object in each line, as the docstring of this module lists them.
        answers: file that gets one line for the start, and one for each request.
    """
    last_step = tracker.last_step
    _answer(answers, where=tracker.where)
    for line in requests:
        request = json.loads(line)
        if "rows" not in request:
            tracker.close(request["outcome"])
            _answer(answers, closed=True)
            return
        rows = [Row(*row) for row in request["rows"] if row[0] > last_step]
        if rows:
            tracker.write(rows)
            last_step = rows[-1].step
        _answer(answers, written=request["rows"][-1][0])
    tracker.close(None)


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def main(request: Mapping[str, Any]) -> int:
    """Runs the process; returns its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tracker prints is no answer
    target = TrackerTarget(request["kind"], request["place"])
    try:
        tracker = open_tracker(target, request["job"], begins=request["begins"])
        write_requests(tracker, sys.stdin, answers)
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises is told to the agent
        text = " ".join(str(error).split()) or "no message"
        _answer(answers, error=f"{type(error).__name__}: {text}"[:500])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
