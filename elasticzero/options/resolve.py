"""Computes the values of options, and the settings that they make. Pure.

An option has a raw value, which a flag, a variable or a file gives. Its row says how that is
checked, and which field of which settings it fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.errors import ElasticZeroError, UserError
from elasticzero.options.option import Option
from elasticzero.options.settings import TrainingSettings
from elasticzero.options.sources import DEFAULT, Origin, ValueSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOptions:
    """Holds the values of options by the field that each fills."""

    training: TrainingSettings
    agent: Mapping[str, Any]
    """Fields of `AgentOptions` itself."""
    policy: Mapping[str, Any]
    """Fields of `JobPolicy`."""
    keep: Mapping[str, Any]
    """Fields of `RetentionPolicy`."""
    logs: Mapping[str, Any]
    """Fields of `LogLimit`."""


def parse_options(options: Iterable[Option], values: Mapping[str, Any]) -> ParsedOptions:
    """Checks and converts the values of options; raises `UserError` that begins with the option.

    Args:
        options: the rows of a table.
        values: raw values by the option's name; an option without one is passed over.
    """
    groups = ("training", "agent", "policy", "keep", "logs")
    fields: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for option in options:
        if option.name not in values:
            continue
        value = values[option.name]
        if option.parse is not None:
            value = option.parse(option.flags[0], value)
        if option.field:
            group, _, name = option.field.rpartition(".")
            fields[group or "agent"][name] = value
    training = TrainingSettings(**fields.pop("training"))
    return ParsedOptions(training=training, **fields)


def check_checkpoint_options(parsed: ParsedOptions) -> None:
    """Raises `UserError` if an option about checkpoints is given without a directory for them."""
    if parsed.training.checkpoint_dir is not None:
        return
    idle = {
        "--checkpoint-every": parsed.training.checkpoint_every > 0,
        "--keep": parsed.keep.get("last") is not None,
        "--strict-checkpoint": parsed.policy.get("strict_checkpoint", False),
    }
    for flag, is_given in idle.items():
        if is_given:
            raise UserError(
                f"{flag} needs --checkpoint-dir DIR: without it no checkpoint is written"
            )


def values_in(
    options: Iterable[Option], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, ValueSource]]:
    """Returns the raw value of each option that a variable or the default gives, and its source.

    Raises `UserError` for a variable with an invalid value.
    """
    values: dict[str, Any] = {}
    sources: dict[str, ValueSource] = {}
    for option in options:
        values[option.name], sources[option.name] = option.default, DEFAULT
        if (setting := option.given_in(environment)) is not None:
            variable, value = setting
            source = ValueSource(Origin.ENVIRONMENT, variable)
            values[option.name] = option.expanded(value, environment, source.note)
            sources[option.name] = source
    return values, sources


def with_source(error: ElasticZeroError, sources: Mapping[str, ValueSource]) -> ElasticZeroError:
    """Returns the error, with the variable or the line of the file that gave the option which it
    begins with.

    A flag is seen on the command line, so then the error stays as it is.
    """
    flag = str(error).partition(" ")[0].rstrip(":")
    source = sources.get(flag.removeprefix("--").replace("-", "_"))
    if type(error) is not UserError or not flag.startswith("--") or source is None:
        return error
    return UserError(f"{error}{source.note}")
