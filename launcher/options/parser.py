"""Parses a command's options by argparse, with this project's errors and late defaults.

The value of an option is resolved once: a flag goes before the environment, the environment before
the file of `--config`, and the file before the default.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from elasticzero.errors import ExitCode
from elasticzero.launcher.options.spelling import spelled_out
from elasticzero.options.option import (
    ARGUMENTS_KEY,
    SCRIPT_KEY,
    Option,
    spellings,
)
from elasticzero.options.sources import DEFAULT, FLAG, Origin, ValueSource
from elasticzero.options.values import expanded_path
from elasticzero.text import nearest_text, print_foreign

if TYPE_CHECKING:
    from elasticzero.launcher.options.config_file import FileValue

NEARNESS = 0.75
"""Least similarity, from 0 to 1, of the option that an error suggests for one that is unknown."""
MAX_IN_USAGE = 6
"""Number of options that a line of usage names; of more it says only that there are some."""
MAX_LISTED = 10
"""Number of choices that an error lists; of more it names the nearest alone, where one is near."""
HELP_ALL = "--help-all"
MISSING = "the following arguments are required: "
"""Beginning of argparse's message where a word or an option is missing."""
EXAMPLES = "examples:\n"
"""Beginning of a text whose lines the help prints as they are."""


class HelpFormatter(argparse.HelpFormatter):
    """Lists each option with dashes only, though underscores are accepted too."""

    unlisted: frozenset[str] = frozenset()
    """Destinations of the options that are passed over."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        shown = [_with_dashes(action) for action in actions]
        free = [action for action in shown if action.option_strings and not action.required]
        if len(free) > MAX_IN_USAGE:
            shown = [
                argparse.Action(["OPTIONS"], "", nargs=0),
                *(a for a in shown if a not in free),
            ]
        super().add_usage(usage, shown, groups if len(free) <= MAX_IN_USAGE else [], prefix)

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in self.unlisted:
            return
        super().add_argument(_with_dashes(action))
        if isinstance(action.choices, dict):  # commands stand further to the right than options
            widest = max(map(len, action.choices)) + self._current_indent + self._indent_increment
            self._action_max_length = max(self._action_max_length, widest)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLES):
            return text
        return super()._fill_text(text, width, indent)


def _with_dashes(action: argparse.Action) -> argparse.Action:
    shown = copy.copy(action)
    shown.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    return shown


class _HelpAll(argparse.Action):
    """Prints the help with every option, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.unlisted = frozenset()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, and exits with the code of bad input.

    Defaults from the environment and from a file may be invalid themselves. They are read once all
    words are parsed: not for `--help`, and not if the flag is given. The result has as its `prog`
    the innermost command that was named, and as its `sources` where each value comes from, by the
    option's name.
    """

    unlisted: frozenset[str] = frozenset()
    """Names of the options that `--help` passes over, and `--help-all` lists."""

    def __init__(self, *args: Any, **options: Any) -> None:
        defaults = {"formatter_class": HelpFormatter, "add_help": False}
        super().__init__(*args, **{**defaults, **options})
        self.add_argument("-h", "--help", action="help", help="This help is shown.")
        self.options: tuple[Option, ...] = ()
        """The options that `add_options` gave the parser."""
        self.required: tuple[str, ...] = ()
        """Names of those that must have a value."""
        self.complete: Callable[[argparse.Namespace], None] | None = None
        """Function that sets what no word has set; raises `UserError`."""
        self.prepare: Callable[[Sequence[str]], list[str]] = list
        """Function that spells out abbreviations in this command's words; raises `UserError`."""
        self.commands: Mapping[str, Parser] = {}
        """Parsers of the commands below this one, by name."""
        self.every_command: Callable[[], Parser] = lambda: self
        """Returns this parser with the commands below all of its commands, for an error alone."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        if isinstance(formatter, HelpFormatter):
            formatter.unlisted = self.unlisted
        return formatter

    def shorten_help(self) -> None:
        """Lets `--help` list some options alone, and adds `--help-all`, which lists every one."""
        rest = [option for option in self.options if not option.is_listed]
        self.unlisted = frozenset(option.name for option in rest)
        unlisted = sum(option.help != argparse.SUPPRESS for option in rest)
        self.add_argument(
            HELP_ALL,
            action=_HelpAll,
            nargs=0,
            default=argparse.SUPPRESS,
            help=f"All options are shown, {unlisted} more than by --help.",
        )

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix(MISSING)
        if missing != message:
            is_command = self.commands and not missing.startswith("-")
            commands = f": {', '.join(self.commands)}"
            message = f"{'a command' if is_command else missing} must be given"
            message += commands if is_command else self._choices_text(missing)
        print_foreign(f"error: {message}\nsee: {self.prog} --help")
        raise SystemExit(ExitCode.USAGE)

    def _choices_text(self, flag: str) -> str:
        """Returns the values of an option of argparse's own, for an error; empty: any value."""
        option = self._option_string_actions.get(flag)
        return f": one of {', '.join(option.choices)}" if option and option.choices else ""

    def add_subparsers(self, **options: Any) -> Any:
        added = super().add_subparsers(**options)
        self.commands = added.choices
        return added

    @property
    def actions(self) -> list[argparse.Action]:
        """Returns the options and positional arguments, in the order of the help."""
        return self._actions

    @property
    def flags(self) -> list[str]:
        """Returns every flag, spelled with dashes."""
        return [flag for flag in self._option_string_actions if "_" not in flag]

    def named(self, prog: str) -> Parser:
        """Returns the parser of the command that these words name, this parser's own first."""
        command = self
        for name in prog.removeprefix(self.prog).split():
            command = command.commands[name]
        return command

    def refuse_unknown(self, word: str) -> NoReturn:
        """Ends with the error about an option that this command does not have."""
        import difflib  # only an error needs it

        if not word.startswith("-"):
            self.error(f"unknown argument {word}: {self.prog} takes no more of them")
        near = difflib.get_close_matches(word.partition("=")[0], self.flags, 1, NEARNESS)
        self.error(f"unknown option {word}{f'; did you mean {near[0]}?' if near else ''}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Ends with an error unless the value is one of the action's choices."""
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        if isinstance(action.choices, dict):
            commands = self.every_command().commands
            deeper = [name for name in choices if value in commands[name].commands]
            self.error(_unknown_command(str(value), choices, deeper, self.prog))
        hint = nearest_text(str(value), choices)
        name = max(action.option_strings, key=len, default=str(action.metavar or action.dest))
        if hint and len(choices) > MAX_LISTED:
            self.error(f"unknown {name} {value}{hint}")
        self.error(f"{name} {value}: one of {', '.join(choices)} is expected{hint}")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = None if args is None else self.prepare(args)
        values, unknown = super().parse_known_args(arguments, namespace)
        if not hasattr(values, "prog"):
            values.prog = self.prog
        if self.complete is not None and not unknown:
            self.complete(values)
        return values, unknown


def _unknown_command(word: str, commands: Sequence[str], deeper: Sequence[str], prog: str) -> str:
    """Returns the error about a word that is no command.

    Args:
        word: The word.
        commands: The commands that there are.
        deeper: Those of them that have a command of this name below them.
        prog: The words before it.
    """
    if word.endswith(".py") and "run" in commands:
        return f"unknown command {word}; to run a script: {prog} run {word}"
    if deeper:
        return f"unknown command {word}; did you mean {prog} {deeper[0]} {word}?"
    hint = nearest_text(word, commands) or f"; the commands are {', '.join(commands)}"
    return f"unknown command {word}{hint}"


def add_command(
    parser: Parser,
    options: Sequence[Option],
    required: Sequence[str] = (),
    *,
    has_short_help: bool = False,
) -> None:
    """Adds the options of a command that runs a script, and the script, to a parser.

    Args:
        parser: the command's.
        options: all that the command has.
        required: names of the options that must have a value.
        has_short_help: Whether `--help` passes over the options whose row does not say that it
            lists them, and `--help-all` lists these too.
    """
    add_options(parser, options, required)
    if has_short_help:
        parser.shorten_help()
    script = parser.add_argument("script", help="This training script runs in every worker.")
    arguments = parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="The script gets these arguments: all words behind it, also those that are spelled as "
        "options of this command.",
    )
    script.required = arguments.required = False  # the file of --config may give both
    parser.prepare = lambda command_line: spelled_out(command_line, options)


def add_options(parser: Parser, options: Sequence[Option], required: Sequence[str] = ()) -> None:
    """Adds options to a parser.

    Args:
        parser: Parser of the command.
        options: Options in the order in which the help lists them.
        required: Names of the options that must have a value.
    """
    parser.options, parser.required = tuple(options), tuple(required)
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
            text += f" (default: {shown_value(option.default)})"
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
    parser.complete = lambda values: _complete(parser, values)


def shown_value(value: Any) -> str:
    """Returns a value as the help and the reference show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _complete(parser: Parser, values: argparse.Namespace) -> None:
    """Sets what no flag has set, and `sources`; raises `UserError` for an invalid value."""
    values.sources = {o.name: FLAG for o in parser.options if hasattr(values, o.name)}
    file = _read_file(parser, values)
    if hasattr(values, "script"):
        _complete_script(parser, values, file)
    for option in parser.options:
        if option.name in values.sources:
            setattr(values, option.name, option.expanded(getattr(values, option.name), os.environ))
            continue
        value, source = option.default, DEFAULT
        if (setting := option.given_in(os.environ)) is not None:
            value, source = setting[1], ValueSource(Origin.ENVIRONMENT, setting[0])
        elif (held := file.get(option.name)) is not None:
            value, source = held.value, ValueSource(Origin.FILE, held.where)
        setattr(values, option.name, option.expanded(value, os.environ, source.note))
        values.sources[option.name] = source
    absent = [
        option
        for option in parser.options
        if option.name in parser.required and getattr(values, option.name) in (None, "")
    ]
    if absent:
        missing_words = " and ".join(_required_word(option) for option in absent)
        flags = {flag for option in absent for flag in option.flags}
        behind = [word for word in getattr(values, "arguments", ()) if word.split("=")[0] in flags]
        where = f" before the script, which gets {behind[0]} where it stands" if behind else ""
        parser.error(f"{missing_words} must be given{where}")


def _read_file(parser: Parser, values: argparse.Namespace) -> dict[str, FileValue]:
    """Returns what the file of `--config` gives; nothing where no file is named."""
    for option in parser.options:
        if option.flags[0] == "--config":
            setting = option.given_in(os.environ)
            path, note = getattr(values, option.name, None), ""
            if path is None and setting is not None:
                path, note = setting[1], ValueSource(Origin.ENVIRONMENT, setting[0]).note
            path = option.expanded(path, os.environ, note)
            if not path:
                break
            from elasticzero.launcher.options.config_file import read_config

            return read_config(path, parser.options, parser.prog)
    return {}


def _complete_script(
    parser: Parser, values: argparse.Namespace, file: dict[str, FileValue]
) -> None:
    """Sets the script and its arguments, each from the file unless the command line gives it.

    Args:
        parser: Parser of the command.
        values: What the command line gave; the script, its arguments and their sources are set.
        file: What the file of `--config` gives, by key.
    """
    for name, key in (("script", SCRIPT_KEY), ("arguments", ARGUMENTS_KEY)):
        values.sources[name] = ValueSource(Origin.COMMAND_LINE, "command line")
        if getattr(values, name):
            continue
        held = file.get(key)
        value: Any = held.value if held is not None else []
        if key == SCRIPT_KEY and held is not None:
            value = expanded_path(f"{held.where}: {key}", value, os.environ)
        setattr(values, name, value)
        values.sources[name] = ValueSource(Origin.FILE, held.where) if held is not None else DEFAULT
    alone = any(o.stands_alone and hasattr(values, o.name) for o in parser.options)
    if not values.script and not alone:
        parser.error(f"a training script must be given, as in: {parser.prog} [OPTIONS] train.py")


def _typed(option: Option) -> Callable[[str], Any]:
    """Returns a function that converts a flag's value, with the same errors as for a variable."""
    return lambda text: option.value(f"{option.flags[0]} {text}", text)


def _required_word(option: Option) -> str:
    variable = f" (or {option.variable})" if option.has_variable else ""
    return f"{option.flags[0]} {option.metavar}{variable}"
