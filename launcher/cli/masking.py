"""Hides secrets in what is printed: passwords, tokens and keys in variables, words and URLs.

Pure, and apart from what prints, so that its tables of names are tested alone. A value is hidden if
its name says that it is secret, so names decide. What is hidden in error costs a look elsewhere;
what is shown in error cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

HIDDEN = "(hidden)"
SHORTEST = 4
"""Length of the shortest secret that is searched for in a text; shorter ones are parts of words."""
_WORDS = frozenset(
    {
        *("TOKEN", "PASSWORD", "PASSWD", "PASS", "PWD", "PASSPHRASE", "SECRET", "SECRETS"),
        *("CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "AUTH", "COOKIE", "JWT", "DSN", "PAT"),
    }
)
_ENDS = ("TOKEN", "PASSWORD", "PASSWD", "SECRET", "APIKEY")
_DIRECTORIES = ("PWD", "OLDPWD")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"([?&][^=&\s]*(?:sig|signature|token|key|secret|password)=)[^&\s]+", re.I)
_HEADER = re.compile(r"(\b(?:Bearer|Basic)\s+)\S+", re.I)


def names_secret(name: str) -> bool:
    """Returns whether the value of a variable or option of this name is to be hidden."""
    parts = re.split(r"[^A-Z0-9]+", name.upper())
    return name not in _DIRECTORIES and any(
        word in _WORDS or word.endswith(_ENDS) for word in parts
    )


def masked_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns the text without users and passwords in URLs, without headers that log in, and
    without these secrets."""
    text = _USER_IN_URL.sub(HIDDEN, text)
    text = _QUERY.sub(rf"\g<1>{HIDDEN}", text)
    text = _HEADER.sub(rf"\g<1>{HIDDEN}", text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN) if len(secret) >= SHORTEST else text
    return text


def masked_variable(name: str, value: str) -> str:
    """Returns the value of an environment variable as it may be printed."""
    return HIDDEN if value and names_secret(name) else masked_text(value)


def masked_words(command: Sequence[str]) -> list[str]:
    """Returns the words of a command as they may be printed.

    What follows an option whose name says that it is secret is hidden, after `=` or in the next
    word.
    """
    shown: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
            hide = False
        elif equals and names_secret(name):
            shown.append(f"{name}={HIDDEN}")
            hide = False
        else:
            shown.append(masked_text(word))
            hide = word.startswith("-") and names_secret(word)
    return shown
