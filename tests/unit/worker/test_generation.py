"""What a generation hands to the stop protocol."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.training.preparation import Prepared
from elasticzero.training.step_machine import StepCondition
from elasticzero.worker.generation import Generation


def test_half_a_micro_batch_is_known_without_a_state_to_save() -> None:
    """A divided state cannot be kept while a snapshot is on its way to another node."""
    generation = Generation(AgentClient(None, STANDALONE))
    training: Any = SimpleNamespace(
        copy=object(),
        can_stop_with_state=lambda: False,
        step=3,
        strategy=SimpleNamespace(shards=2),
        snapshot=lambda: None,
    )
    generation.begin_training(Prepared(training=training, state_dict=dict))
    generation.tracker.move(lambda at: replace(at, condition=StepCondition.CLEAN, halved=4))
    state = generation._stop_state()
    assert (state.clean, state.save, state.halved) == (False, None, 4)
