"""What modules keep besides parameters, through a killed worker and other worlds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.assignment import Resume
from tests.integration.training_harness import Pool
from tests.integration.training_modules import (
    GLOBAL_BATCH,
    SAMPLES,
    Model,
    Samples,
    loss_of,
    state_of,
)
from tests.support.cases import drawn

HERE = Path(__file__).parent
STEPS = 14


def plain(steps: int) -> dict[str, Any]:
    """The state after a loop without any of this project's training code."""
    torch.manual_seed(3)
    model, samples = Model(), Samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        first = step * GLOBAL_BATCH % SAMPLES
        batch = default_collate([samples[i] for i in range(first, first + GLOBAL_BATCH)])
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return json.loads(json.dumps(state_of(model, dict(model.state_dict()))))  # type: ignore[no-any-return]


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    """Numbers to 1e-9; all else exactly, with the order of names."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), path
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_equal(actual[index], value, f"{path}/{index}")
    else:
        assert actual == pytest.approx(expected, abs=1e-9), path


@pytest.mark.parametrize("strategy", drawn("ddp", "zero3"))
def test_every_kind_of_module_state_is_that_of_one_plain_process(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Two ranks, of which one is killed; three, from the checkpoint; then one."""
    folder = str(tmp_path / "checkpoints")
    options: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 2}
    told: dict[str, Any] = {"strategy": strategy, "steps": 30, "die": [1, 5], "saved": folder}
    script = HERE / "training_modules.py"
    running = pool.start(script, [json.dumps(told)], 2, generation=1, **options)
    running.until(running.ended)
    step = newest_good(open_directory(folder))
    assert step is not None, running.logs()
    resume = Resume(tier="storage", step=step)
    for generation, (ranks, until) in enumerate([(3, 9), (1, STEPS)], 2):
        told = {"strategy": strategy, "steps": until, "out": str(tmp_path / "out")}
        place = {"generation": generation, "resume": resume, **options}
        running = pool.start(script, [json.dumps(told)], ranks, **place)
        assert running.finish() == until, running.logs()
        assert_equal(json.loads((tmp_path / "out").read_text()), plain(until))
        resume = Resume(tier="storage", step=until)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_an_average_of_a_network_with_batch_statistics_is_the_same_on_all_ranks(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """Each step is verified; ranks have other statistics until they take those of rank 0."""
    told = {"strategy": strategy, "steps": 9, "body": "average"}
    running = pool.start(
        HERE / "training_modules.py",
        [json.dumps(told)],
        2,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        verify_every=1,
    )
    assert running.finish() == 9, running.logs()


@pytest.mark.parametrize("steps", [6, 8, 10])
def test_what_is_drawn_before_the_loop_changes_nothing_after_it(
    pool: Pool, tmp_path: Path, steps: int
) -> None:
    """The first run ends within an epoch, at the end of one, and after all steps."""
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints")}
    told = {"strategy": "ddp", "body": "noise", "steps": 10, "out": str(tmp_path / "out")}
    alone = json.dumps(told | {"out": str(tmp_path / "alone")})
    place = {"checkpoint_dir": str(tmp_path / "alone-checkpoints")}
    assert pool.start(HERE / "training_modules.py", [alone], 1, **place).finish() == 10
    first = json.dumps(told | {"steps": steps})
    pool.start(HERE / "training_modules.py", [first], 1, generation=1, **options).finish()
    resume = Resume(tier="storage", step=steps)
    second = pool.start(
        HERE / "training_modules.py", [json.dumps(told)], 1, generation=2, resume=resume, **options
    )
    assert second.finish() == 10, second.logs()
    assert (tmp_path / "out").read_text() == (tmp_path / "alone").read_text()
