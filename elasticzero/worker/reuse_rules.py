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
"""Memory may grow by so many bytes, or by half."""
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What a generation has left in its process once everything that can be dropped is dropped."""

    script_groups: int = 0
    """Process groups that the script has made."""
    released: bool = True
    """The package's own groups are gone."""
    threads: tuple[str, ...] = ()
    """By name: those that were not there before."""
    children: tuple[int, ...] = ()
    """Process ids."""
    cuda_error: str | None = None
    resident_bytes: int = 0
    first_resident_bytes: int | None = None
    """The same after the first generation of this process; None: this was it."""


def reason_not_to_reuse(leftovers: Leftovers) -> str | None:
    """The reason not to use this process again; None: it may be used."""
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
