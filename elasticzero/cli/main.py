"""Runs the command line: `elasticzero run | local | status | top | drain | scale | stop | …`.

Each command imports only the modules that it needs, because some commands run for milliseconds.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from elasticzero.errors import ElasticZeroError, ExitCode
from elasticzero.launcher.options.parser import HELP_ALL, Parser
from elasticzero.text import print_error
from elasticzero.version import __version__

COMMANDS = {
    "run": "Runs this node's part of a job.",
    "local": "Runs a whole cluster on this machine, with faults on request.",
    "rehearse": "Trains a script through faults for a few steps, and says what they change.",
    "status": "Shows what a job and its nodes are doing.",
    "top": "Follows a job on the whole terminal until q is pressed.",
    "drain": "Has a node leave its job at the next step.",
    "scale": "Changes the minimum and maximum number of nodes of a job.",
    "stop": "Ends a job at the next step and saves its state.",
    "report": "Writes a page that says what happened in a job, from its logs.",
    "doctor": "Checks what most often stops a job on this machine, and says what to mend.",
    "plan": "Computes the memory that each strategy needs for a model on a cluster.",
    "k8s": "Renders manifests for Kubernetes, and changes jobs there by kubectl.",
    "checkpoint": "Inspects, verifies, compares and converts checkpoints.",
    "tls": "Prints the certificate by which the agents of a job are known.",
    "show": "Prints a file that comes with the package: dashboard, alerts, batch script, examples.",
    "completion": "Prints a script that completes commands and options in a shell.",
    "help": "Shows the help of a command.",
}
COMPLETE = "__complete"
"""Command that the scripts of `completion` call with the words of an unfinished command line."""


def build_parser(arguments: Sequence[str] | None = None) -> Parser:
    """Returns the parser of the command line.

    Args:
        arguments: the command line; only the command that it names gets its options. None: all
            commands get theirs.
    """
    named = next((word for word in arguments or () if word in COMMANDS), None)
    wants_help = arguments is None or any(word in ("-h", "--help", HELP_ALL) for word in arguments)
    parser = Parser(prog="elasticzero", description="Elastic, fault-tolerant PyTorch training.")
    parser.add_argument(
        "--version",
        action="version",
        version=f"elasticzero {__version__}",
        help="The version is shown.",
    )
    parser.every_command = build_parser
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for name, text in COMMANDS.items():
        with_arguments = name in ("run", "local", "rehearse")
        command = commands.add_parser(
            name, help=text, description=text, allow_abbrev=not with_arguments
        )
        if arguments is None or name == named:
            _add_options(command, name, arguments)
    if wants_help:
        from elasticzero.cli.examples import add_examples

        add_examples(parser)
    return parser


def _add_options(command: Parser, name: str, arguments: Sequence[str] | None) -> None:
    if name == "checkpoint":
        from elasticzero.checkpoint.cli.main import add_commands

        add_commands(
            command.add_subparsers(
                title="commands", dest="checkpoint_command", required=True, parser_class=Parser
            ),
            arguments,
        )
    elif name == "help":
        command.add_argument(
            "of",
            metavar="COMMAND",
            nargs="*",
            default=[],
            help="The help of this command is shown.",
        )
        command.set_defaults(run_command=_help)
    else:
        from elasticzero.cli.commands import ADD

        ADD[name](command)


def _help(args: argparse.Namespace) -> int:
    parse([*args.of, "--help"])
    return int(ExitCode.DONE)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed options; an unknown option is an error of the command that got it."""
    parser = build_parser(arguments)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.named(args.prog).refuse_unknown(unknown[0])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. An error of the user prints one line, no traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [COMPLETE]:
        from elasticzero.ops.cli.completion import print_completions

        return print_completions(arguments[1:], build_parser)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` leaves it ignored
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        args = parse(arguments)
        return int(args.run_command(args))
    except ElasticZeroError as error:
        print_error(f"error: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: everything that was started here is stopped", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
