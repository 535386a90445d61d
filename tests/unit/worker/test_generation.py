"""What a generation hands to the stop protocol."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from elasticzero.errors import UserError
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.session import Session
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
        stager=SimpleNamespace(settle=lambda: None),
    )
    generation.begin_training(Prepared(training=training, state_dict=dict))
    generation.tracker.move(lambda at: replace(at, condition=StepCondition.CLEAN, halved=4))
    state = generation._stop_state()
    assert (state.clean, state.save, state.halved) == (False, None, 4)


def test_a_next_beyond_the_end_of_a_loop_becomes_a_sentence() -> None:
    """`for step in range(10): batch = next(loop)` has fewer batches after a restore."""
    generation = Generation(AgentClient(None, STANDALONE))
    assert isinstance(generation.explained(StopIteration()), StopIteration)
    session = Session(generation)
    model, _ = session.prepare(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    samples: Any = [torch.ones(1)] * 2
    loop = session.batches(samples, global_batch=2, steps=1)
    session.backward(model(next(loop)).mean())
    assert isinstance(generation.explained(StopIteration()), StopIteration)
    session.step()
    try:
        next(loop)
    except StopIteration as error:
        explained = generation.explained(error)
        assert isinstance(explained, UserError) and "session.step_count" in str(explained)
    else:
        raise AssertionError("the loop went on")
