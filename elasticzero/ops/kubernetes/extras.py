"""Defines what a pod can have beside CPUs, memory and the GPUs of `--gpus`: further resources, and
volumes that exist already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elasticzero.errors import UserError

PREFIX = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
PART = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")
AMOUNT = re.compile(r"([1-9]\d*)([KMGT]i)?")
SET_BY = {
    "cpu": "--cpus sets it",
    "memory": "--memory sets it",
    "nvidia.com/gpu": "--gpus sets it",
}
"""Resources that --resource does not set, with the reason."""
PLAIN = ("ephemeral-storage",)
HUGE_PAGES = re.compile(r"hugepages-[1-9]\d*[KMG]i")
MIG = re.compile(r"nvidia\.com/mig-.+")
NVIDIA = re.compile(r"nvidia\.com/(mig-.+|gpu\..+)")
"""Names of parts and shares of an NVIDIA GPU; whole ones are of --gpus."""
AMD = "amd.com/gpu"
SOURCES = ("pvc", "secret", "configmap")
"""What a volume of --volume can be of, as kubectl names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Describes a volume that exists already, and where the agent's container has it."""

    source: str
    """`pvc`, `secret` or `configmap`; empty: a directory of the machine."""
    name: str
    """Name of that object, or the directory's path."""
    path: str
    """Path in the container."""
    read_only: bool


def parse_volume(text: str) -> Volume:
    """Reads a value of --volume.

    Args:
        text: `pvc/NAME:PATH`, `secret/NAME:PATH`, `configmap/NAME:PATH` or `/DIRECTORY:PATH`, and
            `:ro` where the container only reads it.

    Raises:
        UserError: the text is nothing of these.
    """
    parts = text.split(":")
    read_only = parts[-1] == "ro" and len(parts) == 3
    place, path = (*parts[:2], "", "")[:2]
    is_whole = len(parts) == 2 + read_only and path.startswith("/")
    if is_whole and place.startswith("/"):
        return Volume(source="", name=place, path=path, read_only=read_only)
    source, _, name = place.partition("/")
    if not is_whole or source not in SOURCES or not PREFIX.fullmatch(name):
        raise UserError(
            f"--volume {text}: pvc/NAME:PATH, secret/NAME:PATH, configmap/NAME:PATH or "
            "/DIRECTORY:PATH is expected, with an absolute PATH, and perhaps :ro after it"
        )
    return Volume(source=source, name=name, path=path, read_only=read_only)


def parse_resources(texts: Iterable[str]) -> dict[str, str]:
    """Reads the values of --resource, each `NAME=N`, and returns the amounts by name.

    Args:
        texts: the values.

    Raises:
        UserError: a value has no `=`, or two are of one name.
    """
    resources: dict[str, str] = {}
    for text in texts:
        name, equals, amount = text.partition("=")
        if not equals:
            raise UserError(f"--resource {text}: NAME=N is expected, such as amd.com/gpu=8")
        if name in resources:
            raise UserError(f"--resource {text}: {name}={resources[name]} is given as well")
        resources[name] = amount
    return resources


def check_resources(resources: Mapping[str, str]) -> None:
    """Checks the resources of --resource.

    Raises:
        UserError: a name or an amount is invalid, another option sets it, or workers cannot use it.
    """
    for name, amount in resources.items():
        what = f"--resource {name}={amount}"
        if name in SET_BY:
            raise UserError(f"{what}: {SET_BY[name]}")
        domain, slash, rest = name.partition("/")
        is_extended = slash and PREFIX.fullmatch(domain) and PART.fullmatch(rest)
        if not (is_extended or name in PLAIN or HUGE_PAGES.fullmatch(name)):
            raise UserError(
                f"{what}: a name such as amd.com/gpu, vpc.amazonaws.com/efa or hugepages-2Mi is "
                "expected"
            )
        match = AMOUNT.fullmatch(amount)
        if match is None or (is_extended and match[2]):
            raise UserError(
                f"{what}: a number from 1 is expected"
                + ("" if is_extended else ", or a size such as 512Mi or 8Gi")
            )
        if MIG.fullmatch(name) and int(amount) > 1:
            raise UserError(
                f"{what}: CUDA shows a process one part of a GPU, so that a pod has one: give "
                f"{name}=1, and more nodes"
            )


def accelerators(resources: Mapping[str, str]) -> int:
    """Returns how many GPUs, or parts of one, these resources are."""
    return sum(int(n) for name, n in resources.items() if name == AMD or NVIDIA.fullmatch(name))


def times(count: int, amount: str) -> str:
    """Returns the amount of a resource that so many pods have."""
    match = AMOUNT.fullmatch(amount)
    assert match is not None
    return f"{count * int(match[1])}{match[2] or ''}"
