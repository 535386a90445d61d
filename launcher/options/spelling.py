"""Spells out the options in the words of a command line, before a parser reads them.

Pure. torchrun takes `-` and `_`, prefixes that fit only one option, and a value after `--tee`. Here
`--tee` without a value is a switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from elasticzero.errors import UserError
from elasticzero.options.option import Option
from elasticzero.text import nearest_text

STREAMS = re.compile(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]")
"""The values that torchrun takes for --tee and --redirects: `3`, or by local rank `0:3,1:1`."""
PREFIX = "ELASTICZERO_"
"""Begins the name of each option's environment variable."""
OTHERS = tuple(
    PREFIX + name
    for name in (
        *("TOKEN", "ETCD_PASSWORD", "CHANNEL_FD", "BELL_FD", "LOCAL_FD", "FAULT_STEPS"),
        "REHEARSAL",
    )
)
"""Variables that are no option's: secrets, and what processes of a job tell each other."""
_NUMBER = re.compile(r"-\d+(\.\d+)?")
TEE, TEE_STREAMS = "--tee", "--tee-streams"
_SHORT = {"-t": TEE}


def spelled_out(arguments: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Returns the arguments, with whole names and `--option=value` in those before the script.

    Raises `UserError` for a prefix that fits several options of torchrun.
    """
    by_flag = {flag: option for option in options for flag in option.flags}
    by_flag |= {flag: by_flag[long] for flag, long in _SHORT.items() if long in by_flag}
    taken: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        flag, value = _split_word(word, by_flag)
        option = by_flag.get(flag)
        if option is None:
            taken.append(word)
            continue
        name = option.flags[0]
        if name == TEE:
            if value is None and rest and STREAMS.fullmatch(rest[0]):
                value = rest.pop(0)
            taken.append(name if value is None else f"{TEE_STREAMS}={value}")
        elif option.is_switch:
            taken.append(name if value is None else f"{name}={value}")
        elif value is None and rest and (not rest[0].startswith("-") or _NUMBER.match(rest[0])):
            taken.append(f"{name}={rest.pop(0)}")
        else:
            taken.append(name if value is None else f"{name}={value}")
    return taken + rest


def meant_variable(variable: str, options: Iterable[Option]) -> str:
    """Returns a question about the variable of an option that was probably meant, for the end of an
    error; empty: the variable is that of an option, or near to none.

    Args:
        variable: Name of an environment variable.
        options: The options that have variables.
    """
    names = [name for option in options for name in option.variables if name.startswith(PREFIX)]
    if not variable.startswith(PREFIX) or variable in names or variable in OTHERS:
        return ""
    shortened = [name.removeprefix(PREFIX) for name in names]
    hint = nearest_text(variable.removeprefix(PREFIX), shortened)
    return hint.replace("did you mean ", f"did you mean {PREFIX}")


def _split_word(word: str, by_flag: dict[str, Option]) -> tuple[str, str | None]:
    """Returns the flag that a word means, as `known` has it, and the value within the word."""
    if not word.startswith("--"):
        flag, value = word[:2], word[2:]
        return (flag, value.removeprefix("=") or None) if flag in by_flag else (word, None)
    text, equals, value = word.partition("=")
    flag = "--" + text[2:].replace("_", "-")
    return _complete_flag(flag, by_flag), value if equals else None


def _complete_flag(flag: str, by_flag: dict[str, Option]) -> str:
    """Returns the flag itself, or the only flag of torchrun that begins with it."""
    if flag in by_flag or flag in ("--help", "--help-all"):
        return flag
    fitting = {
        option.flags[0]
        for name, option in by_flag.items()
        if name.startswith(flag)
        and name.startswith("--")
        and (option.pet or not option.has_variable)
    }
    if len(fitting) > 1:
        raise UserError(f"{flag} could be {' or '.join(sorted(fitting))}; write the whole name")
    return fitting.pop() if fitting else flag
