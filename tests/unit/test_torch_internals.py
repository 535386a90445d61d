"""torch has what it does not offer in public under the same names; `make versions` runs this too.

Hooks on gradients and at steps are tested in `parallel`, stores in `comm/store`.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import get_worker_info

from elasticzero.comm import gloo, nccl
from elasticzero.processes import thread_states
from elasticzero.torch_internals import fsdp, groups, hooks, tensors
from tests.support.groups import end_groups


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The default group of one rank, over gloo."""
    end_groups()  # a test of zero3 on one rank may have made one
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    end_groups()


def test_groups_and_collectives_are_counted(group: dist.ProcessGroup) -> None:
    count = groups.collectives_begun(group)
    assert count is not None
    assert groups.collectives_begun(group) == count
    dist.all_reduce(torch.ones(1))
    assert groups.collectives_begun(group) == (count[0], count[1] + 1)
    dist.new_group([0], group_desc=groups.OWN_GROUP)
    own_group = groups.collectives_begun(group)
    assert own_group is not None and own_group[0] > count[0]
    assert groups.script_groups() == []
    of_script = dist.new_group([0])
    assert groups.script_groups() == [of_script]
    assert groups.collectives_begun(group) is None


def test_the_backend_of_a_group_has_its_name(group: dist.ProcessGroup) -> None:
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    assert list(groups.nccl_backends([group])) == []


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="torch has one NCCL backend")
def test_nccl_is_the_backend_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    plugins: dict[str, Any] = {n: p for n, p in dist.Backend._plugins.items() if n != "NCCL"}
    monkeypatch.setattr(dist.Backend, "_plugins", plugins)
    nccl.disable_torch_watchdog()
    dist.distributed_c10d.BackendConfig(dist.Backend("nccl"))
    assert plugins["NCCL"].creator_fn.__name__ == "_create_nccl_process_group"


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="threads have no name")
def test_threads_of_gloo_have_the_name_that_is_waited_for(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1))  # a thread has its name once it has run something
    assert thread_states(gloo.THREAD_NAME)


def test_a_process_is_a_data_worker_as_torch_sees_it() -> None:
    dataset: Any = [1, 2]
    tensors.as_data_worker(1, 3, dataset)
    try:
        info = get_worker_info()
        assert info is not None
        assert (info.id, info.num_workers) == (1, 3)
        assert info.dataset is dataset
    finally:
        tensors.as_data_worker(0, 0, None)
    assert get_worker_info() is None


def test_tensors_of_a_storage_and_their_changes_are_counted() -> None:
    whole = torch.zeros(4)
    assert tensors.sharing_tensors(whole) == 1
    part = whole[1:]
    assert tensors.sharing_tensors(whole) == tensors.sharing_tensors(part) == 2
    assert tensors.is_of_storage(part, whole.untyped_storage())
    assert not tensors.is_of_storage(torch.zeros(1), whole.untyped_storage())
    count = tensors.count_of_changes(whole)
    part.add_(1)
    assert tensors.counts_of_changes([whole, part]) == [count + 1, count + 1]
    with torch.inference_mode():
        assert tensors.count_of_changes(torch.zeros(1)) == 0


def test_what_a_module_has_registered_is_found() -> None:
    module = nn.Module()
    module.weight, module.child = nn.Parameter(torch.ones(1)), nn.ReLU()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    assert list(tensors.parameters_of(module)) == ["weight"]
    assert list(tensors.children_of(module)) == ["child"]
    assert list(tensors.buffers_of(module)) == ["kept", "unsaved"]
    assert tensors.unsaved_buffers_of(module) == {"unsaved"}


Register = Callable[[torch.optim.Optimizer], Any]


@pytest.mark.parametrize(
    ("register", "at_step"),
    [
        (lambda o: o.register_step_pre_hook(print), True),
        (lambda o: o.register_step_post_hook(print), True),
        (lambda _: register_optimizer_step_pre_hook(print), True),
        (lambda _: register_optimizer_step_post_hook(print), True),
        (lambda o: o.register_state_dict_pre_hook(print), False),
        (lambda o: o.register_state_dict_post_hook(print), False),
    ],
)
def test_hooks_of_an_optimizer_are_found(register: Register, at_step: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not hooks.has_step_hooks(optimizer)
    assert not hooks.has_state_dict_hooks(optimizer)
    handle = register(optimizer)
    try:
        assert hooks.has_step_hooks(optimizer) == at_step
        assert hooks.has_state_dict_hooks(optimizer) != at_step
    finally:
        handle.remove()
    assert not hooks.has_step_hooks(optimizer)
    assert not hooks.has_state_dict_hooks(optimizer)


class Counted(Tensor):
    """Counts the calls of torch's functions on it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, *args: Any, **options: Any) -> Any:
        cls.calls += 1
        return super().__torch_function__(*args, **options)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (lambda x: x.sum(), True),
        (lambda x: x.mean(1).sum(0), True),
        (lambda x: functional.mse_loss(x, torch.zeros(4, 3), reduction="sum"), True),
        (lambda x: functional.l1_loss(x, torch.zeros(4, 3), reduction="sum"), True),
        (lambda x: functional.cross_entropy(x, torch.zeros(4).long(), reduction="sum"), True),
        (lambda x: functional.cross_entropy(x, torch.zeros(4).long()), False),
        (lambda x: x.sum() / 4, False),
        (lambda x: torch.stack([x.mean(), x.square().mean()]).sum(), False),  # of two losses
        (lambda x: x.detach().sum(), False),
    ],
)
def test_a_sum_over_samples_is_told_from_their_mean(
    loss: Callable[[Tensor], Tensor], is_sum: bool
) -> None:
    assert tensors.is_sum_over(loss(torch.ones(4, 3, requires_grad=True)), 4) is is_sum


def test_a_subclass_of_a_tensor_is_not_called_where_it_must_not() -> None:
    tensor = torch.ones(1).as_subclass(Counted)
    assert tensor.requires_grad is False
    before = Counted.calls
    assert before > 0
    with tensors.without_torch_functions():
        assert tensor.requires_grad is False
    assert Counted.calls == before


def tables() -> dict[str, Any]:
    """What torch knows of groups."""
    world: Any = dist.distributed_c10d._world
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
    tags = {tag: list(tagged) for tag, tagged in world.tags_to_pg.items()}
    return {name: dict(getattr(world, name)) for name in names} | {"tags": tags}


def test_a_forgotten_group_goes_on_and_leaves_nothing_in_tables(group: dist.ProcessGroup) -> None:
    before, values = tables(), torch.ones(2)
    made = dist.new_group([0], group_desc=groups.OWN_GROUP)
    assert tables() != before
    groups.forget_group(made)
    groups.forget_group(made)
    assert {tag: tagged for tag, tagged in tables()["tags"].items() if tagged} == before["tags"]
    assert {**tables(), "tags": None} == {**before, "tags": None}
    with pytest.raises(ValueError):
        gloo.destroy_process_group(made)
    made.allreduce([values]).wait()
    assert dist.group.WORLD is group


def test_a_group_beside_others_becomes_the_default_group(group: dist.ProcessGroup) -> None:
    store = dist.HashStore()
    beside = groups.group_beside(store, 0, 1, timedelta(seconds=30), torch.device("cpu"))
    values = torch.ones(2)
    beside.allreduce([values]).wait()
    assert dist.group.WORLD is group and groups.script_groups() == []
    groups.replace_default_group(beside, "beside", store)
    assert dist.group.WORLD is beside and groups.script_groups() == []
    dist.all_reduce(values)
    dist.broadcast(values, 0, group=beside)
    gloo.destroy_process_group(group)
    assert list(dist.distributed_c10d._world.pg_map) == [beside]
    numbered = dist.new_group([0])
    assert numbered.group_name == "1", "as on a rank that has had no other group"
    of_script = dist.new_group([0], use_local_synchronization=True)
    dist.all_reduce(values, group=of_script)
    assert dist.get_backend() == "gloo" and dist.get_process_group_ranks(beside) == [0]


def test_a_group_that_stands_in_for_others_has_a_rank_and_no_collective() -> None:
    end_groups()
    with groups.stand_in_group(1, 3):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()


def test_fsdp2_divides_parameters_anew_and_keeps_their_objects() -> None:
    end_groups()
    model, inputs = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), torch.ones(2, 4)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = model(inputs)
    with groups.stand_in_group(0, 2) as group:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    parameters, (divided,) = dict(model.named_parameters()), fsdp.groups_below(model)
    for rank, ranks in ((2, 3), (3, 4), (0, 1), (1, 2), (0, 1)):
        chunks = {name: torch.chunk(values, ranks) for name, values in whole.items()}
        rows = {name: torch.zeros(parts[0].numel()) for name, parts in chunks.items()}
        for name, parts in chunks.items():
            if rank < len(parts):
                rows[name][: parts[rank].numel()] = parts[rank].reshape(-1)
        of = {id(p): name for name, p in model.named_parameters()}
        data = {id(o): rows[of[id(o.sharded_param)]] for o in divided.fsdp_params}
        assert (parameters["0.weight"].detach() * 2).shape == (5, 4)
        before = weakref.ref(divided.mesh_info.mesh)
        has_groups = hasattr(before(), "_pg_registry")  # from torch 2.13 on
        with groups.stand_in_group(rank, ranks) as group:
            fsdp.divide_anew(divided, DeviceMesh.from_group(group, "cpu"), data)
        fsdp.forget_meshes()
        gc.collect()
        assert before() is None or not has_groups
        assert all(parameter is parameters[n] for n, parameter in model.named_parameters())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and parameter.device_mesh.size() == ranks
            expected_rows = chunks[name][rank] if rank < len(chunks[name]) else whole[name][:0]
            assert torch.equal(parameter.to_local(), expected_rows)
        if ranks == 1:
            assert torch.equal(model(inputs), expected)
            model(inputs).sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            model.zero_grad()
            divided.reshard()


def test_a_check_of_steps_may_end_within_a_step() -> None:
    """torch goes over its hooks at that time, and raised "OrderedDict mutated during iteration"."""

    class Owner:
        def __init__(self, others: list[Owner]) -> None:
            self.others, self.calls = others, 0
            hooks.AnyStepCheck(self.check)

        def check(self, optimizer: torch.optim.Optimizer) -> None:
            self.calls += 1
            self.others.clear()

    ending: list[Owner] = []
    first = Owner(ending)
    ending.append(Owner([]))
    last = Owner([])
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    assert not ending and first.calls == last.calls == 1
