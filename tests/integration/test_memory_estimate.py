"""What `elasticzero plan` computes is what a rank's tensors take, within 5 %."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero import memory_estimate
from elasticzero.memory_estimate import LineUp, ModelSize, rank_memory
from elasticzero.spans import STRATEGIES
from tests.integration.training_harness import Pool

SCRIPT = Path(__file__).parent / "training_memory.py"
LAYER = 256 * 256 + 256
BUCKET_BYTES = 1 << 19
RANKS = 2


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_estimate_is_what_tensors_take(
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    dtype: str,
    element_bytes: int,
) -> None:
    """Two ranks, two micro-batches a step; buckets are small, so that the pool is too."""
    monkeypatch.setattr(memory_estimate, "FLAT_BUCKET_BYTES", BUCKET_BYTES)
    told = {"strategy": strategy, "dtype": dtype, "micro": 1, "bucket_bytes": BUCKET_BYTES}
    running = pool.start(
        SCRIPT, [json.dumps({**told, "out": str(tmp_path / "peak")})], RANKS, snapshot_every=0
    )
    running.finish()
    model = ModelSize(
        elements=24 * LAYER, element_bytes=element_bytes, largest=256 * 256, layer=LAYER
    )
    line_up = LineUp(nodes=RANKS, ranks_per_node=1, direct=True)
    expected = rank_memory(strategy, model, 2, line_up).total
    for rank in range(RANKS):
        measured = json.loads((tmp_path / f"peak-{rank}").read_text())
        assert measured == pytest.approx(expected, rel=0.05), measured / expected
