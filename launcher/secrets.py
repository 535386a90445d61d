"""Reads passwords and tokens from files or the environment, never from the command line, and shows
them nowhere."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from elasticzero.errors import UserError

ETCD_PASSWORD = "ELASTICZERO_ETCD_PASSWORD"
TOKEN = "ELASTICZERO_TOKEN"
VARIABLES = (ETCD_PASSWORD, TOKEN)
"""Environment variables that hold a secret; no process that an agent starts inherits them."""
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Secret:
    """Holds text that no repr, log or error shows."""

    reveal: str = field(repr=False)


def read_secret(
    flag: str, path: str | None, variable: str, environment: Mapping[str, str]
) -> Secret | None:
    """Returns what a file holds, else a variable's value, else None.

    Args:
        flag: The option that names the file, for messages.
        path: The file; None: there is none.
        variable: Name of the variable.
        environment: Variables of the process.

    Raises:
        UserError: The file cannot be read, or holds anything but one line.
    """
    if path is None:
        value = environment.get(variable)
        return Secret(value) if value else None
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}; name a file to read") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not text; one line of text is expected") from None
    lines = text.splitlines()
    if len(lines) != 1 or not lines[0] or len(text) > MAX_BYTES:
        raise UserError(
            f"{flag} {path}: {len(lines)} lines; the secret alone, in one line, is expected"
        )
    return Secret(lines[0])


def forget_secrets(environment: MutableMapping[str, str]) -> None:
    """Removes the secrets from an environment, so that no process inherits them."""
    for variable in VARIABLES:
        environment.pop(variable, None)
