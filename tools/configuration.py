"""The reference page of the options, from the table of options and from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elasticzero.cli.main import COMMANDS, build_parser
from elasticzero.launcher.options.parser import Parser, shown_value
from elasticzero.launcher.options.table import (
    COMMAND_OPTIONS,
    JOB_OPTIONS,
    LOCAL_OPTIONS,
    RUN_OPTIONS,
)
from elasticzero.launcher.options.torchrun import IDLE, MAPPED
from elasticzero.ops.cli.k8s.options import RENDER_OPTIONS, RENDER_REQUIRED
from elasticzero.options.option import Option, split_default
from tools import prose
from tools.markdown import code, marked, sentence, table


def configuration() -> str:
    parsers = _parsers(build_parser())
    parts = [prose.CONFIGURATION]
    for name in (command for command in COMMANDS if command != "checkpoint"):
        parts.append(f"## elasticzero {name}\n\n{sentence(COMMANDS[name])}")
        parts += COMMAND_PAGES.get(name, _options_of)(parsers[name])
    parts.append("## elasticzero checkpoint\n\n" + prose.CHECKPOINT_COMMANDS)
    for name, parser in _parsers(parsers["checkpoint"]).items():
        parts.append(f"### elasticzero checkpoint {name}\n\n{sentence(parser.description or '')}")
        parts += _options_of(parser)
    parts.append(f"## elasticzero k8s\n\n{sentence(COMMANDS['k8s'])} {prose.K8S_COMMANDS}")
    for name, parser in _parsers(parsers["k8s"]).items():
        parts.append(f"### elasticzero k8s {name}\n\n{sentence(parser.description or '')}")
        parts += _render_page(parser) if name == "render" else _options_of(parser)
    parts += [prose.VARIABLES, table(("Environment", "Meaning"), prose.VARIABLE_ROWS)]
    parts.append(prose.VARIABLES_ALONE)
    return "\n\n".join(parts)


def _parsers(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The commands below a parser."""
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(commands.choices)


def _run_page(parser: Parser) -> list[str]:
    return [
        prose.SCRIPT,
        _option_table(COMMAND_OPTIONS),
        *_tables_by_heading(RUN_OPTIONS),
        "### Options of torchrun\n\n" + prose.TORCHRUN,
        _option_table(MAPPED),
        "### Options of torchrun without effect\n\n" + prose.TORCHRUN_IDLE,
        _option_table(IDLE),
    ]


def _local_page(parser: Parser) -> list[str]:
    shared = [option for option in parser.options if option not in LOCAL_OPTIONS]
    taken = ", ".join(code(o.flags[0]) for o in shared if o.help != argparse.SUPPRESS)
    return [
        prose.SCRIPT,
        _option_table(LOCAL_OPTIONS, required=("nodes",)),
        f"It also takes these options of `elasticzero run`, with the same meaning, defaults and "
        f"variables: {taken}.",
    ]


def _render_page(parser: Parser) -> list[str]:
    return [prose.RENDERED_SCRIPT, _option_table(RENDER_OPTIONS, required=RENDER_REQUIRED)]


def _tables_by_heading(options: Sequence[Option]) -> list[str]:
    """A table of options under each heading that the help has too."""
    headings = dict.fromkeys(option.group for option in options)
    return [
        f"### {sentence(heading).rstrip('.')}\n\n"
        + _option_table([option for option in options if option.group == heading])
        for heading in headings
    ]


def _option_table(options: Iterable[Option], required: Sequence[str] = ()) -> str:
    rows = [
        (
            _flags(option),
            "required" if option.name in required else _default(option),
            "<br>".join(code(variable) for variable in option.variables),
            _meaning(option),
        )
        for option in options
    ]
    return table(("Option", "Default", "Environment", "Meaning"), rows)


def _flags(option: Option) -> str:
    spellings = [f"{flag} {option.metavar or ''}".strip() for flag in option.flags]
    if option.choices:
        spellings = [f"{flag} {{{','.join(option.choices)}}}" for flag in option.flags]
    if option.has_off:
        spellings.append(f"--no-{option.flags[0].removeprefix('--')}")
    return "<br>".join(code(word) for word in spellings)


def _default(option: Option) -> str:
    if option.is_switch:
        return "on" if option.default else "off"
    if option.default is not None:
        return code(shown_value(option.default))
    return split_default(option.help)[1]


def _meaning(option: Option) -> str:
    text = option.help
    several = " The option may be given several times." if option.is_list else ""
    numbers = f" ({option.numbers})" if option.numbers else ""
    return marked(sentence(split_default(text)[0]) + several + numbers)


def _steering(parser: Parser) -> list[str]:
    """The page of a command on a running job, whose common options stand with `status`."""
    job = ", ".join(code(option.flags[0]) for option in JOB_OPTIONS)
    return [
        *_options_of(parser, omit=[option.name for option in JOB_OPTIONS]),
        f"It finds the job and its etcd by the same options as `elasticzero status`: {job}.",
    ]


COMMAND_PAGES: dict[str, Callable[[Parser], list[str]]] = {
    "run": _run_page,
    "local": _local_page,
    "top": _steering,
    "drain": _steering,
    "scale": _steering,
    "stop": _steering,
    "report": _steering,
}


def _options_of(parser: argparse.ArgumentParser, omit: Sequence[str] = ()) -> list[str]:
    """A table of what argparse knows of a command."""
    by_name = {option.name: option for option in getattr(parser, "options", ())}
    rows = [
        _row(action, by_name.get(action.dest), getattr(parser, "required", ()))
        for action in parser._actions
        if action.dest not in ("help", *omit) and action.help != argparse.SUPPRESS
    ]
    if not any(row[2] for row in rows):
        return [table(("Option", "Default", "Meaning"), [(a, b, d) for a, b, _, d in rows])]
    return [table(("Option", "Default", "Environment", "Meaning"), rows)]


def _row(
    action: argparse.Action, option: Option | None, required: Sequence[str]
) -> tuple[str, str, str, str]:
    flags = [flag for flag in action.option_strings if "_" not in flag]
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    value = f"{{{','.join(map(str, action.choices))}}}" if action.choices else value
    spellings = [f"{flag} {value}".strip() for flag in flags] or [str(value)]
    variable = option.variables[0] if option and option.variables else ""
    needed = action.required or action.dest in required
    text, told = split_default(action.help or "")
    absent = action.default in (None, False, [], argparse.SUPPRESS)
    default = told or ("" if absent else shown_value(action.default))
    default = "off" if action.nargs == 0 else default if " " in default else code(default)
    is_list = isinstance(action, argparse._AppendAction)
    several = " The option may be given several times." if is_list else ""
    return (
        "<br>".join(map(code, spellings)),
        "required" if needed else default,
        code(variable),
        marked(sentence(text) + several),
    )
