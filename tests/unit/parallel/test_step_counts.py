"""What a step costs the processor: operations that a GPU launches, and waits for what it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elasticzero.data.position import MicroBatch
from elasticzero.options.settings import TrainingSettings
from elasticzero.parallel import Strategy, create
from elasticzero.parallel.base import Setting
from elasticzero.parallel.buckets import gather, queue, reduce_scatter
from elasticzero.parallel.buckets.gather import stepped_together
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.finite import SUMMED_ELEMENTS, SquaredNorm, squared_norm
from elasticzero.parallel.mesh import Mesh
from elasticzero.spans import Span
from elasticzero.state.model import NamedModel
from tests.support.fake_groups import fake_group

LAYERS = 12
WIDTH = 8
PART = MicroBatch(positions=Span(0, 1), weight=1, last=True)
NO_LAUNCH = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "expand", "lift_fresh", "new_empty"),
    *("select", "slice", "split", "split_with_sizes", "t", "transpose", "unbind", "view"),
    *("_local_scalar_dense", "_unsafe_view", "empty_strided", "new_empty_strided"),
    *("_record_function_enter_new", "_record_function_exit"),
}
"""Operations that compute nothing, or that are a wait."""
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero"} | {
    f"__{kind}__" for kind in ("bool", "float", "int", "index")
}
"""Methods of a tensor that wait for its values."""
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Notes each wait for values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in WAITS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU count as a device on which operations are launched."""
    for module in (gather, queue):
        monkeypatch.setattr(module, "is_launched", lambda tensor: True)


def network(layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def laid(name: str, ranks: int = 1, buckets: int = LAYERS, layers: int = LAYERS) -> Strategy:
    """The layers are dealt to so many buckets."""
    model = network(layers)
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    return create(
        name,
        Setting(
            model=model,
            named=NamedModel(model),
            factory=adam,
            device=torch.device("cpu"),
            rank=0,
            world_size=ranks,
            alone=ranks == 1,
            mesh=Mesh.of_world(0, ranks, fake_group(ranks)) if ranks > 1 else None,
            options=TrainingSettings(),
            bucket_plan=BucketPlan(size_bytes=layers // buckets * layer_bytes, order=()),
        ),
    )


def loss_of(model: nn.Module) -> Tensor:
    output: Tensor = model(torch.ones(2, WIDTH))
    return output.square().mean()


def backward(strategy: Strategy) -> None:
    strategy.expect(PART)
    strategy.backward(loss_of(strategy.model), 1.0)


def step(strategy: Strategy, max_norm: float | None = None) -> None:
    backward(strategy)
    strategy.finish(1.0, max_norm)
    assert strategy.norm > 0
    strategy.apply()


def launches(body: Callable[[], object]) -> Counter[str]:
    mode = Launches()
    with mode:
        body()
    return mode.counts


def plain_step(layers: int) -> Callable[[], None]:
    model = network(layers)
    optimizer = adam(model.parameters())

    def body() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    body()
    return body


def extra(name: str, layers: int, buckets: int) -> int:
    """How many launches a step takes beyond a plain loop's."""
    strategy = laid(name, buckets=buckets, layers=layers)
    for _ in range(2):  # some are of a generation's first steps
        step(strategy)
    ours = launches(lambda: step(strategy))
    return ours.total() - launches(plain_step(layers)).total()


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_more_parameters_of_a_bucket_are_no_more_launches(name: str, launched: None) -> None:
    assert extra(name, 24, 4) == extra(name, 8, 4)


@pytest.mark.parametrize(("name", "of_buckets"), [("ddp", 0), ("zero1", 2), ("zero2", 2)])
def test_launches_beyond_a_plain_loop(name: str, of_buckets: int, launched: None) -> None:
    """One copy for each bucket, and on the CPU one norm, which a GPU takes of all at once; besides
    what is the same however many there are."""
    assert extra(name, LAYERS, LAYERS) <= 14 + of_buckets * LAYERS


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_bucket_is_copied_at_once_and_all_are_stepped_at_once(name: str, launched: None) -> None:
    strategy = laid(name, buckets=4)
    step(strategy)
    counts = launches(lambda: backward(strategy))
    assert counts["_foreach_copy_"] == 4
    assert counts["copy_"] == 0
    strategy.finish(1.0, None)
    counts = launches(strategy.apply)
    assert counts["_fused_adamw_"] == 1


class Sent:
    def wait(self) -> None:
        pass


def receive_zeros(flat_E: Tensor, chunks: Any, received: Tensor | None, mesh: Any) -> list[Sent]:
    if received is not None:
        received.zero_()
    return [Sent()]


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_gathers_begin_after_1_2_and_4_buckets(
    name: str, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks: the next forward waits for the first buckets; the others step meanwhile."""
    events: list[str] = []

    def begin_all_gather(*_: Any) -> list[Sent]:
        events.append("gather")
        return [Sent()]

    def all_reduce(tensor: Tensor, *_: Any, **__: Any) -> SimpleNamespace:
        tensor.mul_(2)  # both ranks give the same
        return SimpleNamespace(wait=int)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(reduce_scatter, "begin_reduce_scatter", receive_zeros)
    monkeypatch.setattr(gather, "begin_all_gather", begin_all_gather)
    strategy = laid(name, ranks=2, buckets=6)
    step(strategy)
    optimizer = strategy.optimizers.by_name[""]
    optimizer.register_step_post_hook(lambda *_: events.append("step"))  # is of the script: whole
    backward(strategy)
    strategy.finish(1.0, None)
    events.clear()
    strategy.apply()
    assert events == ["step", *["gather"] * 6]
    strategy.settle()
    optimizer._optimizer_step_post_hooks.clear()
    monkeypatch.setattr(optimizer, "step", lambda: events.append("step"))
    backward(strategy)
    strategy.finish(1.0, None)
    events.clear()
    strategy.apply()
    parts = [["step", *["gather"] * buckets] for buckets in (1, 2, 3)]
    assert events == [event for part in parts for event in part]
    strategy.settle()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("count", range(18))
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_a_step_are_all_buckets_in_order(count: int, ranks: int, device: str) -> None:
    flat_E = torch.empty(0, device=device)
    buckets: list[Any] = [
        SimpleNamespace(world_size=ranks, number=n, flat_E=flat_E) for n in range(count)
    ]
    parts = stepped_together(buckets)
    assert [bucket for part in parts for bucket in part] == buckets
    if ranks == 1 or not buckets:
        assert len(parts) == 1
    elif device == "cpu":
        assert len(parts) == count
    else:
        sizes = [len(part) for part in parts]
        assert sizes[:-1] == [2**n for n in range(len(parts) - 1)]
        assert 0 < sizes[-1] <= 2 ** (len(parts) - 1)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_waits_once(name: str, max_norm: float | None) -> None:
    """Everything that does not depend on the norm and the loss is launched before."""
    strategy = laid(name)
    step(strategy)
    with Waits() as waits:
        backward(strategy)
        strategy.finish(1.0, max_norm)
        assert waits.names == []
        norm, loss = strategy.norm, strategy.loss
        assert waits.names == ["tolist"]
        strategy.apply()
        assert waits.names == ["tolist"]
    assert norm > 0
    assert loss > 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_numbers_of_a_step_are_those_of_a_plain_loop(name: str) -> None:
    model = network()
    loss = loss_of(model)
    loss.backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    strategy = laid(name)
    backward(strategy)
    strategy.finish(0.5, None)
    assert strategy.norm == pytest.approx(float(expected) / 2, rel=1e-6)
    assert strategy.loss == pytest.approx(loss.item() / 2, rel=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_bad_loss_makes_the_norm_bad(name: str) -> None:
    strategy = laid(name)
    strategy.expect(PART)
    loss = loss_of(strategy.model)
    strategy.backward(loss + (torch.inf - loss.detach()), 1.0)
    strategy.finish(1.0, 1.0)
    assert strategy.norm != strategy.norm
    assert strategy.suspects().loss
    strategy.discard()
    step(strategy)


def test_a_long_gradient_is_summed_in_64_bits() -> None:
    """Of 17 million elements whose squares are summed in 32 bits the sum errs by a thousandth."""
    gradient = torch.randn(4 * SUMMED_ELEMENTS + 3, generator=torch.Generator().manual_seed(1))
    cpu, exact = torch.device("cpu"), float(gradient.double().square().sum())
    assert float(squared_norm([gradient], cpu)) == pytest.approx(exact, rel=5e-5)
    assert float(squared_norm([gradient], cpu, in_parts=False)) == pytest.approx(exact, rel=1e-2)


def test_a_factor_keeps_the_square_of_large_gradients_in_range() -> None:
    """A loss scale of fp16 must not make a gradient infinite that is not."""
    counted = SquaredNorm()
    gradient = torch.tensor([3e15 * 65536, 4e15 * 65536])
    counted.add([gradient])
    gradient.mul_(1 / 65536)
    square = counted.total(1 / 65536, torch.device("cpu"))
    assert float(square.sqrt()) == pytest.approx(5e15, rel=1e-6)


def test_a_factor_counts_in_a_norm_that_was_taken_before() -> None:
    counted = SquaredNorm()
    gradient = torch.tensor([3.0, 4.0])
    counted.add([gradient])
    gradient.mul_(0.5)
    assert float(counted.total(0.5, torch.device("cpu")).sqrt()) == 2.5
    assert float(SquaredNorm().total(1.0, torch.device("cpu"))) == 0.0
