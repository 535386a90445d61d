"""Collectives of NCCL that are aborted: two ranks on one GPU."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
RANK = Path(__file__).parent / "rank.py"
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("other", ["waits", "dies"])
def test_a_collective_that_was_aborted_is_not_taken_for_done(other: str) -> None:
    """NCCL says that it is over, though what it gave is not the sum; `verify_collectives` tells. A
    peer that dies is noticed without anybody's word."""
    port = free_port()
    words = [json.dumps({"rank": rank, "port": port, "other": other}) for rank in (0, 1)]
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), word], stdout=subprocess.PIPE, text=True)
        for word in words
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
