"""Checks what patches have made of an object: it is whole, and its parts belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elasticzero.errors import UserError
from elasticzero.ops.kubernetes.naming import Manifest
from elasticzero.ops.kubernetes.patches.document import nearest
from elasticzero.ops.kubernetes.patches.fields import (
    entry_title,
    field_type,
    is_structure,
    required_fields,
)

ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "Volume": ("name",),
    "EnvVar": ("name",),
}
"""Types that have one field beside these."""


def check_object(manifest: Manifest, kind: str, places: Mapping[str, str]) -> None:
    """Checks an object to which a patch was applied.

    Args:
        manifest: the object.
        kind: its type.
        places: file and line of each value of the patch by its name; of the patch itself by "".

    Raises:
        UserError: a part is not whole, has two values where one is expected, or names a volume
            that is not there.
    """
    _check_part(manifest, kind, "", places[""], places)
    claims = manifest.get("spec", {}).get("volumeClaimTemplates", ())
    volumes = [claim["metadata"]["name"] for claim in claims]
    for name, pod in _pods(manifest, ""):
        if not pod["containers"]:
            raise UserError(f"{_place(f'{name}.containers', places)}: {name} has no container left")
        for title, container in _containers(pod, name):
            _check_container(container, title, pod, volumes, places)


def _check_part(
    value: Mapping[str, Any], owner: str, name: str, place: str, places: Mapping[str, str]
) -> None:
    """Checks what a patch has made of an object.

    Args:
        value: the object, or a part of it.
        owner: its type.
        name: how messages name the part.
        place: file and line of what the patch says of it, or of what it is in.
        places: files and lines of what the patch names.

    Raises:
        UserError: the part is not whole, or has two values where one is expected.
    """
    title = name or f"{value['kind']} {value['metadata']['name']}"
    for field in required_fields(owner):
        if value.get(field) is None:
            raise UserError(f"{place}: {title} has no {field}, and must have it")
    _check_alternatives(value, owner, title, place)
    for key, inner in value.items():
        kind = field_type(owner, key)
        if kind is None or not is_structure(kind.name):
            continue
        below = f"{name}.{key}".lstrip(".")
        at = places.get(below, place)
        if kind.shape == "one":
            _check_part(inner, kind.name, below, at, places)
        for index, entry in enumerate(inner if kind.shape == "list" else ()):
            entry_name = entry_title(below, entry, kind) if kind.keys else f"{below}[{index}]"
            _check_part(entry, kind.name, entry_name, places.get(entry_name, at), places)


def _check_alternatives(value: Mapping[str, Any], owner: str, name: str, place: str) -> None:
    if owner not in ALTERNATIVES:
        return
    chosen = [key for key in value if key not in ALTERNATIVES[owner]]
    if len(chosen) > 1:
        raise UserError(
            f"{place}: {name} has {' and '.join(sorted(chosen))}, of which it can have one: write "
            f"null for the other, such as {chosen[0]}: null"
        )


def _place(name: str, places: Mapping[str, str]) -> str:
    """Returns the file and line of what a patch says of a value, or of what it is in."""
    while name not in places:
        name = name[: max(name.rfind("."), name.rfind("["), 0)]
    return places[name]


def _pods(value: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each pod of an object with its name in messages."""
    if isinstance(value, Mapping):
        if "containers" in value:
            yield name, value
        for key, inner in value.items():
            yield from _pods(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for entry in value:
            title = entry.get("name") if isinstance(entry, Mapping) else None
            yield from _pods(entry, f"{name}[{title}]")


def _containers(pod: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for field in ("containers", "initContainers"):
        for container in pod.get(field, ()):
            yield f"{name}.{field}[{container['name']}]", container


def _check_container(
    container: Mapping[str, Any],
    title: str,
    pod: Mapping[str, Any],
    claims: Sequence[str],
    places: Mapping[str, str],
) -> None:
    """Checks that a container has an image, and that the pod has its volumes.

    Args:
        container: the container.
        title: how messages name it.
        pod: the pod that has it.
        claims: names of volumes that are claimed for the pod.
        places: file and line of each value of the patch by its name.
    """
    place = _place(title, places)
    if "image" not in container:
        others = [one["name"] for _, one in _containers(pod, "") if "image" in one]
        question = nearest(container["name"], others)
        text = f"has no image{question}; the pod has the containers {', '.join(others)}"
        raise UserError(f"{place}: {title} {text}")
    volumes = [*(volume["name"] for volume in pod.get("volumes", ())), *claims]
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            place = _place(f"{title}.volumeMounts[{mount['mountPath']}]", places)
            question = nearest(mount["name"], volumes)
            text = f"has the mount {mount['name']}, and the pod no volume of that name{question}"
            raise UserError(f"{place}: {title} {text}")
