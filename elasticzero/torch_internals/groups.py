"""Gives access to what torch does not offer in public of process groups and stores.

Check after an upgrade of torch:
 - `torch._C._distributed_c10d` has the stores, which `torch.distributed` does not declare to type
   checkers;
 - torch's C++ calls the methods of a store that is a class of Python by the names that they have
   there, but for `deleteKey` and `getNumKeys`; `tests/unit/comm/store` calls all of them so;
 - `_world.pg_map` has every process group of this process as a key, the default one too;
 - `_world.group_count` grows with every group that is made, and torch names groups by it, or by the
   ranks and it (from torch 2.15 on), or by the ranks and the number of other groups;
 - a `ProcessGroup` with a backend of gloo or NCCL needs no entry in `_world` for its own methods,
   and may become the default group by entries in the tables of `_world`, which
   `replace_default_group` fills; `destroy_process_group` ends the one before alone then;
 - a `FakeProcessGroup` connects to nobody, and raises an error where a collective is called if
   its options say so;
 - `_get_sequence_number_for_group` grows with every collective that begins, under NCCL;
 - `_get_backend(device)` gives the NCCL backend, which has `name`, `abort` and, from torch 2.7 on,
   `get_error`. `make gpu` runs all of these;
 - with `TORCH_DIST_USE_NCCL2=0` in the environment before the first group is made, `nccl` is the
   backend of before torch 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

__all__ = ["PrefixStore", "Store", "TCPStore"]


OWN_GROUP = "elasticzero"
"""Description of the process groups that are not the script's."""


class PythonStore(Store):
    """Base class of a store in Python that torch's process groups call from C++.

    A reference of C++ does not keep the object of Python, without which a call from C++ fails.
    """

    @property
    def default_timeout(self) -> timedelta:
        """Returns how long a wait takes that has no limit of its own; `set_timeout` sets it."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def has_extended_api(self) -> bool:
        """Returns True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> PythonStore:
        """Returns this store, which several threads may use."""
        return self


class TorchStore(TCPStore):
    """torch's own store, with what ours has besides."""

    @property
    def default_timeout(self) -> timedelta:
        """Returns how long a wait takes that has no limit of its own."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def close(self) -> None:
        """Does nothing: torch closes a store with the last reference to it."""


def group_of_one() -> dist.ProcessGroup:
    """Returns torch's default group of a process that trains alone, which is made if there is
    none: FSDP2 takes no process without a group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def group_beside(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device
) -> dist.ProcessGroup:
    """Returns a group that torch has no record of, beside those that it has; any thread may make
    it, for a GPU one whose own GPU is this.

    Its own methods are its collectives. The functions of `torch.distributed` take it once
    `replace_default_group` was called. Gloo connects the ranks here; NCCL does so when it is asked
    to (`comm/nccl.py`), or in the first collective.

    Args:
        store: The store at which its ranks meet.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: Time limit of its collectives.
        device: The device of the tensors that its collectives take; a GPU means NCCL.
    """
    own_store = PrefixStore(device.type, store)
    group = dist.ProcessGroup(store, rank, world_size)
    if device.type == "cuda":
        backend_type, backend = _nccl(own_store, rank, world_size, timeout)
    else:
        backend_type = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(own_store, rank, world_size, timeout)
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, backend)
    group._set_group_desc(OWN_GROUP)
    return group


def _nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> tuple[Any, Any]:
    """Returns the type of NCCL's backend, and one that is not connected yet."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(range(world_size))
    backend = nccl(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    return dist.ProcessGroup.BackendType.NCCL, backend


@contextmanager
def stand_in_group(rank: int, world_size: int) -> Iterator[dist.ProcessGroup]:
    """Yields a group whose collectives raise an error. In this context it is torch's default group,
    and the only one, and meshes of devices can be made of it and used.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
    """
    assert not dist.is_initialized(), "with its default group torch ends all"
    store, backend_type = HashStore(), dist.ProcessGroup.BackendType.CUSTOM
    fake: Any = FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    backend = fake._create_internal(rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(backend_type)
    group._register_backend(torch.device("cpu"), backend_type, backend)
    if torch.cuda.is_available():
        group._register_backend(torch.device("cuda"), backend_type, backend)
    replace_default_group(group, f"{OWN_GROUP}/none", store)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def replace_default_group(
    group: dist.ProcessGroup, name: str, store: Store, backend: str = "gloo"
) -> None:
    """Makes a group of `group_beside` torch's default group; the one before stays one of this
    package's, until it is destroyed.

    torch names later groups by a number, which then is the same on all ranks, also on those that
    have had no other group.

    Args:
        group: The new default group, of all ranks.
        name: A name that no other group of this process has.
        store: The store at which its ranks have met.
        backend: The name of its backend.
    """
    c10d: Any = dist.distributed_c10d
    world, before = c10d._world, dist.group.WORLD
    tag = f"ptd:{name}"
    named: Any = group
    named._set_group_name(name)
    world.pg_map[group] = backend, store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
    world.pg_to_tag[group] = tag
    for label in ("", tag):
        world.tags_to_pg.setdefault(label, []).append(group)
    c10d._register_process_group(name, group)
    world.group_count = 1
    if before is not None:
        before._set_group_desc(OWN_GROUP)
    c10d._update_default_pg(group)


def forget_group(group: dist.ProcessGroup) -> None:
    """Removes a group that is not the default one from torch's tables, if torch has it; unlike
    `destroy_process_group` it waits for no rank, and ends no connection."""
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    if group not in world.pg_map:
        return
    c10d._unregister_process_group(world.pg_names[group])
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        del table[group]
    world.pg_to_tag.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)


def replace_init(function: Callable[..., None]) -> Callable[[], object]:
    """Has `init_process_group` of torch be this function; returns what puts torch's own back."""
    before = dist.init_process_group
    cast(Any, dist.distributed_c10d).init_process_group = dist.init_process_group = function
    return lambda: replace_init(before)


def script_groups() -> list[dist.ProcessGroup]:
    """Returns the process groups that the script has made."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return [g for g in groups if g is not dist.group.WORLD and g.group_desc != OWN_GROUP]


def collectives_begun(group: dist.ProcessGroup) -> tuple[int, int] | None:
    """Returns (groups made, collectives of this group begun) so far.

    Returns None if the script has groups of its own, which are not counted.
    """
    if script_groups():
        return None
    collectives = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return dist.distributed_c10d._world.group_count, int(collectives)


def nccl_backends(groups: Iterable[dist.ProcessGroup]) -> Iterator[Any]:
    """Returns the NCCL backend of each of these process groups that has one."""
    for group in groups:
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                yield backend
