"""Gives access to FSDP2's parameter groups, which have no public interface, and divides them anew.

A group is what FSDP2 gathers and reduces together. It knows the mesh of ranks that its parameters
are divided over, and each parameter knows its rows; both are of one world. Here they become those
of another one, while the module and the script keep the parameters that they have.

Check after an upgrade of torch: FSDP2's state of a module and its groups; that `FSDPParam` finds
all that depends on the mesh in `_init_sharded_param`, also of a parameter on the meta device, but
for what `_divide_parameter` sets; that a forward uses a view of `all_gather_outputs`; and which
caches know meshes.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

from elasticzero.torch_internals.tensors import without_torch_functions

TELLS_MESH = "mesh_info" in signature(FSDPParam._init_sharded_param).parameters
"""True if FSDP2 tells a parameter the mesh as it divides it, and False if before that."""


def groups_below(root: nn.Module) -> Iterator[Any]:
    """Returns what FSDP2 gathers and reduces together."""
    for module in root.modules():
        yield from groups_of(module)


def groups_of(module: nn.Module) -> Iterator[Any]:
    """Returns what FSDP2 gathers where this module runs."""
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12
            groups = [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)


def owners(group: Any) -> set[nn.Module]:
    """Returns the modules that have parameters of the group, but for those that it belongs to."""
    infos = [of._module_info for of in group.fsdp_params]
    modules = {module for info in infos for module in (info.module, *info.shared_modules)}
    return modules.difference(group.modules)


def has_gradients(group: Any) -> bool:
    """Returns whether autograd has added a gradient to a gathered parameter of the group."""
    leaves = (leaf_of(of) for of in group.fsdp_params)
    return any(leaf is not None and leaf.grad is not None for leaf in leaves)


def leaf_of(of: Any) -> Tensor | None:
    """Returns a parameter as a forward uses it; None before the first."""
    leaf: Tensor | None = getattr(of, "_unsharded_param", None)
    return leaf


def present_parameter(of: Any) -> Any:
    """Returns what the module has under the parameter's name."""
    return getattr(of._module_info.module, of._module_info.param_name)


def set_up(root: nn.Module) -> None:
    """Has FSDP2 find the modules below the root, if it has not yet."""
    module: Any = root
    module._get_fsdp_state()._lazy_init()


def divide_anew(group: Any, mesh: DeviceMesh, rows: Mapping[int, Tensor] | None = None) -> None:
    """Divides the parameters of a group, which are not gathered, over another mesh.

    Args:
        group: The group.
        mesh: The mesh.
        rows: The elements that this rank has of each parameter, by the identity of FSDP2's object:
            flat, and with as many as the first rank has; None: they stay what they are.
    """
    info = replace(group.mesh_info, mesh=mesh)
    frees = group.post_forward_mesh_info is not None
    group.mesh_info, group.post_forward_mesh_info = info, info if frees else None
    for of in group.fsdp_params:
        _divide_parameter(of, info, of._sharded_param_data if rows is None else rows[id(of)])


def _divide_parameter(of: Any, info: Any, data: Tensor) -> None:
    """Divides one parameter.

    Args:
        of: FSDP2's object of the parameter.
        info: What FSDP2 knows of the mesh.
        data: As in `divide_anew`.
    """
    kept = of.sharded_param
    shape = torch.empty_strided(kept.size(), kept.stride(), dtype=kept.dtype, device="meta")
    whole = nn.Parameter(shape, requires_grad=kept.requires_grad)
    of.mesh_info = info
    of._init_sharded_param(whole, of.device, None, *((info,) if TELLS_MESH else ()))
    if of.post_forward_mesh_info is not None:
        of.post_forward_mesh_info = info
        of._init_sharded_post_forward_param_metadata(whole)
    made, of.sharded_param, of._sharded_param_data = of.sharded_param, kept, data
    kept._local_tensor = data.view(of.padded_sharded_param_size)[: len(made._local_tensor)]
    kept._spec = made._spec
    of._setattr_on_modules(kept)
    whole_numel = data.numel() * info.shard_mesh_size
    of.all_gather_outputs = [_resized(gathered, whole_numel) for gathered in of.all_gather_outputs]


def _resized(gathered: Tensor, numel: int) -> Tensor:
    """Returns a tensor of so many elements in the memory of another one, which FSDP2 has freed; the
    parameter that a forward uses is a view of it, and the model may have kept that."""
    storage = gathered.untyped_storage()
    storage.resize_(numel * gathered.itemsize)
    resized = torch.empty(0, dtype=gathered.dtype, device=gathered.device)
    resized.set_(storage, 0, (numel,))  # type: ignore[call-overload]
    storage.resize_(0)
    return resized


def rows_of(parameter: Tensor) -> Tensor:
    """Returns this rank's elements of a parameter that FSDP2 has divided, which share memory."""
    local: Tensor = cast(Any, parameter)._local_tensor.detach()
    return local


def forget_meshes() -> None:
    """Has DTensors forget, in this thread, what they know of operations over meshes. A mesh of as
    many ranks equals one of a world before, whose groups have ended, and keeps these."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    topology: Any = getattr(_collective_utils, "MeshTopoInfo", None)
    for cache in (
        propagator.propagate_op_sharding,
        getattr(propagator, "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None),
        getattr(topology, "build_from_mesh", None),
    ):
        if cache is not None:
            cache.cache_clear()
    getattr(_redistribute, "_planner_cache", {}).clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def keeps_rows(groups: Iterable[Any], tensors: Iterable[Tensor]) -> bool:
    """Returns whether other tensors than these and FSDP2's lie over the mesh of parameters, or in
    the memory of their rows. It looks at all objects of the process.

    Args:
        groups: The groups that have the parameters.
        tensors: Tensors in the memory of rows.
    """
    every = [of for group in groups for of in group.fsdp_params]
    meshes = {id(of.mesh_info.mesh) for of in every}
    memory = {of._sharded_param_data.untyped_storage()._cdata for of in every}
    expected = [*tensors]
    for of in every:
        expected += [of._sharded_param_data, of.sharded_param, of.sharded_param._local_tensor]
    expected += [tensor._base for tensor in expected if tensor._base is not None]
    names = {id(tensor) for tensor in expected}
    with without_torch_functions():  # a gradient that is hidden refuses to be looked at
        return any(
            id(tensor) not in names and _is_of_rows(tensor, meshes, memory)
            for tensor in _every_tensor()
        )


def _every_tensor() -> Iterator[Tensor]:
    """Yields all tensors of the process that Python's garbage collector knows. No line of Python
    runs for any other object: of half a million in 30 ms."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
    yield from compress(things, map(kinds.__contains__, map(type, things)))


def _is_of_rows(tensor: Tensor, meshes: Collection[int], memory: Collection[int]) -> bool:
    """Returns whether a tensor lies over one of these meshes, or in such memory.

    Args:
        tensor: The tensor.
        meshes: The identities of meshes.
        memory: The addresses of storages.
    """
    if isinstance(tensor, DTensor):
        return id(tensor.device_mesh) in meshes
    return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in memory
