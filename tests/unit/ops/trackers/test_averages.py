"""What nodes log becomes one row a step: complete, in order, once, and of one generation."""

from __future__ import annotations

import random

import pytest

from elasticzero.ipc.messages import Finished, Logged, Stepped
from elasticzero.launcher.workers.group import Ended
from elasticzero.ops.trackers import node_scalars
from elasticzero.ops.trackers.averages import Row, StepAverages, least
from elasticzero.ops.trackers.node_scalars import NodeScalars

RANKS = 2


def stepped(step: int) -> Stepped:
    return Stepped(step=step, at_s=0.0, step_s=0.1, data_wait_s=0.0, samples=1)


class Job:
    """A job of some nodes, and a leader that asks them at any time."""

    def __init__(self, nodes: int, dice: random.Random) -> None:
        self.dice = dice
        self.nodes = [NodeScalars(lambda: 1.0) for _ in range(nodes)]
        self.serials = [0] * nodes
        self.generation = 0
        self.world: list[int] = []
        self.steps: dict[int, int] = {}
        self.averages = StepAverages()
        self.rows: list[Row] = []
        self.worlds: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """Starts a generation on some of the nodes."""
        self.generation += 1
        self.averages.begin(self.generation, step)
        count = self.dice.randint(1, len(self.nodes))
        self.world = sorted(self.dice.sample(range(len(self.nodes)), count))
        self.worlds[self.generation] = RANKS * count
        self.steps = {}
        for index, node in enumerate(self.world):
            ranks = range(RANKS * index, RANKS * (index + 1))
            self.nodes[node].begin(self.generation, step, ranks)
            self.steps.update(dict.fromkeys(ranks, step))

    def advance(self, rank: int) -> None:
        """One rank makes its next step, and logs for it; no rank is two steps ahead."""
        step = self.steps[rank] + 1
        if step > min(self.steps.values()) + 1:
            return
        node = self.nodes[self.world[rank // RANKS]]
        self.steps[rank] = step
        node.received(rank, stepped(step))
        scalars = {"generation": self.generation, "tokens": 1.0}
        node.received(rank, Logged(step=step, scalars=scalars))

    def ask(self) -> None:
        """The leader asks all nodes of the world, and those that were in it before."""
        through: list[int | None] = []
        for index, node in enumerate(self.nodes):
            answer = node.since(self.serials[index])
            self.serials[index] = answer["serial"]
            self.averages.add(answer["rows"])
            if index in self.world:
                through.append(answer["through"])
        self.rows += self.averages.complete(least(through))

    def end_workers(self) -> None:
        for rank in self.steps:
            messages: list[Ended | Finished] = [Ended(-9), Finished(step=0)]
            message = self.dice.choice(messages)
            self.nodes[self.world[rank // RANKS]].received(rank, message)


@pytest.mark.parametrize("seed", range(300))
def test_each_step_is_given_once_with_the_values_of_all_ranks(seed: int) -> None:
    dice = random.Random(seed)
    job = Job(dice.randint(1, 4), dice)
    job.begin(0)
    for _ in range(dice.randint(0, 6)):
        for _ in range(dice.randint(1, 60)):
            job.advance(dice.choice(list(job.steps)))
            if dice.random() < 0.1:
                job.ask()
        # A worker is killed. What ranks did beyond the state that is left is done again.
        finished = min(job.steps.values())
        job.end_workers()
        job.begin(dice.randint(max(0, finished - 3), finished))
        if dice.random() < 0.5:
            job.ask()
    furthest = max((row.step for row in job.rows), default=0)
    while len(set(job.steps.values())) > 1 or min(job.steps.values()) <= furthest:
        job.advance(min(job.steps, key=lambda rank: job.steps[rank]))
    job.end_workers()
    job.ask()
    job.rows += job.averages.complete(None)
    assert [row.step for row in job.rows] == list(range(1, max(job.steps.values()) + 1))
    for row in job.rows:
        generation = row.scalars["generation"]
        assert generation == int(generation), "a row has the values of one generation"
        assert row.scalars["tokens"] == job.worlds[int(generation)], "those of all of its ranks"


def test_a_step_waits_for_the_slowest_rank_of_any_node() -> None:
    job = Job(1, random.Random(0))
    job.begin(0)
    job.advance(0)
    job.advance(1)
    job.advance(0)
    job.ask()
    assert job.rows == [], "rank 1 may still log for step 1"
    job.advance(1)
    job.ask()
    assert [row.step for row in job.rows] == [1]


def test_a_rank_that_logs_several_times_counts_with_each_value() -> None:
    node = NodeScalars(lambda: 5.0)
    node.begin(1, 0, [0, 1])
    for rank, loss in [(0, 1.0), (0, 3.0), (1, 8.0)]:
        node.received(rank, Logged(step=0, scalars={"loss": loss}))
    node.received(0, Logged(step=0, scalars={"lr": 0.5}))
    for rank in (0, 1):
        node.received(rank, stepped(1))
    averages = StepAverages()
    averages.add(node.since(0)["rows"])
    assert averages.complete(0) == [Row(0, 5.0, {"loss": 4.0, "lr": 0.5})]


def test_what_comes_after_a_step_was_given_is_dropped() -> None:
    averages = StepAverages()
    averages.add([[1, 4, 0.0, {"loss": [2.0, 1]}]])
    assert [row.step for row in averages.complete(4)] == [4]
    averages.add([[2, 4, 0.0, {"loss": [9.0, 1]}], [2, 5, 0.0, {"loss": [1.0, 1]}]])
    assert [row.step for row in averages.complete(None)] == [5]


def test_a_late_answer_of_an_earlier_generation_changes_nothing() -> None:
    averages = StepAverages()
    averages.add([[2, 4, 0.0, {"loss": [2.0, 1]}]])
    averages.add([[1, 4, 0.0, {"loss": [8.0, 1], "lr": [3.0, 3]}]])
    assert averages.complete(4) == [Row(4, 0.0, {"loss": 2.0, "lr": 1.0})]


def test_steps_that_are_done_again_count_as_done_again() -> None:
    averages = StepAverages()
    averages.begin(1, 0)
    averages.add([[1, step, 0.0, {"loss": [1.0, 1]}] for step in (3, 4, 5)])
    averages.begin(2, 3)
    averages.add([[1, 6, 0.0, {"loss": [1.0, 1]}], [2, 4, 0.0, {"loss": [2.0, 1]}]])
    assert [(r.step, r.scalars["loss"]) for r in averages.complete(None)] == [(3, 1.0), (4, 2.0)]


def test_answers_are_cut_and_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_scalars, "MOST_BYTES", 200)
    node = NodeScalars(lambda: 5.0)
    node.begin(1, 0, [0])
    for step in range(1, 31):
        node.received(0, stepped(step))
        node.received(0, Logged(step=step, scalars={"loss": float(step)}))
    node.received(0, Ended(0))
    steps: list[int] = []
    serial, has_more = 0, True
    while has_more:
        answer = node.since(serial)
        serial, has_more = answer["serial"], answer["more"]
        assert 1 <= len(answer["rows"]) < 30
        steps += [row[1] for row in answer["rows"]]
    assert steps == list(range(1, 31))


def test_entries_that_were_dropped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_scalars, "MOST_ENTRIES", 10)
    node = NodeScalars(lambda: 5.0)
    node.begin(1, 0, [0])
    for step in range(1, 26):
        node.received(0, stepped(step))
        node.received(0, Logged(step=step, scalars={"loss": float(step)}))
    node.received(0, Ended(0))
    answer = node.since(3)
    assert answer["left_out"] == 12
    assert [row[1] for row in answer["rows"]] == list(range(16, 26))
    assert node.since(25) == {**answer, "left_out": 0, "rows": []}
    assert len(node.since(99)["rows"]) == 10, "another incarnation's number: all is given"


def test_the_end_waits_until_a_leader_has_received_all() -> None:
    node = NodeScalars(lambda: 5.0)
    node.begin(1, 0, [0])
    node.received(0, Logged(step=0, scalars={"loss": 1.0}))
    node.answer(0)
    assert not node.drained.is_set(), "its worker may log more"
    node.received(0, Ended(0))
    assert not node.drained.is_set(), "the leader has not asked since"
    assert len(node.answer(0)["rows"]) == 1
    assert node.drained.is_set()
