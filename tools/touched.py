"""Prints the test files of what a change touched: `python -m tools.touched`, for `make quick`.

A change is what differs from the branch `main`, or from the commit before on `main` itself, with
what is not committed. Its tests are the changed ones, then those that import a changed module, then
those that import a module that does. The list ends where the tests would take too long; what it
leaves out is named on standard error.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from tests.support.selection import read_table, seconds_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("elasticzero", "launcher", "checkpoint", "tools", "benchmarks", "tests")
BUDGET_S = 80.0
"""Job-seconds that the tests may take together; two cores do that in less than a minute."""
FARTHEST = 6
"""Number of imports between a changed module and a test that runs for it."""
ALWAYS = "tests/unit/test_house.py"
RUN_BY_TEST = ("tests/contract/", "tests/integration/", "tests/simulation/", "tests/unit/")
"""Folders whose tests need nothing that `make test` has not."""
PRODUCT = ("elasticzero/", "launcher/", "checkpoint/")
STORY = "tests/integration/test_plain_scripts.py"
"""A job whose worker and node are killed; it runs for each change of the product."""


def changed_files() -> set[str]:
    """Returns the paths of a change, from the root of the repository."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.split()

    base = (git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main"))[:1]
    if not base or base == git("rev-parse", "HEAD"):
        base = git("rev-parse", "--verify", "-q", "HEAD~")
    committed = git("diff", "--name-only", *base)
    return {*committed, *git("ls-files", "--others", "--exclude-standard")}


def module_of(path: str) -> str:
    """Returns the name by which a file is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"elasticzero.{name}" if name.startswith(("launcher", "checkpoint")) else name


def imported_by(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Returns the names that a file imports: modules, and names that may be modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: None if is_package else -1]
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)})
    return names


def sources() -> Iterator[str]:
    """Yields the Python files of the repository, each once."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(("elasticzero/launcher/", "elasticzero/checkpoint/")):
                yield name


def distances(changed: Set[str], imports: Mapping[str, Set[str]]) -> dict[str, int]:
    """Returns for each file the number of imports between it and a changed file, up to FARTHEST.

    imports: the names that each file imports.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for file, names in imports.items():
        for name in names:
            importers[name].add(file)
    nearest = dict.fromkeys(sorted(changed), 0)
    reached = set(nearest)
    for distance in range(1, FARTHEST + 1):
        reached = {file for name in reached for file in importers[module_of(name)]} - set(nearest)
        nearest |= dict.fromkeys(sorted(reached), distance)
    return nearest


def chosen(near: Mapping[str, int], seconds: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Returns the test files to run, the nearest first, and those for which there is no time."""
    tests = [
        file
        for file in near
        if Path(file).name.startswith("test_") and file.startswith(RUN_BY_TEST)
    ]
    tests += [ALWAYS, *([STORY] if any(file.startswith(PRODUCT) for file in near) else [])]
    first = (ALWAYS, STORY)
    tests = sorted(
        set(tests), key=lambda file: (file not in first, near.get(file, 0), seconds[file])
    )
    kept, left_out, total_s = [], [], 0.0
    for file in tests:
        if total_s + seconds[file] <= BUDGET_S:
            total_s += seconds[file]
            kept.append(file)
        else:
            left_out.append(file)
    return kept, left_out


def main() -> None:
    imports = {
        file: imported_by(
            (ROOT / file).read_text(), module_of(file), is_package=file.endswith("__init__.py")
        )
        for file in sources()
    }
    near = distances(changed_files(), imports)
    near = {file: distance for file, distance in near.items() if (ROOT / file).exists()}
    table = read_table()
    seconds = {file: seconds_of(file, table) + 0.2 for file in {*near, ALWAYS, STORY}}
    kept, left_out = chosen(near, seconds)
    print(*kept, sep="\n")
    if left_out:
        print(f"Not among the quick tests: {' '.join(left_out)}", file=sys.stderr)


if __name__ == "__main__":
    main()
