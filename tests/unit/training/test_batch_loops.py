"""Loops of a script over its batches, in one process without an agent."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.ipc.messages import LoopExited, Message
from elasticzero.session import Session
from elasticzero.worker.generation import Generation

SAMPLES: Any = [torch.full((1,), float(number)) for number in range(12)]


class Link(AgentClient):
    """Keeps what an agent would be sent."""

    def __init__(self) -> None:
        super().__init__(None, STANDALONE)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


def test_a_loop_closed_late_leaves_the_loop_that_has_followed() -> None:
    """Python's garbage collector may close it in any thread, where a reference cycle has it."""
    link = Link()
    generation = Generation(link)
    session = Session(generation)
    model, _ = session.prepare(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    first, second = (session.batches(SAMPLES, global_batch=2, steps=3) for _ in range(2))
    session.backward(model(next(first)).mean())
    assert session.step()
    next(second)
    link.sent.clear()
    thread = threading.Thread(target=first.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert generation.tracker.now.in_loop, "Ctrl-C would end the process without a save"
    assert not link.sent, "the agent would take the script for one that has left its loop"
    second.close()  # type: ignore[attr-defined]
    assert not generation.tracker.now.in_loop
    assert link.sent == [LoopExited()]
