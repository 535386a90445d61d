"""Defines the options of the commands that only look at a job or prepare one, and starts them."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable

from elasticzero.errors import UserError
from elasticzero.launcher.options.parser import Parser, add_options
from elasticzero.launcher.options.table import JOB_OPTIONS, add_job_options
from elasticzero.launcher.options.validation import check_access, endpoints_of
from elasticzero.options.values import path_argument


def _add_top(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="The job is looked at every S seconds. (default: 1)",
    )
    add(
        "--once",
        action="store_true",
        help="The screen is printed once; the output may be a file.",
    )
    add_job_options(parser)
    parser.set_defaults(run_command=_top)


def _add_report(parser: Parser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        metavar="LOG_DIR",
        type=path_argument("LOG_DIR", os.environ),
        help="The logs are here: DIR/JOB with --log-dir DIR, or one node's directory in it, or "
        "DIR and --job. (default: the agents of the running job are asked)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE",
        type=path_argument("--output", os.environ),
        help="The page is written to this file; - is the standard output. (default: report.html)",
    )
    add_options(parser, JOB_OPTIONS)
    parser.set_defaults(run_command=_report)


def _add_doctor(parser: Parser) -> None:
    from elasticzero.ops.cli.doctor import add_doctor_options

    add_doctor_options(parser)


def _add_rehearse(parser: Parser) -> None:
    from elasticzero.ops.rehearse.command import add_rehearse_options

    add_rehearse_options(parser)


def _add_plan(parser: Parser) -> None:
    from elasticzero.ops.cli.plan import add_plan_options

    add_plan_options(parser)


def _add_k8s(parser: Parser) -> None:
    from elasticzero.ops.cli.k8s.commands import add_k8s_commands

    add_k8s_commands(parser)


def _add_show(parser: Parser) -> None:
    from elasticzero.ops.cli.show import add_show_options

    add_show_options(parser)


def _add_completion(parser: Parser) -> None:
    from elasticzero.ops.cli.completion import add_completion_options

    add_completion_options(parser)


WING_COMMANDS: dict[str, Callable[[Parser], None]] = {
    "rehearse": _add_rehearse,
    "top": _add_top,
    "report": _add_report,
    "doctor": _add_doctor,
    "plan": _add_plan,
    "k8s": _add_k8s,
    "show": _add_show,
    "completion": _add_completion,
}
"""Functions that give a command's parser its options and its `run_command`, which takes the parsed
arguments and returns the exit code."""


def _top(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("rich") is None:
        raise UserError("elasticzero top needs the package rich: pip install 'elasticzero[top]'")
    from elasticzero.launcher.cli.job_access import operator_credentials
    from elasticzero.ops.cli.top import top

    if not 0.1 <= args.interval <= 3600:
        raise UserError(f"--interval {args.interval:g}: 0.1 to 3600 seconds are expected")
    access, operator = check_access(args), operator_credentials(args)
    endpoints = endpoints_of(args)
    shown = top(args.job, endpoints, access, operator, interval_s=args.interval, once=args.once)
    return int(shown)


def _report(args: argparse.Namespace) -> int:
    from elasticzero.launcher.cli.job_access import operator_credentials
    from elasticzero.ops.cli.report import report_on_job, report_on_logs

    if args.directory is not None:
        return int(report_on_logs(args.directory, args.job, args.output))
    if not args.etcd or not args.job:
        raise UserError(
            "give a directory of logs (elasticzero report LOG_DIR), or --job ID and --etcd "
            "HOST:PORT of a running job"
        )
    access, operator = check_access(args), operator_credentials(args)
    return int(report_on_job(args.job, endpoints_of(args), access, operator, args.output))
