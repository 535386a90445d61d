"""What tests of k8s/ share: its folders, other renders, and what kubectl makes of them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from elasticzero.cli import main as cli
from tests.unit.manifests import Manifest
from tools import manifests as tool

FOLDERS = (tool.BASE, *tool.OVERLAYS)
"""Folders that kustomize renders."""
OTHER_RENDERS = {
    "gke-spot jobset": f"{tool.CPUS} --cloud gke --spot --kind jobset --checkpoints gs://bucket/it",
    "eks-spot trainjob": f"{tool.NAME} {tool.IMAGE} {tool.GPUS} --cloud eks --spot "
    "--kind trainjob --checkpoints efs-sc --env-from credentials",
    "aks-spot tls": f"{tool.NAME} {tool.IMAGE} {tool.GPUS} --cloud aks --spot --etcd-tls "
    "--etcd-backup --checkpoints azurefile-csi",
    "queue that exists": f"{tool.CPUS} --queue elsewhere --run two --restart --checkpoints nfs "
    "--env ELASTICZERO_SNAPSHOT_EVERY=10",
}
"""Options of renders that nobody keeps."""
PLACES = (*FOLDERS, *tool.EXAMPLES, *OTHER_RENDERS)
CASES = [*((place, "plain") for place in PLACES), *((folder, "prefixed") for folder in FOLDERS)]
Render = Callable[[str], list[Manifest]]
OLDEST_KUBECTL = 27
"""Minor version of the oldest kubectl whose kustomize knows what the manifests use."""


def kubectl_minor(path: str) -> int:
    command = [path, "version", "--client", "--output=yaml"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return int(re.sub(r"\D.*", "", yaml.safe_load(out)["clientVersion"]["minor"]))


def kustomized(folder: Path, program: Callable[[str], str]) -> list[Manifest]:
    kubectl = program("kubectl")
    if kubectl_minor(kubectl) < OLDEST_KUBECTL:
        pytest.skip(f"overlays and components need kubectl 1.{OLDEST_KUBECTL} or newer")
    command = [kubectl, "kustomize", str(folder)]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert rendered.returncode == 0, rendered.stderr
    assert not rendered.stderr
    return list(yaml.safe_load_all(rendered.stdout))


def prefixed(folder: str, root: Path, place: Path, program: Callable[[str], str]) -> list[Manifest]:
    """A folder's manifests in an overlay with a prefix and a label, as a second copy has it."""
    base = os.path.relpath(root / "k8s" / folder, place)
    overlay = {
        "resources": [base],
        "namePrefix": "team-",
        "labels": [{"pairs": {"team": "vision"}, "includeSelectors": True}],
    }
    (place / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return kustomized(place, program)


def printed(arguments: list[str]) -> str:
    """What a command of `elasticzero` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cli.main(arguments) == 0
    return text.getvalue()


def arguments_of(place: str) -> list[str]:
    """The command line that renders a place."""
    if place in OTHER_RENDERS:
        return ["k8s", "render", *shlex.split(OTHER_RENDERS[place]), *shlex.split(tool.SCRIPT)]
    return tool.command_of(place)


read_schema = cache(kubernetes_validate.utils.schema_contents)


def validate(manifest: Manifest, version: str) -> None:
    """Holds a manifest strictly to the schema of a release, which is read once; the package reads
    all definitions for each manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", read_schema)
        kubernetes_validate.validate(manifest, version, strict=True)
