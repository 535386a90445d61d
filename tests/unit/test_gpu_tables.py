"""The tables of benchmarks/gpu.py, from a document of figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def benchmarks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    for name in ("gpu", "gpu_report", "performance_page", "ratio"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def document(device: str = "cuda") -> dict[str, Any]:
    """Two turns of six contenders, and two strategies' recovery, one of them cut short."""

    def turns(*medians_s: float, longest_s: float = 0.04) -> list[dict[str, float]]:
        return [{"median_s": s, "mean_s": s, "longest_s": longest_s} for s in medians_s]

    return {
        "device": device,
        "turns": {
            "plain": turns(0.0290, 0.0292),
            "DDP": turns(0.0300, 0.0310),
            "DDP+ZRO": turns(0.0300, 0.0310),
            "ddp": turns(0.0297, 0.0310),
            "zero1": turns(0.0330, 0.0341),
            "ddp+capture": turns(0.0300, 0.0300, longest_s=0.088),
        },
        "peak_bytes": {
            name: size << 20
            for name, size in {"plain": 9084, "DDP": 9559, "DDP+ZRO": 9557, "zero1": 9578}.items()
        }
        | {"ddp": 9084 << 20, "ddp+capture": None},
        "recovery": {
            "ddp": {
                "worker": {"seconds": 0.61, "recomputed": 0},
                "node": {"seconds": 0.6, "recomputed": 0},
                "drain": {"seconds": 0.1, "recomputed": 0},
                "join": {"seconds": 1.64, "recomputed": 0},
            },
            "zero2": {
                "worker": {"seconds": 0.65, "recomputed": 12},
                "node": {"seconds": 2.4, "recomputed": 5},
            },
        },
        "missing": {"recovery of zero2": "its 24 s were over"},
    }


TABLES = """\
| one rank | step, ms | peak, MiB | against | ratio | 95 % range | wanted |  | memory |  |
|---|---|---|---|---|---|---|---|---|---|
| plain | 29.10 | 9,084 |  |  |  |  |  |  |  |
| DDP | 30.50 | 9,559 | plain | 1.048 | 1.034 to 1.062 |  |  |  |  |
| DDP+ZRO | 30.50 | 9,557 |  |  |  |  |  |  |  |
| ddp | 30.35 | 9,084 | plain | 1.043 | 1.024 to 1.062 | ≤ 1.03 | met |  |  |
|  |  |  | DDP | 0.995 | 0.990 to 1.000 | ≤ 1 | met | 0.950 | met |
| zero1 | 33.55 | 9,578 | DDP | 1.100 | 1.100 to 1.100 | ≤ 1.03 | NOT met |  |  |
|  |  |  | DDP+ZRO | 1.100 | 1.100 to 1.100 |  |  | 1.002 | NOT met |
| ddp+capture | 30.00 |  |  |  |  |  |  |  |  |

| a snapshot each 10 steps | stops a step for, ms | wanted |  |
|---|---|---|---|
| ddp | 58.0 | ≤ 2 | NOT met |

| two ranks that share the GPU | ddp | zero2 | wanted |  |
|---|---|---|---|---|
| SIGKILL to a worker: next step after | 0.61 s | 0.65 s, 12 steps again | ≤ 0.70 s | met |
| SIGKILL to a node: next step after | 0.60 s | 2.40 s, 5 steps again | ≤ 0.70 s | NOT met |
| drain: training pauses | 0.10 s | not measured | ≤ 0.13 s | NOT met |
| a node joins: training pauses | 1.64 s | not measured | ≤ 0.13 s | NOT met |

Not measured: recovery of zero2: its 24 s were over."""


def test_tables_have_ratios_verdicts_and_what_is_missing() -> None:
    from gpu_report import tables

    assert tables(document()) == TABLES


def test_a_rehearsal_has_no_verdict() -> None:
    from gpu_report import tables

    text = tables(document("cpu"))
    assert "met |" not in text and "two ranks that share the CPU" in text


def test_nothing_measured_is_said_and_breaks_nothing() -> None:
    from gpu_report import tables

    nothing: dict[str, Any] = {key: {} for key in ("turns", "peak_bytes", "recovery")}
    missing = {"steps": "its 9 s were over"}
    text = tables(nothing | {"device": "cuda", "missing": missing})
    assert text == "Not measured: steps: its 9 s were over."


def test_a_contender_that_left_early_is_compared_by_the_turns_it_had() -> None:
    from gpu_report import steps_table

    cut = document()
    cut["turns"]["ddp"].pop()
    assert "| DDP | 0.990 | 0.990 to 0.990 |" in steps_table(cut)


def test_a_turn_leaves_out_the_steps_in_which_memory_settles() -> None:
    from gpu_report import SETTLING_STEPS, turn

    steps = [9.0] * SETTLING_STEPS + [1.0, 2.0, 6.0]
    assert turn(steps) == {"median_s": 2.0, "mean_s": 3.0, "longest_s": 6.0}


def test_a_rehearsal_is_not_recorded(tmp_path: Path) -> None:
    from gpu import record

    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(document("cpu")))
    with pytest.raises(SystemExit, match="rehearsal"):
        record(path)


def test_files_of_a_gpu_are_recorded_with_their_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark's file gives its page the tables; that of the tests is kept as it is."""
    import gpu

    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    (tmp_path / "gpu.md").write_text("<!-- gpu: generated -->\n<!-- gpu: end -->\n")
    machine = {"processor": "P", "cores": 16, "memory_bytes": 8 << 30, "gpu": "H", "kernel": "6"}
    about = {"date": "2026-11-30", "commit": "abc", "machine": {**machine, "torch": "2.11"}}
    path = tmp_path / "file.json"
    for document_of in (document() | {"command": "python"}, {"tests": {}, "device": "cuda"}):
        path.write_text(json.dumps(document_of | about))
        gpu.record(path)
    page = (tmp_path / "gpu.md").read_text()
    assert "2026-11-30, commit abc: P, 16 cores, 8 GiB, H, Linux 6, torch 2.11" in page
    assert TABLES in page
    for name in ("gpu", "gpu-tests"):
        assert json.loads((tmp_path / f"{name}-2026-11-30.json").read_text())["commit"] == "abc"


def test_a_time_limit_ends_what_runs_and_nothing_after_it() -> None:
    import signal
    import time

    from gpu import TimeUpError, time_limit

    with pytest.raises(TimeUpError, match="its 0 s were over"), time_limit(0.01):
        time.sleep(30.0)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
