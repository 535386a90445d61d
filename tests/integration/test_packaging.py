"""What is built from a zip, a tar or the sdist of this tree is the same, is whole, and starts."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.cases import slow

PACKED_AS = {
    "elasticzero": "elasticzero",
    "launcher": "elasticzero/launcher",
    "checkpoint": "elasticzero/checkpoint",
    "examples": "elasticzero/share/examples",
    "k8s/components": "elasticzero/share/k8s/components",
}
LINKS = ("elasticzero/launcher", "elasticzero/checkpoint")
ADDED = ("elasticzero/added", "launcher/added", "launcher/added/deeper", "checkpoint/added")
"""Packages that only the trees to build from have: nothing that is built names them."""
SOURCES = ("zip", "tar", "sdist")
BUILD = "import setuptools.build_meta as build, sys; build.build_{kind}(sys.argv[1])"
"""Calls the hook that pip calls too, without its isolated environment, and so without network."""
INSTALL = ("-m", "pip", "--python")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
COMPAT = ("--config-settings", "editable_mode=compat", "--editable")
IMPORT = """
import elasticzero, elasticzero.cli.main as cli, elasticzero.checkpoint.cli.main, sys
import elasticzero.launcher.added.deeper
assert elasticzero.__file__.startswith(sys.argv[1]), elasticzero.__file__
assert cli.__file__.startswith(sys.argv[1]), cli.__file__
"""
PLACES = """
import elasticzero, elasticzero.cli.main as cli
print(elasticzero.__file__, cli.__file__, sep="\\n")
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints that ends well."""
    arguments = [str(word) for word in command]
    ran = subprocess.run(
        arguments,
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def dependencies() -> str:
    """The folders of the packages that this environment has, without that of this tree."""
    named = [path for path in sys.path if path.endswith("-packages")]
    return os.pathsep.join(dict.fromkeys([*named, *site.getsitepackages()]))


@pytest.fixture(scope="module")
def archives(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tree.zip and tree.tar, as `git archive` would make them were all committed."""
    folder = tmp_path_factory.mktemp("archives")
    (folder / "objects").mkdir()
    objects = run("git", "rev-parse", "--git-path", "objects", cwd=root).strip()
    apart = {
        "GIT_INDEX_FILE": str(folder / "index"),
        "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(root / objects),
    }
    run("git", "add", "--all", cwd=root, **apart)
    tree = run("git", "write-tree", cwd=root, **apart).strip()
    for kind in ("zip", "tar"):
        run("git", "archive", "--output", folder / f"tree.{kind}", tree, cwd=root, **apart)
    return folder


@pytest.fixture(scope="module")
def trees(archives: Path) -> dict[str, Path]:
    """What somebody has who unpacks each kind of archive; that of the zip has no links."""
    folders = {kind: archives / kind for kind in SOURCES}
    with zipfile.ZipFile(archives / "tree.zip") as archive:
        archive.extractall(folders["zip"])  # Python's way: a link becomes a file with its target
    with tarfile.open(archives / "tree.tar") as archive:
        archive.extractall(folders["tar"], filter="tar")
    for kind in ("zip", "tar"):
        for package in ADDED:
            (folders[kind] / package).mkdir()
            (folders[kind] / package / "__init__.py").touch()
        left = folders[kind] / "build" / "lib" / "elasticzero" / "moved_since.py"
        left.parent.mkdir(parents=True)
        left.touch()  # as an earlier build in this folder leaves it
    run(sys.executable, "-c", BUILD.format(kind="sdist"), archives, cwd=folders["zip"])
    [sdist] = archives.glob("elasticzero-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(archives / "unpacked", filter="data")
    (archives / "unpacked" / sdist.name.removesuffix(".tar.gz")).rename(folders["sdist"])
    return folders


@pytest.fixture(scope="module")
def wheels(archives: Path, trees: dict[str, Path]) -> dict[str, Path]:
    """The wheel of each tree."""
    built = {}
    for kind, tree in trees.items():
        place = archives / f"wheel-of-{kind}"
        run(sys.executable, "-c", BUILD.format(kind="wheel"), place, cwd=tree)
        [built[kind]] = place.glob("elasticzero-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the zip's wheel, and the dependencies of this one."""
    return environment(tmp_path_factory.mktemp("installed"), wheels["zip"])


def environment(folder: Path, *installed: str | Path) -> Path:
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    # Plain paths: the files there that point at this tree are not read.
    (packages / "dependencies.pth").write_text(dependencies().replace(os.pathsep, "\n"))
    run(sys.executable, *INSTALL, python, "install", *OFFLINE, *installed, cwd=folder)
    return folder


def contents(wheel: Path) -> dict[str, int]:
    """The names of the files in a wheel, each with its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist()}


def tracked(root: Path) -> set[str]:
    """The package's files that git has, or would add, under the names that a wheel gives them."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", *PACKED_AS, cwd=root)
    present = [name for name in listed.splitlines() if (root / name).exists()]
    return {
        packed_as + name.removeprefix(folder)
        for folder, packed_as in PACKED_AS.items()
        for name in present
        if name.startswith(f"{folder}/") and name not in LINKS
    }


def test_the_trees_differ_in_what_matters(trees: dict[str, Path]) -> None:
    """The zip has plain files where the tar has links, and the sdist has none of either."""
    for link in LINKS:
        assert (trees["zip"] / link).is_file()
        assert (trees["tar"] / link).is_symlink()
        assert not os.path.lexists(trees["sdist"] / link)


def test_a_wheel_is_the_same_from_a_zip_a_tar_and_the_sdist(wheels: dict[str, Path]) -> None:
    files = {kind: contents(wheel) for kind, wheel in wheels.items()}
    assert files["zip"].keys() == files["tar"].keys() == files["sdist"].keys()
    assert files["zip"] == files["tar"] == files["sdist"]


def test_a_wheel_holds_every_file_of_the_package(root: Path, wheels: dict[str, Path]) -> None:
    """Also packages that nothing names, and what `show` prints; no test and no benchmark."""
    added = {
        PACKED_AS[name.partition("/")[0]] + f"/{name.partition('/')[2]}/__init__.py"
        for name in ADDED
    }
    expected = tracked(root)
    assert len(expected) > 100
    packed = {name for name in contents(wheels["zip"]) if ".dist-info/" not in name}
    assert packed == expected | added


@pytest.mark.parametrize("kind", SOURCES)
def test_the_command_line_starts_from_each_wheel(
    kind: str, root: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """Unpacked, beside the packages that it needs; `-S` keeps the path of this tree away."""
    with zipfile.ZipFile(wheels[kind]) as archive:
        archive.extractall(tmp_path / "package")
    path = os.pathsep.join([str(tmp_path / "package"), dependencies()])
    start = (sys.executable, "-S", "-P", "-m", "elasticzero.cli")

    def printed(*arguments: str) -> str:
        return run(*start, *arguments, cwd=tmp_path, PYTHONPATH=path)

    assert printed("--help").startswith("usage: elasticzero")
    assert printed("checkpoint", "--help").startswith("usage: elasticzero checkpoint")
    rules = root / "k8s" / "components" / "monitoring" / "rules.yaml"
    assert printed("show", "alerts") == rules.read_text()
    assert printed("show", "examples/gpt.py") == (root / "examples" / "gpt.py").read_text()
    places = run(sys.executable, "-S", "-P", "-c", PLACES, cwd=tmp_path, PYTHONPATH=path)
    assert all(line.startswith(str(tmp_path)) for line in places.splitlines()), places


def test_the_wheel_works_alone(installed: Path, tmp_path: Path) -> None:
    [packages] = installed.glob("lib/python*/site-packages")
    run(installed / "bin" / "python", "-c", IMPORT, packages, cwd=tmp_path)


@pytest.mark.parametrize("arguments", [(), ("checkpoint",)])
def test_the_installed_command_starts(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    output = run(installed / "bin" / "elasticzero", *arguments, "--help", cwd=tmp_path)
    assert output.startswith(" ".join(["usage: elasticzero", *arguments])), output


@pytest.mark.parametrize("by", ["make", slow("pip")])
def test_an_editable_installation_starts(
    by: str, root: Path, trees: dict[str, Path], tmp_path: Path
) -> None:
    """From the zip: by a path after `make` has put links there, and by pip's import hook."""
    tree = tmp_path / "tree"
    shutil.copytree(trees["zip"], tree)
    if by == "make":
        run("make", "links", cwd=tree)
        assert all((tree / link).readlink() == (root / link).readlink() for link in LINKS)
    place = tmp_path / "environment"
    place.mkdir()
    environment(place, *(COMPAT if by == "make" else ("--editable",)), tree)
    hooks = list(place.glob("lib/python*/site-packages/__editable__*_finder.py"))
    assert bool(hooks) == (by == "pip")
    for line in run(place / "bin" / "python", "-c", PLACES, cwd=tmp_path).splitlines():
        assert line.startswith(str(tree)), line
    command = place / "bin" / "elasticzero"
    assert run(command, "--help", cwd=tmp_path).startswith("usage: elasticzero")
    example = (root / "examples" / "quickstart.py").read_text()
    assert run(command, "show", "examples/quickstart.py", cwd=tmp_path) == example
