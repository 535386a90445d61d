"""The size of buckets, the order of parameters in them, and who knows of it when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticzero.parallel.buckets.choice import BucketChoice
from elasticzero.parallel.buckets.plan import (
    DEFAULT_PLAN,
    MAX_BYTES,
    MIN_BYTES,
    BucketPlan,
    ExchangeCost,
    order_of,
)
from elasticzero.serialization import RecordError

CPU = torch.device("cpu")


@given(st.permutations(range(7)), st.integers(0, 7))
def test_parameters_are_filled_as_their_gradients_came(order: list[int], count: int) -> None:
    names = [f"p{number}" for number in range(7)]
    ready = [names[number] for number in order[:count]]
    filled = BucketPlan(order=order_of(ready, names)).filling_order(names)
    assert filled[:count] == ready
    assert filled[count:] == [name for name in reversed(names) if name not in ready]


def test_the_reverse_of_registration_is_stored_as_nothing() -> None:
    assert order_of(["c", "b"], ["a", "b", "c"]) == ()


@pytest.mark.parametrize("order", [(), None, (0, 1), (0, 1, 2, 3), (0, 0, 2), (5, 6, 7)])
def test_an_order_of_another_model_counts_for_nothing(order: tuple[int, ...] | None) -> None:
    assert BucketPlan(order=order).filling_order(["a", "b", "c"]) == ["c", "b", "a"]


@given(st.floats(1e-6, 1e-1), st.floats(1e-12, 1e-7), st.integers(1 << 20, 1 << 36))
def test_no_whole_number_of_mebibytes_takes_less_time(
    latency_s: float, slope: float, total: int
) -> None:
    cost = ExchangeCost(latency_s=latency_s, s_per_byte=slope)

    def seconds(size: float) -> float:
        return total / size * latency_s + size * slope

    best = cost.best_bytes(total)
    assert best % MIN_BYTES == 0
    others = range(MIN_BYTES, MAX_BYTES + 1, MIN_BYTES)
    assert seconds(best) <= min(seconds(size) for size in others) * 1.13  # rounded at 1.5 MiB


def test_a_line_is_fit_through_two_exchanges() -> None:
    cost = ExchangeCost.fit((1_000, 0.003), (11_000, 0.013))
    assert cost.latency_s == pytest.approx(0.002)
    assert cost.s_per_byte == pytest.approx(1e-6)
    noise = ExchangeCost.fit((1_000, 0.003), (11_000, 0.001))
    assert noise.best_bytes(1 << 30) == MAX_BYTES
    assert ExchangeCost.fit((1_000, 0.001), (2_000, 0.003)).best_bytes(1 << 30) == MIN_BYTES


class Backwards(nn.Module):
    """Its layers run in the order in which they are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(3, 1), nn.Linear(2, 3)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x))
        return output


def choices(ranks: int) -> tuple[list[Backwards], list[BucketChoice]]:
    models = [Backwards() for _ in range(ranks)]
    made = [BucketChoice(dict(model.named_parameters()), CPU) for model in models]
    for rank, (model, choice) in enumerate(zip(models, made, strict=True)):
        choice.begin_recording(dict(model.named_parameters()), rank)
    return models, made


def boundary(made: list[BucketChoice]) -> list[dict[str, object]]:
    """Every rank takes a boundary after a step; returns their states."""
    for choice in made:
        choice.take_shared()
    shared = [choice.shared() for choice in made]
    for tensors in shared[1:]:
        for name, tensor in tensors.items():
            tensor.copy_(shared[0][name])
    return [choice.state_dict() for choice in made]


def test_all_ranks_have_rank_zeros_order_from_one_step_on() -> None:
    models, made = choices(3)
    for model in models:
        model(torch.ones(1, 2)).sum().backward()
    assert boundary(made) == [{}] * 3
    [order, *others] = [state["order"] for state in boundary(made)]
    assert others == [order] * 2
    names = [name for name, _ in models[0].named_parameters()]
    filled = made[2].used(None).filling_order(names)
    assert [name.partition(".")[0] for name in filled] == ["last"] * 2 + ["first"] * 2 + ["unused"]
    assert made[0].shared() == made[1].shared() == {}


def test_a_step_without_gradients_decides_nothing() -> None:
    """Its batch was passed over."""
    models, made = choices(2)
    assert boundary(made) == boundary(made) == [{}] * 2
    models[0](torch.ones(1, 2)).sum().backward()
    boundary(made)
    assert all(state["order"] for state in boundary(made))


def test_a_stored_choice_is_not_made_again() -> None:
    model = Backwards()
    choice = BucketChoice(dict(model.named_parameters()), CPU)
    choice.load_state_dict({"size_bytes": 5, "order": [4, 3, 2, 1, 0]})
    choice.begin_recording(dict(model.named_parameters()), 0)
    model(torch.ones(1, 2)).sum().backward()
    assert choice.shared() == {}
    assert choice.state_dict() == {"size_bytes": 5, "order": [4, 3, 2, 1, 0]}
    assert choice.used("auto").size_bytes == 5
    assert choice.used(None).size_bytes is None
    assert choice.used(7).size_bytes == 7
    assert {choice.used(size).order for size in ("auto", None, 7)} == {(4, 3, 2, 1, 0)}


def test_nothing_is_stored_before_something_is_chosen() -> None:
    choice = BucketChoice({}, CPU)
    choice.load_state_dict({})
    assert choice.plan == DEFAULT_PLAN
    assert choice.state_dict() == {}
    with pytest.raises(RecordError, match="size_bytes"):
        choice.load_state_dict({"size_bytes": "large"})
