"""`cpu_offload` of zero3 on a GPU: two ranks, whose state lies in host memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from tests.integration import training_offload
from tests.integration.training_harness import Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SCRIPT = Path(training_offload.__file__)
TOLD = {"strategy": "zero3", "micro": 2, "clip": 0.5, "weighted": True}
PATIENCE_S = 100.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


def trained(pool: Pool, folder: Path, told: dict[str, Any]) -> dict[str, Tensor]:
    """The state after worlds of 2 and 1, of which the second begins from the first one's file."""
    resume = Resume(tier="fresh")
    for generation, (ranks, steps) in enumerate([(2, 6), (1, 9)], 1):
        running = pool.start(
            SCRIPT,
            [json.dumps(TOLD | told | {"steps": steps, "found": str(folder.parent / folder.name)})],
            ranks,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(folder),
        )
        assert running.finish(PATIENCE_S) == steps
        resume = Resume(tier="storage", step=steps)
    return ez_checkpoint.load(folder)


@pytest.mark.parametrize(
    ("dtype", "fused", "tolerance"),
    [("float64", False, 1e-9), ("float64", True, 1e-9), ("bfloat16", False, 2e-2)],
)
def test_state_in_host_memory_gives_the_same_weights(
    pool: Pool, tmp_path: Path, dtype: str, fused: bool, tolerance: float
) -> None:
    """The optimizer steps on the CPU, which rounds otherwise than the GPU. 0-dim parameters stay on
    the GPU, and a copy of them is stepped."""
    told = {"dtype": dtype, "fused": fused}
    plain = trained(pool, tmp_path / "plain", told | {"offload": "none"})
    offloaded = trained(pool, tmp_path / "own", told | {"offload": "all"})
    assert plain.keys() == offloaded.keys()
    for name in plain:
        if name.startswith(("model/", "optimizer/")):
            difference = (plain[name].double() - offloaded[name].double()).abs().max().item()
            assert difference <= tolerance, (name, difference)
    places = json.loads((tmp_path / "own-0").read_text())
    assert places["rows"] == places["pieces"] == places["state"] == ["cpu"]
    assert places["whole"] == ["cuda"] and places["pinned"] and places["copied"]
    places = json.loads((tmp_path / "plain-0").read_text())
    assert places["rows"] == places["pieces"] == ["cuda"] and not places["copied"]


def test_mirrors_cannot_be_had_with_it(pool: Pool, tmp_path: Path) -> None:
    arguments = [json.dumps(TOLD | {"offload": "all", "steps": 1})]
    running = pool.start(SCRIPT, arguments, 2, mirrors=(1,), mirrored_by=1)
    running.until(lambda: any(worker.all(Failed) for worker in running.workers), PATIENCE_S)
    running.until(running.ended, PATIENCE_S)
    messages = [failed.message for worker in running.workers for failed in worker.all(Failed)]
    assert any("mirrors of --redundancy mirror" in message for message in messages), messages
