"""Ends a worker whose main thread is stuck in a collective that never returns.

Gloo can lose an operation when its connection closes (seen with torch 2.13: a survivor of a killed
peer, one time in some dozens, waits in a send though no socket of its group is left). In a group of
the script's own, which nobody shuts, an operation waits too. The main thread cannot be reached
there, but the state is whole. So when the agent has ended the generation, and the main thread stays
in a collective while the process does nothing, another thread runs the stop protocol in its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticzero.ipc.agent_client import AgentClient, GenerationEnded
from elasticzero.ipc.thread_location import main_thread
from elasticzero.worker.stop_protocol import StopState, run_stop_protocol

STUCK_S = 1.0
"""Time in seconds after which a collective that is idle, with all its connections shut, counts as
stuck."""
POLL_S = 0.1
IDLE_SHARE = 0.2
"""Share of a core: a process that uses less computes nothing. A backward that still computes comes
to its collective, which then raises."""


def watch_for_stuck_collective(
    link: AgentClient, stop_state: Callable[[], StopState], excused: Callable[[], bool]
) -> None:
    """Begins to watch the main thread, just after the agent has ended the generation.

    Args:
        link: The client of the agent.
        stop_state: Returns the state for the stop protocol, once the main thread may change it no
            more.
        excused: Returns whether the main thread waits for a GPU, which NCCL's abort releases.
    """
    threading.Thread(
        target=_watch, args=(link, stop_state, excused), name="elasticzero-rescue", daemon=True
    ).start()


def _watch(
    link: AgentClient, stop_state: Callable[[], StopState], excused: Callable[[], bool]
) -> None:
    since_s, cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() - since_s < STUCK_S:
        began_s = time.monotonic()
        if link.shutting_down.wait(POLL_S):
            return
        now_s, used_s = time.monotonic(), time.process_time()
        _, waits = main_thread()
        if not waits or excused() or used_s - cpu_s > IDLE_SHARE * (now_s - began_s):
            since_s = now_s
        cpu_s = used_s
    if link.claim_shutdown():
        ended = GenerationEnded(link.aborted or "the generation is over", aborted=True)
        run_stop_protocol(link, ended, stop_state(), may_keep=False)
