"""The steps of k8s/Dockerfile, in a plain directory: what they copy is there, and what they build
runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest
import setuptools

from elasticzero import __version__

PINNED = re.compile(r"python:3\.\d+\.\d+-slim-\w+")
RECORDED = ("apt-get", "rm", "useradd")
"""Programs that change the system: a stand-in notes what they are asked."""
FOLDERS = ("/opt", "/source", "/app", "/var/lib/apt")
"""Folders of the image that lie below the plain directory here."""


@dataclass
class Stage:
    """One stage of the image: its steps in order, and its folder here."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


@pytest.fixture(scope="module")
def stages(root: Path) -> list[Stage]:
    text = (root / "k8s" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    build_stages: list[Stage] = []
    for step in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = step.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            build_stages.append(Stage(base=base, name=name))
        else:
            build_stages[-1].steps.append((word, " ".join(rest.split())))
    return build_stages


def of(stage: Stage, word: str) -> list[str]:
    return [rest for step, rest in stage.steps if step == word]


@dataclass
class Image:
    """What the steps have made of plain directories, one for each stage."""

    folders: dict[str, Path]
    asked: list[str]


def is_sent(name: str, rules: list[str]) -> bool:
    """Whether Docker sends this file of the tree, by .dockerignore: the last rule counts."""
    sent = True
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = name.split("/")
        below = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if any(fnmatch(part, pattern) for part in [*below, *parts]):
            sent = rule.startswith("!")
    return sent


@pytest.fixture(scope="module")
def image(root: Path, stages: list[Stage], tmp_path_factory: pytest.TempPathFactory) -> Image:
    pytest.importorskip("ensurepip")
    top = tmp_path_factory.mktemp("image")
    stand_ins, log = top / "bin", top / "log"
    stand_ins.mkdir()
    for name in RECORDED:
        (stand_ins / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
        (stand_ins / name).chmod(0o755)
    (stand_ins / "python").symlink_to(sys.executable)
    rules = [r for r in (root / ".dockerignore").read_text().split("\n") if r and r[0] != "#"]
    result = Image(folders={}, asked=[])
    for stage in stages:
        folder = top / (stage.name or "final")
        for place in FOLDERS:
            (folder / place[1:]).mkdir(parents=True)
        result.folders[stage.name or "final"] = folder
        directory = "/"
        for word, rest in stage.steps:
            match word:
                case "WORKDIR":
                    directory = rest
                case "COPY" if rest.startswith("--from="):
                    source, place = rest.split()[1:]
                    other = result.folders[rest.split()[0].removeprefix("--from=")]
                    shutil.copytree(other / source[1:], folder / place[1:], symlinks=True)
                case "COPY":
                    *sources, place = rest.split()
                    target = folder / os.path.join(directory, place)[1:]
                    for source in sources:
                        copy_sent(root, source, target, rules)
                case "RUN":
                    run_step(rest, folder, folder / directory[1:], stand_ins)
    result.asked = log.read_text().splitlines()
    return result


def copy_sent(root: Path, source: str, target: Path, rules: list[str]) -> None:
    """Copies a file or folder of the tree as COPY does; what is not sent is not there."""
    assert is_sent(source, rules), f"{source} is in .dockerignore"
    path = root / source
    if path.is_symlink() or path.is_file():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target / path.name, follow_symlinks=False)
        return

    def left_out(folder: str, names: list[str]) -> list[str]:
        below = os.path.relpath(folder, root)
        return [name for name in names if not is_sent(f"{below}/{name}", rules)]

    shutil.copytree(path, target, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def run_step(command: str, folder: Path, directory: Path, stand_ins: Path) -> None:
    """Runs a step as it is written, but for its folders, without network."""
    for place in FOLDERS:
        command = re.sub(rf"(?<![\w.]){place}(?=[/\s]|$)", f"{folder}{place}", command)
    env = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": str(Path(setuptools.__file__).parents[1]),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads 0 as the value of the option itself
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    shell = ["sh", "-euc", command]
    done = subprocess.run(
        shell, cwd=directory, capture_output=True, text=True, env=env, timeout=110, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_it_has_two_stages_of_one_pinned_base(stages: list[Stage]) -> None:
    build, final = stages
    assert build.base == final.base
    assert PINNED.fullmatch(final.base)
    assert build.name == "build"


def test_dependencies_are_pinned_and_extras_are_there(root: Path, stages: list[Stage]) -> None:
    (install,) = (step for step in of(stages[0], "RUN") if "pip install" in step)
    assert "-c constraints.txt" in install
    extras = re.search(r"'\.\[([\w,]+)\]'", install)
    assert extras is not None
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    chosen = extras[1].split(",")
    assert {"s3", "gcs"} <= set(chosen) <= optional.keys()
    pins = (root / "constraints.txt").read_text()
    for requirement in [*project["dependencies"], *(r for name in chosen for r in optional[name])]:
        name = re.split(r"[<>=]", requirement)[0]
        assert re.search(rf"^{re.escape(name)}==", pins, re.MULTILINE), name


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_installed_command_runs(image: Image) -> None:
    final = image.folders["final"]
    programs = final / "opt" / "elasticzero" / "bin"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(setuptools.__file__).parents[1])}

    def printed(*arguments: str | Path) -> str:
        done = subprocess.run(
            [str(word) for word in arguments],
            cwd=final / "app",
            capture_output=True,
            text=True,
            env=env,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert printed(programs / "elasticzero", "--version") == f"elasticzero {__version__}\n"
    code = "import elasticzero.ops.kubernetes as package; print(package.__file__)"
    assert printed(programs / "python", "-c", code).startswith(str(final))


def test_the_examples_are_in_the_image_and_nothing_else_of_the_tree(image: Image) -> None:
    app = image.folders["final"] / "app"
    assert (app / "examples" / "gpt.py").is_file()
    assert {path.name for path in app.iterdir()} == {"examples"}
    source = image.folders["build"] / "source"
    assert not (source / "tests").exists()
    assert not list(source.rglob("__pycache__/*.pyc"))[:1]


def test_it_has_a_compiler_and_a_user_of_its_own(image: Image, stages: list[Stage]) -> None:
    install = next(line for line in image.asked if "install" in line)
    assert install.split()[-1] == "g++", "torch.compile needs it"
    assert "--no-install-recommends" in install
    (added,) = (line for line in image.asked if line.startswith("useradd "))
    (user,) = of(stages[1], "USER")
    assert f"--uid {user.partition(':')[0]} " in added
    (entry,) = of(stages[1], "ENTRYPOINT")
    assert json.loads(entry) == ["elasticzero"]
