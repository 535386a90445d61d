"""The same training as `scripts/regression.py` in plain PyTorch: one process, whole batches."""

from __future__ import annotations

import torch
from torch import Tensor

from elasticzero.data.sampling import SampleOrder
from tests.integration.scripts import regression


def order_of_samples(global_batch: int, epochs: int) -> list[list[int]]:
    """The samples of each step: every epoch's order cut in global batches, the last one shorter."""
    order = SampleOrder(samples=regression.SAMPLES, seed=3, shuffle=True)
    cuts = range(0, regression.SAMPLES, global_batch)
    return [
        [int(i) for i in order.indices(epoch, cut, min(cut + global_batch, regression.SAMPLES))]
        for epoch in range(epochs)
        for cut in cuts
    ]


def steps_in(global_batch: int, epochs: int) -> int:
    return epochs * regression.steps_per_epoch(global_batch)


def undisturbed(global_batch: int, epochs: int) -> dict[str, Tensor]:
    """Final weights by name."""
    return trained_on(order_of_samples(global_batch, epochs))


def trained_on(steps: list[list[int]]) -> dict[str, Tensor]:
    """Final weights by name. steps: the samples of each step."""
    model = regression.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    data = regression.dataset()
    for samples in steps:
        x, y = data[samples]
        optimizer.zero_grad()
        regression.loss_of(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
