"""An ordinary torchrun script that knows nothing of ElasticZero: DDP, and a checkpoint of its own.

    torchrun --nproc-per-node 2 examples/torchrun_ddp.py --checkpoint /tmp/model.pt
    elasticzero run --nproc-per-node 2 examples/torchrun_ddp.py --checkpoint /tmp/model.pt

On several nodes they meet over etcd by `torchrun --nnodes 1:2 --rdzv-backend elasticzero
--rdzv-endpoint HOST:2379 …`, or `elasticzero run --nnodes 1:2 --etcd HOST:2379 --job my-run …`.

Started again, it goes on after the last epoch that it saved.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def waves(samples: int) -> TensorDataset:
    """Points of a curve with a little noise, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 1, generator=generator) * 6 - 3
    noise = 0.05 * torch.randn(samples, 1, generator=generator)
    return TensorDataset(x, torch.sin(2 * x) + noise)


def save(path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the checkpoint in one move, so that there is always a whole one."""
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    staged = path.with_suffix(".staged")
    torch.save(state, staged)
    os.replace(staged, path)


def train(path: Path, epochs: int, samples: int, batch: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first_epoch = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    if rank == 0:
        print(f"start epoch {first_epoch} world {world_size} restarts {restarts}", flush=True)
    parallel = DistributedDataParallel(model)
    data = waves(samples)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(parallel(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            save(path, epoch, model, optimizer)
            print(f"epoch {epoch} world {world_size} loss {loss.item():.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to save to")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32, help="samples at once on one worker")
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(options.checkpoint, options.epochs, options.samples, options.batch)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
