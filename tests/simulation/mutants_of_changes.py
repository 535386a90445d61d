"""Deliberately broken rules of changes inside the workers' loops: see `mutants`."""

from __future__ import annotations

from tests.simulation.mutants import Mutant

MUTANTS_OF_CHANGES = (
    Mutant(
        name="a world has another proposal once its first is withdrawn",
        file="protocol/planned/proposal.py",
        right="return view.proposal is None and view.workers.prepared is None",
        wrong="return not is_open(view)",
    ),
    Mutant(
        name="a world that workers have entered is written over an alarm",
        file="agent/store_writer.py",
        right='        if action.world.resume.tier == "live":\n',
        wrong="        if False:\n",
    ),
    Mutant(
        name="a world from a round takes the token of a proposal",
        file="agent/store_writer.py",
        right="            self._cluster.spend_token()\n",
        wrong="",
    ),
    Mutant(
        name="workers that have entered a world are started in it",
        file="protocol/decide.py",
        right="        if enters(view, world):\n",
        wrong="        if False:\n",
        further=(
            (
                "protocol/decide.py",
                '        if world.resume.tier == "live":\n',
                "        if False:\n",
            ),
        ),
    ),
    Mutant(
        name="snapshots of a generation that workers have entered do not count",
        file="protocol/resume.py",
        right="if report.switched and generation == world.generation + 1:",
        wrong="if False:",
    ),
    Mutant(
        name="the number of a generation that workers have entered is given again",
        file="protocol/regroup.py",
        right="entered = world.generation + 1 if switched else 0",
        wrong="entered = 0",
    ),
    Mutant(
        name="a node that has left inside the others' loops opens a round",
        file="agent/observer.py",
        right='workers.at_boundary and workers.switched != "left"',
        wrong="workers.at_boundary",
    ),
    Mutant(
        name="a node that was left behind waits for a world that nobody is left to write",
        file="protocol/planned/switch.py",
        right="        if all(node in missing and",
        wrong="        if False and all(node in missing and",
    ),
    Mutant(
        name="workers are killed before the others have come to the boundary",
        file="protocol/decide.py",
        right="workers.running and leaves(view, world) and not",
        wrong='workers.running and workers.switched == "left" and not',
    ),
)
