"""Which of the deliberately broken rules of `tests/simulation/mutants.py` the simulator finds, and
after how many schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, edited, hunt
from tests.simulation.mutants_of_changes import MUTANTS_OF_CHANGES
from tests.simulation.mutants_of_ends import MUTANTS_OF_ENDS
from tests.simulation.mutants_of_rounds import MUTANTS_OF_ROUNDS

ALL = (*MUTANTS, *MUTANTS_OF_CHANGES, *MUTANTS_OF_ENDS, *MUTANTS_OF_ROUNDS)
SEEDS = 3_000
TIMEOUT_S = 600.0
NOTHING = "none broke a rule"


def test_each_edit_of_a_mutant_compiles() -> None:
    for mutant in ALL:
        for file, text in edited(mutant).items():
            compile(text, file, "exec")


@pytest.mark.chaos
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_simulator_finds_a_mutant(mutant: Mutant, tmp_path: Path) -> None:
    verdict = hunt(mutant, tmp_path, first=0, count=SEEDS, timeout_s=TIMEOUT_S)
    print(f"{mutant.name}: {verdict}")
    assert "schedules: " in verdict, verdict
    if NOTHING in verdict and mutant.unfound:
        pytest.xfail(mutant.unfound)
    assert NOTHING not in verdict, verdict
