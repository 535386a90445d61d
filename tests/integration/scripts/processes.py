"""Forks processes on demand, from one that has imported all that they need.

Each line of JSON on its input is an order: what the script's own `start` makes of it, it answers
with the ids of the processes that were started. `null` waits until all of them have ended, and
answers with their exit statuses, by id; a killed one's is the negative signal.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable


def serve(start: Callable[..., list[int]]) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        answer: object = _ended() if order is None else start(*order)
        print(json.dumps(answer), flush=True)


def fork(work: Callable[[], object]) -> int:
    """Do this in a process of its own; its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except Exception:  # noqa: BLE001 - the top of a process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def _ended() -> dict[int, int]:
    ended: dict[int, int] = {}
    while True:
        try:
            child, status = os.wait()
        except ChildProcessError:
            return ended
        ended[child] = os.waitstatus_to_exitcode(status)
