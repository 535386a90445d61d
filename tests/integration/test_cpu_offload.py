"""`cpu_offload` of zero3 changes where state lies, and no number; elsewhere it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from tests.integration.training_harness import Pool

SCRIPT = Path(__file__).parent / "training_offload.py"
TOLD = {"strategy": "zero3", "micro": 2, "clip": 0.5, "weighted": True}


def assert_same_state(a: Path, b: Path) -> None:
    """Model and optimizer, bit by bit."""
    loaded = (ez_checkpoint.load(a), ez_checkpoint.load(b))
    one, other = ({n: t for n, t in state.items() if n[:4] != "rng/"} for state in loaded)
    assert one.keys() == other.keys()
    assert any(name.startswith("optimizer/") for name in one)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_state_in_host_memory_is_the_same_through_faults_and_worlds(
    pool: Pool, tmp_path: Path, dtype: str
) -> None:
    """Two ranks, of which one is killed; one rank; three. Both runs go on from the same step."""
    for offload in ("none", "all"):
        folder = tmp_path / offload
        options: dict[str, Any] = {"checkpoint_dir": str(folder), "checkpoint_every": 2}
        told = TOLD | {"offload": offload, "dtype": dtype, "steps": 9}
        arguments = [json.dumps(told | {"die": [1, 5], "saved": str(folder)})]
        running = pool.start(SCRIPT, arguments, 2, generation=1, **options)
        running.until(running.ended)
        assert newest_good(open_directory(str(folder))) in (2, 4), running.logs()
        reached = 2
        for generation, (ranks, steps) in enumerate([(1, 9), (3, 13)], 2):
            resume = Resume(tier="storage", step=reached)
            places = options | {"generation": generation, "resume": resume}
            arguments = [json.dumps(told | {"steps": steps})]
            running = pool.start(SCRIPT, arguments, ranks, **places)
            assert running.finish() == steps
            reached = steps
    assert_same_state(tmp_path / "none", tmp_path / "all")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["none", "all"])
def test_a_checkpoint_loads_with_and_without_it(pool: Pool, tmp_path: Path, first: str) -> None:
    """The second half is trained the other way, by another number of ranks; or all the same."""
    halves = {"mixed": [first, "all" if first == "none" else "none"], "same": ["none", "none"]}
    for name, (before, after) in halves.items():
        worlds = [(2, TOLD | {"offload": before, "steps": 6})]
        worlds += [(3, TOLD | {"offload": after, "steps": 12})]
        pool.train_through(SCRIPT, tmp_path / name, worlds)
    assert_same_state(tmp_path / "mixed", tmp_path / "same")


@pytest.mark.parametrize("shard", ["world", "node"])
def test_auto_takes_zero3_which_copies_from_the_cpu(pool: Pool, tmp_path: Path, shard: str) -> None:
    """On the CPU there is nothing to pin."""
    told = TOLD | {"strategy": "auto", "offload": "all", "steps": 2, "fused": True}
    arguments = [json.dumps(told | {"found": str(tmp_path / "found")})]
    options: dict[str, Any] = {"row": 2, "shard": shard, "checkpoint_dir": str(tmp_path / "c")}
    running = pool.start(SCRIPT, arguments, 4 if shard == "node" else 2, **options)
    assert running.finish() == 2
    assert "--strategy auto takes zero3, which alone has cpu_offload" in running.logs()
    placement = json.loads((tmp_path / "found-0").read_text())
    assert placement["rows"] == placement["pieces"] == placement["state"] == ["cpu"]
    assert placement["copied"] and not placement["pinned"]


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        *(
            ({"strategy": name, "offload": "all"}, f"cpu_offload=True with strategy {name}, and")
            for name in ("ddp", "zero1", "zero2")
        ),
        ({"offload": "first"}, "has cpu_offload False, rank 0 on node0 has True"),
    ],
)
def test_it_is_refused_in_one_line(
    pool: Pool, tmp_path: Path, told: dict[str, Any], complaint: str
) -> None:
    arguments = [json.dumps(TOLD | {"steps": 1} | told)]
    running = pool.start(SCRIPT, arguments, 2)
    running.until(lambda: any(worker.all(Failed) for worker in running.workers))
    running.until(running.ended)
    messages = [failed.message for worker in running.workers for failed in worker.all(Failed)]
    assert any(complaint in message for message in messages), messages
