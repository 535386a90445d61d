"""The house rules that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticzero
from tools.collectives import calls_of_groups, uses_of_default_group
from tools.source import entries, sections

PRODUCT = ("elasticzero", "launcher", "checkpoint")
FOLDERS = (*PRODUCT, "examples", "benchmarks", "tests", "tools")
MAX_LINES = 600
MAX_MODULES = 14
"""In one package, without its `__init__` and `__main__`."""
EMPTY_NAMES = {
    *("found", "own", "given", "known", "said", "mine", "words", "more", "each", "here"),
    *("wanted", "begun", "dealt"),
}
"""Names that say only that there is a value."""
CONTRIBUTORS = "  - Work on it:"
"""The section of mkdocs.yml that has the pages for contributors; all others are for users."""
FOR_CONTRIBUTORS = re.compile(
    r"decisions/|\bdecision \d{4}|design/targets\.md|\bnot met\b|\bunmet\b|\baimed at\b|"
    r"\bthat is wanted\b",
    re.IGNORECASE,
)
"""Decisions, and targets that are not met."""
DEFAULT_GROUP_IS_THEIRS = ("elasticzero/integrations/", "checkpoint/api.py")
"""Where a framework or a user has made torch's default group."""
DEFAULT_GROUP_IS_MADE = (
    "elasticzero/comm/process_group.py",
    "elasticzero/torch_internals/groups.py",
)


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def sources(root: Path, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    return [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]


def test_no_file_is_longer_than_the_cap(root: Path) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(root)}
    assert len(lengths) > 20
    too_long = {str(path.relative_to(root)): n for path, n in lengths.items() if n > MAX_LINES}
    assert not too_long, f"files past {MAX_LINES} lines: {too_long}"


def test_no_package_has_too_many_modules(root: Path) -> None:
    modules = Counter(
        str(path.parent.relative_to(root))
        for path in sources(root, PRODUCT)
        if path.stem not in ("__init__", "__main__")
    )
    assert len(modules) > 20
    crowded = {package: n for package, n in modules.items() if n > MAX_MODULES}
    assert not crowded, f"packages of more than {MAX_MODULES} modules: {crowded}"


def bound_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yields each name that the code of a file binds, but attributes, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield node.lineno, name


def test_names_say_what_the_value_is(root: Path) -> None:
    files = {path: str(path.relative_to(root)) for path in sources(root)}
    bound = [(files[path], *names) for path in files for names in bound_names(path)]
    assert len(bound) > 10_000
    results = "benchmarks/recovery_report.py"  # its field `found` is a key of recorded results
    empty = [place for place in bound if place[2] in EMPTY_NAMES and place[0] != results]
    assert not empty, "\n".join(f"{file}:{line}: {name}" for file, line, name in empty)


def test_docstrings_describe_the_parameters_that_exist(root: Path) -> None:
    """A section `Args` has all parameters of its function, in their order, and no other."""
    described = 0
    wrong = []
    for path in sources(root, PRODUCT):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            parts = sections(ast.get_docstring(node) or "")
            if "Args" not in parts:
                continue
            described += 1
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [a.arg for a in arguments if a.arg not in ("self", "cls")]
            if [name for name, _ in entries(parts["Args"])] != names:
                wrong.append(f"{path.relative_to(root)}: {node.name}")
    assert described > 5
    assert not wrong, "\n".join(wrong)


def test_imports_go_one_way(root: Path) -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    completed = run(str(lint), "--no-cache", cwd=root)
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    "module",
    [
        "elasticzero",
        "elasticzero.checkpoint",
        "elasticzero.cli.main",
        "elasticzero.checkpoint.cli.main",
    ],
)
def test_import_leaves_torch_alone(root: Path, module: str) -> None:
    program = f"import {module}, sys; assert 'torch' not in sys.modules"
    completed = run(sys.executable, "-c", program, cwd=root)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("name", ["launcher", "checkpoint"])
def test_a_bare_import_is_refused(root: Path, name: str) -> None:
    completed = run(sys.executable, "-c", f"import {name}", cwd=root)
    assert completed.returncode == 1
    reason = completed.stderr.splitlines()[-1]
    assert reason.startswith("ImportError: ")
    assert f"elasticzero.{name}" in reason


def test_there_is_one_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert elasticzero.__version__ == project["version"]


def pinned(requirements: Path) -> dict[str, str]:
    lines = requirements.read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_a_package_is_pinned_once_for_an_end_of_the_range(root: Path, end: str) -> None:
    folder = root / "tests/integrations"
    assert not pinned(folder / f"{end}.txt").keys() & pinned(folder / "tools.txt").keys()


def test_the_lowest_versions_are_those_that_are_tested(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pins = pinned(root / "tests/integrations/oldest.txt")
    bounds = dict(entry.split(",")[0].split(">=") for entry in project["dependencies"])
    assert pins.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", pins[name]), name


@pytest.mark.parametrize("name", ["launcher", "checkpoint"])
def test_the_links_into_the_package_are_relative(root: Path, name: str) -> None:
    link = root / "elasticzero" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def pages(root: Path) -> list[Path]:
    return [
        *(root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((root / "docs").rglob("*.md")),
    ]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", t).lower()) for t in titles)
    return {title.strip().replace(" ", "-") for title in kept}


@pytest.mark.parametrize(("page", "lines"), [("README.md", 150), ("docs/architecture.md", 200)])
def test_the_first_pages_stay_short(root: Path, page: str, lines: int) -> None:
    assert len((root / page).read_text().splitlines()) <= lines


def test_no_table_of_the_architecture_has_a_long_row(root: Path) -> None:
    """A row that fills a screen is not read."""
    rows = [
        line
        for line in (root / "docs" / "architecture.md").read_text().splitlines()
        if line.startswith("|")
    ]
    assert len(rows) > 50
    assert not [row for row in rows if len(row) > 260]


def test_every_link_between_pages_leads_somewhere(root: Path) -> None:
    generated = root / "docs" / "reference"
    broken = []
    for page in pages(root):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            if target.parent == generated and not generated.is_dir():
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(root)}: {link}")
    assert not broken, "\n".join(broken)


def test_every_file_that_the_pages_name_exists(root: Path) -> None:
    """`a/b.py` is a path from the root, or one below a folder of sources; `b.py` is any file."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=root).stdout.splitlines()
    files = {name for name in listed if (root / name).exists()}
    suffixes = {"/".join(name.split("/")[-n:]) for name in files for n in range(1, 5)}
    missing = []
    for page in pages(root):
        for name in re.findall(r"`([\w./-]+\.(?:py|toml|yaml|yml))(?:::\w+)?`", page.read_text()):
            if name not in files and name not in suffixes:
                missing.append(f"{page.relative_to(root)}: {name}")
    allowed = {"train.py", "plain.py", "fsdp.py", "infer.py"}
    missing = [line for line in missing if line.rpartition(" ")[2] not in allowed]
    assert not missing, "\n".join(missing)


def user_pages(root: Path) -> list[Path]:
    navigation = (root / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for_users, section, _ = navigation.partition(CONTRIBUTORS)
    assert section
    return [root / name for name in re.findall(r": ([\w./-]+\.md)$", for_users, re.MULTILINE)]


def remarks_for_contributors(text: str, rules: set[str]) -> list[str]:
    """The rules by letter and number, decisions and unmet targets that a text names.

    What stands behind a hyphen or a quotation mark is an option or a value, as `-A3` and "F4" are.
    """
    line = " ".join(text.split())
    names = re.findall(r"(?<![-\w\"])[A-Z]+\d+\b", line)
    return [name for name in names if name in rules] + FOR_CONTRIBUTORS.findall(line)


@pytest.fixture
def rules(root: Path) -> set[str]:
    page = (root / "docs/reference/rules.md").read_text()
    store = {"S3"}  # means the store of objects to users
    return set(re.findall(r"^\| ([A-Z]+\d+) \|", page, re.MULTILINE)) - store


def test_pages_for_users_name_no_rule_no_decision_and_no_target(
    root: Path, rules: set[str]
) -> None:
    """A rule's number, a decision or a target that is not met tells a user nothing."""
    for_users = user_pages(root)
    assert len(for_users) > 30 and len(rules) > 200
    remarks = [
        f"{page.relative_to(root)}: {remark}"
        for page in for_users
        for remark in remarks_for_contributors(page.read_text(), rules)
    ]
    assert not remarks, "\n".join(remarks)


@pytest.mark.parametrize(
    ("text", "remarks"),
    [
        ("the member stays (V4)", ["V4"]),
        ("by RE2 and R25", ["RE2", "R25"]),
        ("see [why](decisions/0027-manifests-are-rendered.md)", ["decisions/"]),
        ("as decision 0042 says", ["decision 0042"]),
        ("**The 1 %\nthat is wanted is not\nmet.**", ["that is wanted", "not met"]),
        (
            "what was\naimed at is in [targets](design/targets.md)",
            ["aimed at", "design/targets.md"],
        ),
        ('checkpoints at S3, on an H100, "F4" and "BF16", grep -A3', []),
    ],
)
def test_remarks_for_contributors_are_found(text: str, remarks: list[str], rules: set[str]) -> None:
    assert remarks_for_contributors(text, rules) == remarks


def test_every_page_is_in_the_navigation(root: Path) -> None:
    navigation = (root / "mkdocs.yml").read_text()
    names = [f"docs/{page.name}" for page in (root / "docs").glob("*.md")]
    assert len(names) > 20
    assert not [name for name in names if f": {name}\n" not in navigation]


def test_the_architecture_names_every_package_once(root: Path) -> None:
    """In the tables of packages the first cell names packages, and the last one files in them."""
    text = (root / "docs" / "architecture.md").read_text().partition("## The core")[2]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    named = Counter(name for first, *_ in rows for name in re.findall(r"`([\w./-]+)`", first))
    folders = ("launcher", "checkpoint", "elasticzero", "elasticzero/ops")
    packages = {
        str(path.parent.relative_to(root))
        for folder in folders
        for path in (root / folder).glob("*/__init__.py")
    }
    assert not packages - {*folders, *named, "elasticzero/launcher", "elasticzero/checkpoint"}
    assert not {name: n for name, n in named.items() if n > 1 or not (root / name).is_dir()}
    for first, *_, last in rows:
        places = [root / name for name in re.findall(r"`([\w./-]+)`", first)]
        places += [place.parent for place in places]
        for name in re.findall(r"`([\w./-]+\.py)`", last):
            assert any((place / name).exists() for place in places), (first, name)


def test_each_family_of_rules_has_letters_of_its_own(root: Path) -> None:
    """Code, tests and documents refer to a rule by its letters and number alone."""
    letters = re.findall(r"^## ([A-Z]+): ", (root / "docs/reference/rules.md").read_text(), re.M)
    assert len(letters) == len(set(letters)) > 20


def test_each_collective_names_its_group(root: Path) -> None:
    """Beside a second world torch's default group may be of the wrong ranks."""
    texts = {str(path.relative_to(root)): path.read_text() for path in sources(root, PRODUCT)}
    ours = {n: text for n, text in texts.items() if not n.startswith(DEFAULT_GROUP_IS_THEIRS)}
    calls = [(file, *call) for file, text in ours.items() for call in calls_of_groups(text)]
    assert len(calls) > 30
    without = [
        f"{file}:{line}: {name}" for file, line, name, names_group in calls if not names_group
    ]
    assert not without, "\n".join(without)
    default = [
        f"{file}:{line}: the default group"
        for file, text in ours.items()
        for line in uses_of_default_group(text)
        if file not in DEFAULT_GROUP_IS_MADE
    ]
    assert not default, "\n".join(default)


@pytest.mark.parametrize(
    ("call", "names_group"),
    [
        ("dist.all_reduce(t)", False),
        ("dist.all_reduce(t, group=None)", False),
        ("dist.all_reduce(t, group=g)", True),
        ("dist.all_reduce(t, op, g)", True),
        ("dist.P2POp(dist.isend, t, 1)", False),
        ("dist.P2POp(dist.isend, t, 1, g)", True),
        ("dist.get_rank()", False),
        ("torch.distributed.barrier()", False),
        ("broadcast(t, 0)", False),
        ("gather(t, group=g)", True),
        ("dist.distributed_c10d.reduce(t, 0)", False),
        ("dist.destroy_process_group()", False),
    ],
)
def test_a_call_without_a_group_is_found(call: str, names_group: bool) -> None:
    imports = "import torch.distributed as dist\nfrom torch.distributed import broadcast\n"
    alias = "gather = getattr(dist, 'all_gather_single', dist.all_gather_into_tensor)\n"
    [(line, _, names)] = calls_of_groups(f"{imports}{alias}{call}")
    assert (line, names) == (4, names_group)
    assert [*uses_of_default_group("dist.all_reduce(t, group=dist.group.WORLD)")] == [1]
