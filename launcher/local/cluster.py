"""Starts and ends the agents of a cluster on this machine, which are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticzero.errors import UserError
from elasticzero.launcher.addresses import loopback
from elasticzero.launcher.local.channel import VARIABLE, LocalChannel
from elasticzero.launcher.observability.event_log import EventReader
from elasticzero.launcher.snapshots.shared_memory import (
    SHARED_MEMORY,
    is_owned,
    remove_orphan,
    snapshot_directory,
)
from elasticzero.processes import (
    STANDBY_NAME,
    bound_to_this_process,
    children_of,
    descendants,
    is_alive,
    name_of,
)

POLL_S = 0.02
STOP_S = 1.5
"""Seconds that the agents get to exit after Ctrl-C, before every process is killed."""


@dataclass(slots=True)
class Node:
    """Holds one agent's process, its events and its log."""

    name: str
    process: subprocess.Popen[bytes]
    events: EventReader
    log: Path
    channel: LocalChannel | None = None
    """The command's end of the channel to the agent; None: there is none."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Says where on this machine an agent runs, and how others reach it."""

    command_prefix: Sequence[str] = ()
    """Command that executes the words after it, such as `ip netns exec NAME`."""
    address: str = field(default_factory=loopback)
    environment: Mapping[str, str] = field(default_factory=dict)
    command_line: str = "elasticzero.cli"
    """Module that has the command line; a release that `environment` names may have another."""


def on_loopback(node: str) -> Placement:
    """Returns a placement in the machine's own network, which all agents share."""
    return Placement()


@dataclass(slots=True)
class Cluster:
    """Holds agents on this machine; they stop when this process or the starting thread ends.

    `command` has the arguments of `run` that all of them share.
    """

    command: Sequence[str]
    job: str
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    output: int | None = None
    """Descriptor for the workers' repeated output; None: it goes into the agent's log."""
    place: Callable[[str], Placement] = on_loopback
    """Returns the placement of the node of this name."""
    connected: bool = False
    """True if each agent gets a channel to this process, and registers once it is told to."""
    nodes: dict[str, Node] = field(default_factory=dict)
    _started: int = 0

    def check_alone(self, nodes: int) -> None:
        """Raises `UserError` if another cluster of this machine runs the job.

        Args:
            nodes: Number of nodes that are to be started.
        """
        if any(is_owned(snapshot_directory(self.job, f"node-{i}")) for i in range(nodes)):
            raise UserError(
                f"job {self.job} runs on this machine already: give this one another --job, or end "
                f"that one with elasticzero stop --job {self.job}"
            )

    def start_node(self, name: str | None = None) -> Node:
        """Starts one more agent.

        Args:
            name: Name of an agent that has exited; None: a new name.
        """
        if name is None:
            name = f"node-{self._started}"
            self._started += 1
        directory = self.log_dir / self.job / name
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "agent.log"
        events = EventReader(directory)
        events.skip()
        at = self.place(name)
        command = [*at.command_prefix, sys.executable, "-m", at.command_line, "run"]
        command += ["--job", self.job, "--node-name", name, "--log-dir", str(self.log_dir)]
        command += ["--host", at.address, "--http-host", at.address, *self.command]
        environment = {**os.environ, **self.environment, **at.environment}
        process, channel = self._spawn(command, log, environment)
        node = Node(name, process, events, log, channel)
        self.nodes[name] = node
        return node

    def _spawn(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], LocalChannel | None]:
        """Starts an agent's process; returns it, and this end of the channel to it, if there is
        one.

        Args:
            command: The agent's command line.
            log: The file that gets its output.
            environment: Its environment.
        """
        channel, inherited = None, list[int]()
        with ExitStack() as opened:
            file = opened.enter_context(log.open("ab"))
            if self.connected:
                channel, theirs = LocalChannel.pair()
                inherited = [opened.enter_context(theirs).fileno()]
                environment = {**environment, VARIABLE: str(inherited[0])}
            process = subprocess.Popen(
                bound_to_this_process(command, signal.SIGHUP),
                stdin=subprocess.DEVNULL,
                stdout=file if self.output is None else self.output,
                stderr=file,
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
        return process, channel

    def messages(self) -> Iterator[tuple[Node, Mapping[str, Any]]]:
        """Yields (node, message) for each message of an agent since the last call."""
        for node in list(self.nodes.values()):
            for message in node.channel.receive() if node.channel is not None else ():
                yield node, message

    def send(self, nodes: Iterable[Node], **message: Any) -> None:
        """Sends a message to the agents of these nodes."""
        for node in nodes:
            if node.channel is not None:
                node.channel.send(**message)

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.running]

    def kill_node(self, node: Node) -> None:
        """Sends SIGKILL to every process of one node, as if its machine had gone."""
        victims = [node.process.pid, *descendants(node.process.pid)]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.process.wait()

    def workers_of(self, node: Node) -> list[int]:
        """Returns the process ids of a node's running workers, the children of its fork server,
        which is the first child of the agent's keeper; those that stand by are none."""
        keepers = children_of(node.process.pid) if node.running else []
        servers = [server for keeper in keepers for server in children_of(keeper)[:1]]
        children = [pid for server in servers for pid in children_of(server) if is_alive(pid)]
        return [pid for pid in children if name_of(pid) != STANDBY_NAME]

    def kill_worker(self, node: Node) -> int:
        """Sends SIGKILL to the node's last worker; returns its process id."""
        pid = self.workers_of(node)[-1]
        os.kill(pid, signal.SIGKILL)
        return pid

    def drain(self, node: Node) -> None:
        """Sends SIGTERM to the agent, as at a preemption."""
        node.process.send_signal(signal.SIGTERM)

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (node, event) for each event since the last call."""
        for name, node in list(self.nodes.items()):
            for event in node.events.read():
                yield name, event

    def stop(self) -> None:
        """Interrupts all agents, kills what still runs after STOP_S, and frees shared memory."""
        pids = {pid for node in self.running() for pid in descendants(node.process.pid)}
        for node in self.running():
            node.process.send_signal(signal.SIGINT)
        deadline_s = time.monotonic() + STOP_S
        while self.running() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        for node in self.running():
            self.kill_node(node)
        for pid in pids:
            if is_alive(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name, node in self.nodes.items():
            if node.channel is not None:
                node.channel.close()
            for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
                remove_orphan(snapshot_directory(self.job, name, folder))


def cluster_environment(nodes: int) -> dict[str, str]:
    """Returns variables with which nodes share the machine's cores, except those already set."""
    threads = max(1, (os.cpu_count() or 1) // nodes)
    variables = {"OMP_NUM_THREADS": str(threads)}
    return {key: value for key, value in variables.items() if key not in os.environ}
