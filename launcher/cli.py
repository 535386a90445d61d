"""The command line: `elasticzero run | local | status | drain | scale | stop | checkpoint …`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elasticzero.errors import ElasticZeroError, ExitCode, UserError
from elasticzero.launcher.options import (
    add_job_options,
    add_run_options,
    check_access,
    check_name,
    check_numbers,
    check_script,
    endpoints_of,
    given_token,
    parse_nnodes,
    parse_nproc,
)


class Parser(argparse.ArgumentParser):
    """Errors in one line with the exit code of bad input."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\nsee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)


def build_parser() -> argparse.ArgumentParser:
    from elasticzero.checkpoint.cli import add_commands

    parser = Parser(prog="elasticzero", description="Elastic, fault-tolerant PyTorch training.")
    parser.add_argument("--version", action="version", version=f"elasticzero {_version()}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    run = commands.add_parser("run", help="run this node's part of a job", allow_abbrev=False)
    add_run_options(run)
    local = commands.add_parser(
        "local",
        help="run a whole cluster on this machine, with faults on request",
        allow_abbrev=False,
    )
    local.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes at the start")
    local.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="WHAT@STEP",
        help="kill-node, kill-worker, drain or join, when the job reaches STEP; "
        "kill-node:NODE@STEP names the node",
    )
    omit = ("--nnodes", "--node-name", "--host", "--http-host", "--http-port", "--standalone")
    add_run_options(local, omit=(*omit, "--preemption"))
    local.add_argument("--nnodes", help="fewest and most nodes (default: 1:N)", metavar="MIN:MAX")
    status = commands.add_parser("status", help="what a job is doing")
    status.add_argument("--json", action="store_true", help="for scripts")
    drain = commands.add_parser("drain", help="have a node leave at the next step")
    drain.add_argument("node", metavar="NODE", help="its name, as `elasticzero status` shows it")
    scale = commands.add_parser("scale", help="change the fewest and most nodes of a job")
    scale.add_argument("nnodes", metavar="MIN:MAX", help="or N, for exactly so many")
    stop = commands.add_parser("stop", help="end a job at the next step, with its state saved")
    for command in (status, drain, scale, stop):
        add_job_options(command)
    for command in (drain, scale, stop):
        _add_wait_options(command)
    checkpoint = commands.add_parser(
        "checkpoint", help="look at checkpoints and change their shape"
    )
    add_commands(
        checkpoint.add_subparsers(dest="checkpoint_command", required=True, parser_class=Parser)
    )
    return parser


def _add_wait_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="return when it has happened")
    parser.add_argument(
        "--wait-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds to wait at most (default: 300)",
    )


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options; a word that a command does not know is that command's error."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        known = " ".join(words[:1])
        parser.prog = f"elasticzero {known}"
        parser.error(f"unknown option {unknown[0]}")
    return args


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("elasticzero")
    except PackageNotFoundError:
        return "(not installed)"


def _run(args: argparse.Namespace) -> int:
    from elasticzero.checkpoint.commit import check_writable
    from elasticzero.checkpoint.storage import open_directory
    from elasticzero.launcher import runner
    from elasticzero.launcher.agent import AgentOptions
    from elasticzero.launcher.forkserver import Launch
    from elasticzero.launcher.secret import forget_secrets
    from elasticzero.launcher.view import Limits
    from elasticzero.launcher.workers import worker_environment

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
    directory = args.checkpoint_dir
    if directory is not None:
        place = open_directory(directory)
        check_writable(place)
        directory = place.where
    log_root = Path(args.log_dir or tempfile.mkdtemp(prefix="elasticzero-logs-")).absolute()
    limits = Limits(
        min_nodes=least,
        max_nodes=most,
        strategy=args.strategy,
        max_restarts=args.max_restarts,
        strict_checkpoint=args.strict_checkpoint,
        join_timeout_s=args.join_timeout,
        settle_s=args.settle,
        lease_ttl_s=float(args.lease_ttl),
        hang_timeout_s=given.hang_timeout_s,
    )
    launch = Launch(
        target=script,
        is_module=args.module,
        arguments=tuple(args.arguments),
        environment=worker_environment(os.environ),
        directory=os.getcwd(),
    )
    options = AgentOptions(
        job=job,
        node=node,
        limits=limits,
        nproc=nproc,
        launch=launch,
        log_dir=log_root / job / node,
        snapshot_dir=runner.snapshot_directory(job, node),
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
        endpoints=endpoints_of(args), access=access, token=token, restart=args.restart
    )
    network = runner.Network(args.host, args.http_host, args.http_port)
    return int(runner.run_agent(options, coordination, network))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Mistakes of the user are one line, never a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` leaves it ignored
    try:
        if args.command == "run":
            return _run(args)
        if args.command == "local":
            return _local(args)
        if args.command == "status":
            return _status(args)
        if args.command in ("drain", "scale", "stop"):
            return _steer(args)
        return int(args.run_command(args))
    except ElasticZeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: everything that was started here is stopped", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
