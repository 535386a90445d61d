"""The command line of elasticzero, with an agent's loop that fails as a tester's file says.

No signal makes one thread of a process stand still, or raise, while the others go on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from elasticzero.cli.main import main
from elasticzero.launcher.agent.core import AgentCore
from elasticzero.launcher.protocol.actions import Decision
from elasticzero.launcher.protocol.view import View

CYCLE = AgentCore.cycle
ONCE, ALWAYS, STALL = "once", "always", "stall"


def cycle(core: AgentCore) -> tuple[View, Decision]:
    file = Path(os.environ["TESTER_FAULT_FILE"])
    fault = file.read_text() if file.exists() else ""
    while fault == STALL and file.exists():
        time.sleep(0.02)
    if fault == ONCE:
        file.unlink()
    if fault in (ONCE, ALWAYS):
        raise RuntimeError("a bug in the loop")
    return CYCLE(core)


if __name__ == "__main__":
    AgentCore.cycle = cycle  # type: ignore[method-assign,assignment]
    sys.exit(main())
