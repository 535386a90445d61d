"""Which runs a rehearsal makes, and what the workers of each do."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from elasticzero.ops.rehearse.runs import (
    FAULTS,
    MIN_STEPS,
    Run,
    can_happen,
    following,
    most_runs,
    undisturbed,
)
from elasticzero.rehearsal.plan import VARIABLE, Plan, read_plan


def runs_of(strategies: list[str], world: int, faults: tuple[str, ...] = FAULTS) -> list[Run]:
    made = []
    for number, strategy in enumerate(strategies):
        first = undisturbed(strategy, world, 12)
        made += [first, *following(first, faults, is_first=not number, half_parameters=False)]
    return made


def test_each_strategy_has_each_fault_and_the_first_one_the_controls() -> None:
    made = [(run.strategy, run.fault) for run in runs_of(["ddp", "zero2"], 2)]
    assert made == [
        ("ddp", "none"),
        ("ddp", "none again"),
        ("ddp", "nudged"),
        *(("ddp", fault) for fault in FAULTS),
        ("zero2", "none"),
        *(("zero2", fault) for fault in FAULTS),
    ]


@pytest.mark.parametrize("worlds", [[1], [2], [1, 3], [2, 3, 4]])
def test_the_number_of_runs_is_known_before(worlds: list[int]) -> None:
    strategies = ["ddp", "zero1", "zero3"]
    made = list(chain.from_iterable(runs_of(strategies, world) for world in worlds))
    assert len(made) == most_runs(strategies, worlds, FAULTS)


def test_the_only_node_of_a_world_does_not_leave() -> None:
    assert not can_happen("kill-node", 1)
    assert not can_happen("drain", 1)
    assert {run.fault for run in runs_of(["ddp"], 1)} >= {"kill-worker", "join"}


def test_16_bit_parameters_have_a_nudged_run_in_each_strategy() -> None:
    first = undisturbed("zero1", 2, 12)
    names = [run.fault for run in following(first, (), is_first=False, half_parameters=True)]
    assert names == ["nudged"]


@pytest.mark.parametrize("steps", [MIN_STEPS, 5, 12])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_comes_between_steps(fault: str, steps: int) -> None:
    """The ranks agree on a drain and on a join one step before the generation ends."""
    run = Run(strategy="ddp", fault=fault, world=2, steps=steps)
    plan = run.plan("d")
    assert plan.hold_step is not None
    assert 1 <= plan.hold_step <= run.fault_step <= steps - 2
    assert run.fault_step - plan.hold_step == (fault in ("drain", "join"))
    assert plan.kill_rank == (1 if fault == "kill-worker" else None)
    assert plan.nudge_step is None


@pytest.mark.parametrize("name", ["none", "none again", "nudged"])
def test_nothing_is_waited_for_in_a_run_without_a_fault(name: str) -> None:
    run = Run(strategy="ddp", fault=name, world=2, steps=12)
    plan = run.plan("d")
    assert plan.hold_step is None
    assert plan.nudge_step == (6 if name == "nudged" else None)


def test_workers_read_the_plan_that_the_environment_names(tmp_path: Path) -> None:
    plan = Plan(directory=str(tmp_path), steps=9, hold_step=4, kill_rank=1)
    plan.write(tmp_path / "plan.json")
    assert read_plan({VARIABLE: str(tmp_path / "plan.json")}) == plan
    assert json.loads((tmp_path / "plan.json").read_text())["nudge_step"] is None


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}])
def test_without_the_variable_there_is_no_plan(environment: dict[str, str]) -> None:
    assert read_plan(environment) is None
