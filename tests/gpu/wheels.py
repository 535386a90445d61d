"""Fetches the wheels of the GPU kit, and unpacks them beside a torch that is installed already.

    python -m tests.gpu.wheels [--python 3.12]

A machine with a GPU may have no network. The wheels of `wheels.txt` lie in `.gpu/wheels`, which
travels with the checkout; the kit unpacks them there and changes nothing of the machine. Without
them the kit takes the packages that Python has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("wheels.txt")
FOLDER = ROOT / ".gpu"
WHEELS, SITE = FOLDER / "wheels", FOLDER / "site"
MAX_BYTES = 64 << 20
"""Maximum bytes of the wheels and of the checkout's files together."""
PLATFORMS = ("2_34", "2_28", "2_27", "2_17", "2_12", "2_5")
"""Versions of glibc that a wheel may need, by the names of manylinux; pip takes each literally."""
OLD_PLATFORMS = ("2014", "2010", "1")


def requirements(text: str) -> tuple[list[str], list[str]]:
    """Returns the requirements that have wheels on PyPI, and those to build."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    built = [line.partition("#")[0].strip() for line in lines if line.endswith("# built")]
    return [line for line in lines if "#" not in line], built


def fetch(python: str, machine: str) -> None:
    """Puts the wheels for a version of Python and a processor into `.gpu/wheels`."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    wheels, built = requirements(LIST.read_text())
    pip = [sys.executable, "-m", "pip"]
    target = ["--implementation", "cp", "--python-version", python]
    for name in [f"_{number}" for number in PLATFORMS] + list(OLD_PLATFORMS):
        target += ["--platform", f"manylinux{name}_{machine}"]
    common = ["--quiet", "--no-deps"]
    download = [*pip, "download", *common, "--only-binary=:all:", *target, "-d", str(WHEELS)]
    subprocess.run([*download, *wheels], check=True)
    subprocess.run([*pip, "wheel", *common, "-w", str(WHEELS), *built], check=True)
    if bound := [wheel.name for wheel in WHEELS.iterdir() if is_bound(wheel.name, machine)]:
        raise SystemExit(f"error: {', '.join(bound)}: built for this machine alone")
    size = sum(wheel.stat().st_size for wheel in WHEELS.iterdir())
    check_size(size, checkout_bytes())
    print(f"{len(list(WHEELS.iterdir()))} wheels, {size / 2**20:.1f} MiB, in {WHEELS}")


def is_bound(wheel: str, machine: str) -> bool:
    """Returns whether a wheel's name binds it to a machine that is not the one meant."""
    platform = wheel.removesuffix(".whl").rpartition("-")[2]
    return platform != "any" and not ("manylinux" in platform and platform.endswith(machine))


def checkout_bytes() -> int:
    """Returns the size of the files that git tracks, or 0 where there is no git."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sum(path.lstat().st_size for path in paths if os.path.lexists(path))


def check_size(wheels_bytes: int, files_bytes: int) -> None:
    """Ends the program where wheels and files together are too many bytes to travel."""
    if wheels_bytes + files_bytes > MAX_BYTES:
        raise SystemExit(
            f"error: {wheels_bytes / 2**20:.1f} MiB of wheels and {files_bytes / 2**20:.1f} MiB of "
            f"files are more than {MAX_BYTES >> 20} MiB; shorten {LIST.name}"
        )


def install() -> Path:
    """Unpacks the wheels, if there are any, and describes this checkout as a package beside them.

    Without that description neither torchrun finds the plug-in, nor Python the version.

    Returns:
        The folder for PYTHONPATH.
    """
    wheels = sorted(WHEELS.glob("*.whl")) if WHEELS.exists() else []
    state = json.dumps([sys.version, [wheel.name for wheel in wheels]])
    note = SITE / "installed.json"
    if note.exists() and note.read_text() == state:
        return SITE
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        pip += ["--no-compile", "--no-cache-dir", "--target", str(SITE)]
        subprocess.run([*pip, *map(str, wheels)], check=True)
    try:
        version("elasticzero")
    except PackageNotFoundError:
        describe(SITE)
    note.write_text(state)
    return SITE


def describe(folder: Path) -> None:
    """Writes the metadata of this checkout's package, as an installation would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"elasticzero-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: elasticzero\nVersion: {project['version']}\n"
    )
    sections = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for section, entries in sections.items():
        lines += [f"[{section}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def search_path(*folders: Path) -> str:
    """Returns PYTHONPATH with folders, the unpacked wheels and this checkout in front."""
    before = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), str(SITE), str(ROOT), *filter(None, [before])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--python", default="3.12", metavar="3.N", help="of the GPU's machine")
    parser.add_argument("--machine", default="x86_64", help="processor of the GPU's machine")
    options = parser.parse_args()
    fetch(options.python, options.machine)


if __name__ == "__main__":
    main()
