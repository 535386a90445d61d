"""The text of `--fault`, and when faults come: also in jobs whose ranks, nodes and generations are
drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.local.faults import (
    Fault,
    FaultPlan,
    Progress,
    WaitingRanks,
    check_nodes,
    in_order,
    is_due,
    most_nodes,
    parse_fault,
    steps_of,
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill-node@60", Fault("kill-node", 60)),
        ("kill-node:node-0@60", Fault("kill-node", 60, "node-0")),
        ("join@5", Fault("join", 5)),
        ("kill-node@30s", Fault("kill-node", None, after_s=30.0)),
        ("drain:node-1@2.5s", Fault("drain", None, "node-1", 2.5)),
        ("join@0s", Fault("join", None, after_s=0.0)),
    ],
)
def test_faults(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(fault.text) == fault


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kil-node@60", "one of kill-node, kill-worker, drain, join; did you mean kill-node?"),
        ("killnode@60", "did you mean kill-node?"),
        ("kill_worker@3", "did you mean kill-worker?"),
        ("Drain@3", "did you mean drain?"),
        ("melt@3", "WHAT@WHEN is expected, WHAT one of kill-node, kill-worker, drain, join"),
        ("@3", "WHAT@WHEN is expected"),
        ("", "WHAT@WHEN is expected"),
        ("kill-node", "it does not say when; kill-node@60 comes at step 60"),
        ("kill-node:node-0", "it does not say when"),
        ("kill-node@", "'' is no step and no time"),
        ("kill-node@x", "'x' is no step and no time; kill-node@60 comes at step 60, and"),
        ("kill-node@30sec", "did you mean 30s?"),
        ("kill-node@30 s", "did you mean 30s?"),
        ("kill-node@+60", "did you mean 60?"),
        ("kill-node@step60", "'step60' is no step and no time"),
        ("kill-node@1:30", "'1:30' is no step and no time"),
        ("kill-node@-3", "did you mean 3?"),
        ("kill-node:@60", "a node's name is expected after the colon, as in kill-node:node-0@60"),
        ("join:node-1@60", "a node that joins is a new one; write join@WHEN"),
        ("kill-node@60@70", "'60@70' is no step and no time"),
        ("a\nb@60", "WHAT@WHEN is expected"),
    ],
)
def test_bad_faults_name_what_is_meant(text: str, problem: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_fault(text)
    assert str(raised.value).startswith(f"--fault {text}: ")
    assert problem in str(raised.value)


def test_any_text_is_a_fault_or_refused() -> None:
    """No text ends in another error, and what is accepted says the same when it is written."""
    draw = random.Random(11)
    pieces = [*("kill-node", "drain", "join", ":", "@", "node-0", "6", "60", "s", "2.5", "-", " ")]
    for _ in range(5000):
        text = "".join(draw.choices(pieces, k=draw.randrange(6)))
        try:
            fault = parse_fault(text)
        except UserError as error:
            assert str(error).startswith(f"--fault {text}: ")
            continue
        assert parse_fault(fault.text) == fault


def test_a_node_that_is_not_there_is_named_with_the_nearest() -> None:
    check_nodes([parse_fault("kill-node:node-2@5"), parse_fault("join@5")], 2)
    with pytest.raises(UserError, match="are node-0, node-1; only a join brings more; did you"):
        check_nodes([parse_fault("kill-node:node-2@5")], 2)
    with pytest.raises(UserError, match=r"are node-0, node-1; only a join brings more$"):
        check_nodes([parse_fault("kill-node:x@5")], 2)


@pytest.mark.parametrize(
    ("nodes", "faults", "most"),
    [
        (3, [], 3),
        (3, ["kill-node@60", "join@110"], 3),
        (3, ["join@10"], 4),
        (2, ["join@30", "drain@20", "kill-worker@10"], 2),
        (2, ["join@30s", "drain@20s"], 2),
        (2, ["kill-node@1", "join@30s"], 3),  # nobody can know which comes first
        (2, ["join@1", "join@30s", "drain@31s"], 4),
    ],
)
def test_most_nodes(nodes: int, faults: list[str], most: int) -> None:
    assert most_nodes(nodes, [parse_fault(text) for text in faults]) == most


def test_faults_come_in_the_order_of_steps_and_of_times() -> None:
    faults = [parse_fault(f"join@{when}") for when in ("9", "2s", "3", "1.5s", "3", "20")]
    steps, times = in_order(faults)
    assert [fault.step for fault in steps] == [3, 3, 9, 20]
    assert [fault.after_s for fault in times] == [1.5, 2.0]
    assert list(steps_of(faults)) == [3, 9, 20]


def test_when_a_fault_is_due() -> None:
    at_step, at_time = parse_fault("kill-node@60"), parse_fault("kill-node@30s")
    assert not is_due(at_step, Progress(step=60, trained_s=100.0))  # some rank is on its way there
    assert is_due(at_step, Progress(step=60, waits_at=60))
    assert is_due(at_step, Progress(waits_at=75))  # training has begun behind it
    assert is_due(at_step, Progress(step=61))  # nobody has waited
    assert not is_due(at_step, Progress(step=59, waits_at=59))
    assert not is_due(at_time, Progress(step=1000, waits_at=1000))
    assert not is_due(at_time, Progress(trained_s=29.9))
    assert is_due(at_time, Progress(trained_s=30.0))


def test_a_generation_waits_once_all_of_its_ranks_do() -> None:
    waiting = WaitingRanks().with_rank((1, "a"), 0, 60).with_rank((1, "a"), 1, 60)
    assert waiting.waits_at(1, {"a": 2}) == 60
    assert waiting.waits_at(1, {"a": 3}) is None
    assert waiting.waits_at(1, {"a": 2, "b": None}) is None
    assert waiting.waits_at(1, {}) is None
    assert waiting.waits_at(2, {"a": 2}) is None
    assert waiting.without(59) == waiting
    assert waiting.without(60) == WaitingRanks()


@dataclass
class Job:
    """A job as the plan sees it: nodes with ranks that make steps, and wait as `FaultHold` does."""

    plan: FaultPlan
    steps: tuple[int, ...]
    nodes: dict[str, int]
    """The number of ranks of each node of the world."""
    generation: int = 1
    started: int = 0
    at: dict[tuple[str, int], int] = field(default_factory=dict)
    """The boundary at which each rank is, or waits."""
    waits: set[tuple[str, int]] = field(default_factory=set)
    struck: dict[str, int] = field(default_factory=dict)
    """Holds what each node's agent has been told last."""
    began_at: int = 0
    """Step at which the generation began."""
    came: list[tuple[Fault, list[int], int]] = field(default_factory=list)
    """Each fault, with the boundaries at which the ranks were, and where they had begun."""

    def begin(self, step: int) -> None:
        """Begins a generation at a step."""
        self.waits, self.began_at = set(), step
        places = [(node, i) for node in sorted(self.nodes) for i in range(self.nodes[node])]
        self.at = dict.fromkeys(places, step)

    def arrive(self, rank: tuple[str, int]) -> None:
        """Does what a worker does at a boundary, its agent, and the command."""
        node, step = rank[0], self.at[rank]
        due = [s for s in self.steps if self.struck.get(node, -1) < s <= step]
        if not due:
            return
        self.waits.add(rank)
        number = sorted(self.at).index(rank)
        message = {"waits": step, "rank": number, "ranks": self.nodes[node]}
        if not self.plan.must_wait((self.generation, node), message):
            self.tell([node], step)

    def tell(self, nodes: list[str], step: int) -> None:
        for node in nodes:
            self.struck[node] = max(self.struck.get(node, -1), step)
        self.waits = {r for r in self.waits if self.at[r] > self.struck.get(r[0], -1)}

    def inject(self, fault: Fault) -> bool:
        self.came.append((fault, sorted(self.at.values()), self.began_at))
        if fault.kind == "join":
            self.nodes[f"new-{self.started}"] = 1
            self.started += 1
        elif fault.kind == "kill-node" and len(self.nodes) > 1:
            del self.nodes[sorted(self.nodes)[-1]]
        return True

    def command(self, trained_s: float) -> None:
        """Does what the command does in a turn of its loop."""
        waits_at = self.plan.waits_at(self.generation, self.nodes)
        before = len(self.came)
        progress = Progress(step=waits_at or 0, waits_at=waits_at, trained_s=trained_s)
        self.plan.strike(progress, self.inject)
        if waits_at is not None:
            self.plan.release(waits_at)
            self.tell(list(self.nodes), waits_at)
        if len(self.came) > before:
            self.generation += 1
            self.begin(max(0, min(self.at.values()) - self.came[-1][1][0] % 3))


def play(draw: random.Random, until: Callable[[Job], bool]) -> Job:
    """A drawn job, in which every rank that can make a step makes one some time."""
    kinds = ["kill-node", "kill-worker", "drain", "join"]
    texts = [f"{draw.choice(kinds)}@{draw.randrange(12)}" for _ in range(draw.randrange(4))]
    texts += [f"{draw.choice(kinds)}@{draw.randrange(60)}s" for _ in range(draw.randrange(2))]
    faults = [parse_fault(text) for text in texts]
    nodes = {f"node-{i}": draw.randrange(1, 3) for i in range(draw.randrange(1, 4))}
    job = Job(FaultPlan(faults), tuple(steps_of(faults)), nodes)
    job.begin(draw.choice([0, 0, 0, 7]))
    for rank in list(job.at):
        job.arrive(rank)
    for turn in range(2000):
        if until(job):
            return job
        generation = job.generation
        ready = [r for r in job.at if r not in job.waits and job.at[r] == min(job.at.values())]
        if ready and draw.random() < 0.8:
            rank = draw.choice(ready)  # collectives keep ranks within one step of one another
            job.at[rank] += 1
            job.arrive(rank)
        else:
            job.command(turn / 10)
        if job.generation != generation:
            for rank in list(job.at):
                job.arrive(rank)
    raise AssertionError(f"{texts}: the ranks wait for ever: {job}")


def test_drawn_jobs_come_to_their_end_and_faults_to_their_steps() -> None:
    """Whatever the order of what ranks and the command do: no rank waits for ever, and each fault
    at a step comes when all ranks are at this boundary, or have begun behind it."""
    for seed in range(400):
        job = play(
            random.Random(seed),
            lambda job: not job.plan.left and min(job.at.values()) >= 15,
        )
        for fault, places, began_at in job.came:
            if fault.step is not None:
                assert set(places) == {max(fault.step, began_at)}, seed
