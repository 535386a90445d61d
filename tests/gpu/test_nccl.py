"""Collectives of NCCL that are aborted: two ranks on one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
RANK = Path(__file__).parent / "rank.py"
PATIENCE_S = 60.0


@pytest.mark.parametrize("other", ["waits", "dies"])
def test_a_collective_that_was_aborted_is_not_taken_for_done(tmp_path: Path, other: str) -> None:
    """NCCL says that it is over, though what it gave is not the sum; `verify_collectives` tells. A
    peer that dies is noticed without anybody's word."""
    port_file = str(tmp_path / "port")
    arguments = [
        json.dumps({"rank": rank, "port_file": port_file, "other": other}) for rank in (0, 1)
    ]
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), word], stdout=subprocess.PIPE, text=True)
        for word in arguments
    ]
    try:
        told, _ = ranks[0].communicate(timeout=PATIENCE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    seen = json.loads(told.splitlines()[-1])
    assert "closed" in seen["error"]
    assert seen["took_s"] < PATIENCE_S / 4
    assert not seen["right"]
