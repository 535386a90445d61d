"""The examples for fast networks: each field is valid and has the vendor's page beside it, and the
page has their commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elasticzero.ops.cli.k8s.patch_files import read_patches
from elasticzero.ops.kubernetes.patches.document import Patch
from tests.unit.manifests import Manifest, agent_of, agents_of, environment, pod_of
from tests.unit.test_k8s import VERSIONS
from tools import manifests as tool

NAMES = tuple(Path(place).stem for place in tool.NETWORKS)
MARK = re.compile(r"# (?:\[([A-Z]+)\]|ours: )")
IDENTITY = ("apiVersion", "kind", "name", "mountPath")
"""Fields that find what a patch changes; whatever stands below them has the page."""


def patch_of(root: Path, name: str) -> Patch:
    (patch,) = read_patches([str(root / "k8s" / "components" / "networks" / f"{name}.yaml")])
    return patch


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The places of all values that hold no others."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    below = [place for key, inner in entries for place in leaves(inner, (*path, key))]
    return below or [path]


def marks_of(patch: Patch, rows: list[str], path: tuple[str | int, ...]) -> set[str]:
    """The marks in the rows of a value and of what it is in."""
    numbers = {
        patch.lines[path[:end]] for end in range(1, len(path) + 1) if path[:end] in patch.lines
    }
    # An entry of a list has its mark beside its name, where that is the first row.
    return {mark[0] for n in numbers if (mark := MARK.search(rows[n - 1]))}


@pytest.mark.parametrize("name", NAMES)
def test_every_field_has_its_page_beside_it(root: Path, name: str) -> None:
    patch = patch_of(root, name)
    rows = Path(patch.file).read_text().splitlines()
    pages = dict(re.findall(r"^# \[([A-Z]+)\] (https://\S+)", "\n".join(rows), re.M))
    used = {
        mark
        for row in rows
        if not row.startswith("# [")
        for mark in re.findall(r"\[([A-Z]+)\]", row)
    }
    assert used == pages.keys()
    checked = [path for path in leaves(patch.value) if path[-1] not in IDENTITY]
    bare = [path for path in checked if not marks_of(patch, rows, path)]
    assert not bare
    assert len(checked) >= 3


@pytest.mark.parametrize("place", tool.NETWORKS)
def test_the_whole_render_is_valid(root: Path, place: str) -> None:
    """Its Job for each release, and all of it for the newest."""
    rendered: list[Manifest] = list(yaml.safe_load_all((root / "k8s" / place).read_text()))
    assert len(rendered) >= 8
    for version in VERSIONS:
        kubernetes_validate.validate(agents_of(rendered), version, strict=True)
    for manifest in rendered:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("place", tool.NETWORKS)
def test_pods_lie_in_one_zone_and_see_their_gpus(root: Path, place: str) -> None:
    job = agents_of(list(yaml.safe_load_all((root / "k8s" / place).read_text())))
    assert "podAffinity" in pod_of(job)["affinity"]
    variables = environment(agent_of(job))
    assert variables["ELASTICZERO_NPROC_PER_NODE"] == "gpu"
    assert variables["ELASTICZERO_HOST"] == "10.1.2.3", "the address of the pod's own interface"
    (agent,) = (c for c in pod_of(job)["containers"] if c["name"] == "agent")
    limits, requests = agent["resources"]["limits"], agent["resources"]["requests"]
    for name in limits:
        assert limits[name] == requests[name], "devices and huge pages cannot be shared"


def test_efa_has_devices_huge_pages_and_the_right(root: Path) -> None:
    job = agents_of(list(yaml.safe_load_all((root / "k8s/examples/eks-efa.yaml").read_text())))
    agent = agent_of(job)
    assert agent["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert agent["resources"]["limits"]["hugepages-2Mi"] == "5120Mi"
    assert agent["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert "vpc.amazonaws.com/efa" in {t["key"] for t in pod_of(job)["tolerations"]}


def test_the_daemon_of_tcpxo_is_a_sidecar_that_is_ready_first(root: Path) -> None:
    job = agents_of(list(yaml.safe_load_all((root / "k8s/examples/gke-tcpxo.yaml").read_text())))
    (daemon,) = pod_of(job)["initContainers"]
    assert daemon["restartPolicy"] == "Always"
    assert daemon["startupProbe"]["exec"]["command"][-1] == "/run/health-check"
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    interfaces = yaml.safe_load(annotations["networking.gke.io/interfaces"])
    names = [entry["interfaceName"] for entry in interfaces]
    variables = environment(agent_of(job))
    assert names == [variables["NCCL_SOCKET_IFNAME"], *variables["NCCL_FASTRAK_IFNAME"].split(",")]
    devices = yaml.safe_load(annotations["devices.gke.io/container.tcpxo-daemon"])
    assert sum(entry["path"][11:].isdigit() for entry in devices) == 8
    limits = daemon["resources"]["limits"]
    assert "nvidia.com/gpu" not in limits, "GPUs are counted once"


def test_the_page_has_the_commands_of_the_renders(root: Path) -> None:
    page = (root / "docs" / "fast-networks.md").read_text()
    texts = re.findall(r"elasticzero (k8s render .*?train\.py)", page.replace("\\\n", " "), re.S)
    shown = {options(text) for text in texts}
    rendered = set()
    for options_text in tool.NETWORKS.values():
        text = options_text.replace(f"{tool.PATCHES}/", "--patch ")
        rendered.add(options(f"k8s render {text} train.py"))
    assert shown == rendered
    for name in NAMES:
        assert f"`k8s/components/networks/{name}.yaml`" in page
        assert f"`k8s/examples/{name}.yaml`" in page


def options(text: str) -> frozenset[str]:
    """The flags of a command with their values, but for the image."""
    parts = re.split(r" (?=--)", shlex.join(shlex.split(text)).removesuffix(" train.py"))
    return frozenset(part for part in parts if not part.startswith("--image"))
