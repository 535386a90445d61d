"""Holds what a job has chosen for its buckets, on one rank of a generation: rules U1 to U4 of
`plan.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.options.settings import BucketBytes
from elasticzero.parallel.buckets.plan import DEFAULT_PLAN, BucketPlan, order_of
from elasticzero.serialization import decode, encode
from elasticzero.torch_internals.hooks import GradientReady

SHARED = "buckets/order"
"""The name of the order among what rank 0 gives all ranks."""


class BucketChoice:
    """Holds the plan that is stored with the state, and records the order of gradients for it."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        """Begins without a choice.

        Args:
            names: The names of all the model's parameters.
            device: The device of messages between ranks.
        """
        self.plan = DEFAULT_PLAN
        self._names = list(names)
        self._device = device
        self._ready: dict[str, None] = {}
        self._hooks: list[Any] = []
        self._shares = False
        """Ranks have no order yet, and rank 0 is to give them one."""
        self._shared: Tensor | None = None
        """The order that rank 0 has shared at the boundary before; None: it has shared none."""

    def used(self, size: BucketBytes) -> BucketPlan:
        """Returns the plan of this generation's layout.

        Args:
            size: The value of `--bucket-bytes`.
        """
        return self.plan if size == "auto" else replace(self.plan, size_bytes=size)

    def take_size(self, size_bytes: int) -> None:
        """Takes the size that rank 0 has measured."""
        self.plan = replace(self.plan, size_bytes=size_bytes)

    def begin_recording(self, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        """Begins to record the order of gradients on rank 0, unless it is known (U2); all ranks
        call this.

        Args:
            parameters: The parameters by name.
            rank: This rank.
        """
        self._shares = self.plan.order is None
        if self._shares and rank == 0:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(GradientReady(self._hook(name)))
                for name, parameter in parameters.items()
                if parameter.requires_grad
            ]

    @property
    def is_open(self) -> bool:
        """Returns whether ranks have no order yet, which rank 0 records."""
        return self._shares

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._ready.setdefault(name)

    def shared(self) -> dict[str, Tensor]:
        """Returns what rank 0 gives all ranks at a boundary after a step, if there is anything."""
        if not self._shares:
            return {}
        count = len(self._names)
        if self._ready:
            order = order_of(list(self._ready), self._names) or tuple(reversed(range(count)))
        else:  # another rank, or rank 0 before its first gradient
            order = (0,) * count
        self._shared = torch.tensor(order, dtype=torch.int64, device=self._device)
        return {SHARED: self._shared}

    def take_shared(self) -> None:
        """Takes over what was shared at the boundary before; all ranks call this after a step.

        A rank that has made another step since then shows that all ranks have got it. So the states
        of all ranks have the order from the same step on.
        """
        shared, self._shared = self._shared, None
        if shared is None:
            return
        order = tuple(shared.tolist())
        if sorted(order) == list(range(len(order))):
            recorded = order_of([self._names[number] for number in order], self._names)
            self.plan, self._shares = replace(self.plan, order=recorded), False
            for hook in self._hooks:
                hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Returns what is part of the training state, equal on all ranks; empty: nothing."""
        return {} if self.plan == DEFAULT_PLAN else dict(encode(self.plan))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a stored plan; raises `RecordError` for one of another form."""
        if state:
            self.plan = decode(BucketPlan, dict(state), "buckets")
