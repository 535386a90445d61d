"""What a worker records at each boundary: what its owners have, and no number of it is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.rehearsal.owners import _wholes
from elasticzero.rehearsal.plan import VARIABLE, Plan
from elasticzero.rehearsal.probe import nudge
from elasticzero.rehearsal.records import Header, LiveValue, Moment, StepRecord, parse_lines
from elasticzero.session import Session
from elasticzero.worker.generation import Generation

BATCH, STEPS = 5, 4
FEATURES = 64
"""Rounding hides a nudge in most weights, by the processor; of so many, one at least shows it."""
SAMPLES = BATCH * STEPS


class Counting(nn.Module):
    """Keeps numbers in every way that a module has."""

    calls: Tensor
    scratch: Tensor
    seen: Tensor | None

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("seen", None)
        self.notes = {"forwards": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.notes

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scratch = self.scratch + 1
        self.seen = x.mean() if self.seen is None else self.seen + x.mean()
        self.notes["forwards"] += 1
        output: Tensor = self.dropout(self.linear(x))
        return output


class Noting(torch.optim.AdamW):
    """Keeps a number of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.limit = 3


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, FEATURES, generator=generator), torch.arange(SAMPLES))


def trained(
    dropout: float = 0.0, hook: Callable[[str, Tensor], float | None] | None = None
) -> tuple[nn.Module, list[float]]:
    """Trains in this process; returns the model, and the loss of each step."""
    torch.manual_seed(1)
    session = Session(Generation(AgentClient(None, STANDALONE)))
    model, optimizer = session.prepare(Counting(dropout), Noting)
    schedule = session.track("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 3))
    if hook is not None:
        session.on_gradients(hook)
    session.restore()
    losses = []
    for x, y in session.batches(rows(), global_batch=BATCH, epochs=1):
        loss = (model(x).squeeze(1) - y).square().mean()
        session.backward(loss)
        assert session.step(max_grad_norm=1.0)
        schedule.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Plan]]:
    def write(**changes: Any) -> Plan:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        made = Plan(directory=str(directory), steps=99, **changes)
        made.write(directory / "plan.json")
        monkeypatch.setenv(VARIABLE, str(directory / "plan.json"))
        return made

    yield write


def read(plan: Plan) -> tuple[Header, list[StepRecord]]:
    with plan.records(STANDALONE.generation, 0).open() as file:
        return parse_lines(file)


def texts(record: StepRecord) -> dict[tuple[str, str], str]:
    return {(value.kind, value.name): value.text for value in record.live}


def test_records_begin_before_the_first_step_and_come_after_each(
    plan: Callable[..., Plan],
) -> None:
    made = plan()
    _, losses = trained()
    header, [start, *boundaries] = read(made)
    assert header == Header()
    assert (start.step, start.moment, start.loss, start.samples) == (0, Moment.START, "", ())
    assert [record.step for record in boundaries] == [1, 2, 3, 4]
    assert {record.moment for record in boundaries} == {Moment.BOUNDARY}
    recorded = [float.fromhex(record.loss) for record in boundaries]
    assert recorded == pytest.approx(losses, rel=1e-6)
    assert all(float.fromhex(record.gradient_norm) > 0 for record in boundaries)


def test_the_samples_of_all_steps_are_those_of_the_epoch(plan: Callable[..., Plan]) -> None:
    made = plan()
    trained()
    samples = [index for record in read(made)[1] for index in record.samples]
    assert sorted(samples) == list(range(SAMPLES))


def test_what_lives_is_read_from_its_owners(plan: Callable[..., Plan]) -> None:
    """A buffer that is None, or that the model does not save, an optimizer's own number, and what
    a module returns as extra state, are among it."""
    made = plan()
    trained()
    start, *_, last = map(texts, read(made)[1])
    assert start["buffer", "seen"] == "None"
    assert last["buffer", "seen"] not in ("None", "0.0")
    assert (start["buffer", "calls"], last["buffer", "calls"]) == ("0", "4")
    assert start["buffer", "scratch"] == "float32[2]"
    assert last["extra state", "_extra_state['forwards']"] == "4"
    assert last["parameter", "linear.weight"] == f"float32[1, {FEATURES}]"
    assert ("optimizer", "state['linear.bias']['step']") not in start
    assert last["optimizer", "state['linear.bias']['step']"] == "4.0"
    assert last["optimizer", "state['linear.weight']['exp_avg']"] == f"float32[1, {FEATURES}]"
    assert start["optimizer", "param_groups[0]['lr']"] == "0.1"
    assert last["optimizer attribute", "limit"] == "3"
    assert last["tracked", "schedule['last_epoch']"] == "4"
    assert {name for kind, name in last if kind == "generator"} >= {"torch", "python", "numpy"}


def test_training_is_the_same_with_and_without_records(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan()
    recorded, losses = trained(dropout=0.3)
    monkeypatch.delenv(VARIABLE)
    alone, others = trained(dropout=0.3)
    assert losses == others
    for name, tensor in alone.state_dict().items():
        if isinstance(tensor, Tensor):
            assert torch.equal(recorded.state_dict()[name], tensor), name


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.3, True)])
def test_a_forward_that_draws_is_told(
    dropout: float, draws: bool, plan: Callable[..., Plan]
) -> None:
    made = plan()
    trained(dropout)
    start, *boundaries = read(made)[1]
    assert not start.draws
    assert {record.draws for record in boundaries} == {draws}


def values_of(record: StepRecord) -> dict[str, LiveValue]:
    return {value.name: value for value in record.live if value.kind == "parameter"}


def test_one_step_has_its_gradients_nudged_in_the_last_place(plan: Callable[..., Plan]) -> None:
    """The script's own function sees the gradients as they are."""
    made = plan()
    trained()
    before = read(made)[1]
    seen: list[str] = []
    made = plan(nudge_step=2)
    trained(hook=lambda name, _: seen.append(name))
    after = read(made)[1]
    assert [values_of(a) == values_of(b) for a, b in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert len(seen) == 2 * STEPS
    first, second = (values_of(records[2])["linear.weight"] for records in (before, after))
    pairs = zip(first.projections, second.projections, strict=True)
    assert 0 < max(abs(a - b) for a, b in pairs) < 1e-5


def test_the_sums_of_the_scripts_function_reach_it(plan: Callable[..., Plan]) -> None:
    plan(nudge_step=2)
    torch.manual_seed(1)
    session = Session(Generation(AgentClient(None, STANDALONE)))
    model, _ = session.prepare(Counting(0.0), Noting)
    hook = session.on_gradients(lambda name, elements: float(elements.numel()))
    session.restore()
    for x, _ in session.batches(rows(), global_batch=BATCH, epochs=1):
        hook.sums = {}
        session.backward(model(x).mean())
        session.step()
        assert hook.sums == {"linear.weight": FEATURES, "linear.bias": 1.0}


def test_the_lowest_rank_gives_what_several_have() -> None:
    """A parameter without dimensions is whole on each rank under zero3."""
    divided = [["optimizer", "m", "float32", [4], 0, 2], ["optimizer", "m", "float32", [4], 2, 2]]
    scalar = ["optimizer", "s", "float32", [], 0, 1]
    none = ["optimizer", "m", "float32", [4], 0, 0]
    wholes = _wholes([[divided[0], scalar], [divided[1], scalar], [none]])
    assert wholes == {
        ("optimizer", "m"): ("float32", [4], {0, 1}),
        ("optimizer", "s"): ("float32", [], {0}),
    }


class Average:
    """Keeps an average of parameters by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.shadow[name].lerp_(parameter, 0.1)


def test_tensors_that_change_and_that_nothing_keeps_are_named(plan: Callable[..., Plan]) -> None:
    """A target network and an average of the script's own, but no batch, no loss, no alias of a
    parameter, and nothing that is tracked."""
    made = plan(looks_around=True)
    torch.manual_seed(1)
    session = Session(Generation(AgentClient(None, STANDALONE)))
    target, fixed = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)
    model, optimizer = session.prepare(nn.Linear(FEATURES, 1), Noting)
    alias = [parameter.data for parameter in model.parameters()]
    average = Average(model)
    tracked = torch.optim.swa_utils.AveragedModel(model)
    session.track("average", tracked)
    session.restore()
    for x, _ in session.batches(rows(), global_batch=BATCH, epochs=1):
        loss = model(x).mean() + fixed(x).mean().detach()
        session.backward(loss)
        session.step()
        average.update(model)
        tracked.update_parameters(model)
        with torch.no_grad():
            target.weight.copy_(next(model.parameters()))
    assert alias
    names = json.loads(made.unkept.read_text())
    place = "test_tensors_that_change_and_that_nothing_keeps_are_named()"
    assert sorted(name for name in names if name.endswith(place)) == [
        f"average.shadow['bias'] of {place}",
        f"average.shadow['weight'] of {place}",
        f"target.weight of {place}",
    ]
    assert optimizer is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_nudge_is_as_small_as_rounding(dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    gradient = torch.tensor([1.0, -2.0, 0.0, 1e-3, 3.0]).to(dtype)
    changed = gradient.clone()
    nudge(changed, unit)
    assert changed[2] == 0
    assert bool((changed.double().abs() >= gradient.double().abs()).all())
    differences = (changed.double() - gradient.double()).abs()
    assert 0 < float(differences.max()) <= 6 * unit
    assert float(differences[3]) > unit  # as large as rounding is in a sum of larger numbers
    nudge(empty := torch.zeros(0, dtype=dtype), unit)
    assert not empty.numel()
