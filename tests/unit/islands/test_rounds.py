"""How an island's parameters follow the rounds, with an agent that is played here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elasticzero.ipc.messages import Message
from elasticzero.ipc.rounds import (
    NONE,
    FragmentNews,
    IslandProgress,
    RoundNews,
    SamplesLeft,
    outer_name,
    sent_name,
)
from elasticzero.islands.elements import Elements
from elasticzero.islands.layout import fragments_of
from elasticzero.islands.progress import after_step
from elasticzero.islands.rounds import IslandRounds, Part
from elasticzero.options.diloco import DiLoCo
from elasticzero.state.model import LocalTensor

ELEMENTS = 40
INCARNATION = "i"


class Agent:
    """Plays the agent of an island, and the island's inner steps."""

    def __init__(self, folder: Path, settings: DiLoCo) -> None:
        self.folder = folder
        self.round_news: dict[int, RoundNews] = {}
        self.local_E = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.outer_E = torch.arange(ELEMENTS, dtype=torch.float64)
        self.round, self.progress = 0, NONE
        parameter = nn.Parameter(self.local_E)
        layouts = fragments_of({"w": parameter}, {}, 1)
        part = Part(least=lambda number: number, folder=folder, elements=self._elements)
        self.rounds = IslandRounds(self, part, settings, layouts)

    @contextmanager
    def _elements(self) -> Iterator[Elements]:
        whole = {"w": [LocalTensor(self.local_E)]}
        yield Elements(held=whole, written=whole)

    def send(self, message: Message) -> None: ...

    def check(self) -> None: ...

    def tell(self, settled: int, *, done: bool = False) -> None:
        """Tells the worker of the present round, whose outer parameters are written first."""
        path = self.folder / outer_name(0, self.round, str(self.round))
        path.write_bytes(self.outer_E.numpy().tobytes())
        news = FragmentNews(round=self.round, digest=str(self.round), called=False, settled=settled)
        version = max(self.round_news, default=0) + 1
        self.round_news[version] = RoundNews(
            version=version,
            incarnation=INCARNATION,
            fragments=(news,),
            claims=(),
            left=SamplesLeft(),
            none_left=done,
            done=done,
        )

    def step(self, change: float) -> None:
        """Makes an inner step."""
        self.local_E += change * torch.arange(1, ELEMENTS + 1)
        self.progress = after_step(self.progress, 1, 1, 1)

    def boundary(self, *, has_samples: bool = True) -> IslandProgress:
        self.progress = self.rounds.at_boundary(self.progress, has_samples=has_samples)
        return self.progress

    def sent_E(self) -> Tensor:
        number = self.progress.fragments[0].number
        return torch.from_numpy(
            np.fromfile(self.folder / sent_name(0, INCARNATION, number), np.float64)
        )

    def prepare(self, unit: float) -> Tensor:
        """Rounds the newest contribution as an agent does that encodes it; returns what is sent."""
        rounded_E = (self.sent_E() / unit).round() * unit
        path = self.folder / sent_name(0, INCARNATION, self.progress.fragments[0].number)
        path.write_bytes(rounded_E.numpy().tobytes())
        return rounded_E

    def close_round(self, sent_E: Tensor) -> None:
        """Averages with an island that has contributed the half of it."""
        self.outer_E = self.outer_E - 0.75 * sent_E
        self.round += 1


@pytest.mark.parametrize("steps_since", [0, 2], ids=["in time", "late"])
def test_what_rounding_leaves_out_comes_with_the_next_contribution(
    steps_since: int, tmp_path: Path
) -> None:
    agent = Agent(tmp_path, DiLoCo(every=3, wire="int8"))
    agent.tell(settled=0)
    agent.boundary()
    assert torch.equal(agent.local_E, agent.outer_E)
    made_E = torch.zeros(ELEMENTS, dtype=torch.float64)
    told_E = torch.zeros(ELEMENTS, dtype=torch.float64)
    for number in range(1, 8):
        steps = 3 if number == 1 else 3 - steps_since
        for _ in range(steps):
            agent.step(-0.01)
            made_E += -0.01 * torch.arange(1, ELEMENTS + 1)
            agent.boundary()
        assert agent.progress.fragments[0].number == number
        told_E -= agent.prepare(unit=0.5)
        for _ in range(steps_since):
            agent.step(-0.01)
            agent.boundary()
        off_E = (told_E - made_E).abs()
        assert off_E.max() <= 0.25 + 1e-9, "what is left out does not grow"
        agent.close_round(agent.sent_E())
        agent.tell(settled=number)
        agent.boundary()
        made_E += -0.01 * steps_since * torch.arange(1, ELEMENTS + 1)
    left_E = agent.local_E - agent.outer_E
    assert left_E.abs().max() > 0
    agent.step(-0.01)
    agent.tell(settled=7, done=True)
    agent.boundary(has_samples=False)  # contributes the rest
    agent.close_round(agent.prepare(unit=0.5))
    agent.tell(settled=8, done=True)
    agent.boundary(has_samples=False)
    assert agent.rounds.is_over(agent.progress)
    assert torch.equal(agent.local_E, agent.outer_E), "all islands end with the same"


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_round_without_the_contribution_that_waits_moves_parameters_alike(
    wire: str, tmp_path: Path
) -> None:
    """Whether the agent has rounded it meanwhile or not: ranks may see either."""
    ends = []
    for is_rounded in (False, True):
        folder = tmp_path / str(is_rounded)
        folder.mkdir()
        agent = Agent(folder, DiLoCo(every=2, wire=wire))
        agent.tell(settled=0)
        agent.boundary()
        for _ in range(2):
            agent.step(-0.013)
            agent.boundary()
        before_E = agent.local_E.clone()
        if is_rounded:
            agent.prepare(unit=0.5)
        agent.close_round(torch.ones(ELEMENTS, dtype=torch.float64))
        agent.tell(settled=0)
        agent.boundary()
        assert agent.progress.fragments[0].sent is not None
        assert agent.progress.fragments[0].base == 1
        assert torch.allclose(agent.local_E, before_E - 0.75), "its own steps stay"
        ends.append(agent.local_E.clone())
    assert torch.equal(*ends)


def test_without_rounding_parameters_are_the_outer_ones_after_a_round(tmp_path: Path) -> None:
    agent = Agent(tmp_path, DiLoCo(every=2))
    agent.tell(settled=0)
    agent.boundary()
    for number in (1, 2, 3):
        for _ in range(2):
            agent.step(-0.1)
            agent.boundary()
        agent.close_round(agent.sent_E())
        agent.tell(settled=number)
        agent.boundary()
        assert torch.equal(agent.local_E, agent.outer_E)
    assert agent.progress == replace(agent.progress, incarnation=INCARNATION)
