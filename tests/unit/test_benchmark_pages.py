"""The pages of tables in benchmarks/results, as the benchmarks' `--record` writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PARTS = (
    *("recovery", "recovery gpu", "rendezvous", "checkpoint warm", "checkpoint cold"),
    "gpu",
    *("training", "training memory", "training 4 ranks", "training checks"),
)


@pytest.fixture
def benchmarks(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.delitem(sys.modules, "performance_page", raising=False)
    return root / "benchmarks"


@pytest.mark.parametrize("name", PARTS)
def test_publish_replaces_its_own_part_alone(benchmarks: Path, tmp_path: Path, name: str) -> None:
    from performance_page import publish

    for page in (benchmarks / "results").glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text())
    page = tmp_path / f"{name.split()[0]}.md"
    before = page.read_text()
    assert publish(name, "new tables", tmp_path) == page
    first, last = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    head, tail = before.partition(first)[0], before.partition(last)[2]
    assert page.read_text() == f"{head}{first}\n\nnew tables\n\n{last}{tail}"


def test_publish_refuses_a_part_that_has_no_place(benchmarks: Path, tmp_path: Path) -> None:
    from performance_page import publish

    (tmp_path / "recovery.md").write_text("# Recovery\n")
    with pytest.raises(SystemExit, match=r"recovery\.md has no"):
        publish("recovery gpu", "new tables", tmp_path)
