"""A whole cluster on this machine: real agents, real workers, an etcd, and faults on request."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.agent.config import console_of
from elasticzero.launcher.observability.console import ClusterConsole
from elasticzero.launcher.observability.event_log import EventReader
from elasticzero.launcher.options.validation import make_log_directory
from elasticzero.launcher.snapshots.shared_memory import SHARED_MEMORY, snapshot_directory
from elasticzero.launcher.store.etcd.server import EmbeddedEtcd
from elasticzero.processes import bound_to_this_process, children_of, descendants, is_alive

LOOK_EVERY_S = 0.02
STOP_S = 1.5
"""After Ctrl-C the agents get so long before everything is killed."""
FAULTS = ("kill-node", "kill-worker", "drain", "join")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the cluster when the job reaches a step."""

    what: str
    step: int
    node: str | None = None
    """None: the last node that trains."""

    @property
    def text(self) -> str:
        """As it was given."""
        return f"{self.what}{f':{self.node}' if self.node else ''}@{self.step}"


def parse_fault(text: str) -> Fault:
    """`WHAT@STEP` or `WHAT:NODE@STEP`; raises `UserError`."""
    match = re.fullmatch(r"([a-z-]+)(?::([A-Za-z0-9._-]+))?@(\d+)", text)
    if not match or match[1] not in FAULTS:
        raise UserError(f"--fault {text}: WHAT@STEP is wanted, WHAT one of {', '.join(FAULTS)}")
    return Fault(match[1], int(match[3]), match[2])


def most_nodes(nodes: int, faults: Sequence[Fault]) -> int:
    """How many nodes there are at most, if every fault strikes in the order of steps."""
    most = nodes
    for fault in sorted(faults, key=lambda fault: fault.step):
        nodes += {"join": 1, "kill-worker": 0}.get(fault.what, -1)
        most = max(most, nodes)
    return most


@dataclass(slots=True)
class Node:
    """One agent's process."""

    name: str
    process: subprocess.Popen[bytes]
    events: EventReader
    log: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where on this machine an agent runs, and how others reach it."""

    before: Sequence[str] = ()
    """Words of a command that becomes the one after it, as `ip netns exec NAME`."""
    address: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)


def on_loopback(node: str) -> Placement:
    """All agents share the machine's own network."""
    return Placement()


@dataclass(slots=True)
class Cluster:
    """Agents on this machine, which stop when this process or the thread that started them ends.

    `command` are the words after `run` that all of them share.
    """

    command: Sequence[str]
    job: str
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    output: int | None = None
    """Descriptor for the workers' repeated output; None: into the agent's log."""
    place: Callable[[str], Placement] = on_loopback
    """Where the node of a name runs."""
    nodes: dict[str, Node] = field(default_factory=dict)
    _started: int = 0

    def start_node(self, again: str | None = None) -> Node:
        """Start one more agent, under a name of its own, or that of one that has ended."""
        name = again or f"node-{self._started}"
        self._started += again is None
        directory = self.log_dir / self.job / name
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "agent.log"
        events = EventReader(directory)
        events.skip()
        at = self.place(name)
        words = [*at.before, sys.executable, "-m", "elasticzero.launcher.cli", "run"]
        words += ["--job", self.job, "--node-name", name, "--log-dir", str(self.log_dir)]
        words += ["--host", at.address, "--http-host", at.address, *self.command]
        with log.open("ab") as file:
            process = subprocess.Popen(
                bound_to_this_process(words, signal.SIGHUP),
                stdin=subprocess.DEVNULL,
                stdout=file if self.output is None else self.output,
                stderr=file,
                env={**os.environ, **self.environment, **at.environment},
                start_new_session=True,
            )
        node = Node(name, process, events, log)
        self.nodes[name] = node
        return node

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.running]

    def kill_node(self, node: Node) -> None:
        """SIGKILL to every process of one node, as if its machine had gone."""
        victims = [node.process.pid, *descendants(node.process.pid)]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.process.wait()

    def workers_of(self, node: Node) -> list[int]:
        """Process ids of a node's living workers: the children of its fork server."""
        servers = children_of(node.process.pid) if node.running else []
        return [pid for server in servers for pid in children_of(server) if is_alive(pid)]

    def kill_worker(self, node: Node) -> int:
        """SIGKILL to the node's last worker; its process id."""
        pid = self.workers_of(node)[-1]
        os.kill(pid, signal.SIGKILL)
        return pid

    def drain(self, node: Node) -> None:
        """SIGTERM to the agent, as at a preemption."""
        node.process.send_signal(signal.SIGTERM)

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(node, event) for everything since the last call."""
        for name, node in list(self.nodes.items()):
            for event in node.events.read():
                yield name, event

    def stop(self) -> None:
        """Interrupt all agents; kill what is left after STOP_S; leave no process and no memory."""
        pids = {pid for node in self.running() for pid in descendants(node.process.pid)}
        for node in self.running():
            node.process.send_signal(signal.SIGINT)
        deadline_s = time.monotonic() + STOP_S
        while self.running() and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        for node in self.running():
            self.kill_node(node)
        for pid in pids:
            if is_alive(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name in self.nodes:
            for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
                shutil.rmtree(snapshot_directory(self.job, name, folder), ignore_errors=True)


def shared_words(args: argparse.Namespace, endpoint: str, most: int) -> list[str]:
    """The options that every agent of the cluster gets."""
    nnodes = args.nnodes or f"1:{most}"
    words = ["--etcd", endpoint, "--nnodes", nnodes, "--http-port", "0", "--preemption", "none"]
    for name in (
        "nproc_per_node",
        "strategy",
        "checkpoint_dir",
        "checkpoint_every",
        "snapshot_every",
        "snapshot_dir",
        "verify_replicas",
        "keep",
        "keep_every",
        "spares",
        "max_restarts",
        "role",
        "hang_timeout",
        "etcd_cacert",
        "etcd_cert",
        "etcd_key",
        "etcd_user",
        "etcd_password_file",
        "token_file",
    ):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("settle", "lease_ttl", "grace", "join_timeout", "exit_timeout", "save_timeout"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += _output_words(args)
    words.append("--keep-workers" if args.keep_workers else "--no-keep-workers")
    if args.strict_checkpoint:
        words.append("--strict-checkpoint")
    if args.module:
        words.append("--module")
    if args.no_python:
        words.append("--no-python")
    return [*words, args.script, *args.arguments]


def _output_words(args: argparse.Namespace) -> list[str]:
    """What of their workers' output the agents repeat: what this command is to show."""
    words = [] if args.local_ranks_filter is None else ["--local-ranks-filter"]
    words += [args.local_ranks_filter] if words else []
    if args.tee or (not args.log_dir and args.tee_streams is None and args.redirects is None):
        return [*words, "--tee"]
    words += [] if args.tee_streams is None else [f"--tee={args.tee_streams}"]
    return words if args.redirects is None else [*words, f"--redirects={args.redirects}"]


def cluster_environment(nodes: int) -> dict[str, str]:
    """What makes several nodes live well on one machine, unless the user said otherwise."""
    threads = max(1, (os.cpu_count() or 1) // nodes)
    wanted = {"OMP_NUM_THREADS": str(threads)}
    return {key: value for key, value in wanted.items() if key not in os.environ}


def strike(cluster: Cluster, fault: Fault, training: Sequence[str]) -> tuple[str, float] | None:
    """Do what the fault says; the node it struck, and when (wall clock). None: there is nobody to
    strike at this moment."""
    if fault.what == "join":
        return cluster.start_node().name, time.time()
    living = [cluster.nodes[n] for n in training if cluster.workers_of(cluster.nodes[n])]
    chosen = [node for node in living if fault.node in (None, node.name)]
    if not chosen:
        return None
    node = chosen[-1]
    struck_s = time.time()
    if fault.what == "kill-node":
        cluster.kill_node(node)
    elif fault.what == "kill-worker":
        cluster.kill_worker(node)
    else:
        cluster.drain(node)
    return node.name, struck_s


def run(args: argparse.Namespace) -> ExitCode:
    """`elasticzero local`: start the cluster, tell what happens, strike, and take it all down."""
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: at least 1 is wanted")
    faults = sorted((parse_fault(text) for text in args.fault or ()), key=lambda fault: fault.step)
    names = {f"node-{i}" for i in range(most_nodes(args.nodes, faults) + len(faults))}
    for fault in faults:
        if fault.node is not None and fault.node not in names:
            raise UserError(f"--fault {fault.what}:{fault.node}: the nodes are node-0, node-1, …")
    job = args.job or f"local-{uuid.uuid4().hex[:6]}"
    log_dir = make_log_directory(args.log_dir, job).parent
    console = console_of(args)
    with ExitStack() as stack:
        endpoint = args.etcd
        if endpoint is None:
            endpoint = stack.enter_context(EmbeddedEtcd()).endpoint
        most = most_nodes(args.nodes, faults)
        words = shared_words(args, endpoint, most)
        output = None if console.silent else sys.stdout.fileno()
        cluster = Cluster(words, job, log_dir, cluster_environment(most), output)
        stack.callback(cluster.stop)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        lines = ClusterConsole(log_dir / job, args.nodes, endpoint, muted=console.silent)
        for _ in range(args.nodes):
            cluster.start_node()
        code = _watch(cluster, faults, lines)
        for fault in faults:
            lines.never_struck(fault.text)
        lines.close(code)
        return code


def _watch(cluster: Cluster, faults: list[Fault], lines: ClusterConsole) -> ExitCode:
    """Follow the job to its end."""
    while True:
        alive = bool(cluster.running())
        for node, event in cluster.events():
            lines.take(node, event)
        if faults and lines.plain:
            lines.cannot_strike(faults[0].text)
        while faults and lines.step >= faults[0].step:
            struck = strike(cluster, faults[0], lines.training)
            if struck is None:
                break
            lines.struck(faults.pop(0).what, *struck)
        if not alive:
            return _outcome(cluster, lines)
        time.sleep(LOOK_EVERY_S)


def _outcome(cluster: Cluster, lines: ClusterConsole) -> ExitCode:
    """The job's exit code from its agents'; where it failed, the first agent's own words."""
    codes = {name: node.process.returncode for name, node in cluster.nodes.items()}
    if ExitCode.DONE in codes.values():
        return ExitCode.DONE
    for wanted in (ExitCode.FAILED, ExitCode.USAGE, ExitCode.UNAVAILABLE):
        logs = [cluster.nodes[name].log for name, code in codes.items() if code == wanted]
        if logs:
            lines.quote(logs, traced=cluster.output is not None)
            return wanted
    return ExitCode.FAILED
