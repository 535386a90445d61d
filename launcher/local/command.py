"""Runs `elasticzero local`: a cluster on this machine, with an etcd, and faults on request."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.agent.config import console_of
from elasticzero.launcher.local.cluster import POLL_S, Cluster, cluster_environment
from elasticzero.launcher.observability.console import ClusterConsole
from elasticzero.launcher.options.table import passed_on_arguments
from elasticzero.launcher.options.validation import make_log_directory, parse_nnodes
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.text import count_text

FAULTS = ("kill-node", "kill-worker", "drain", "join")


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes a fault that is injected when the job reaches a step."""

    kind: str
    step: int
    node: str | None = None
    """Name of the node; None: the last one that trains."""

    @property
    def text(self) -> str:
        """Returns the text that the user gave."""
        return f"{self.kind}{f':{self.node}' if self.node else ''}@{self.step}"


def parse_fault(text: str) -> Fault:
    """Parses `WHAT@STEP` or `WHAT:NODE@STEP`; raises `UserError` for other text."""
    match = re.fullmatch(r"([a-z-]+)(?::([A-Za-z0-9._-]+))?@(\d+)", text)
    if not match or match[1] not in FAULTS:
        raise UserError(f"--fault {text}: WHAT@STEP is expected, WHAT one of {', '.join(FAULTS)}")
    return Fault(match[1], int(match[3]), match[2])


def most_nodes(nodes: int, faults: Sequence[Fault]) -> int:
    """Returns the largest number of nodes, if the faults are injected in the order of steps."""
    most = nodes
    for fault in sorted(faults, key=lambda fault: fault.step):
        nodes += {"join": 1, "kill-worker": 0}.get(fault.kind, -1)
        most = max(most, nodes)
    return most


def agent_arguments(args: argparse.Namespace, endpoint: str, most: int) -> list[str]:
    """Returns the words that every agent gets after `run`: its options, the script, its arguments.

    They read no file of `--config`, for `args` has what it gave.

    Args:
        args: Parsed arguments of `local`.
        endpoint: The member of etcd that the agents use.
        most: Maximum number of nodes that the cluster ever has.
    """
    nnodes = args.nnodes or f"1:{most}"
    options = ["--config=", "--etcd", endpoint, "--nnodes", nnodes, "--http-port", "0"]
    options += ["--preemption", "none", *passed_on_arguments(args), *_output_options(args)]
    return [*options, args.script, *args.arguments]


def _output_options(args: argparse.Namespace) -> list[str]:
    """Returns the options by which agents repeat the output that this command is to show."""
    options = [] if args.local_ranks_filter is None else ["--local-ranks-filter"]
    options += [args.local_ranks_filter] if options else []
    if args.tee or (not args.log_dir and args.tee_streams is None and args.redirects is None):
        return [*options, "--tee"]
    options += [] if args.tee_streams is None else [f"--tee={args.tee_streams}"]
    return options if args.redirects is None else [*options, f"--redirects={args.redirects}"]


def inject(cluster: Cluster, fault: Fault, training: Sequence[str]) -> tuple[str, float] | None:
    """Injects a fault.

    Args:
        cluster: The nodes.
        fault: The kind of fault, and the node if it names one.
        training: Nodes that train now.

    Returns:
        The name of the node that it hit, and the wall-clock time. None: no such node trains at this
        moment.
    """
    if fault.kind == "join":
        return cluster.start_node().name, time.time()
    living = [cluster.nodes[n] for n in training if cluster.workers_of(cluster.nodes[n])]
    chosen = [node for node in living if fault.node in (None, node.name)]
    if not chosen:
        return None
    node = chosen[-1]
    struck_s = time.time()
    if fault.kind == "kill-node":
        cluster.kill_node(node)
    elif fault.kind == "kill-worker":
        cluster.kill_worker(node)
    else:
        cluster.drain(node)
    return node.name, struck_s


def check_cluster(args: argparse.Namespace) -> list[Fault]:
    """Returns the faults in the order of their steps; raises `UserError` for options that
    contradict each other."""
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: at least 1 is expected")
    faults = sorted((parse_fault(text) for text in args.fault or ()), key=lambda fault: fault.step)
    names = {f"node-{i}" for i in range(most_nodes(args.nodes, faults) + len(faults))}
    for fault in faults:
        if fault.node is not None and fault.node not in names:
            raise UserError(f"--fault {fault.kind}:{fault.node}: the nodes are node-0, node-1, …")
    _check_enough_nodes(args, most_nodes(args.nodes, faults))
    return faults


def run(args: argparse.Namespace) -> ExitCode:
    """Runs `elasticzero local`: starts the cluster, prints events, injects faults, and stops it."""
    faults = check_cluster(args)
    job = args.job or f"local-{uuid.uuid4().hex[:6]}"
    log_dir = make_log_directory(args.log_dir, job).parent
    console = console_of(args)
    with ExitStack() as stack:
        endpoint = args.etcd
        if endpoint is None:
            endpoint = stack.enter_context(EtcdServer()).endpoint
        most = most_nodes(args.nodes, faults)
        arguments = agent_arguments(args, endpoint, most)
        output = None if console.silent else sys.stdout.fileno()
        cluster = Cluster(arguments, job, log_dir, cluster_environment(most), output)
        stack.callback(cluster.stop)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        lines = ClusterConsole(log_dir / job, args.nodes, endpoint, muted=console.silent)
        for _ in range(args.nodes):
            cluster.start_node()
        code = _watch(cluster, faults, lines)
        for fault in faults:
            lines.report_missed_fault(fault.text)
        lines.close(code)
        return code


def _check_enough_nodes(args: argparse.Namespace, most: int) -> None:
    """Raises `UserError` if the job could never begin because there are too few nodes."""
    if args.nnodes is None or args.etcd is not None:  # nodes of other machines may join
        return
    least, _ = parse_nnodes(args.nnodes)
    if least > most:
        raise UserError(
            f"--nnodes {args.nnodes}: the job needs {count_text(least, 'node')}, and --nodes "
            f"{args.nodes} starts too few"
        )


def _watch(cluster: Cluster, faults: list[Fault], lines: ClusterConsole) -> ExitCode:
    """Follows the job to its end; returns its exit code.

    Args:
        cluster: The nodes.
        faults: Faults that are to be injected, the earliest first.
        lines: Prints what happens.
    """
    while True:
        alive = bool(cluster.running())
        for node, event in cluster.events():
            lines.record(node, event)
        if faults and lines.plain:
            lines.report_waiting_fault(faults[0].text)
        while faults and lines.step >= faults[0].step:
            struck = inject(cluster, faults[0], lines.training)
            if struck is None:
                break
            lines.report_fault(faults.pop(0).kind, *struck)
        if not alive:
            return _outcome(cluster, lines)
        time.sleep(POLL_S)


def _outcome(cluster: Cluster, lines: ClusterConsole) -> ExitCode:
    """Returns the job's exit code from its agents' codes; prints the error of the first if it
    failed."""
    codes = {name: node.process.returncode for name, node in cluster.nodes.items()}
    if ExitCode.DONE in codes.values():
        return ExitCode.DONE
    for exit_code in (ExitCode.FAILED, ExitCode.USAGE, ExitCode.DEFECT, ExitCode.UNAVAILABLE):
        ended = [name for name, code in codes.items() if code == exit_code]
        if ended:
            lines.quote(ended, traced=cluster.output is not None)
            return exit_code
    return ExitCode.FAILED
