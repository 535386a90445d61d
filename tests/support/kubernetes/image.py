"""Reads a Dockerfile as far as a container's start depends on it.

Pure. Follows https://docs.docker.com/reference/dockerfile/. Of the last stage it takes ENV,
WORKDIR, ENTRYPOINT, CMD, and COPY from the build's context.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.kubernetes.job import Invalid

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What an image says of the processes that run in it."""

    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    directory: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)
    """Path in the build's context of each path in the image that is copied from there."""


def parse_dockerfile(text: str, base: Mapping[str, str]) -> Image:
    """Returns the image of a Dockerfile's last stage; raises `Invalid`.

    base: environment of the image that it starts from, such as PATH.
    """
    stages = re.split(r"(?im)^FROM\s", _without_comments(text))
    image = Image(environment=dict(base))
    for line in stages[-1].splitlines()[1:]:
        word, _, rest = line.strip().partition(" ")
        image = _instruction(image, word.upper(), rest.strip())
    return image


def _instruction(image: Image, word: str, rest: str) -> Image:
    fields = {name: getattr(image, name) for name in Image.__dataclass_fields__}
    match word:
        case "ENV":
            variables = dict(image.environment)
            for name, value in _pairs(rest):
                variables[name] = _substituted(value, variables)
            fields["environment"] = variables
        case "WORKDIR":
            fields["directory"] = rest
        case "ENTRYPOINT":
            fields["entrypoint"] = _exec_form(word, rest)
        case "CMD":
            fields["arguments"] = _exec_form(word, rest)
        case "COPY":
            places = [argument for argument in shlex.split(rest) if not argument.startswith("--")]
            if "--from=" not in rest:
                source, target = places
                fields["copied"] = {**image.copied, target: source}
    return Image(**fields)


def _without_comments(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines))


def _pairs(rest: str) -> list[tuple[str, str]]:
    """Parses `NAME=VALUE ...`, and the older `NAME VALUE`."""
    if "=" not in rest.split()[0]:
        name, _, value = rest.partition(" ")
        return [(name, value.strip())]
    parts = [word.partition("=") for word in shlex.split(rest)]
    return [(name, value) for name, _, value in parts]


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def _exec_form(word: str, rest: str) -> tuple[str, ...]:
    if not rest.startswith("["):
        raise Invalid(f"{word} {rest}: the shell form is not played")
    return tuple(json.loads(rest))
