"""Applies patches to manifests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from elasticzero.ops.kubernetes.naming import Manifest
from elasticzero.ops.kubernetes.patches.checks import check_patch
from elasticzero.ops.kubernetes.patches.document import Patch, nearest
from elasticzero.ops.kubernetes.patches.fields import object_type
from elasticzero.ops.kubernetes.patches.merging import merged
from elasticzero.ops.kubernetes.patches.results import check_object


def patched_manifests(
    files: Mapping[str, list[Manifest]], patches: Iterable[Patch]
) -> dict[str, list[Manifest]]:
    """Returns manifests with patches applied, one after the other.

    Args:
        files: manifests by the file that has them.
        patches: the patches, in their order.

    Raises:
        UserError: a patch is invalid, or the manifests have nothing that it changes.
    """
    result = {name: list(manifests) for name, manifests in files.items()}
    for patch in patches:
        name, index = _target(result, patch)
        before = result[name][index]
        kind = object_type(before["apiVersion"], before["kind"])
        places = check_patch(patch, before, kind)
        after = merged(before, patch.value, kind)
        if after is None:
            del result[name][index]
            continue
        for field in ("metadata", "spec"):
            if field in before and not after.get(field):
                patch.refuse((field,), f"{before['kind']} {_name(before)} must keep its {field}")
        if after["metadata"].get("annotations") == {}:
            del after["metadata"]["annotations"]  # as kustomize does, which keeps empty labels
        check_object(after, kind, places)
        result[name][index] = after
    return result


def _name(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def _target(files: Mapping[str, list[Manifest]], patch: Patch) -> tuple[str, int]:
    """Returns the file that has a patch's object, and the object's index there."""
    value = patch.value
    if not isinstance(value, Mapping):
        patch.refuse(
            (),
            "a patch is an object with kind and metadata.name; operations of a JSON patch, and "
            "other lists, are not taken",
        )
    kind, metadata = value.get("kind"), value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    for what, text in (("kind", kind), ("metadata.name", name)):
        if not isinstance(text, str) or not text:
            patch.refuse((), f"the patch has no {what}, by which its object is found")
    assert isinstance(metadata, Mapping)
    if "namespace" in metadata:
        text = "no object of a render names a namespace: leave it out, and give it to kubectl"
        patch.refuse(("metadata", "namespace"), text)
    objects = {
        (m["kind"], m["metadata"]["name"]): (file, index)
        for file, manifests in files.items()
        for index, m in enumerate(manifests)
    }
    if (kind, name) not in objects:
        _refuse_unknown(patch, str(kind), str(name), list(objects))
    file, index = objects[str(kind), str(name)]
    version = files[file][index]["apiVersion"]
    if value.get("apiVersion", version) != version:
        text = f"apiVersion {value['apiVersion']}: {kind} {name} has {version} in the render"
        patch.refuse(("apiVersion",), text)
    return file, index


def _refuse_unknown(
    patch: Patch, kind: str, name: str, objects: Sequence[tuple[str, str]]
) -> NoReturn:
    kinds = sorted({one for one, _ in objects})
    if kind not in kinds:
        text = f"the render has no object of kind {kind}{nearest(kind, kinds)}; it has "
        patch.refuse(("kind",), text + ", ".join(kinds))
    names = [object_name for object_kind, object_name in objects if object_kind == kind]
    text = f"the render has no {kind} {name}{nearest(name, names)}; it has {', '.join(names)}"
    patch.refuse(("metadata", "name"), text)
