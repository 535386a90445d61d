"""NaN and infinity are said with step and rank, and never replace the last finite state."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.failure import Failed
from elasticzero.spans import STRATEGIES
from tests.integration.training_harness import Pool

SCRIPT = Path(__file__).parent / "training_nonfinite.py"


def run(pool: Pool, folder: Path, told: dict[str, Any], **options: Any) -> list[str]:
    """What the two workers of a training say of their failures; they end, or wait for their agents
    to end them."""
    line = json.dumps({"steps": 20} | told)
    running = pool.start(SCRIPT, [line], 2, checkpoint_dir=str(folder), **options)

    def final_failures() -> list[Failed]:
        failures = [failed for worker in running.workers for failed in worker.all(Failed)]
        return [failed for failed in failures if failed.blame != "peer"]

    running.until(lambda: running.ended() or bool(final_failures()))
    with suppress(AssertionError):
        running.until(running.ended, 2.0)
    running.kill()
    assert final_failures() and all(failed.final for failed in final_failures()), running.logs()
    return [failed.message for failed in final_failures()]


def assert_finite(folder: Path) -> None:
    """The newest good checkpoint is finite but for what may be otherwise."""
    state = ez_checkpoint.load(folder)
    assert state.pop("model/mask").isinf().all() and state.pop("model/frozen").isnan().all()
    assert all(torch.isfinite(t).all() for t in state.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("wrong", "what"),
    [("loss", "the loss on rank 1"), ("gradient", "the gradient of 'first.")],
)
def test_the_state_before_a_bad_gradient_or_loss_is_saved(
    pool: Pool, tmp_path: Path, strategy: str, wrong: str, what: str
) -> None:
    """One rank's alone: all ranks stop before the step is applied, and say the same."""
    messages = run(pool, tmp_path, {"strategy": strategy, "wrong": wrong})
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("step 5 was not applied: NaN or infinity in "), message
        assert what in message, message
        assert f"the newest good checkpoint is that of step 4 in {tmp_path}" in message
    assert newest_good(open_directory(str(tmp_path))) == 4
    assert_finite(tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrong", ["lr", "state"])
def test_a_state_that_overflows_replaces_no_checkpoint(
    pool: Pool, tmp_path: Path, strategy: str, wrong: str
) -> None:
    """The optimizer's own step makes the state infinite, of one rank's shard alone or of all;
    `state` shows in no gradient. One rank alone would else be found by the replica guard."""
    told = {"strategy": strategy, "wrong": wrong}
    messages = run(pool, tmp_path, told, checkpoint_every=1, verify_every=0)
    matches = [re.search(r"state of step (\d+).* holds NaN or infinity in '", m) for m in messages]
    assert all(match and int(match[1]) >= 5 for match in matches), messages
    newest = newest_good(open_directory(str(tmp_path)))
    assert newest is not None and newest < 5
    assert all(f"the newest good checkpoint is that of step {newest} in" in m for m in messages)
    assert_finite(tmp_path)


def test_a_micro_batch_of_weight_zero_may_have_any_loss(pool: Pool, tmp_path: Path) -> None:
    """A mean over no tokens is NaN, and takes no part; here the weights of a batch are all zero."""
    messages = run(pool, tmp_path, {"strategy": "ddp", "wrong": "weightless"})
    assert any("the weights of a global batch sum to 0" in message for message in messages)


def test_one_process_saves_the_state_before_and_exits_with_70(tmp_path: Path) -> None:
    """`python train.py`: the exit code that says not to try again."""
    told = json.dumps({"strategy": "ddp", "wrong": "loss", "steps": 20})
    done = subprocess.run(
        [sys.executable, SCRIPT, told],
        env=os.environ | {"ELASTICZERO_CHECKPOINT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 70, done.stderr
    assert "error: step 5 was not applied: NaN or infinity in the loss on rank 0" in done.stderr
    assert "; --on-nonfinite skip leaves such batches out" in done.stderr
    assert newest_good(open_directory(str(tmp_path))) == 4
    assert_finite(tmp_path)
