"""Runs a container's command as a container runtime does: `python` this file, then the command.

It stands for the runtime's shim and the kernel's namespace of processes. The command gets SIGTERM
only where it has a handler, as the first process of a container. Once it ends, all processes that
it has left behind are killed. The exit status is the command's, or 128 and the number of the signal
that ended it (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from elasticzero.processes import adopt_orphans, bound_to_this_process, kill_descendants

END_S = 10.0
"""Seconds within which killed processes must be gone."""


def main(command: Sequence[str]) -> int:
    """Runs the command to its end; returns its exit status."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process = subprocess.Popen(bound_to_this_process(command), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    while (code := process.poll()) is None:
        time.sleep(0.02)  # one long wait would hold up a signal that came just before it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_descendants(END_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
