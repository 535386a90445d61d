"""Strategy `ddp`: everything whole on each rank, by torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elasticzero.parallel import Setting, Slot
from elasticzero.parallel.optimizers import (
    MASTER,
    as_tensor,
    by_parameter,
    check_keys,
    open_optimizer,
    put_state,
)
from elasticzero.spans import Span
from elasticzero.state import MODEL, OPTIMIZER, Share, Spec

BUFFERS_LEFT_ALONE: Any = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)
"""The session keeps buffers equal, in every strategy; torch 2.13 has renamed the option."""


class Replicated:
    """Implements `Strategy`; with one rank the model is left as it is."""

    replicated = True

    def __init__(self, setting: Setting) -> None:
        opened = open_optimizer(setting.factory, setting.named, pieces=False)
        self.optimizer = opened.optimizer
        self.group_names = opened.group_names
        self._schemas = opened.schema_of()
        self._parameters = setting.named.parameters
        self._ranks = setting.world_size
        self._ddp: DistributedDataParallel | None = None
        self.model: nn.Module = setting.model
        if setting.world_size > 1:
            on_gpu = setting.device.type == "cuda"
            self._ddp = DistributedDataParallel(
                setting.model,
                device_ids=[setting.device.index] if on_gpu else None,
                **BUFFERS_LEFT_ALONE,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
            self.model = self._ddp

    def expect(self, *, last: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = last

    def backward(self, loss: Tensor, fraction: float) -> None:
        (loss * (fraction * self._ranks)).backward()  # DDP divides by the number of ranks

    def finish(self, factor: float, max_norm: float | None) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def apply(self) -> None:
        self.optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def share(self) -> Share:
        share = Share()
        share.add_even({MODEL + name: p.detach() for name, p in self._parameters.items()})
        by_key: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, Tensor] = {}
        for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    full, tensor = f"{OPTIMIZER}{name}/{key}", as_tensor(value)
                    if tensor is None:
                        continue
                    if tensor.dim() == 0:
                        scalars[full] = tensor
                    else:
                        by_key.setdefault(key, {})[full] = tensor
        for tensors in by_key.values():
            share.add_even(tensors)
        count = len(scalars)
        share.add_whole(scalars, tuple(i * self._ranks // count for i in range(count)))
        return share

    @contextmanager
    def filling(self, stored: Mapping[str, Spec]) -> Iterator[list[Slot]]:
        slots: list[Slot] = []
        for name, parameter in self._parameters.items():
            slots.append(Slot(MODEL + name, Span(0, parameter.numel()), parameter.data))
        states: list[tuple[str, nn.Parameter, dict[str, Tensor]]] = []
        index = by_parameter(stored)
        for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                keys = index.get(name, {})
                check_keys(name, keys, self._schemas[name])
                tensors: dict[str, Tensor] = {}
                for key, spec in keys.items():
                    if key == MASTER:
                        continue
                    tensors[key] = torch.empty(spec.shape, dtype=spec.dtype)
                    span = Span(0, spec.numel)
                    slots.append(Slot(f"{OPTIMIZER}{name}/{key}", span, tensors[key]))
                states.append((name, parameter, tensors))
        yield slots
        for name, parameter, tensors in states:
            put_state(self.optimizer, parameter, tensors, self._schemas[name])
