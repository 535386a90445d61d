"""Collectives of NCCL that are aborted, and groups that are connected beside others: two ranks on
one GPU. Without a GPU the second uses gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
PATIENCE_S = 60.0


def told_by_rank_0(script: str, folder: Path, **arguments: str) -> dict[str, Any]:
    """Has two ranks run a script of this folder, and returns what rank 0 prints."""
    port_file = str(folder / "port")
    told = [json.dumps({"rank": rank, "port_file": port_file} | arguments) for rank in (0, 1)]
    command = [sys.executable, str(HERE / script)]
    ranks = [subprocess.Popen([*command, one], stdout=subprocess.PIPE, text=True) for one in told]
    try:
        printed, _ = ranks[0].communicate(timeout=PATIENCE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def test_groups_are_connected_and_entered_beside_running_collectives(tmp_path: Path) -> None:
    result = told_by_rank_0("beside.py", tmp_path)
    assert result["right"] and result["changed"]
    assert result["beside"] > 0, "no collective ran meanwhile"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("other", ["waits", "dies"])
def test_a_collective_that_was_aborted_is_not_taken_for_done(tmp_path: Path, other: str) -> None:
    """NCCL says that it is over, though what it gave is not the sum; `verify_collectives` tells. A
    peer that dies is noticed without anybody's word."""
    seen = told_by_rank_0("rank.py", tmp_path, other=other)
    assert "closed" in seen["error"]
    assert seen["took_s"] < PATIENCE_S / 4
    assert not seen["right"]
