"""torchao's 8-bit, 4-bit and float8 optimizers train as in one process, through faults and worlds.

`make integrations` runs these in an environment that has torchao. The optimizers compile their step
with a C++ compiler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointMismatch
from elasticzero.ipc.assignment import Resume
from elasticzero.parallel import Setting, create
from elasticzero.snapshots.restore import restore_state
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import NamedModel
from tests.integration.clusters import elasticzero
from tests.integration.training_harness import Pool
from tests.integrations.torchao_runs import (
    MARKS,
    PACKED,
    PATIENCE_S,
    SCRIPT,
    STEPS,
    assert_close,
    assert_equal,
    plain,
    run,
    state_in,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def pool(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        *((strategy, "AdamW8bit") for strategy in ("ddp", "zero1", "zero2")),
        ("zero1", "Adam8bit"),
        ("zero2", "AdamW4bit"),
        ("ddp", "AdamWFp8"),
    ],
)
def test_two_ranks_train_as_one_process(
    pool: Pool, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """Bit by bit, since the sum of two halves has one order."""
    told = {"strategy": strategy, "optimizer": optimizer, "steps": STEPS}
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "c"), "verify_every": 4}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, generation=1, **options)
    assert running.finish(PATIENCE_S) == STEPS
    expected = plain(tmp_path, optimizer)
    packed = {name for name in expected if name.endswith(".codes")}
    keys = ("exp_avg.codes", "exp_avg_sq.codes")
    assert packed == {f"optimizer/{name}/{key}" for name in PACKED for key in keys}
    assert_equal(state_in(tmp_path / "c"), expected)


def test_training_goes_on_in_other_worlds_with_other_strategies(pool: Pool, tmp_path: Path) -> None:
    told = {"optimizer": "AdamW8bit"}
    worlds = ((3, "zero2", 9), (2, "ddp", 16), (1, "zero1", 23), (2, "zero1", STEPS))
    resume = Resume(tier="fresh")
    for generation, (world_size, strategy, steps) in enumerate(worlds, 1):
        running = pool.start(
            SCRIPT,
            [json.dumps(told | {"strategy": strategy, "steps": steps})],
            world_size,
            generation=generation,
            resume=resume,
            checkpoint_dir=str(tmp_path / "c"),
        )
        assert running.finish(PATIENCE_S) == steps
        resume = Resume(tier="storage", step=steps)
    assert_close(state_in(tmp_path / "c"), plain(tmp_path, "AdamW8bit"))


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_state_of_two_ranks_of_zero2_is_the_same_in_ddp_on_one(
    pool: Pool, tmp_path: Path, optimizer: str
) -> None:
    """Bit by bit; and an optimizer that packs in another way does not take it."""
    from tests.integrations import training_torchao

    told = {"strategy": "zero2", "optimizer": optimizer, "steps": 5}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, checkpoint_dir=str(tmp_path))
    assert running.finish(PATIENCE_S) == 5
    [step] = tmp_path.glob("step-*")
    stored = {n: t for n, t in state_in(step).items() if n.startswith("optimizer/")}

    def restored(kind: str) -> dict[str, Tensor]:
        model = training_torchao.Model()
        strategy = create(
            "ddp",
            Setting(
                model=model,
                named=NamedModel(model),
                factory=lambda parameters: training_torchao.optimizer_of(kind, parameters),
                device=torch.device("cpu"),
                rank=0,
                world_size=1,
            ),
        )
        small = AuxiliaryState(torch.device("cpu"), groups=strategy.optimizers.groups)
        scheduler = training_torchao.schedule_of(strategy.optimizers.as_made)
        small.track("scheduler", scheduler)
        restore_state(open_step(DiskStorage(step)), strategy, small, 0)
        made = strategy.optimizers.as_made
        kept = made.state[strategy.model.get_parameter("first.weight")]["exp_avg"]
        assert type(kept).__name__.startswith("OptimState") and kept.shape == (64, 64)
        assert made.param_groups[0]["lr"].item() == pytest.approx(0.01)
        return {name: held.tensor for name, held in strategy.rank_state().held.items()}

    state = restored(optimizer)
    assert_equal({name: t for name, t in state.items() if name.startswith("optimizer/")}, stored)
    other = "AdamW8bit" if optimizer == "AdamW4bit" else "AdamW4bit"
    with pytest.raises(CheckpointMismatch):
        restored(other)


def test_the_tools_take_packed_state_as_any_other(pool: Pool, tmp_path: Path) -> None:
    told = {"strategy": "zero2", "optimizer": "AdamW8bit", "steps": 6}
    options: dict[str, Any] = {"generation": 1, "checkpoint_dir": str(tmp_path / "c")}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, **options)
    assert running.finish(PATIENCE_S) == 6
    for arguments in (
        ("verify", str(tmp_path / "c")),
        ("reshard", str(tmp_path / "c"), str(tmp_path / "r"), "--world-size", "3"),
        ("verify", str(tmp_path / "r")),
        ("diff", str(tmp_path / "c"), str(tmp_path / "r")),
        ("export", str(tmp_path / "c"), str(tmp_path / "hf"), "--format", "hf"),
    ):
        completed = run(elasticzero("checkpoint", *arguments))
        assert completed.returncode == 0, (arguments, completed.stdout + completed.stderr)
    options |= {"generation": 2, "resume": Resume(tier="storage", step=6)}
    options["checkpoint_dir"] = str(tmp_path / "r")
    told |= {"steps": STEPS, "strategy": "ddp"}
    running = pool.start(SCRIPT, [json.dumps(told)], 2, **options)
    assert running.finish(PATIENCE_S) == STEPS
    assert_equal(state_in(tmp_path / "r"), plain(tmp_path, "AdamW8bit"))


def test_zero3_refuses_packed_state_in_a_sentence() -> None:
    told = {"strategy": "zero3", "optimizer": "AdamW8bit", "steps": 2}
    completed = run([sys.executable, str(SCRIPT), json.dumps(told)])
    assert completed.returncode == 64
    last = completed.stderr.splitlines()[-1]
    assert last.startswith("error: AdamW8bit keeps packed state, with a scale for each block")
    assert "use zero1 or zero2, which give it whole parameters" in last
