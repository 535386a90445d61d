"""Gives all ranks a value of one rank, as JSON and the bytes of tensors: neither runs code where it
is read.

torch's `broadcast_object_list` sends a pickle in its place, and a pickle that another process has
made runs what that one likes. This stands apart from `rank_zero.py`, which sends tensors of a
layout that is known to all ranks already, again and again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.nested import flatten, unflatten
from elasticzero.rank_groups.group import message_device


def broadcast_value(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """Returns one rank's value on every rank; all ranks of the group call this together.

    A tensor comes on the CPU, or on the device of the group where it was not on the CPU before.

    Args:
        value: Dicts, lists, tuples, numbers, strings, arrays and tensors, nested in any way; that
            of any other rank than `source` has no effect.
        group: The process group.
        source: The rank in the group whose value counts, which gets back the very object.

    Raises:
        UserError: The value of this rank, the source, holds something else.
    """
    device = message_device(group)
    if dist.get_rank(group) == source:
        head, tensors = _packed(value)
        sizes = torch.tensor([len(head), sum(tensor.numel() for tensor in tensors)])
        dist.broadcast(sizes.to(device), group=group, group_src=source)
        data = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *tensors])
        dist.broadcast(data.to(device), group=group, group_src=source)
        return value
    received = torch.zeros(2, dtype=torch.int64, device=device)
    dist.broadcast(received, group=group, group_src=source)
    size_of_head, size_of_tensors = map(int, received.tolist())
    data = torch.zeros(size_of_head + size_of_tensors, dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=source)
    data = data.cpu()
    return _unpacked(bytes(data[:size_of_head].numpy()), data[size_of_head:], device)


def _packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """Returns a value's JSON with the layout of its tensors, and the bytes of these."""
    tensors: dict[str, Tensor] = {}
    nested = flatten(value, "", tensors)
    layout = [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type == "cpu"]
        for name, t in tensors.items()
    ]
    return json.dumps([nested, layout]).encode(), [_bytes_of(t) for t in tensors.values()]


def _bytes_of(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.zeros(0, dtype=torch.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _unpacked(head: bytes, data: Tensor, device: torch.device) -> Any:
    """Returns the value of a message.

    Args:
        head: Its JSON.
        data: The bytes of its tensors, one after the other.
        device: The device for tensors that were on none of the CPU.
    """
    nested, layout = json.loads(head)
    tensors = dict(_tensors(layout, data, device))
    return unflatten(nested, tensors.__getitem__)


def _tensors(
    layout: Iterable[Any], data: Tensor, device: torch.device
) -> Iterable[tuple[str, Tensor]]:
    start = 0
    for name, dtype_name, shape, on_cpu in layout:
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r:.80} is no dtype")
        size = torch.Size(shape).numel() * dtype.itemsize
        values = torch.zeros(shape, dtype=dtype)
        if size:
            values = data[start : start + size].clone().view(dtype).reshape(shape)
        start += size
        yield name, values if on_cpu else values.to(device)
