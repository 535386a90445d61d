"""What an optimizer keeps in any form comes back as it was, or is refused before a step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.storage.disk import DiskStorage
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.parallel import Strategy
from elasticzero.parallel.optimizers.attributes import is_same
from elasticzero.parallel.optimizers.groups import Optimizers, open_optimizers
from elasticzero.parallel.optimizers.whole_state import WholeRestore, WholeState
from elasticzero.snapshots import restore
from elasticzero.spans import STRATEGIES
from elasticzero.state.model import NamedModel, spec_of
from tests.support import kept_state
from tests.unit.state.test_state import Small, Transposed, build, save, train

DAMPED = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)


def values(strategy: Strategy) -> dict[str, Any]:
    """What the optimizers, the groups and the model of a rank hold, copied."""
    share = strategy.rank_state()
    groups = strategy.optimizers.groups
    return {
        "tensors": {n: held.tensor.clone().reshape(-1) for n, held in share.held.items()},
        "small": share.optimizers,
        "options": [{k: v for k, v in g.options.items() if k != "params"} for g in groups],
    }


def restored(step: Path, name: str, kind: Any, dtype: torch.dtype) -> Strategy:
    torch.manual_seed(7)
    again, small = build(name, kind, dtype)
    restore.restore_state(open_step(DiskStorage(step)), again, small, 0)
    return again


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", kept_state.WHOLE)
def test_ddp_keeps_all_that_an_optimizer_keeps(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    factory = kept_state.WHOLE[kind]
    strategy, small = build("ddp", factory, dtype)
    for turn in range(3):  # saved after steps 3, 6 and 9
        train(strategy, dtype)
        step = save(tmp_path / str(turn), strategy, small, "ddp")
        again = restored(step, "ddp", factory, dtype)
        assert is_same(values(strategy), values(again), set())
        for _ in range(3):
            train(again, dtype)
        copied = restored(step, "ddp", factory, dtype)
        for _ in range(3):
            train(copied, dtype)
        assert is_same(values(again), values(copied), set())
    for _ in range(3):
        train(strategy, dtype)
    assert is_same(values(strategy), values(again), set())


@pytest.mark.parametrize("name", ["ddp", "zero1"])
@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.AdamW, fused=True, amsgrad=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.Adagrad, fused=True),
    ],
)
def test_state_comes_back_as_its_parameter_lies(tmp_path: Path, factory: Any, name: str) -> None:
    """A fused step takes the elements of both as they lie in memory."""
    strategy, small = build(name, factory, kind=Transposed)
    train(strategy)
    step = save(tmp_path, strategy, small, name)
    again, small = build(name, factory, kind=Transposed)
    restore.restore_state(open_step(DiskStorage(step)), again, small, 0)
    for of in (strategy, again):
        train(of)
    assert is_same(values(strategy), values(again), set())


@pytest.mark.parametrize("name", ["zero1", "zero2"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lists", "Lists keeps 'GG', which is neither a tensor nor a number"),
        ("trees", "Trees keeps '.*', which is neither a tensor nor a number"),
        ("global", "Global keeps 'global' in its state, which is no parameter"),
        ("counting", "Counting changes its attribute self.count when it steps"),
        ("slow", "StoredSlow keeps parameters, or copies of them, in its attribute self.slow"),
        ("wrapper", "Wrapper changes its attributes self.inner, self.steps when it steps"),
        ("adapting", "Adapting treats its parameters together"),
        ("modal", r"Modal changes parameters in its train\(\) and eval\(\)"),
        ("bare", "Bare cannot work on parts of a model"),
        ("unseen", r"Unseen cannot work on parts of a model \(made for one model\)"),
    ],
)
def test_parts_are_refused_in_a_sentence(name: str, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, kept_state.WHOLE[kind])


def test_a_vector_of_all_weights_is_a_copy_of_parameters() -> None:
    with pytest.raises(UserError, match="Flat keeps parameters, or copies of them, in its attri"):
        build("zero2", kept_state.Flat)


def test_numbers_of_all_elements_are_not_dealt_with_parts() -> None:
    model = Small()
    made = kept_state.Sized(list(model.parameters()))
    nature = open_optimizers(made, NamedModel(model), "elements").groups[0].nature
    assert nature.works_on == "parameters"
    with pytest.raises(UserError, match="works on whole parameters"):
        open_optimizers(made, NamedModel(model), "rows")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (kept_state.Forgetful, "Forgetful changes its attribute self.count when it steps, which"),
        (kept_state.Slow, "Slow changes its attribute self.slow when it steps"),
        (kept_state.Flat, "Flat changes its attribute self.slow when it steps"),
        (kept_state.Halfway, "has another value there once its load_state_dict is given what"),
    ],
)
def test_what_a_state_dict_does_not_hold_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build("ddp", kind)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_attribute_that_changes_later_ends_the_step_in_which_it_does(name: str) -> None:
    strategy, _ = build(name, kept_state.Warmed)
    train(strategy)  # three steps
    with pytest.raises(UserError, match=r"Warmed changes its attribute self\.past when it steps"):
        train(strategy)


def test_what_fails_on_dummies_is_looked_at_in_its_first_step() -> None:
    strategy, _ = build("ddp", kept_state.Hidden)
    with pytest.raises(UserError, match=r"Hidden changes its attribute self\.count"):
        train(strategy)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_optimizer_that_asks_for_a_closure_is_refused(name: str) -> None:
    """Under zero1 it was told to take ddp, which refused it in the first step."""
    with pytest.raises(UserError, match="Sharp computes the loss anew inside its step") as refused:
        build(name, kept_state.Sharp)
    assert "use strategy ddp" not in str(refused.value)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("kind", "is_advised"),
    [
        *((factory, name != "unseen") for name, factory in kept_state.WHOLE.items()),
        *((kept_state.Forgetful, False), (kept_state.Slow, False), (kept_state.Halfway, False)),
        *((kept_state.Flat, False), (kept_state.Sharp, False)),
    ],
)
def test_another_strategy_is_advised_where_it_takes_the_optimizer(
    name: str, kind: Any, is_advised: bool
) -> None:
    """A user who follows a sentence does not meet the next one."""
    try:
        build(name, kind)
    except UserError as refused:
        text = str(refused)
    else:
        return
    assert not is_advised or "use strategy ddp" in text or "use zero1 or zero2" in text, text
    for advised in ("ddp",) * ("use strategy ddp" in text) + ("zero1",) * ("use zero1" in text):
        build(advised, kind)
        for _ in range(2):
            train(build(advised, kind)[0])


def test_what_no_checkpoint_holds_is_refused_before_a_step() -> None:
    class Odd(kept_state.Stepping):
        def scale(self, p: Any, state: dict[Any, Any]) -> float:
            state["odd"] = {object}
            return 1.0

    with pytest.raises(UserError, match=r"Odd keeps what no checkpoint can hold: .*odd' is a set"):
        build("ddp", Odd)


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_keys_of_any_name_change_strategy(tmp_path: Path, first: str, second: str) -> None:
    strategy, small = build(first, kept_state.Names)
    train(strategy)
    step = save(tmp_path, strategy, small, first)
    again = restored(step, second, kept_state.Names, torch.float32)
    for _ in range(2):
        assert is_same(values(strategy)["tensors"], values(again)["tensors"], set())
        train(strategy)
        train(again)


SHAPES = st.sampled_from([(), (1,), (4,), (5, 4), (2, 0), (3, 1, 2)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
TENSORS = st.builds(lambda shape, dtype: (torch.rand(shape) * 9).to(dtype), SHAPES, DTYPES)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | TENSORS
KEYS = st.sampled_from(["master", "a/b", "a", "%", "", "$tensor", "momentum_buffer", "b"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(KEYS | st.integers(0, 3), VALUES, max_size=4), max_size=3),
    st.dictionaries(st.text(max_size=2) | st.integers(), VALUES, max_size=2),
)
def test_whatever_is_kept_comes_back_as_it_was(
    states: list[dict[Any, Any]], entries: dict[Any, Any]
) -> None:
    """The optimizer keeps a momentum for a dummy, which is not what it has here."""
    model = Small()
    made, again = (opened(model) for _ in range(2))
    for parameter, state in zip(model.parameters(), states, strict=False):
        made.by_name[""].state[parameter] = state
    made.by_name[""].state.update(entries)
    try:
        whole = WholeState.of(made)
    except UserError as error:
        assert "two tensors come to the name" in str(error) or "bits" in str(error)
        return
    small = json.loads(json.dumps(whole.small))
    put = WholeRestore(again, {n: spec_of(t) for n, t in whole.tensors.items()}, small)
    for target in put.targets():
        target.tensor.copy_(whole.tensors[target.name])
    put.put()
    assert is_same(again.by_name[""].state, made.by_name[""].state, set())


def opened(model: nn.Module) -> Optimizers:
    made = DAMPED(list(model.parameters()))
    return open_optimizers(made, NamedModel(model), "nothing")


class Gated(Small):
    """Has a parameter that is never used, and one whose gradient is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_state_of_zeros_is_not_taken_for_none(
    tmp_path: Path, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.state.test_state.Small", Gated)
    strategy, small = build(first, DAMPED)
    gated: Any = strategy.model
    monkeypatch.setattr(Gated, "forward", lambda self, x: self.first(x) + 0 * self.gate)
    train(strategy)
    step = save(tmp_path, strategy, small, first)
    again = restored(step, second, DAMPED, torch.float32)
    kept = [len(s.optimizers.groups[0].optimizer.state) for s in (strategy, again)]
    assert kept[0] == kept[1] == len([*gated.parameters()]) - 2
    monkeypatch.setattr(Gated, "forward", lambda self, x: self.first(x) + self.gate + self.unused)
    for turn in (strategy, again):
        train(turn)
    left, right = (values(turn)["tensors"] for turn in (strategy, again))
    assert {name.split("/")[1] for name in left.keys() ^ right.keys()} <= {"second.bias"}
    for name in left.keys() & right.keys():
        assert torch.equal(left[name], right[name]), name


def test_other_state_is_refused(tmp_path: Path) -> None:
    strategy, small = build("ddp", kept_state.Lists)
    train(strategy)
    step = save(tmp_path, strategy, small, "ddp")
    for name, kind, message in (
        ("ddp", torch.optim.SGD, "it holds 'GG' for parameter 'first.weight'"),
        ("zero1", torch.optim.SGD, "strategy ddp alone can restore"),
    ):
        with pytest.raises(CheckpointMismatch, match=message):
            restored(step, name, kind, torch.float32)


@pytest.mark.parametrize("kind", [kept_state.Counting, kept_state.StoredSlow, kept_state.Wrapper])
def test_a_trial_changes_nothing_of_the_optimizer(kind: Any) -> None:
    model = Small()
    before = [p.detach().clone() for p in model.parameters()]
    draws = torch.get_rng_state()
    made = kind(list(model.parameters()))
    fresh = kind(list(model.parameters()))
    open_optimizers(made, NamedModel(model), "nothing")
    assert is_same(made.state_dict(), fresh.state_dict(), set())
    assert is_same(before, [p.detach() for p in model.parameters()], set())
    assert torch.equal(draws, torch.get_rng_state())


def test_an_optimizer_that_changes_what_it_loads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, small = build("ddp", kept_state.Counting)
    train(strategy)
    step = save(tmp_path, strategy, small, "ddp")
    again, small_again = build("ddp", kept_state.Counting)
    load = kept_state.Counting.load_state_dict
    monkeypatch.setattr(
        kept_state.Counting, "load_state_dict", lambda self, held: load(self, held | {"count": 9})
    )
    with pytest.raises(CheckpointMismatch, match=r"optimizer's state \(its state_dict\)"):
        restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)


def test_schedulers_hold_the_groups_that_are_restored(tmp_path: Path) -> None:
    strategy, small = build("ddp", kept_state.Counting)
    train(strategy)
    step = save(tmp_path, strategy, small, "ddp")
    again, small_again = build("ddp", kept_state.Counting)
    group = again.optimizers.groups[0]
    restore.restore_state(open_step(DiskStorage(step)), again, small_again, 0)
    assert group.optimizer.param_groups[0] is group.options
    assert group.optimizer.count == 3  # type: ignore[attr-defined]
