"""Decides whether a worker's process may be used for another generation. Pure.

A process is used again only if none of these holds; otherwise it ends, and its agent forks another.
The first that holds is the reason given:
 K1  A process group of the script's own is left, whose peers may be gone.
 K2  A process group of this package could not be destroyed in time: an operation hangs in it.
 K3  A thread that the generation has started still runs.
 K4  A child process is left: a data worker, or one that the script has started.
 K5  CUDA reports an error, which stays for good.
 K6  Much more memory stays allocated than after the first generation of this process.
Other reasons are checked before: a failure of the script's own, a state that was to be kept in
memory and was not, a world that never formed. A process that is not done in time is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

SLACK_BYTES = 512 << 20
"""Memory may grow by this number of bytes, or by half."""
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Describes what a generation has left in its process after everything that can be dropped."""

    script_groups: int = 0
    """Number of process groups that the script has made."""
    released: bool = True
    """True if the package's own groups are gone."""
    threads: tuple[str, ...] = ()
    """Names of the threads that did not exist before."""
    children: tuple[int, ...] = ()
    """Ids of the child processes."""
    cuda_error: str | None = None
    resident_bytes: int = 0
    first_resident_bytes: int | None = None
    """Resident memory after the first generation of this process; None: this was the first."""


def reason_not_to_reuse(leftovers: Leftovers) -> str | None:
    """Returns the reason not to use this process again; None: it may be used."""
    if leftovers.script_groups:
        return f"{leftovers.script_groups} process group(s) of the script's own are left"
    if not leftovers.released:
        return "an operation hangs in a process group"
    if leftovers.threads:
        return f"threads still run: {', '.join(leftovers.threads[:SHOWN])}"
    if leftovers.children:
        return f"child processes are left: {', '.join(map(str, leftovers.children[:SHOWN]))}"
    if leftovers.cuda_error is not None:
        return f"CUDA reports an error: {leftovers.cuda_error}"
    first = leftovers.first_resident_bytes
    if first is not None and leftovers.resident_bytes > first + max(SLACK_BYTES, first // 2):
        return f"memory grew from {first >> 20} to {leftovers.resident_bytes >> 20} MiB"
    return None
