"""Deliberately broken rules of how a job ends that has state in memory: see `mutants`."""

from __future__ import annotations

from tests.simulation.mutants import Mutant

MUTANTS_OF_ENDS = (
    Mutant(
        name="a job that is given up leaves its state in memory",
        file="protocol/termination.py",
        right="    if not only_in_memory(view, resume) or not view.can_save or",
        wrong="    if True or not view.can_save or",
    ),
    Mutant(
        name="a job ends though a node is away with a part of the last step",
        file="protocol/termination.py",
        right="    if cause is None or not away or",
        wrong="    if True or not away or",
    ),
    Mutant(
        name="the last save waits until all retention is over",
        file="../checkpoint/steps/retention.py",
        right="_Cause(save=committed, go_on=go_on)",
        wrong="_Cause(save=committed)",
        further=(
            (
                "../checkpoint/steps/retention.py",
                "            if not go_on():\n",
                "            if False:\n",
            ),
        ),
    ),
    Mutant(
        name="a snapshot is saved in one round alone, though that save was given up",
        file="agent/core.py",
        right="        self._saved_held = None  # it is given up",
        wrong="        # it is given up",
        unfound="A save must be given up in a round in which the same snapshot stays the newest, "
        "and be needed again: of 5,000 schedules one, with seed 3188, is such a one. test_core "
        "has the case.",
    ),
    Mutant(
        name="who must save is told once, whoever is lost since",
        file="protocol/regroup.py",
        right="if not ranks or (told and set(ranks) <= set(view.saved_ranks)):",
        wrong="if not ranks or told:",
    ),
    Mutant(
        name="a last checkpoint that was not written is let be",
        file="protocol/termination.py",
        right='    if cause is None or cause[1].blame != "storage":',
        wrong="    if True:",
    ),
)
