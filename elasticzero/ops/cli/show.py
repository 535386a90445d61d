"""Prints a file that comes with the package: `elasticzero show [NAME]`.

A wheel has the files in `elasticzero/share`, where setup.py maps them to. In a checkout they lie in
their own folders, below its root.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from elasticzero import version
from elasticzero.errors import ExitCode
from elasticzero.launcher.options.parser import Parser
from elasticzero.text import print_bytes, print_result, table_text

_MONITORING = "k8s/components/monitoring"
_NETWORKS = "k8s/components/networks"
_PORTS = "examples/ports"
_PACKAGE = Path(version.__file__).parent  # the folder of the whole package


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Describes a file that the package brings for people to use."""

    path: str
    """Place below the root of a checkout, and below `elasticzero/share` of a wheel."""
    about: str
    """Description of the file, as the list shows it."""


SHARED_FILES = {
    "dashboard": SharedFile(f"{_MONITORING}/dashboard.json", "the dashboard for Grafana"),
    "alerts": SharedFile(
        f"{_MONITORING}/rules.yaml", "the alerts for Prometheus, as one of its rule_files"
    ),
    "prometheusrule": SharedFile(
        f"{_MONITORING}/prometheusrule.yaml", "the same alerts for Prometheus' operator"
    ),
    "podmonitor": SharedFile(
        f"{_MONITORING}/podmonitor.yaml", "what Prometheus' operator scrapes on Kubernetes"
    ),
    "podmonitoring": SharedFile(
        f"{_MONITORING}/podmonitoring.yaml", "what Google's managed Prometheus scrapes on GKE"
    ),
    "kustomization": SharedFile(
        f"{_MONITORING}/kustomization.yaml",
        "the Kustomize component of dashboard, prometheusrule and podmonitor",
    ),
    "networks/eks-efa.yaml": SharedFile(
        f"{_NETWORKS}/eks-efa.yaml", "the patch for EKS with EFA, for k8s render"
    ),
    "networks/gke-tcpxo.yaml": SharedFile(
        f"{_NETWORKS}/gke-tcpxo.yaml", "the patch for GKE with TCPXO, for k8s render"
    ),
    "networks/infiniband.yaml": SharedFile(
        f"{_NETWORKS}/infiniband.yaml", "the patch for InfiniBand, for k8s render"
    ),
    "networks/roce.yaml": SharedFile(
        f"{_NETWORKS}/roce.yaml", "the patch for RoCE, for k8s render"
    ),
    "sbatch": SharedFile("examples/slurm/elasticzero.sbatch", "the batch script for Slurm"),
    "examples/quickstart.py": SharedFile("examples/quickstart.py", "the smallest training script"),
    "examples/gpt.py": SharedFile(
        "examples/gpt.py", "a small GPT that learns Python's own sources"
    ),
    "examples/torchrun_ddp.py": SharedFile(
        "examples/torchrun_ddp.py", "a script for torchrun that resumes by itself"
    ),
    "ports/nanogpt_before.py": SharedFile(
        f"{_PORTS}/nanogpt_before.py", "a GPT in the manner of nanoGPT, for torchrun"
    ),
    "ports/nanogpt_after.py": SharedFile(
        f"{_PORTS}/nanogpt_after.py", "the same, ported to ElasticZero"
    ),
    "ports/classifier_before.py": SharedFile(
        f"{_PORTS}/classifier_before.py", "a classifier of images with AMP, BatchNorm and an EMA"
    ),
    "ports/classifier_after.py": SharedFile(
        f"{_PORTS}/classifier_after.py", "the same, ported to ElasticZero"
    ),
    "ports/lora_before.py": SharedFile(
        f"{_PORTS}/lora_before.py", "LoRA adapters by transformers' Trainer and peft"
    ),
    "ports/lora_after.py": SharedFile(f"{_PORTS}/lora_after.py", "the same, ported to ElasticZero"),
    "examples/job.toml": SharedFile("examples/job.toml", "options of a job, for --config"),
}
"""The files by the names that the command line has for them."""


def add_show_options(parser: Parser) -> None:
    """Adds the argument of `show`, and sets its `run_command`."""
    parser.add_argument(
        "name",
        nargs="?",
        choices=tuple(SHARED_FILES),
        metavar="NAME",
        help="The file with this name is printed. (default: a list of all names)",
    )
    parser.set_defaults(run_command=_show)


def _show(args: argparse.Namespace) -> ExitCode:
    if args.name is None:
        rows = [(name, file.about) for name, file in SHARED_FILES.items()]
        print_result(table_text(("NAME", "WHAT IT IS"), rows), end="")
    else:
        print_bytes(_content(SHARED_FILES[args.name]))
    return ExitCode.DONE


def _content(file: SharedFile) -> bytes:
    share = _PACKAGE / "share"
    root = share if share.is_dir() else _PACKAGE.parent
    return (root / file.path).read_bytes()
