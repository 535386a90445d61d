"""The commands that run a job or steer one: their options, and what they start."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Callable

from elasticzero.errors import StorageError
from elasticzero.launcher.options.option import Option
from elasticzero.launcher.options.parser import Parser
from elasticzero.launcher.options.table import add_job_options, add_local_options, add_run_options
from elasticzero.launcher.options.torchrun import without_effect
from elasticzero.launcher.options.validation import (
    check_access,
    check_folder,
    check_name,
    check_numbers,
    check_script,
    endpoints_of,
    given_token,
    make_log_directory,
    overflow_folder,
    parse_nnodes,
    parse_nproc,
)
from elasticzero.launcher.torchrun.values import (
    check_rendezvous,
    check_signals,
    console_of,
    launch_of,
    worker_settings,
)

STORAGE_LIMIT_S = 30.0
"""A checkpoint directory that has not answered by then cannot be written."""


def _add_run(parser: Parser) -> None:
    add_run_options(parser)
    parser.set_defaults(run_command=_run)


def _add_local(parser: Parser) -> None:
    add_local_options(parser, _LOCAL_OPTIONS, omit=_NOT_LOCAL)
    parser.set_defaults(run_command=_local)


_LOCAL_OPTIONS = (
    Option(("--nodes",), "nodes at the start", type=int, metavar="N", own=False),
    Option(
        ("--fault",),
        "kill-node, kill-worker, drain or join, when the job reaches STEP; "
        "kill-node:NODE@STEP names the node",
        metavar="WHAT@STEP",
        is_list=True,
        own=False,
    ),
    Option(("--nnodes",), "fewest and most nodes (default: 1:N)", metavar="MIN:MAX", own=False),
)
_NOT_LOCAL = (
    "--nnodes",
    "--node-name",
    "--host",
    "--http-host",
    "--http-port",
    "--standalone",
    "--preemption",
)


def _add_status(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts")
    add_job_options(parser)
    parser.set_defaults(run_command=_status)


def _add_drain(parser: Parser) -> None:
    parser.add_argument("node", metavar="NODE", help="its name, as `elasticzero status` shows it")
    _add_steering(parser)


def _add_scale(parser: Parser) -> None:
    parser.add_argument("nnodes", metavar="MIN:MAX", help="or N, for exactly so many")
    _add_steering(parser)


def _add_steering(parser: Parser) -> None:
    add_job_options(parser)
    parser.add_argument("--wait", action="store_true", help="return when it has happened")
    parser.add_argument(
        "--wait-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds to wait at most (default: 300)",
    )
    parser.set_defaults(run_command=_steer)


ADD: dict[str, Callable[[Parser], None]] = {
    "run": _add_run,
    "local": _add_local,
    "status": _add_status,
    "drain": _add_drain,
    "scale": _add_scale,
    "stop": _add_steering,
}
"""What gives a command's parser its options and its `run_command`, which takes the parsed arguments
and returns the exit code."""


def _run(args: argparse.Namespace) -> int:
    from elasticzero.checkpoint.steps.catalog import check_writable
    from elasticzero.checkpoint.storage.base import open_directory, within
    from elasticzero.launcher.agent import main as runner
    from elasticzero.launcher.agent.agent import AgentOptions
    from elasticzero.launcher.agent.node_claim import node_claim
    from elasticzero.launcher.protocol.view import Limits
    from elasticzero.launcher.secrets import forget_secrets
    from elasticzero.launcher.snapshots.shared_memory import snapshot_directory

    least, most = parse_nnodes(args.nnodes)
    meeting = check_rendezvous(args, most)
    access, token = check_access(args), given_token(args)
    forget_secrets(os.environ)
    job = check_name(args.job or f"job-{uuid.uuid4().hex[:8]}", "--job")
    node = check_name(args.node_name or socket.gethostname(), "--node-name")
    nproc = parse_nproc(args.nproc_per_node)
    launch = launch_of(args)
    signals = check_signals(args.signals_to_handle)
    console = console_of(args)
    given = check_numbers(args)
    memory = check_folder(args.snapshot_dir)
    overflow = overflow_folder(memory)
    directory, storage_trouble = args.checkpoint_dir, None
    if directory is not None:
        place = open_directory(directory)
        directory = place.where
        try:
            within(STORAGE_LIMIT_S, directory, lambda: check_writable(place))
        except StorageError as error:
            if not args.etcd:
                raise
            storage_trouble = error
    log_dir = make_log_directory(args.log_dir, job)
    limits = Limits(
        min_nodes=least,
        max_nodes=most,
        spares=given.spares,
        strategy=args.strategy,
        max_restarts=args.max_restarts,
        strict_checkpoint=args.strict_checkpoint,
        join_timeout_s=args.join_timeout,
        settle_s=args.settle,
        lease_ttl_s=float(args.lease_ttl),
        hang_timeout_s=given.hang_timeout_s,
        save_timeout_s=args.save_timeout,
    )
    options = AgentOptions(
        job=job,
        node=node,
        limits=limits,
        nproc=nproc,
        launch=launch,
        log_dir=log_dir / node,
        snapshot_dir=snapshot_directory(job, node, memory),
        overflow_dir=snapshot_directory(job, node, overflow) if overflow else None,
        checkpoint_dir=directory,
        checkpoint_every=args.checkpoint_every,
        snapshot_every=given.snapshot_every,
        verify_every=given.verify_every,
        keep=given.keep,
        keep_workers=args.keep_workers,
        grace_s=args.grace,
        preemption=args.preemption,
        console=console,
        workers=worker_settings(args, nproc, os.environ),
    )
    coordination = runner.Coordination(
        endpoints=endpoints_of(args),
        access=access,
        token=token,
        restart=args.restart,
        storage_trouble=storage_trouble,
        hosted=meeting.hosted,
        node_rank=meeting.node_rank if least == most else None,
    )
    network = runner.Network(args.host, args.http_host, args.http_port)
    lines = [*meeting.lines, *without_effect(vars(args))]
    with node_claim(options, named=args.node_name is not None) as (claim, options):
        return int(runner.run_agent(options, coordination, network, claim, signals, lines))


def _local(args: argparse.Namespace) -> int:
    from elasticzero.launcher.local import cluster as local

    check_script(args.script, is_module=args.module, is_program=args.no_python)
    parse_nproc(args.nproc_per_node)
    console_of(args)
    if args.nnodes is not None:
        parse_nnodes(args.nnodes)
    if args.job is not None:
        check_name(args.job, "--job")
    check_numbers(args)
    check_access(args)
    given_token(args)
    return int(local.run(args))


def _status(args: argparse.Namespace) -> int:
    from elasticzero.launcher.cli.status import status

    access, token = check_access(args), given_token(args)
    return int(status(args.job, endpoints_of(args), access, token, as_json=args.json))


def _steer(args: argparse.Namespace) -> int:
    """drain, scale, stop."""
    from elasticzero.launcher.cli import control

    wait_s = args.wait_timeout if args.wait else None
    nnodes = parse_nnodes(args.nnodes, "scale") if args.command == "scale" else (0, 0)
    with control.opened(args.job, endpoints_of(args), check_access(args)) as store:
        if args.command == "drain":
            return int(control.drain(store, args.job, args.node, wait_s))
        if args.command == "scale":
            return int(control.scale(store, args.job, nnodes, wait_s))
        return int(control.stop(store, args.job, wait_s))
