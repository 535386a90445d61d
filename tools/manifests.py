"""Writes k8s/ by `elasticzero k8s render`: `python -m tools.manifests [--check]`.

The base and the examples are what the command prints; an overlay is the difference to the base.
With --check nothing is written: the exit code is 1 if a file differs from what the command prints.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import chdir
from pathlib import Path

from elasticzero import __version__
from elasticzero.cli.main import parse
from elasticzero.ops.cli.k8s.commands import rendered_files, yaml_text
from elasticzero.ops.kubernetes.naming import Manifest
from tools.kustomize import difference
from tools.source import ROOT

SOURCES = ROOT
"""Where the paths of patches begin."""
FOLDER = ROOT / "k8s"
BASE = "base"
NAME = "--name elasticzero"
IMAGE = f"--image registry.example.com/elasticzero:{__version__}"
SCRIPT = "/app/examples/gpt.py --global-batch=48 --steps=2000"
CPUS = f"{NAME} {IMAGE} --nnodes 2:4"
GPUS = "--nnodes 2:8 --gpus 8 --strategy zero2"
OVERLAYS = {
    "overlays/quick-look": f"{NAME} --image elasticzero:{__version__} --nnodes 1:3 "
    "--checkpoints none --etcd-members 1 --etcd-storage emptyDir --cpus 500m --memory 2Gi "
    "--shared-memory 512Mi",
    "overlays/gke-spot": f"{NAME} {IMAGE} {GPUS} --cloud gke --spot --checkpoints standard-rwx "
    "--checkpoint-size 1Ti",
    "overlays/eks-spot": f"{NAME} {IMAGE} {GPUS} --cloud eks --spot "
    "--checkpoints s3://example-bucket/elasticzero --service-account trainer",
    "overlays/aks-spot": f"{NAME} {IMAGE} {GPUS} --cloud aks --spot --checkpoints azurefile-csi",
    "overlays/on-prem": f"{NAME} {IMAGE} {GPUS} --grace-period 60 --checkpoints nfs --etcd-backup",
    "overlays/tls": f"{CPUS} --checkpoints shared-files --etcd-tls --etcd-backup "
    "--token-secret elasticzero-token",
    "overlays/kueue": f"{NAME} {IMAGE} {GPUS} --checkpoints shared-files --queue training "
    "--make-queue",
}
EXAMPLES = {
    "examples/jobset.yaml": f"--name train {IMAGE} {GPUS} --checkpoints shared-files --kind jobset",
    "examples/trainjob.yaml": f"--name train {IMAGE} {GPUS} --checkpoints shared-files "
    "--kind trainjob",
}
TRAIN = f"--name train {IMAGE} {GPUS} --zones one"
PATCHES = "--patch k8s/components/networks"
NETWORKS = {
    "examples/eks-efa.yaml": f"{TRAIN} --cloud eks --checkpoints s3://example-bucket/runs "
    "--service-account trainer --resource vpc.amazonaws.com/efa=32 "
    f"--resource hugepages-2Mi=5120Mi {PATCHES}/eks-efa.yaml",
    "examples/gke-tcpxo.yaml": f"{TRAIN} --cloud gke --checkpoints gs://example-bucket/runs "
    f"--service-account trainer --monitoring gmp-system {PATCHES}/gke-tcpxo.yaml",
    "examples/infiniband.yaml": f"{TRAIN} --checkpoints nfs "
    f"--resource rdma/hca_shared_devices_a=1 {PATCHES}/infiniband.yaml",
    "examples/roce.yaml": f"{TRAIN} --checkpoints nfs "
    f"--resource rdma/rdma_shared_device_eth=1 {PATCHES}/roce.yaml",
}
"""Whole renders for fast networks; docs/fast-networks.md has the same commands."""
RENDERS = {BASE: f"{CPUS} --checkpoints shared-files", **OVERLAYS, **EXAMPLES, **NETWORKS}
"""Options of the command for each folder, and for each file that is one whole render; all run the
same script."""

JOB = "spec/template/spec/containers/env/value"
ENVIRONMENTS = (
    ("StatefulSet", JOB),
    ("Job", JOB),
    ("CronJob", "spec/jobTemplate/spec/template/spec/containers/env/value"),
)
REFERENCES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Service": ENVIRONMENTS,
    "Job": ENVIRONMENTS,
    "ResourceFlavor": (("ClusterQueue", "spec/resourceGroups/flavors/name"),),
    "ClusterQueue": (("LocalQueue", "spec/clusterQueue"),),
    "LocalQueue": (("Job", "metadata/labels/kueue.x-k8s.io\\/queue-name"),),
}
"""Where a name of each kind stands: in variables (of etcd's Service, and of the Job, whose name is
the job's id), and within Kueue's objects. Kustomize knows the other places itself."""
NAMES = """\
# Has kustomize change these too, where `namePrefix` or `nameSuffix` changes a name.
nameReference:
"""


ORDER = """\
# An entry that has nothing but its name stays as it is; it is named to keep its place.
"""
WRITTEN = (BASE, "overlays", "examples")
"""Folders of which every YAML file is made here."""


def command_of(place: str) -> list[str]:
    """The command that prints the manifests of a place of k8s/."""
    return ["k8s", "render", *shlex.split(RENDERS[place]), *shlex.split(SCRIPT)]


def files_of(place: str) -> Mapping[str, list[Manifest]]:
    """The manifests that the command prints, by the file of k8s/ that has them."""
    with chdir(SOURCES):
        return rendered_files(parse(command_of(place)))


def rendered(place: str) -> list[Manifest]:
    """The manifests that the command prints."""
    return [m for manifests in files_of(place).values() for m in manifests]


def head_of(place: str) -> str:
    command = f"elasticzero {shlex.join(command_of(place))}"
    return f"# `make manifests` writes this file; do not edit it:\n# {command}\n"


def kustomization(resources: Iterable[str], rest: str) -> str:
    """The text of a kustomization.yaml."""
    listed = "".join(f"  - {name}\n" for name in resources)
    kind = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    return f"{kind}resources:\n{listed}{rest}"


def base_files() -> Mapping[str, str]:
    """The text of each file of the base, by its name."""
    files = files_of(BASE)
    names = NAMES + "".join(
        f"  - kind: {referred}\n    fieldSpecs:\n"
        + "".join(f"      - kind: {kind}\n        path: {path}\n" for kind, path in places)
        for referred, places in REFERENCES.items()
    )
    texts = {name: head_of(BASE) + yaml_text(manifests) for name, manifests in files.items()}
    configured = kustomization(files, "configurations:\n  - names.yaml\n")
    return texts | {"kustomization.yaml": head_of(BASE) + configured, "names.yaml": names}


def overlay_files(place: str) -> Mapping[str, str]:
    """The text of each file of an overlay, by its name."""
    head, changes = head_of(place), difference(rendered(BASE), rendered(place))
    deletions = "".join(
        "  - patch: |\n" + "".join(f"      {row}\n" for row in yaml_text([patch]).splitlines())
        for patch in changes.deletions
    )
    added = {"added.yaml": head + yaml_text(changes.added)} if changes.added else {}
    patches = f"patches:\n  - path: patches.yaml\n{deletions}"
    return {
        "kustomization.yaml": head + kustomization(["../../base", *added], patches),
        "patches.yaml": head + ORDER + yaml_text(changes.patches),
        **added,
    }


def all_files() -> Mapping[Path, str]:
    """The text of each file of k8s/ that the command makes, by its place below that folder."""
    folders = {BASE: base_files(), **{place: overlay_files(place) for place in OVERLAYS}}
    texts = {Path(f, name): text for f, texts in folders.items() for name, text in texts.items()}
    return texts | {Path(p): head_of(p) + yaml_text(rendered(p)) for p in (*EXAMPLES, *NETWORKS)}


def stale_files(*, write: bool) -> list[str]:
    """The files of k8s/ that are not as the command prints them; they are written, or removed."""
    stale = []
    texts = all_files()
    for name, text in texts.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in _others(texts):
        stale.append(str(path.relative_to(ROOT)))
        if write:
            path.unlink()
    return stale


def _others(texts: Mapping[Path, str]) -> list[Path]:
    """The YAML files of these folders, and of overlays that there are no more, that none makes."""
    written = [path for kind in WRITTEN for path in sorted((FOLDER / kind).rglob("*.yaml"))]
    return [path for path in written if path.relative_to(FOLDER) not in texts]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write k8s/ by `elasticzero k8s render`.")
    parser.add_argument("--check", action="store_true", help="report stale files, write none")
    check = parser.parse_args().check
    stale = stale_files(write=not check)
    if check and stale:
        print(
            f"These files are not what the code renders; run make manifests: {', '.join(stale)}",
            file=sys.stderr,
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
