"""Trains a small GPT on a text in the manner of nanoGPT, on all ranks that torchrun has started."""

import argparse
import math
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, HEADS, CONTEXT = 2, 64, 4, 64
BATCH, ACCUMULATION = 4, 6  # samples at once, and how often they make a step of the optimizer
RATE, LOWEST_RATE, WARM_UP = 3e-3, 3e-4, 10
EVALUATE_EVERY = 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (head.transpose(1, 2) for head in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def rate_at(step: int, steps: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LOWEST_RATE + 0.5 * (1 + math.cos(math.pi * done)) * (RATE - LOWEST_RATE)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.stack([text[start : start + CONTEXT] for start in starts.tolist()])
    y = torch.stack([text[start + 1 : start + 1 + CONTEXT] for start in starts.tolist()])
    return x, y


def train(rank: int, world_size: int, device: torch.device, options: argparse.Namespace) -> None:
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    split = int(0.9 * len(text))
    assert ACCUMULATION % world_size == 0, "the number of ranks must divide the accumulation"
    accumulation = ACCUMULATION // world_size
    torch.manual_seed(1337 + rank)

    plain = GPT().to(device)
    if options.dtype == "float64":
        plain.double()
    half = options.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16) if half else nullcontext()
    optimizer = adamw(plain.parameters())
    first_step = 0
    if options.out.exists():  # goes on where an earlier run has saved
        saved = torch.load(options.out, map_location=device, weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_step = saved["step"]
    model = DistributedDataParallel(plain) if world_size > 1 else plain

    def evaluate() -> float:
        plain.eval()
        losses: list[float] = []
        with torch.no_grad():
            for start in range(split, len(text) - CONTEXT - 1, 16 * CONTEXT):
                x, y = windows(text, torch.tensor([start]))
                losses.append(plain(x.to(device), y.to(device))[1].item())
        plain.train()
        return sum(losses) / len(losses)

    for step in range(first_step, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, options.steps)
        for micro in range(accumulation):
            x, y = windows(text, torch.randint(split - CONTEXT, (BATCH,)))
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro == accumulation - 1
            with autocast:
                _, loss = model(x.to(device), y.to(device))
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = step + 1 == options.steps
        if rank == 0 and (last or (step + 1) % EVALUATE_EVERY == 0):
            print(f"step {step + 1} validation loss {evaluate():.4f}", flush=True)
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--out", type=Path, default=Path("gpt.pt"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" not in os.environ:  # without torchrun
        train(0, 1, device, options)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(dist.get_rank(), dist.get_world_size(), device, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
