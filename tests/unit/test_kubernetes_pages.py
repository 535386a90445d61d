"""The examples in the pages on Kubernetes are rendered as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from elasticzero.cli.main import parse
from elasticzero.ops.cli.k8s.commands import rendered_files
from tests.unit.manifests import Manifest
from tests.unit.test_k8s import VERSIONS

RENDER = ("--name", "train", "--image", "registry/image:1", "--nnodes", "2:4", "--gpus", "8")


def examples(root: Path, page: str) -> list[str]:
    """The texts of a page that are YAML."""
    return re.findall(r"^```yaml\n(.*?)^```", (root / "docs" / page).read_text(), re.M | re.S)


def render(*patches: Path) -> list[Manifest]:
    """What the command prints with these patches."""
    flags = [text for patch in patches for text in ("--patch", str(patch))]
    command = ["k8s", "render", *RENDER, "--checkpoints", "none", *flags, "/app/train.py"]
    return [m for part in rendered_files(parse(command)).values() for m in part]


@pytest.fixture(scope="module")
def patches(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("patches")
    texts = examples(root, "kubernetes-patches.md")
    for number, text in enumerate(texts):
        (place / f"{number}.yaml").write_text(text)
    return [place / f"{number}.yaml" for number in range(len(texts))]


def test_every_patch_of_the_page_changes_what_it_names(patches: list[Path]) -> None:
    assert len(patches) >= 7
    plain = {(m["kind"], m["metadata"]["name"]): m for m in render()}
    for patch in patches:
        named = {
            (document["kind"], document["metadata"]["name"])
            for document in yaml.safe_load_all(patch.read_text())
        }
        after = {(m["kind"], m["metadata"]["name"]): m for m in render(patch)}
        assert {key for key in plain if after[key] != plain[key]} == named


def test_the_patches_of_the_page_are_valid_together(patches: list[Path]) -> None:
    plain, after = render(), render(*patches)
    changed = [m for m in after if m not in plain]
    assert len(changed) == 3
    for version in VERSIONS:
        for manifest in changed:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_page_names_every_option(root: Path) -> None:
    page = (root / "docs" / "kubernetes-patches.md").read_text()
    for flag in (
        *("--zones", "--resource", "--volume", "--tmp-size", "--etcd-image", "--no-fixed-uid"),
        *("--monitoring", "--patch"),
    ):
        assert f"{flag} " in page or f"{flag}`" in page
