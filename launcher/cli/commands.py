"""Defines the options of the commands that run or control a job, and starts the commands."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from elasticzero.errors import ElasticZeroError, ExitCode, UserError
from elasticzero.launcher.addresses import is_resolved, without_brackets
from elasticzero.launcher.options.parser import Parser, add_options
from elasticzero.launcher.options.table import (
    JOB_OPTIONS,
    add_job_options,
    add_local_options,
    add_run_options,
)
from elasticzero.launcher.options.validation import (
    check_access,
    check_metrics_directory,
    check_name,
    check_script,
    endpoints_of,
    given_token,
    parse_common_options,
    parse_nnodes,
    parse_nproc,
)
from elasticzero.launcher.store.job_token import HOW
from elasticzero.options.resolve import with_source
from elasticzero.text import count_text

if TYPE_CHECKING:
    from elasticzero.launcher.agent.extensions.base import ExtensionFactory

log = logging.getLogger(__name__)

Extensions: TypeAlias = "Callable[[], Sequence[ExtensionFactory]]"
"""Returns the extensions of an agent; only `run` imports what they need."""
Completion: TypeAlias = Callable[[str], int]
"""Prints the script that completes command lines in a shell; returns the exit code."""


def add_run(parser: Parser, extensions: Extensions, completion: Completion) -> None:
    """Adds the options of `run`, and sets its `run_command`.

    Args:
        parser: The parser of `run`.
        extensions: Extensions of the agent.
        completion: What `--print-completion` does.
    """
    add_run_options(parser)
    run_command = partial(_run, extensions=extensions, completion=completion)
    parser.set_defaults(run_command=run_command)


def _add_local(parser: Parser) -> None:
    add_local_options(parser)
    parser.set_defaults(run_command=_local)


def _add_status(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="The status is printed as JSON, for scripts."
    )
    parser.add_argument(
        "--url",
        action="store_true",
        help="Only the address of the status page is printed, with the job's token in it.",
    )
    add_job_options(parser)
    parser.set_defaults(run_command=_status)


def _add_drain(parser: Parser) -> None:
    parser.add_argument(
        "node", metavar="NODE", help="The node has this name in `elasticzero status`."
    )
    _add_control_options(parser)


def _add_scale(parser: Parser) -> None:
    parser.add_argument(
        "nnodes",
        metavar="MIN:MAX",
        help="The job is to run on MIN to MAX nodes; N means exactly N.",
    )
    _add_control_options(parser)


def _add_control_options(parser: Parser) -> None:
    add_job_options(parser)
    parser.add_argument(
        "--wait", action="store_true", help="The command returns once the change has happened."
    )
    parser.add_argument(
        "--wait-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="With --wait, the command waits at most S seconds. (default: 300)",
    )
    parser.set_defaults(run_command=_control)


def _add_tls(parser: Parser) -> None:
    commands = parser.add_subparsers(
        dest="tls_command", required=True, metavar="COMMAND", parser_class=Parser
    )
    text = "Prints the certificate of the authority that a job's nodes make of the job's token."
    command = commands.add_parser("ca", help=text, description=text, allow_abbrev=False)
    of_the_token = [o for o in JOB_OPTIONS if o.name in ("job", "token_file")]
    add_options(command, of_the_token, required=("job",))
    command.set_defaults(run_command=_tls_ca)


CORE_COMMANDS: dict[str, Callable[[Parser], None]] = {
    "local": _add_local,
    "status": _add_status,
    "drain": _add_drain,
    "scale": _add_scale,
    "stop": _add_control_options,
    "tls": _add_tls,
}
"""Functions that give a command's parser its options and its `run_command`, which takes the parsed
arguments and returns the exit code. `run` is missing: see `add_run`."""


def _run(args: argparse.Namespace, extensions: Extensions, completion: Completion) -> int:
    if args.print_completion is not None:
        return completion(args.print_completion)
    try:
        if args.dry_run:
            from elasticzero.launcher.cli.dry_run import dry_run

            return dry_run(args)
        return _run_agent(args, extensions)
    except ElasticZeroError as error:
        shown = with_source(error, args.sources)
        if args.log_dir and args.job and args.node_name and not args.dry_run:
            from elasticzero.launcher.observability.event_log import EventLog

            directory = Path(args.log_dir, args.job, args.node_name)
            with suppress(OSError), closing(EventLog(directory)) as log:
                log.write("error", message=str(shown), details="", traceback="")
        raise shown from None


def _run_agent(args: argparse.Namespace, extensions: Extensions) -> int:
    from elasticzero.launcher.cli.resolved_run import resolve_run
    from elasticzero.launcher.local.channel import await_start, fault_relay, inherited_channel
    from elasticzero.launcher.observability import logging_setup

    channel = inherited_channel(os.environ)  # no worker is to inherit the variable
    resolved = resolve_run(args)
    options, rendezvous = resolved.options, resolved.rendezvous
    least, most = resolved.nodes
    level = "warning" if args.quiet else args.log_level
    logging_setup.set_up(options.node, level, args.log_format)
    workers = count_text(options.nproc, "worker")
    log.info(f"starting {workers} of job {options.job}; torch takes a few seconds to load")
    if args.host and not is_resolved(args.host):
        log.warning(
            f"--host {args.host} is no name that this machine can resolve, and all reach this node "
            "by it: give an address of this machine, or mend DNS"
        )

    from elasticzero.launcher.agent.main import Coordination, Launching, Network, run_agent
    from elasticzero.launcher.agent.node_claim import node_claim

    factories = extensions()  # no import may lie between the claim and the handler of SIGTERM
    coordination = Coordination(
        endpoints=endpoints_of(args),
        access=resolved.access,
        token=resolved.token,
        tls=resolved.tls,
        restart=args.restart,
        storage_error=resolved.storage_error,
        hosted=rendezvous.hosted,
        node_rank=rendezvous.node_rank if least == most and not options.is_island else None,
        islands=-(-least // options.policy.max_nodes),
    )
    names = tuple(name.strip() for name in (args.http_names or "").split(",") if name.strip())
    host = without_brackets(args.host) if args.host else None
    network = Network(host, args.http_host, args.http_port, names)
    with node_claim(options, named=args.node_name is not None) as (claim, options):
        launching = Launching(
            claim=claim,
            signals=resolved.signals,
            lines=resolved.lines,
            extensions=factories,
        )
        if channel is not None:
            launching = replace(
                launching,
                extensions=(*factories, fault_relay(channel)),
                await_start=partial(await_start, channel),
            )
        return int(run_agent(options, coordination, network, launching))


def _local(args: argparse.Namespace) -> int:
    from elasticzero.launcher.local.command import check_cluster, run

    try:
        check_local(args)
        check_cluster(args)
        if args.dry_run:
            from elasticzero.launcher.cli.dry_run import dry_run_local

            return dry_run_local(args)
    except ElasticZeroError as error:
        raise with_source(error, args.sources) from None
    return int(run(args))


def check_local(args: argparse.Namespace) -> None:
    """Checks the options of `local` that its agents get; raises `UserError`."""
    from elasticzero.launcher.agent.config import console_of
    from elasticzero.launcher.options.tls_settings import check_tls

    check_script(args.script, is_module=args.module, is_program=args.no_python)
    parse_nproc(args.nproc_per_node)
    console_of(args)
    if args.nnodes is not None:
        parse_nnodes(args.nnodes)
    if args.job is not None:
        check_name(args.job, "--job")
    parse_common_options(args)
    check_metrics_directory(os.environ)
    check_access(args)
    check_tls(args, given_token(args))


def _status(args: argparse.Namespace) -> int:
    from elasticzero.launcher.cli.job_access import operator_credentials
    from elasticzero.launcher.cli.status import print_page_address, status

    access, operator = check_access(args), operator_credentials(args)
    if args.url:
        return int(print_page_address(args.job, endpoints_of(args), access, operator))
    return int(status(args.job, endpoints_of(args), access, operator, as_json=args.json))


def _tls_ca(args: argparse.Namespace) -> int:
    from elasticzero.launcher.cli.job_access import print_authority

    token = given_token(args)
    if token is None:
        raise UserError(
            f"the authority of a job is made of its token: give {HOW}; a token that the first "
            "node has made and stored in etcd makes none"
        )
    print_authority(check_name(args.job, "--job"), token)
    return int(ExitCode.DONE)


def _control(args: argparse.Namespace) -> int:
    """Runs `drain`, `scale` or `stop`."""
    from elasticzero.launcher.cli import control

    wait_s = args.wait_timeout if args.wait else None
    nnodes = parse_nnodes(args.nnodes, "scale") if args.command == "scale" else (0, 0)
    with control.open_job_store(args.job, endpoints_of(args), check_access(args)) as store:
        if args.command == "drain":
            return int(control.drain(store, args.job, args.node, wait_s))
        if args.command == "scale":
            return int(control.scale(store, args.job, nnodes, wait_s))
        return int(control.stop(store, args.job, wait_s))
