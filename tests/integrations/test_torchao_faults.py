"""torchao's optimizers keep their state through killed workers and other worlds."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.launcher.observability.lineage import Lineage
from tests.integration.clusters import elasticzero, events_in
from tests.integrations.torchao_runs import (
    MARKS,
    SCRIPT,
    STEPS,
    assert_close,
    assert_equal,
    run,
    state_in,
)

pytestmark = MARKS


def trained(folder: Path, told: dict[str, Any], *arguments: str) -> dict[str, Tensor]:
    """The weights and the optimizer's state after a job of `elasticzero local`."""
    job = f"torchao-{secrets.token_hex(4)}"
    options = ["--job", job, "--log-dir", str(folder / "logs"), "--checkpoint-every", "10"]
    options += ["--checkpoint-dir", str(folder / "c"), *arguments]
    completed = run(elasticzero("local", *options, str(SCRIPT), json.dumps(told)))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return state_in(folder / "c")


@pytest.mark.parametrize(
    ("strategy", "faults", "options"),
    [
        ("zero2", ("kill-worker@8", "kill-node@18"), ("--deterministic",)),
        ("ddp", ("kill-worker@8", "drain@18"), ("--deterministic",)),
        ("zero1", ("kill-node@12",), ("--redundancy", "mirror", "--snapshot-every", "1000")),
    ],
)
def test_a_killed_worker_and_a_change_of_world_change_nothing(
    tmp_path: Path, strategy: str, faults: Sequence[str], options: Sequence[str]
) -> None:
    """With sums in one fixed order, bit by bit; a mirror has the state of the lost node."""
    told: dict[str, Any] = {"optimizer": "AdamW8bit", "steps": STEPS, "pause": 0.1, "clip": 0.5}
    if "--deterministic" in options:
        told["virtual"] = 3
    arguments = ["--nodes", "3", "--strategy", strategy, "--verify-replicas", "3", *options]
    disturbed = [word for fault in faults for word in ("--fault", fault)]
    expected = trained(tmp_path / "a", told | {"pause": 0.0}, *arguments)
    state = trained(tmp_path / "b", told, *arguments, *disturbed)
    lineage = Lineage()
    [logs] = (tmp_path / "b" / "logs").iterdir()
    for event in events_in(logs):
        lineage.take(event)
    assert len(lineage.resume_steps) == len(faults) + 1
    if "mirror" in options:
        assert lineage.recomputed == 0
        assert_close(state, expected)
    else:
        assert_equal(state, expected)
