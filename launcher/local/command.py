"""Runs `elasticzero local`: a cluster on this machine, with an etcd, and faults on request."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from elasticzero.errors import ExitCode, UserError
from elasticzero.ipc.messages import FAULT_STEPS_VARIABLE
from elasticzero.launcher.agent.config import console_of, progress_mode
from elasticzero.launcher.local.channel import Start
from elasticzero.launcher.local.cluster import POLL_S, Cluster, cluster_environment
from elasticzero.launcher.local.faults import (
    Fault,
    check_nodes,
    most_nodes,
    parse_fault,
    steps_of,
)
from elasticzero.launcher.local.injection import FaultInjector
from elasticzero.launcher.local.relay import OutputRelay
from elasticzero.launcher.observability.console import ClusterConsole
from elasticzero.launcher.observability.output import terminal
from elasticzero.launcher.observability.progress.island_lines import IslandLines
from elasticzero.launcher.options.table import passed_on_arguments
from elasticzero.launcher.options.validation import make_log_directory, parse_nnodes
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.options.diloco import NAME
from elasticzero.text import count_text


def agent_arguments(args: argparse.Namespace, endpoint: str, most: int) -> list[str]:
    """Returns the words that every agent gets after `run`: its options, the script, its arguments.

    They read no file of `--config`, for `args` has what it gave.

    Args:
        args: Parsed arguments of `local`.
        endpoint: The member of etcd that the agents use.
        most: Maximum number of nodes that the cluster ever has.
    """
    least = args.nodes if args.strategy == NAME else 1  # islands begin together
    nnodes = args.nnodes or f"{least}:{most}"
    options = ["--config=", "--etcd", endpoint, "--nnodes", nnodes, "--http-port", "0"]
    options += ["--preemption", "none", "--progress", "off"]
    options += [*passed_on_arguments(args), *_output_options(args)]
    return [*options, args.script, *args.arguments]


def _output_options(args: argparse.Namespace) -> list[str]:
    """Returns the options by which agents repeat the output that this command is to show."""
    options = [] if args.local_ranks_filter is None else ["--local-ranks-filter"]
    options += [args.local_ranks_filter] if options else []
    if args.tee or (not args.log_dir and args.tee_streams is None and args.redirects is None):
        return [*options, "--tee"]
    options += [] if args.tee_streams is None else [f"--tee={args.tee_streams}"]
    return options if args.redirects is None else [*options, f"--redirects={args.redirects}"]


def check_cluster(args: argparse.Namespace) -> list[Fault]:
    """Returns the faults; raises `UserError` for options that contradict each other."""
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: at least 1 is expected")
    faults = [parse_fault(text) for text in args.fault or ()]
    most = most_nodes(args.nodes, faults)
    check_nodes(faults, args.nodes)
    _check_enough_nodes(args, most)
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
        environment = {**cluster_environment(most), **_fault_environment(faults)}
        mode = progress_mode(args)
        relay = None if console.silent or mode != "line" else OutputRelay()
        output = None if console.silent else sys.stdout.fileno()
        output = output if relay is None else relay.write_fd
        cluster = Cluster(arguments, job, log_dir, environment, output, connected=True)
        cluster.check_alone(args.nodes)
        if mode == "line":
            stack.enter_context(terminal.in_background())
        stack.callback(cluster.stop)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        lines = ClusterConsole(
            log_dir / job,
            args.nodes,
            endpoint,
            mode=mode,
            muted=console.silent,
            quiet=args.quiet,
        )
        if args.strategy == NAME:
            lines.islands = IslandLines()
        if mode == "line":
            terminal.follow(lines.ticker)
        for _ in range(args.nodes):
            cluster.start_node()
        injector = FaultInjector(cluster, faults, lines)
        try:
            code = _watch(cluster, injector, lines, relay)
        except KeyboardInterrupt:
            lines.interrupt()
            raise
        for fault in injector.left:
            lines.report_missed_fault(fault.text, timed=fault.after_s is not None)
        lines.close(code)
        return code


def _fault_environment(faults: Sequence[Fault]) -> dict[str, str]:
    """Returns the variable by which workers know at which steps they wait for a fault."""
    steps = ",".join(map(str, steps_of(faults)))
    return {FAULT_STEPS_VARIABLE: steps} if steps else {}


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


def _watch(
    cluster: Cluster, injector: FaultInjector, lines: ClusterConsole, relay: OutputRelay | None
) -> ExitCode:
    """Follows the job to its end; returns its exit code.

    Args:
        cluster: The nodes, whose agents were started just now.
        injector: Injects the faults.
        lines: Prints what happens.
        relay: Passes the workers' output on; None: the agents write it themselves.
    """
    start = Start()
    while True:
        running = cluster.running()
        for name, event in cluster.events():
            lines.record(name, event)
        lines.tick()
        if relay is not None:
            relay.pass_on()
        for node, message in cluster.messages():
            if "ready" in message:
                start.note_ready(node.name)
            injector.take(node, message)
        ready = start.may_register(node.name for node in running)
        cluster.send((cluster.nodes[name] for name in ready), begin=True)
        injector.turn(time.monotonic())
        if not running:
            if relay is not None:
                relay.close()
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
            lines.quote(ended)
            return exit_code
    return ExitCode.FAILED
