"""Parses and runs `elasticzero checkpoint`.

Torch is imported only where dtypes are converted or torch's own format is read or written. The
modules of the commands that read a whole checkpoint are imported only by those commands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elasticzero.checkpoint.cli import report
from elasticzero.checkpoint.format.names import step_of
from elasticzero.checkpoint.steps import catalog, verify
from elasticzero.checkpoint.storage.base import Directory
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, ExitCode, UserError
from elasticzero.options.values import path_argument
from elasticzero.text import print_error, print_result, shown

CHECKPOINT_COMMANDS = {
    "list": "Lists the steps in a directory, and checks the sizes of their files (verify reads "
    "their bytes).",
    "inspect": "Shows what a checkpoint holds.",
    "verify": "Reads every byte and compares its checksum.",
    "reshard": "Writes a checkpoint for another world size.",
    "diff": "Compares the state that two checkpoints hold, whatever their world sizes and "
    "strategies.",
    "export": "Converts a checkpoint to a format of other programs.",
    "import": "Converts what other programs have saved to a checkpoint.",
}


def add_commands(
    subparsers: argparse._SubParsersAction[Any], command_line: Sequence[str] | None = None
) -> None:
    """Adds the commands to the parser. Each sets `run_command`, a function that takes the parsed
    arguments and returns the exit code.

    Args:
        subparsers: What the parser has for its commands.
        command_line: The arguments of the command line, which name the commands that get their
            options; None: all commands get them.
    """
    subparsers.dest = argparse.SUPPRESS  # argparse then names all commands where none is given
    for name, text in CHECKPOINT_COMMANDS.items():
        command = subparsers.add_parser(name, help=text, description=text)
        command.add_argument(
            "--json", action="store_true", help="The result is printed as JSON, for scripts."
        )
        if command_line is None or name in command_line:
            _add_options(command, name)


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    match name:
        case "list":
            command.add_argument(
                "directory",
                type=path_argument("directory", os.environ),
                help="The checkpoint directory is a path or a URL.",
            )
            command.set_defaults(run_command=_list)
        case "inspect":
            command.add_argument(
                "path", type=path_argument("path", os.environ), help=catalog.RESOLVABLE
            )
            command.set_defaults(run_command=_inspect)
        case "verify":
            text = (
                "The path or URL is that of a checkpoint directory (every step is verified), "
                "of one step, or of a tag in it, as DIR/tags/best."
            )
            command.add_argument("path", type=path_argument("path", os.environ), help=text)
            command.set_defaults(run_command=_verify)
        case _:
            from elasticzero.checkpoint.cli.bulk import BULK_COMMANDS

            BULK_COMMANDS[name](command)


def main(argv: Sequence[str] | None = None) -> int:
    command_line = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="elasticzero checkpoint")
    add_commands(parser.add_subparsers(required=True), command_line)
    try:
        args = parser.parse_args(command_line)
        return int(args.run_command(args))
    except ElasticZeroError as error:
        print_error(f"error: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def _list(args: argparse.Namespace) -> int:
    directory = _existing(args.directory)
    parent, _, name = directory.where.rstrip("/").rpartition("/")
    if step_of(name) is not None:
        raise UserError(
            f"{directory.where} is one step: list {parent}, or look at this step with `inspect`"
        )
    named = report.tags_in(directory)
    rows = [report.row_of(info, named) for info in catalog.steps(directory)]
    left = [info.name for info in catalog.uncommitted(directory)]
    if args.json:
        print_result(json.dumps({"steps": rows, "uncommitted": left}))
    else:
        print_result(report.steps_text(directory.where, rows, left), end="")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    storage = catalog.find(args.path)
    seen = report.summarize(storage, report.tags_around(storage.where))
    print_result(json.dumps(seen.to_json()) if args.json else report.step_text(seen), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    one = catalog.tagged(open_directory(args.path).where)
    storages = [] if one else [info.storage for info in catalog.steps(_existing(args.path))]
    verified = []
    for step in storages or [one or catalog.find(args.path)]:
        bad = list(verify.find_corruption(step))
        verified.append({"path": step.where, "good": not bad, "faults": [asdict(f) for f in bad]})
        if args.json:
            continue
        print_result(f"{shown(step.where)}: {'DAMAGED' if bad else 'good'}")
        for item in bad:
            where = "" if item.start is None else f": bytes {item.start} to {item.stop}"
            print_result(f"  {item.file}{where}: {shown(item.reason)}")
    if args.json:
        print_result(json.dumps(verified))
    return int(ExitCode.DONE if all(step["good"] for step in verified) else ExitCode.FAILED)


def _existing(url: str) -> Directory:
    directory = open_directory(url)
    if not directory.names() and not Path(directory.where).is_dir():
        raise UserError(f"{directory.where} is empty or does not exist")
    return directory


if __name__ == "__main__":
    sys.exit(main())
