"""Claims the checkpoint directory for a job, unless another job lives in it.

The record in the directory names the job that has it (`checkpoint/steps/owner.py`). Whether that
job is gone is asked where its nodes are registered, in its etcd. Where that is another cluster, an
etcd that refuses connections is gone, and so is its job. An etcd that cannot be reached tells
nothing: then a job of the same name is the same one begun again, and another one is judged by the
age of its record.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from elasticzero.checkpoint.steps.owner import OwnerRecord, claim, refusal
from elasticzero.checkpoint.storage.base import Directory

CONNECT_S = 2.0
"""Time limit in seconds of a connection to an etcd."""
POLL_S = 0.5
SWEEP_S = 300.0
"""Time limit in seconds of removing what the saves of a former owner have left; a large directory
of an object store takes long to list."""
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_LOCAL = ("127.0.0.1", "localhost", "::1")


def this_network() -> str:
    """Returns an identifier of this machine and its network, as it is until it is started again."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{_NETWORK.stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getuid()}"


def claim_directory(
    directory: Directory,
    job: OwnerRecord,
    has_nodes: Callable[[str], bool],
    log_line: Callable[[str], None],
    limit_s: float,
) -> None:
    """Claims the directory for a job that has not begun yet.

    It waits for the nodes of another job to be gone, whose leases may not have lapsed yet.

    Args:
        directory: The checkpoint directory.
        job: The job, whose record is new.
        has_nodes: Returns whether nodes of a job of the given name are registered in this job's
            etcd.
        log_line: Receives a line on what is waited for.
        limit_s: Seconds after which another job counts as alive.

    Raises:
        UserError: Another job lives in the directory; the error names it.
        StorageError: The directory cannot be written.
    """

    def is_gone(owner: OwnerRecord) -> bool:
        return nodes_are_gone(owner, job, has_nodes)

    deadline_s = time.monotonic() + limit_s
    waiting = False
    while time.monotonic() < deadline_s and (other := refusal(directory, job, is_gone)):
        if not waiting:
            log_line(f"job {other.owner.job} has {other.where}; waiting for its nodes to be gone")
        waiting = True
        time.sleep(POLL_S)
    claim(directory, job, is_gone)


def nodes_are_gone(owner: OwnerRecord, job: OwnerRecord, has_nodes: Callable[[str], bool]) -> bool:
    """Returns whether the nodes of the job that has a directory are known to be gone.

    Args:
        owner: The record in the directory.
        job: The job that asks.
        has_nodes: Returns whether nodes of a job of the given name are registered in this job's
            etcd.
    """
    if owner.cluster == job.cluster or set(owner.etcd) & set(job.etcd):
        return not has_nodes(owner.job)
    answers = {_answers(endpoint, owner.network == job.network) for endpoint in owner.etcd}
    if answers == {False}:
        return True
    return True not in answers and owner.job == job.job


def _answers(endpoint: str, same_network: bool) -> bool | None:
    """Returns whether an etcd accepts a connection; None: it cannot be reached, so that this is not
    known.

    Args:
        endpoint: Its address.
        same_network: Whether an address of the machine itself means the same for both.
    """
    host, _, port = endpoint.rpartition("://")[2].rstrip("/").rpartition(":")
    host = host.strip("[]")
    if host in _LOCAL and not same_network:
        return None
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError):
        return None
    return True
