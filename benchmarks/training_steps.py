"""Training steps of torch's own strategies and of ours without a session, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elasticzero.data.position import MicroBatch
from elasticzero.parallel import Setting, create
from elasticzero.parallel.mesh import Mesh
from elasticzero.rank_groups.group import RankGroup
from elasticzero.spans import Span
from elasticzero.state.model import NamedModel
from elasticzero.torch_internals.hooks import StepCheck

Step = Callable[[Tensor, Tensor], None]
"""Trains on a batch and its targets with the mean squared error."""


def beside_a_session(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer, which a session of this process does not refuse: it has a check."""
    optimizer.register_step_pre_hook(StepCheck(lambda: None))
    return optimizer


def torch_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None = None
) -> Step:
    """Returns a step of a model that reduces its gradients by itself.

    max_norm: limit of the norm of the gradient; None: no limit.
    """
    beside_a_session(optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fully_sharded(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> nn.Module:
    """Wraps each block, and then the model, with torch's FSDP2 over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def strategy_step(
    name: str,
    model: nn.Module,
    factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    device: torch.device,
    *,
    mirrors: bool = False,
) -> Step:
    """Returns a step of our strategy of this name, over all ranks.

    mirrors: each rank keeps a live copy of the part of the rank after it.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    setting = Setting(
        model=model,
        named=NamedModel(model),
        factory=lambda parameters: beside_a_session(factory(parameters)),
        device=device,
        rank=rank,
        world_size=ranks,
        mesh=Mesh.of_world(rank, ranks, RankGroup("all ranks", range(ranks), dist.group.WORLD)),
        mirrors=((rank + 1) % ranks,) if mirrors else (),
        mirrored_by=(rank - 1) % ranks if mirrors else None,
    )
    strategy = create(name, setting)

    def step(x: Tensor, y: Tensor) -> None:
        strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
        strategy.backward(nn.functional.mse_loss(strategy.model(x), y), 1.0 / ranks)
        strategy.finish(1.0, None)
        strategy.apply()

    return step
