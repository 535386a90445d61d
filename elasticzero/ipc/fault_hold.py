"""Holds a worker at the boundary of a step for which `elasticzero local` has a fault, until it has
come.

A training step takes milliseconds, and the command looks after its agents less often: without this
a fault of step 60 would come some steps later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.messages import FAULT_STEPS_VARIABLE, AwaitsFault

POLL_S = 0.005
"""Pause in seconds between two looks at whether the fault has come."""


def open_fault_hold(environment: Mapping[str, str], link: AgentClient) -> FaultHold | None:
    """Returns what holds this worker at the steps of faults; None: there are none.

    Args:
        environment: The worker's environment.
        link: The client of the agent.
    """
    numbers = environment.get(FAULT_STEPS_VARIABLE, "").split(",")
    steps = sorted(map(int, filter(str.isdecimal, numbers)))
    return FaultHold(steps, link) if steps and not link.standalone else None


class FaultHold:
    """Holds one worker at the steps of faults, once each."""

    def __init__(self, steps: Sequence[int], link: AgentClient) -> None:
        """Begins before the first boundary.

        Args:
            steps: The steps, in their order.
            link: The client of the agent.
        """
        self._steps = list(steps)
        self._link = link

    def hold(self, step: int) -> None:
        """Waits at a boundary until the faults of its step, and of those before it, have come.

        Args:
            step: Number of steps made.

        Raises:
            GenerationEnded: The agent has ended the generation meanwhile, as after a fault that
                struck another node.
        """
        link = self._link
        self._steps = [due for due in self._steps if due > link.fault_struck]
        if not self._steps or self._steps[0] > step:
            return
        link.send(AwaitsFault(step=step))
        with link.busy("waiting for a fault"):
            while link.fault_struck < step:
                link.check()
                time.sleep(POLL_S)
