"""Environment variables whose names are nearly those of options."""

from __future__ import annotations

import pytest

from elasticzero.launcher.options.spelling import OTHERS, meant_variable
from elasticzero.launcher.options.table import RUN_OPTIONS


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ELASTICZERO_CHECKPONT_EVERY", "ELASTICZERO_CHECKPOINT_EVERY"),
        ("ELASTICZERO_STRATEGYY", "ELASTICZERO_STRATEGY"),
        ("ELASTICZERO_NODES_NAME", "ELASTICZERO_NODE_NAME"),
    ],
)
def test_a_misspelt_variable_has_the_nearest_option(variable: str, meant: str) -> None:
    assert meant_variable(variable, RUN_OPTIONS) == f"; did you mean {meant}?"


def test_other_variables_have_none() -> None:
    names = [name for option in RUN_OPTIONS for name in option.variables]
    for variable in (*names, *OTHERS, "CHECKPONT_EVERY", "ELASTICZERO_OF_MY_OWN", "PATH"):
        assert meant_variable(variable, RUN_OPTIONS) == "", variable
