"""Writes k8s/ by `elasticzero k8s render`: `python -m tools.manifests [--check]`.

With --check nothing is written: the exit code is 1 if a file differs from what the command prints.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from elasticzero import __version__
from elasticzero.cli.main import parse
from elasticzero.ops.cli.k8s.commands import render_options, yaml_text
from elasticzero.ops.kubernetes.options import RenderOptions
from elasticzero.ops.kubernetes.render import render_manifests
from tools.source import ROOT

FOLDER = ROOT / "k8s"
IMAGE = f"registry.example.com/elasticzero:{__version__}"
SCRIPT = "/app/examples/gpt.py --global-batch=48 --steps=2000"
GPUS = f"--image {IMAGE} --nnodes 2:8 --gpus 8 --strategy zero2"
OVERLAYS = {
    "base": f"--name elasticzero --image {IMAGE} --nnodes 2:4 --checkpoints shared-files",
    "overlays/quick-look": f"--name quick-look --image elasticzero:{__version__} --nnodes 1:3 "
    "--checkpoints none --etcd-members 1 --etcd-storage emptyDir --cpus 500m --memory 2Gi "
    "--shared-memory 512Mi",
    "overlays/gke-spot": f"--name train {GPUS} --cloud gke --spot --checkpoints standard-rwx "
    "--checkpoint-size 1Ti",
    "overlays/eks-spot": f"--name train {GPUS} --cloud eks --spot "
    "--checkpoints s3://example-bucket/elasticzero --service-account trainer",
    "overlays/aks-spot": f"--name train {GPUS} --cloud aks --spot --checkpoints azurefile-csi",
    "overlays/on-prem": f"--name train {GPUS} --grace-period 60 --checkpoints nfs --etcd-backup",
    "overlays/tls": f"--name train --image {IMAGE} --nnodes 2:4 --checkpoints shared-files "
    "--etcd-tls --etcd-backup --token-secret train-token",
    "overlays/kueue": f"--name train {GPUS} --checkpoints shared-files --queue training "
    "--make-queue",
    "overlays/jobset": f"--name train {GPUS} --checkpoints shared-files --kind jobset",
    "overlays/trainjob": f"--name train {GPUS} --checkpoints shared-files --kind trainjob",
}
"""Options of the command that renders each folder of k8s/; all run the same script."""

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


def command_of(folder: str) -> list[str]:
    """The command that prints the manifests of a folder of k8s/."""
    return ["k8s", "render", *shlex.split(OVERLAYS[folder]), *shlex.split(SCRIPT)]


def options_of(folder: str) -> RenderOptions:
    return render_options(parse(command_of(folder)))


def files_of(folder: str) -> Mapping[str, str]:
    """The text of each file of a folder of k8s/, by its name."""
    command = f"elasticzero {shlex.join(command_of(folder))}"
    head = f"# `make manifests` writes this file; do not edit it:\n# {command}\n"
    found = render_manifests(options_of(folder))
    files = {name: head + yaml_text(manifests) for name, manifests in found.items()}
    resources = "".join(f"  - {name}\n" for name in files)
    files["kustomization.yaml"] = (
        f"{head}apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources:\n{resources}configurations:\n  - names.yaml\n"
    )
    files["names.yaml"] = NAMES + "".join(
        f"  - kind: {referred}\n    fieldSpecs:\n"
        + "".join(f"      - kind: {kind}\n        path: {path}\n" for kind, path in places)
        for referred, places in REFERENCES.items()
    )
    return files


def stale_files(*, write: bool) -> list[str]:
    """The files of k8s/ that are not as the command prints them; they are written, or removed."""
    stale = []
    for folder in OVERLAYS:
        texts = files_of(folder)
        place = FOLDER / folder
        for name, text in texts.items():
            path = place / name
            if not path.exists() or path.read_text() != text:
                stale.append(str(path.relative_to(ROOT)))
                if write:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
        for path in _others(place, texts):
            stale.append(str(path.relative_to(ROOT)))
            if write:
                path.unlink()
    return stale


def _others(place: Path, texts: Mapping[str, str]) -> list[Path]:
    return [path for path in sorted(place.glob("*.yaml")) if path.name not in texts]


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
