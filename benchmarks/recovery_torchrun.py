"""The same training as `recovery_ours.py`, written for torchrun: DDP, each step's end noted in a
file."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", help="file to which each step of rank 0 adds a line")
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--begin", type=float, default=0.0, help="seconds of a core at the begin")
    options = parser.parse_args()
    end_s = time.process_time() + options.begin
    while time.process_time() < end_s:
        pass
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16))
    model = DistributedDataParallel(plain.to(device), device_ids=[0] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = 32 // world_size
    with open(options.notes, "a", buffering=1) as notes:
        while True:
            time.sleep(options.pause)
            x, y = torch.randn(count, 256).to(device), torch.randn(count, 16).to(device)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()
            if rank == 0:
                restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                notes.write(f"{time.time()} {world_size} {os.getpid()} {restart}\n")


if __name__ == "__main__":
    main()
