"""Deals whole parameters to ranks, which sum their gradients and, under zero1 and zero2, step them.

An optimizer so sees the same tensors in every world: kernels that treat the end of a tensor, or a
thread's part of it, in another way than the rest give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MESSAGE_BYTES = 4 << 20
"""Size in bytes from which parameters of one rank are exchanged in another message."""
ALIGNMENT = 64
"""Elements at whose multiples parameters begin in a message, as in memory of their own."""


@dataclass(slots=True, eq=False)
class OwnedParameters:
    """Names parameters of one dtype and device that one rank of each row owns; they travel in one
    message."""

    owner: int
    """The index of that rank's shard."""
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """The first element of each in a message."""
    numel: int = 0
    """Elements of a message."""

    def add(self, name: str, parameter: nn.Parameter) -> None:
        self.names.append(name)
        self.parameters.append(parameter)
        self.offsets.append(self.numel)
        self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def empty(self) -> Tensor:
        """Returns room for one message."""
        return torch.empty(self.numel, dtype=self._like.dtype, device=self._like.device)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns a message of these tensors, one for each parameter, of the same size."""
        message = torch.zeros(self.numel, dtype=self._like.dtype, device=self._like.device)
        torch._foreach_copy_(self.unpack(message), [tensor.detach() for tensor in tensors])
        return message

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Returns the parameters' places in a message, in their shapes."""
        return [
            message[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    @property
    def _like(self) -> Tensor:
        return self.parameters[0].data


Round = list[OwnedParameters]
"""Messages that travel at a time: at most one of each owner."""


def owners_of(parameters: Mapping[str, nn.Parameter], shards: int) -> dict[str, int]:
    """Returns each parameter's owner: the largest goes first, to the rank of a row that has
    least."""
    loads = [0] * shards
    owners: dict[str, int] = {}
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    for name in sorted(parameters, key=lambda name: -sizes[name]):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


def deal_whole(
    parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Any], shards: int
) -> list[Round]:
    """Returns the messages in which these parameters travel.

    Args:
        parameters: The parameters by name.
        kinds: What the parameters of one message must have in common besides dtype and device, by
            name.
        shards: Number of ranks to which they are dealt.
    """
    owners = owners_of(parameters, shards)
    messages: list[list[OwnedParameters]] = [[] for _ in range(shards)]
    open_messages: dict[Any, OwnedParameters] = {}
    for name, parameter in parameters.items():
        kind = (owners[name], parameter.dtype, parameter.device, kinds.get(name))
        message = open_messages.get(kind)
        size = parameter.element_size()
        if message is None or (message.numel + parameter.numel()) * size > MESSAGE_BYTES:
            message = open_messages[kind] = OwnedParameters(owners[name])
            messages[owners[name]].append(message)
        message.add(name, parameter)
    most = max((len(queue) for queue in messages), default=0)
    return [[queue[i] for queue in messages if i < len(queue)] for i in range(most)]
