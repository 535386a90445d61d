"""Reads the values of options from a TOML file, the one of `--config`.

A key is an option's name without the dashes in front; `_` may stand for `-`. The keys `script` and
`args` give the training script and its arguments. A section such as `[network]` is named after a
heading of the help, and holds options of that heading; they may stand outside of it too. A section
such as `[diloco]` is named after an option whose value is settings by name, and holds these. Every
error names the file, and the line where the text shows it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticzero.errors import UserError
from elasticzero.launcher.options.spelling import TEE, TEE_STREAMS
from elasticzero.options.option import ARGUMENTS_KEY, SCRIPT_KEY, Option

_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileValue:
    """Holds a value that the file gives, and where it stands."""

    value: Any
    where: str
    """FILE:LINE, or FILE alone where the line cannot be told."""


def read_config(path: str, options: Iterable[Option], command: str) -> dict[str, FileValue]:
    """Returns the values that the file gives, by the names of the options, `script` and `args`.

    Args:
        path: Path of the file.
        options: Options of the command.
        command: Name of the command, for errors.

    Raises:
        UserError: The file cannot be read, has a key that is no option of the command, or a value
            of another type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--config {path}: {why}; name a TOML file to read") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT.search(str(error))
        line = (at and at[1]) or text.rstrip().count("\n") + 1
        raise UserError(f"{path}:{line}: not TOML: {_AT.sub('', str(error))}") from None
    return parse_config(path, text, table, options, command)


def parse_config(
    path: str, text: str, table: Mapping[str, Any], options: Iterable[Option], command: str
) -> dict[str, FileValue]:
    """Returns what a parsed file gives, as `read_config` does.

    Args:
        path: Path of the file, for errors.
        text: Text of the file, in which the lines of keys are found.
        table: What the text holds.
        options: Options of the command.
        command: Name of the command, for errors.

    Raises:
        UserError: A key is no option of the command or is given twice, or a value is of another
            type.
    """
    by_key = {
        flag.removeprefix("--"): option
        for option in options
        if option.in_file
        for flag in option.flags
        if flag.startswith("--")
    }
    sections = {option.group for option in by_key.values() if option.group}
    values: dict[str, FileValue] = {}
    for section, key, value in _flat(table, sections):
        line = line_of(text, key)
        where = path if line is None else f"{path}:{line}"
        dashed = key.replace("_", "-")
        options_here = {k: o for k, o in by_key.items() if section in (None, o.group)}
        script_keys = (SCRIPT_KEY, ARGUMENTS_KEY) if section is None else ()
        if dashed in script_keys:
            name, value = dashed, _words(dashed, value, where)
        elif dashed in options_here:
            name, value = _typed(options_here[dashed], dashed, value, where)
        else:
            near = difflib.get_close_matches(dashed, [*options_here, *script_keys], n=1)
            then = f"did you mean {near[0]}?" if near else f"see: {command} --help"
            place = f" in [{section}]" if section else ""
            raise UserError(f"{where}: {command} has no option {key!r} for a file{place}; {then}")
        if name in values:
            raise UserError(f"{where}: {dashed} is given twice; {values[name].where} has it too")
        values[name] = FileValue(value=value, where=where)
    return values


def _flat(
    table: Mapping[str, Any], sections: Collection[str]
) -> Iterator[tuple[str | None, str, Any]]:
    """Yields the section, the key and the value of each entry; the section of most is None."""
    for key, value in table.items():
        if key in sections and isinstance(value, dict):
            yield from ((key, inner_key, inner) for inner_key, inner in value.items())
        else:
            yield None, key, value


def line_of(text: str, key: str) -> int | None:
    """Returns the line of a key of the file or of a section; None if not exactly one line may be
    it."""
    quoted = rf"""(?P<quote>["']?){re.escape(key)}(?P=quote)"""
    places = list(re.finditer(rf"^[ \t]*(?:\[+[ \t]*)?{quoted}[ \t]*[=.\]]", text, re.MULTILINE))
    return text.count("\n", 0, places[0].start()) + 1 if len(places) == 1 else None


def _typed(option: Option, key: str, value: Any, where: str) -> tuple[str, Any]:
    """Returns the name of the option and its value.

    Args:
        option: Option that the key names.
        key: The key, with dashes, for errors.
        value: Value in the file.
        where: File and line, for errors.

    Raises:
        UserError: The value is of another type, or the option does not accept it.
    """
    is_text = isinstance(value, str)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if option.flags[0] == TEE and (is_text or is_number):
        return TEE_STREAMS.removeprefix("--").replace("-", "_"), str(value)
    if option.is_table and isinstance(value, dict):
        value, is_text = _settings(key, value, where), True
    if option.is_switch:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {key}: true or false is expected")
        return option.name, value
    if option.is_list:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in values):
            raise UserError(f"{where}: {key}: a list of strings is expected")
        return option.name, [option.value(f"{where}: {key} {one}", one) for one in values]
    if option.type is not str and not is_number:
        expected = "a whole number" if option.type is int else "a number"
        raise UserError(f"{where}: {key}: {expected} is expected")
    if not (is_text or is_number):
        raise UserError(f"{where}: {key}: a string or a number is expected")
    shown = str(value)
    return option.name, option.value(f"{where}: {key} {shown}", shown)


def _settings(key: str, table: Mapping[str, Any], where: str) -> str:
    """Returns the settings of a section as an option has them: `every=50,inner=zero2`.

    Args:
        key: The option, for errors.
        table: The section.
        where: File and line, for errors.

    Raises:
        UserError: A setting is neither text nor a number.
    """
    for name, value in table.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number or isinstance(value, str)):
            raise UserError(f"{where}: {key}: {name}: a string or a number is expected")
    return ",".join(f"{name}={value}" for name, value in table.items())


def _words(key: str, value: Any, where: str) -> Any:
    """Returns the script, or its arguments.

    Args:
        key: The key of the script or of its arguments.
        value: Value in the file.
        where: File and line, for errors.

    Raises:
        UserError: The value is of another type.
    """
    if key == SCRIPT_KEY:
        if not isinstance(value, str) or not value:
            raise UserError(f"{where}: {key}: a string is expected, such as 'train.py'")
        return value
    parts = value if isinstance(value, list) else [None]
    if not all(isinstance(w, (str, int, float)) and not isinstance(w, bool) for w in parts):
        raise UserError(
            f"{where}: {key}: a list of strings and numbers is expected, such as ['--lr', 0.1]"
        )
    return [str(word) for word in parts]
