"""Gives each agent on a machine a node name and an HTTP port of its own.

A node's name is held by the lock of its directory in shared memory, which ends with the process. So
an agent that is started again, after its predecessor has died, takes its own name back.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from elasticzero.errors import OperatorError
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.console import log_for_node
from elasticzero.launcher.http.server import PortTaken
from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from elasticzero.launcher.snapshots.shared_memory import (
    NameTaken,
    OwnedDirectory,
    remove_orphans,
    snapshot_directory,
)

MOST_AGENTS = 256
"""Maximum number of node names, and of HTTP ports, that are tried on one machine where none was
given."""


@contextmanager
def node_claim(
    options: AgentOptions, *, named: bool
) -> Iterator[tuple[OwnedDirectory, AgentOptions]]:
    """Returns this process's claim of a node's name on this machine, and the options with that
    name.

    Args:
        options: Options of the node.
        named: Whether the user gave the name. Otherwise the name gets a number where a living agent
            of the job has it on this machine.

    Raises:
        OperatorError: No name is free.
    """
    for root in (options.snapshot_dir, options.overflow_dir):
        if root is not None:
            remove_orphans(root.parent)
    claim, options = _claimed(options, named=named)
    overflow = None
    try:
        if options.overflow_dir is not None:
            overflow = OwnedDirectory(options.overflow_dir)
        yield claim, options
    finally:
        claim.release()
        if overflow is not None:
            overflow.release()


def _claimed(options: AgentOptions, *, named: bool) -> tuple[OwnedDirectory, AgentOptions]:
    name, most = options.node, 1 if named else MOST_AGENTS
    for number in itertools.count(1):
        node = name if number == 1 else f"{name}-{number}"
        root = snapshot_directory(options.job, node, options.snapshot_dir.parent)
        try:
            claim = OwnedDirectory(root)
        except NameTaken:
            if number >= most:
                raise
            continue
        if number > 1:
            log_for_node(
                node,
                f"another agent of job {options.job} runs on this machine as node {name}: this one "
                f"is node {node} (--node-name)",
            )
        log_dir = options.log_dir.parent / node
        overflow = options.overflow_dir
        if overflow is not None:
            overflow = snapshot_directory(options.job, node, overflow.parent)
        options = replace(options, node=node, snapshot_dir=root, overflow_dir=overflow)
        return claim, replace(options, log_dir=log_dir)
    raise AssertionError("unreachable")


def listen_on_free_port(
    port: int | None, listen: Callable[[int], socket.socket], log_line: Callable[[str], None]
) -> socket.socket:
    """Returns a socket that listens at the given port, or at the first free one from the default
    on.

    Args:
        port: the port that was given, if any.
        listen: returns a socket that listens at a port; raises `PortTaken`.
        log_line: receives a line where the port is not the default.

    Raises:
        OperatorError: no port can be listened at.
    """
    if port is not None:
        return listen(port)
    for tried in range(DEFAULT_HTTP_PORT, DEFAULT_HTTP_PORT + MOST_AGENTS):
        try:
            listening = listen(tried)
        except PortTaken:
            continue
        if tried != DEFAULT_HTTP_PORT:
            log_line(
                f"port {DEFAULT_HTTP_PORT} is in use: /metrics is at port {tried} (--http-port)"
            )
        return listening
    raise OperatorError(
        f"no port from {DEFAULT_HTTP_PORT} to {tried} is free for /metrics: give --http-port PORT, "
        "or 0 for any"
    )
