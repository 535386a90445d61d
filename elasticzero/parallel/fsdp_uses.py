"""Records which parameters a rank has used under FSDP2, and makes zero gradients for the others.

FSDP2 leaves a parameter without a gradient out of what it reduces, so that ranks which have used
different parameters would add up different tensors. It gathers and reduces a block when the block
runs: all ranks must run the same blocks in the same order, which `blocks` checks.

Check after an upgrade of torch: FSDP2's state of a module and its parameter groups, of which
`_get_fsdp_state` is no public interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elasticzero.parallel import same_number


class Uses:
    """Tracks what one rank has used in a global batch."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], blocks: Sequence[nn.Module]
    ) -> None:
        """Wraps FSDP2's groups. parameters: by name, as FSDP2 has made them. blocks: modules
        with a group of their own."""
        self.names: set[str] = set()
        """Parameters that this rank has used."""
        self.blocks = 0
        """Stands for the blocks that have run, in their order."""
        self._counts = True
        self._whole = {n: p for n, p in parameters.items() if not isinstance(p, DTensor)}
        self._groups = list(_groups(model))
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._names = {
            id(of): name_of[id(of.sharded_param)]
            for group in self._groups
            for of in group.fsdp_params
        }
        for group in self._groups:
            group.post_backward = partial(self._reduce, group, group.post_backward)
        for index, block in enumerate(blocks, 1):
            block.register_forward_pre_hook(partial(self._enter, index))

    def clear(self) -> None:
        """Begins a new global batch."""
        self.names.clear()
        self.blocks = 0

    def backward(self, loss: Tensor, *, counts: bool) -> None:
        """counts: the micro-batch has a weight; else it uses nothing."""
        self._counts = counts
        unused = [] if counts else [leaf for leaf in self._leaves() if leaf.grad is None]
        loss.backward()
        for leaf in unused:
            leaf.grad = None
        if counts:
            self.names |= {name for name, p in self._whole.items() if p.grad is not None}

    def _leaves(self) -> Iterator[Tensor]:
        """Returns the tensors to which autograd gives gradients."""
        yield from self._whole.values()
        for group in self._groups:
            for of in group.fsdp_params:
                if (leaf := _leaf(of)) is not None and of.unsharded_accumulated_grad is None:
                    yield leaf

    def _reduce(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Runs the group's own `post_backward`, with zeros for what this rank has not used."""
        for of in group.fsdp_params:
            leaf = _leaf(of)
            if leaf is None or not leaf.requires_grad:
                continue
            if leaf.grad is not None or of.unsharded_accumulated_grad is not None:
                if self._counts:
                    self.names.add(self._names[id(of)])
            elif group.reduce_grads:
                leaf.grad = torch.zeros_like(leaf)
        post_backward(*unused)

    def _enter(self, index: int, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.blocks = (self.blocks * 8191 + index) % same_number.MODULUS


def _groups(model: nn.Module) -> Iterator[Any]:
    """Returns what FSDP2 gathers and reduces together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch before 2.12
                groups = [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


def _leaf(of: Any) -> Tensor | None:
    """Returns a parameter as a forward uses it; None before the first."""
    leaf: Tensor | None = getattr(of, "_unsharded_param", None)
    return leaf
