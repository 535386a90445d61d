"""Parses a command's options by argparse, with this project's errors and late defaults."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from elasticzero.errors import ExitCode
from elasticzero.launcher.options.option import Option, spellings
from elasticzero.launcher.options.spelling import spelled_out


class HelpFormatter(argparse.HelpFormatter):
    """Lists each option with dashes only, though underscores are accepted too."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage(usage, [_with_dashes(action) for action in actions], groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(_with_dashes(action))


def _with_dashes(action: argparse.Action) -> argparse.Action:
    shown = copy.copy(action)
    shown.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    return shown


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, and exits with the code of bad input.

    Defaults from the environment may be invalid themselves. They are read once all words are
    parsed: not for `--help`, and not if the flag is given. The result has as its `prog` the
    innermost command that was named.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})
        self.options: tuple[Option, ...] = ()
        """The options that `add_options` gave the parser."""
        self.complete: Callable[[argparse.Namespace], None] | None = None
        """Function that sets what no word has set; raises `UserError`."""
        self.prepare: Callable[[Sequence[str]], list[str]] = list
        """Function that spells out abbreviations in this command's words; raises `UserError`."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\nsee: {self.prog} --help", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = None if args is None else self.prepare(args)
        found, unknown = super().parse_known_args(words, namespace)
        if not hasattr(found, "prog"):
            found.prog = self.prog
        if self.complete is not None:
            self.complete(found)
        return found, unknown


def add_command(parser: Parser, options: Sequence[Option], required: Sequence[str] = ()) -> None:
    """Adds the options of a command that runs a script, and the script, to a parser."""
    add_options(parser, options, required)
    parser.add_argument("script", help="This training script runs in every worker.")
    arguments = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="The script gets these arguments."
    )
    arguments.required = False  # or else an error about a missing script names it too
    parser.prepare = lambda words: spelled_out(words, options)


def add_options(parser: Parser, options: Sequence[Option], required: Sequence[str] = ()) -> None:
    """Adds options to a parser. required: names of the options that must have a value."""
    parser.options = tuple(options)
    headings = dict.fromkeys(option.group for option in options if option.group)
    groups = {heading: parser.add_argument_group(heading) for heading in headings}
    for option in options:
        flags = [
            spelling
            for flag in option.flags
            for spelling in (spellings(flag) if flag.startswith("--") else [flag])
        ]
        text = option.help
        if option.default is not None and not option.is_switch:
            text += f" (default: {option.default})"
        place = groups.get(option.group, parser)
        if option.is_switch:
            action: Any = argparse.BooleanOptionalAction if option.has_off else "store_true"
            place.add_argument(
                *flags, dest=option.name, action=action, default=argparse.SUPPRESS, help=text
            )
        else:
            place.add_argument(
                *flags,
                dest=option.name,
                action="append" if option.is_list else "store",
                default=argparse.SUPPRESS,
                type=_typed(option),
                choices=option.choices,
                metavar=option.metavar,
                help=text,
            )

    def given(found: argparse.Namespace, option: Option) -> bool:
        return getattr(found, option.name) not in (None, "")

    def complete(found: argparse.Namespace) -> None:
        missing = [option for option in options if not hasattr(found, option.name)]
        found.by_flag = frozenset(o.name for o in options if o not in missing)
        found.defaulted = frozenset(
            o.name for o in missing if not any(os.environ.get(v) for v in o.variables)
        )
        for option in missing:
            setattr(found, option.name, option.default_in(os.environ))
        if absent := [o for o in options if o.name in required and not given(found, o)]:
            missing_words = " and ".join(_required_word(option) for option in absent)
            parser.error(f"{missing_words} must be given")

    parser.complete = complete


def _typed(option: Option) -> Callable[[str], Any]:
    """Returns a function that converts a flag's value, with the same errors as for a variable."""
    return lambda text: option.value(f"{option.flags[0]} {text}", text)


def _required_word(option: Option) -> str:
    variable = f" (or {option.variable})" if option.own else ""
    return f"{option.flags[0]} {option.metavar}{variable}"
