"""The commands that run a job or steer one: their options, and what they start."""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from elasticzero.errors import StorageError, UserError
from elasticzero.launcher.option_values import (
    check_access,
    check_folder,
    check_name,
    check_numbers,
    check_script,
    endpoints_of,
    given_token,
    overflow_folder,
    parse_nnodes,
    parse_nproc,
)
from elasticzero.launcher.options import add_job_options, add_run_options
from elasticzero.launcher.parser import Parser

STORAGE_LIMIT_S = 30.0
"""A checkpoint directory that has not answered by then cannot be written."""


def _add_run(parser: Parser) -> None:
    add_run_options(parser)
    parser.set_defaults(run_command=_run)


def _add_local(parser: Parser) -> None:
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes at the start")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="WHAT@STEP",
        help="kill-node, kill-worker, drain or join, when the job reaches STEP; "
        "kill-node:NODE@STEP names the node",
    )
    omit = ("--nnodes", "--node-name", "--host", "--http-host", "--http-port", "--standalone")
    add_run_options(parser, omit=(*omit, "--preemption"))
    parser.add_argument("--nnodes", help="fewest and most nodes (default: 1:N)", metavar="MIN:MAX")
    parser.set_defaults(run_command=_local)


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
    from elasticzero.checkpoint.commit import check_writable
    from elasticzero.checkpoint.storage import open_directory, within
    from elasticzero.launcher import runner
    from elasticzero.launcher.agent import AgentOptions
    from elasticzero.launcher.forkserver import Launch
    from elasticzero.launcher.node_claim import node_claim
    from elasticzero.launcher.secret import forget_secrets
    from elasticzero.launcher.shared_memory import snapshot_directory
    from elasticzero.launcher.view import Limits
    from elasticzero.launcher.worker_process import worker_environment

    least, most = parse_nnodes(args.nnodes)
    if args.standalone and most > 1:
        raise UserError(f"--standalone is one node, but --nnodes is {args.nnodes}")
    if not args.etcd and most > 1:
        raise UserError(
            f"--nnodes {args.nnodes} needs --etcd HOST:PORT, where the nodes find each other; "
            "for several nodes on this machine use: elasticzero local --nodes N"
        )
    if args.etcd and not args.job:
        raise UserError("--etcd needs --job ID, the same on every node: it names the training run")
    access, token = check_access(args), given_token(args)
    forget_secrets(os.environ)
    job = check_name(args.job or f"job-{uuid.uuid4().hex[:8]}", "--job")
    node = check_name(args.node_name or socket.gethostname(), "--node-name")
    script = check_script(args.script, args.module)
    nproc = parse_nproc(args.nproc_per_node)
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
    log_root = Path(args.log_dir or tempfile.mkdtemp(prefix="elasticzero-logs-")).absolute()
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
    launch = Launch(
        target=script,
        is_module=args.module,
        arguments=tuple(args.arguments),
        environment=worker_environment(os.environ),
        directory=os.getcwd(),
        exit_timeout_s=args.exit_timeout,
    )
    options = AgentOptions(
        job=job,
        node=node,
        limits=limits,
        nproc=nproc,
        launch=launch,
        log_dir=log_root / job / node,
        snapshot_dir=snapshot_directory(job, node, memory),
        overflow_dir=snapshot_directory(job, node, overflow) if overflow else None,
        checkpoint_dir=directory,
        checkpoint_every=args.checkpoint_every,
        snapshot_every=given.snapshot_every,
        keep=given.keep,
        keep_workers=args.keep_workers,
        grace_s=args.grace,
        preemption=args.preemption,
        tee="all" if args.tee or not args.log_dir else "none",
    )
    coordination = runner.Coordination(
        endpoints=endpoints_of(args),
        access=access,
        token=token,
        restart=args.restart,
        storage_trouble=storage_trouble,
    )
    network = runner.Network(args.host, args.http_host, args.http_port)
    with node_claim(options, named=args.node_name is not None) as (claim, options):
        return int(runner.run_agent(options, coordination, network, claim))


def _local(args: argparse.Namespace) -> int:
    from elasticzero.launcher import local

    check_script(args.script, args.module)
    parse_nproc(args.nproc_per_node)
    if args.nnodes is not None:
        parse_nnodes(args.nnodes)
    if args.job is not None:
        check_name(args.job, "--job")
    check_numbers(args)
    check_access(args)
    given_token(args)
    return int(local.run(args))


def _status(args: argparse.Namespace) -> int:
    from elasticzero.launcher.status import status

    access, token = check_access(args), given_token(args)
    return int(status(args.job, endpoints_of(args), access, token, as_json=args.json))


def _steer(args: argparse.Namespace) -> int:
    """drain, scale, stop."""
    from elasticzero.launcher import control

    wait_s = args.wait_timeout if args.wait else None
    nnodes = parse_nnodes(args.nnodes, "scale") if args.command == "scale" else (0, 0)
    with control.opened(args.job, endpoints_of(args), check_access(args)) as store:
        if args.command == "drain":
            return int(control.drain(store, args.job, args.node, wait_s))
        if args.command == "scale":
            return int(control.scale(store, args.job, nnodes, wait_s))
        return int(control.stop(store, args.job, wait_s))
