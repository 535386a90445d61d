"""Says how one render of manifests differs from another, in patches that kustomize applies. Pure.

The patches are strategic merges. An entry of a list that they name goes before those that they do
not name. So a patch names all entries of a list up to the last one that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.ops.kubernetes.naming import Manifest

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
"""Lists whose entries Kubernetes merges, each with the key by which it finds an entry. Other lists
are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Says what makes one render of another."""

    added: tuple[Manifest, ...]
    """Manifests of objects that the other render alone has."""
    patches: tuple[Manifest, ...]
    """What differs in an object of both."""
    deletions: tuple[Manifest, ...]
    """Patches that delete an object."""


def difference(base: Iterable[Manifest], other: Iterable[Manifest]) -> Difference:
    """Returns what makes the render `other` of the render `base`."""
    before, after = ({_identity(m): m for m in render} for render in (base, other))
    return Difference(
        added=tuple(m for identity, m in after.items() if identity not in before),
        patches=tuple(
            _head(m) | _merged(before[identity], m, _head(m))
            for identity, m in after.items()
            if identity in before and before[identity] != m
        ),
        deletions=tuple(
            {**_head(m), "$patch": "delete"}
            for identity, m in before.items()
            if identity not in after
        ),
    )


def _identity(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def _head(manifest: Manifest) -> Manifest:
    """Returns what names an object in a patch."""
    api_version, kind, name = _identity(manifest)
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}


def _merged(before: Manifest, after: Manifest, head: Manifest) -> Manifest:
    """Returns the patch of an object below its head."""
    changes = _changes(before, after)
    metadata = head["metadata"] | changes.pop("metadata", {})
    return {"metadata": metadata, **changes}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that differ; None stands for one that goes."""
    kept = {
        key: _change(key, before[key], value) if key in before else value
        for key, value in after.items()
        if key not in before or before[key] != value
    }
    return kept | {key: None for key in before if key not in after}


def _change(key: str, before: Any, after: Any) -> Any:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return _changes(before, after)
    if key in MERGE_KEYS and isinstance(before, list) and isinstance(after, list):
        return _entries(MERGE_KEYS[key], before, after)
    return after


def _entries(key: str, before: list[Any], after: list[Any]) -> list[Any]:
    """Returns the entries of a list that is merged by a key."""
    old = {entry[key]: entry for entry in before}
    names = [entry[key] for entry in after]
    end = max((i + 1 for i, entry in enumerate(after) if old.get(entry[key]) != entry), default=0)
    deleted = [{"$patch": "delete", key: name} for name in old if name not in names]
    named = [
        {key: entry[key], **_changes(old[entry[key]], entry)} if entry[key] in old else entry
        for entry in after[:end]
    ]
    return [*named, *deleted]
