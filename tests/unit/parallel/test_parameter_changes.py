"""What a script changes of parameters beside the optimizer's steps counts, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import prune
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel import Setting, Strategy, create
from elasticzero.parallel.buckets import gather
from elasticzero.parallel.buckets.gather import PendingParameter
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.parameter_changes import ParameterObjects, refused_operation
from elasticzero.rank_groups.group import RankGroup
from elasticzero.spans import Span
from elasticzero.state.boundary_values import BoundaryValues
from elasticzero.state.model import MODEL, NamedModel
from tests.support.fake_groups import fake_group
from tests.support.groups import end_groups

STRATEGIES = ["ddp", "zero1", "zero2", "zero1 in a fixed order"]
KINDS = [torch.float64, torch.bfloat16]
Change = Callable[[nn.Module, int, dict[str, Any]], None]


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    output: Tensor = model(x.to(dtype))
    return (output.double() - 1).square().mean()


def laid(model: nn.Module, name: str, ranks: int = 1, mesh: Mesh | None = None) -> Strategy:
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=optimizer_of,
        device=torch.device("cpu"),
        rank=0,
        world_size=ranks,
        alone=ranks == 1,
        mesh=mesh,
        options=TrainingSettings(deterministic="fixed" in name),
        bucket_plan=BucketPlan(size_bytes=20, order=()),
    )
    return create(name.split()[0], setting)


PART = MicroBatch(positions=Span(0, 1), weight=1, last=True, slice=0, runs=(Span(0, 1),))


def step(strategy: Strategy, number: int, dtype: torch.dtype) -> None:
    assert strategy.take_changes() is None
    strategy.expect(PART)
    strategy.backward(loss_of(strategy.model, number, dtype), 1.0)
    assert strategy.take_changes() is None
    strategy.finish(1.0, None)
    strategy.apply()


def set_data(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def from_vector(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.clamp(-0.3, 0.3), model.parameters())


def through_a_vector(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    """The script keeps the vector, and works with it from then on."""
    if number == 0:
        kept["vector"] = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(kept["vector"], model.parameters())
    kept.setdefault("seen", []).append(kept["vector"].clone())
    kept["vector"].clamp_(-0.3, 0.3)


def set_memory(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(parameter.detach() * 0.5)  # type: ignore[call-overload]


def transposed(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    weight = model.get_parameter("0.weight")
    weight.data = weight.data.t()


def swapped(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    """Two parameters take each other's memory."""
    one, other = model.get_parameter("0.bias"), model.get_parameter("2.weight")
    one.data, other.data = other.data.view(4), one.data.view(1, 4)


def clamped(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.25, 0.25)


def put_back(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    if number == 0:
        kept["best"] = [p.detach().clone() for p in model.parameters()]
    if number == 2:
        for parameter, value in zip(model.parameters(), kept["best"], strict=True):
            parameter.data.copy_(value)


def aliased_before(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    """`kept` has aliases from before `prepare`, which are read and written."""
    kept.setdefault("seen", []).extend(alias.clone() for alias in kept["before"])
    for alias in kept["before"]:
        alias.mul_(0.75)


def aliased_until_moved(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    """Once a parameter has other memory, what the script has of the former is not of it."""
    former = kept.setdefault("former", [])
    if number == 0:
        former.extend(parameter.data for parameter in model.parameters())
    if number == 2:
        set_data(model, number, kept)
    kept.setdefault("seen", []).extend(alias.clone() for alias in former)
    for alias in former:
        alias.mul_(0.75)


def swapped_while_read(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    """Two parameters take each other's memory, which the script reads and writes."""
    kept["read"] = kept.get("read", []) + [parameter.data for parameter in model.parameters()]
    swapped(model, number, kept)
    kept.setdefault("seen", []).extend(alias.clone() for alias in kept["read"])
    for alias in kept["read"]:
        alias.mul_(0.95)


CHANGES = [
    set_data,
    from_vector,
    through_a_vector,
    set_memory,
    transposed,
    swapped,
    clamped,
    put_back,
    aliased_before,
    aliased_until_moved,
    swapped_while_read,
]


def trained(name: str, dtype: torch.dtype, change: Change) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns the weights after some steps, with a change after each, and what the change kept."""
    model, kept = network(dtype), dict[str, Any]()
    if change is aliased_before:
        kept["before"] = [parameter.data for parameter in model.parameters()]
    if name == "plain":
        optimizer = optimizer_of(model.parameters())
    else:
        strategy = laid(model, name)
    for number in range(5):
        if name == "plain":
            optimizer.zero_grad()
            loss_of(model, number, dtype).backward()
            optimizer.step()
        else:
            step(strategy, number, dtype)
        change(model, number, kept)
    if name != "plain":
        assert strategy.take_changes() is None
        held = strategy.rank_state().held
        for parameter_name, parameter in model.named_parameters():
            assert torch.equal(held[MODEL + parameter_name].tensor, parameter)
    return [parameter.detach() for parameter in model.parameters()], kept


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_change_after_a_step_counts(name: str, change: Change, dtype: torch.dtype) -> None:
    expected, expected_kept = trained("plain", dtype, change)
    weights, kept = trained(name, dtype, change)
    close = 0.02 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(weights, expected, rtol=close, atol=close)
    torch.testing.assert_close(kept, expected_kept, rtol=close, atol=close)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data.float(), "'0.weight' is now of torch.float32, and was of torch.float64"),
        (lambda data: data[:2], r"'0.weight' is now of \(2, 4\), and was of \(4, 4\)"),
    ],
)
def test_another_kind_of_values_is_refused(
    name: str, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    model = network(torch.float64)
    strategy = laid(model, name)
    weight = model.get_parameter("0.weight")
    weight.data = change(weight.data)
    with pytest.raises(UserError, match=sentence):
        raise strategy.take_changes() or AssertionError("it was taken")


def set_plain(model: nn.Module, number: int, kept: dict[str, Any]) -> None:
    weight = model.get_parameter("0.weight")
    weight.data = torch.ones(weight.shape, dtype=weight.dtype)


@pytest.fixture
def group() -> Iterator[None]:
    """Ends the group that zero3 makes for one process alone, also that of an earlier test."""
    end_groups()
    yield
    end_groups()


@pytest.mark.parametrize("change", [set_data, set_plain])
def test_other_memory_is_refused_where_a_rank_has_rows(group: None, change: Change) -> None:
    model = network(torch.float64)
    strategy = laid(model, "zero3")
    for number in range(2):
        step(strategy, number, torch.float64)
        clamped(model, number, {})
    assert strategy.take_changes() is None
    assert model.get_parameter("0.weight").detach().abs().max() <= 0.25
    change(model, 0, {})
    with pytest.raises(UserError, match=r"'0\.weight' was given other memory"):
        raise strategy.take_changes() or AssertionError("it was taken")


def test_a_loss_of_parameters_from_before_is_refused_where_a_rank_has_rows(group: None) -> None:
    """A decay over a list of parameters from before `prepare` had no effect, in silence."""
    model = network(torch.float64)
    parameters = list(model.parameters())
    strategy = laid(model, "zero3")
    strategy.expect(PART)
    loss = loss_of(strategy.model, 0, torch.float64)
    decay = torch.stack([p.square().sum() for p in parameters]).sum()
    with pytest.raises(UserError, match=r"'0\.weight' as it was before session\.prepare"):
        strategy.backward(loss + decay, 1.0)
    for parameter in parameters:
        parameter.grad = None
    strategy.discard()
    del parameters, parameter, decay
    strategy.expect(PART)
    strategy.backward(loss_of(strategy.model, 0, torch.float64), 1.0)


@pytest.mark.parametrize("one_release", [True, False])
def test_a_backward_of_zero3_has_the_gradients_of_one_process(
    group: None, one_release: bool
) -> None:
    """FSDP2 averages, and losses were multiplied by the number of ranks: a hook that clamps what
    flows through a module clamped other numbers in every world, in silence. Beside ranks of the
    release before it stays so."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ranks = RankGroup("all ranks", range(2), dist.group.WORLD)
    setting = Setting(
        model=(model := network(torch.float64)),
        named=NamedModel(model),
        factory=optimizer_of,
        device=torch.device("cpu"),
        rank=0,
        world_size=2,
        mesh=Mesh.of_world(0, 2, ranks),
        one_release=one_release,
    )
    strategy = create("zero3", setting)
    gradients: list[Tensor] = []
    output = strategy.model(torch.zeros(6, 4, dtype=torch.float64))
    output.register_hook(gradients.append)
    strategy.expect(PART)
    strategy.backward(output.sum(), 0.25)
    assert gradients[0].unique().tolist() == [0.25 if one_release else 0.5]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("change", [set_data, set_plain])
def test_a_forward_with_other_memory_is_refused_where_a_rank_has_rows(
    group: None, change: Change, gradients: bool
) -> None:
    """It would compute with the rows: averages of weights would be tried and never be used."""
    model = network(torch.float64)
    strategy = laid(model, "zero3")
    step(strategy, 0, torch.float64)
    change(model, 0, {})
    with (
        pytest.raises(UserError, match=r"'0\.weight' was given other memory"),
        torch.set_grad_enabled(gradients),
    ):
        loss_of(model, 1, torch.float64)


@pytest.mark.parametrize(
    "operation",
    [
        lambda p: prune.l1_unstructured(nn.Linear(3, 5), "weight", 0.5, importance_scores=p),
        lambda p: p.reshape(-1),
        lambda p: torch.as_strided(p, (2,), (1,)),
        lambda p: p * torch.ones(5, 3),
    ],
)
def test_torchs_errors_for_rows_of_a_parameter_become_sentences(
    group: None, operation: Callable[[Tensor], Any]
) -> None:
    """Pruning under zero3 ended in torch's words on unevenly sharded tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)], src_data_rank=None))
    with pytest.raises(RuntimeError) as raised:
        operation(rows)
    assert isinstance(refused_operation(raised.value, [rows]), UserError), raised.value
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) + torch.ones(3)
    assert refused_operation(raised.value, [rows]) is raised.value


@pytest.mark.parametrize("at_prepare", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_that_share_memory_are_one_or_refused(name: str, at_prepare: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    try:
        if at_prepare:
            second.data = first.data
        strategy = laid(model, name)
        second.data = first.data
        if (error := strategy.take_changes()) is not None:
            raise error
        assert name == "ddp"
    except UserError as refused:
        assert "'0.weight' and '1.weight' share memory" in str(refused) and name != "ddp"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m: m.load_state_dict(network(torch.float64).state_dict(), assign=True),
            "'0.weight' is another object",
        ),
        (lambda m: m.__setitem__(2, nn.Linear(4, 1)), "'2.weight' is another object"),
        (
            lambda m: nn.utils.parametrize.register_parametrization(m[2], "weight", nn.Tanh()),
            "'2.weight' is no parameter of the model any more",
        ),
        (lambda m: m.append(nn.Linear(1, 1)), "'3.weight' was added after session.prepare"),
        (
            lambda m: m[1].register_parameter("slope", nn.Parameter(torch.ones(1))),
            "'1.slope' was added",
        ),
        (lambda m: m.__delitem__(2), "'2.weight' is no parameter of the model any more"),
    ],
)
def test_another_parameter_object_is_refused(
    change: Callable[[nn.Sequential], Any], sentence: str
) -> None:
    model = network(torch.float64)
    objects = ParameterObjects(model)
    assert objects.difference() is None
    change(model)
    for _ in range(2):
        with pytest.raises(UserError, match=sentence):
            raise objects.difference() or AssertionError("it was taken")


def test_modules_without_parameters_may_come_and_go() -> None:
    model = network(torch.float64)
    objects = ParameterObjects(model)
    model[1] = nn.ReLU()
    model.append(nn.Dropout())
    assert not objects.are_same
    assert objects.difference() is None
    assert objects.are_same


class Under:
    """A gather that is under way."""

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_step_waits_for_what_the_script_has_aliases_of(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Other parameters are gathered while the script goes on."""
    monkeypatch.setattr(gather, "begin_all_gather", lambda *arguments: [Under()])
    model = network(dtype)
    strategy = laid(model, name, ranks=2)

    def pending() -> set[str]:
        strategy.apply()
        names = {n for n, p in model.named_parameters() if type(p) is PendingParameter}
        strategy.settle()
        strategy.rank_state()
        assert strategy.take_changes() is None
        return names

    every = {parameter_name for parameter_name, _ in model.named_parameters()}
    assert pending() == every
    kept = [model.get_parameter("0.weight").data.view(-1)[:3]]
    assert "0.weight" not in pending() and "2.weight" in pending()
    kept.clear()
    assert pending() == every
    model.get_parameter("2.weight").data = torch.ones(1, 4, dtype=dtype)
    assert strategy.take_changes() is None
    assert pending() == every
    kept = [torch.ones(1, 4, dtype=dtype)]
    model.get_parameter("2.weight").data = kept[0]
    assert strategy.take_changes() is None
    assert "0.weight" in pending() and "2.weight" not in pending()
    kept.clear()
    assert strategy.take_changes() is None
    assert pending() == every


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_of_which_a_script_has_the_memory_are_exchanged_and_put_back(
    name: str, dtype: torch.dtype
) -> None:
    """Averages of weights are often so tried: what is read meanwhile has them, training has not."""
    model, model_alone = network(dtype), network(dtype)
    strategy, alone = laid(model, name), laid(model_alone, name)
    for number in range(4):
        for of in (strategy, alone):
            step(of, number, dtype)
        backup = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        assert strategy.take_changes() is None
        held = strategy.rank_state().held
        for parameter_name, values in zip(dict(model.named_parameters()), backup, strict=True):
            assert torch.equal(held[MODEL + parameter_name].tensor, values * 0.5)
        for parameter, values in zip(model.parameters(), backup, strict=True):
            parameter.data = values
    for parameter, other in zip(model.parameters(), model_alone.parameters(), strict=True):
        assert torch.equal(parameter, other)


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def past_the_count(parameter: nn.Parameter) -> None:
    """Torch does not count it; the first step is read."""
    parameter.data.mul_(0.5)


def other_memory(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.5


def there(values: BoundaryValues, strategy: Strategy) -> bool:
    """Whether this rank could hand over the state of the last boundary."""
    return values.are_there(strategy.changed_names())


def at_boundary(strategy: Strategy) -> BoundaryValues:
    """What is known of parameters from this boundary on."""
    values = BoundaryValues(dict(strategy.model.named_parameters()))
    values.mark()
    values.copy()
    return values


@pytest.mark.parametrize("change", [in_place, past_the_count, other_memory])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_change_within_a_step_is_no_state_of_the_boundary(
    name: str, change: Callable[[nn.Parameter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is lost then would have the change made twice."""
    model = network(torch.float64)
    strategy = laid(model, name, mesh=Mesh.of_world(0, 1, fake_group(1)))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(strategy._changes, "_due", True)  # type: ignore[attr-defined] # as of several ranks
    values = at_boundary(strategy)
    strategy.expect(PART)
    assert there(values, strategy)
    change(model.get_parameter("0.weight"))
    assert not there(values, strategy)
    strategy.backward(loss_of(model, 0, torch.float64), 1.0)
    values.learn()
    assert strategy.take_changes() is None
    strategy.finish(1.0, None)
    values.learn_compared(strategy.changed_names())
    strategy.apply()
    values.mark()
    values.copy()
    before = model.get_parameter("0.weight").detach().clone()
    strategy.expect(PART)
    change(model.get_parameter("0.weight"))
    assert there(values, strategy), "what has changed in a step is copied from then on"
    values.put_back()
    assert torch.equal(model.get_parameter("0.weight"), before)


@pytest.mark.parametrize("name", [*STRATEGIES, "zero3"])
def test_a_step_by_itself_leaves_the_state_of_the_boundary(name: str) -> None:
    model = network(torch.float64)
    strategy = laid(model, name)
    values = at_boundary(strategy)
    for number in range(2):
        strategy.expect(PART)
        strategy.backward(loss_of(strategy.model, number, torch.float64), 1.0)
        assert there(values, strategy)
        values.learn()
        strategy.finish(1.0, None)
        assert there(values, strategy)
        strategy.apply()
        values.mark()
        values.copy()


@pytest.mark.parametrize("name", STRATEGIES)
def test_other_memory_between_steps_is_state_of_the_boundary(name: str) -> None:
    """Aliases from before `prepare` keep parameters out of their buckets for good."""
    model = network(torch.float64)
    aliases = [parameter.data for parameter in model.parameters()]
    strategy = laid(model, name)
    for number in range(2):
        step(strategy, number, torch.float64)
        set_data(model, number, {})
        assert strategy.take_changes() is None
        values = at_boundary(strategy)
        strategy.expect(PART)
        assert there(values, strategy)
    assert aliases
