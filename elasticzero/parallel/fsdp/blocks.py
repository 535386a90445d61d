"""Applies FSDP2 to the blocks of a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from elasticzero.parallel.base import Setting
from elasticzero.parallel.mesh import Mesh
from elasticzero.rank_groups.group import ALONE
from elasticzero.state.model import called_parts
from elasticzero.torch_internals.fsdp import forget_meshes
from elasticzero.torch_internals.groups import group_of_one, stand_in_group


def partition(
    setting: Setting, undivided: set[nn.Parameter]
) -> tuple[list[nn.Module], dict[str, weakref.ref[nn.Parameter]]]:
    """Applies `fully_shard` to the blocks of the model, to what the script calls and to the root,
    but for parameters without dimensions or elements, which it does not take.

    Returns:
        These modules, the root last, and each parameter as it was before FSDP2 had it.
    """
    with device_mesh(setting.place, setting.device.type) as mesh:
        return _partition(setting, undivided, mesh)


def _partition(
    setting: Setting, undivided: set[nn.Parameter], mesh: DeviceMesh
) -> tuple[list[nn.Module], dict[str, weakref.ref[nn.Parameter]]]:
    options: dict[str, Any] = {"mesh": mesh}
    if undivided:
        options["ignored_params"] = undivided
    if setting.gathered_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=setting.gathered_dtype, reduce_dtype=torch.float32
        )
    if setting.cpu_offload:  # pinned memory is copied to a GPU while it computes
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=setting.device.type == "cuda")
    modules = [
        module
        for part in dict.fromkeys(called_parts(setting.model))
        if any(True for _ in part.parameters())
        for module in (*_blocks(part), part)
    ]
    if setting.model not in modules:  # FSDP2 takes no ModuleDict, and adds to the model's class
        modules.append(nn.Module())
        modules[-1].add_module("model", setting.model)
    names = {parameter: name for name, parameter in setting.named.parameters.items()}
    before: dict[str, weakref.ref[nn.Parameter]] = {}  # torch swaps no tensor that has one
    for module in modules:
        whole = setting.materialize(module)
        for parameter in module.parameters():
            if parameter in names:
                before.setdefault(names[parameter], weakref.ref(parameter))
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()  # FSDP2 takes no others
        _sum_gradients(fully_shard(module, **options), setting)
        _release(whole, module)
    return modules, before


def _sum_gradients(module: FSDPModule, setting: Setting) -> None:
    """Has FSDP2 sum gradients, where it would average them over the ranks.

    A loss must then not be multiplied by the number of ranks. Backwards of the script's own, as
    hooks of modules and of activations, so see gradients as one process has them.
    """
    if setting.one_release:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)


def _release(whole: Iterable[nn.Parameter], module: nn.Module) -> None:
    """Frees parameters that FSDP2 has replaced, so that no rank has the whole of a model from the
    meta device; an optimizer still refers to them."""
    kept = {id(parameter) for parameter in module.parameters()}
    for parameter in whole:
        if id(parameter) not in kept:
            parameter.data = parameter.data.new_empty(0)


@contextmanager
def device_mesh(mesh: Mesh, device: str) -> Iterator[DeviceMesh]:
    """Yields torch's mesh: rows of ranks that FSDP2 divides tensors over, where there are several,
    and the replicas. It can be given to FSDP2 in this context.

    Args:
        mesh: The rows of ranks, which need not be connected yet where they are one.
        device: The type of the device that computes.
    """
    forget_meshes()
    if mesh.shard_group is ALONE and mesh.world_size == 1:
        yield DeviceMesh.from_group(group_of_one(), device)
    elif mesh.replicas > 1:
        yield DeviceMesh.from_group(
            [mesh.replica_group.process_group, mesh.shard_group.process_group],
            device,
            mesh=torch.tensor(mesh.rows()),
            mesh_dim_names=("replicas", "shards"),
        )
    elif mesh.shard_group.is_connected:
        yield DeviceMesh.from_group(mesh.shard_group.process_group, device)
    else:
        with stand_in_group(mesh.shard, mesh.shards) as group:
            yield DeviceMesh.from_group(group, device)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the children of the outermost lists of modules, which run one after the other; one
    that shares a parameter with another part of the model stays with the root."""
    users: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        users[id(parameter)] = users.get(id(parameter), 0) + 1

    def search(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                inside: dict[int, int] = {}
                for _, parameter in child.named_parameters(remove_duplicate=False):
                    inside[id(parameter)] = inside.get(id(parameter), 0) + 1
                alone = inside and all(users[key] == count for key, count in inside.items())
                if alone and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                    yield child
                    continue
            yield from search(child)

    seen: set[int] = set()
    for block in search(model):
        if id(block) not in seen:
            seen.add(id(block))
            yield block
