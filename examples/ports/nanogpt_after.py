"""Trains a small GPT on a text in the manner of nanoGPT, on nodes that come and go."""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import elasticzero as ez

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


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a text, by the place where they begin."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        text = self.text[start : start + CONTEXT + 1]
        return text[:-1], text[1:]


def train(session: ez.Session, options: argparse.Namespace) -> None:
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    split = int(0.9 * len(text))
    held_out = Windows(text[split:])
    few = Subset(held_out, range(0, len(held_out) - 1, 16 * CONTEXT))
    torch.manual_seed(1337)

    plain = GPT()
    if options.dtype == "float64":
        plain.double()
    precision = "bf16" if options.dtype == "bfloat16" else "fp32"
    model, optimizer = session.prepare(plain, adamw, precision=precision)
    session.restore()

    batches = session.batches(
        Windows(text[:split]),
        global_batch=BATCH * ACCUMULATION,
        micro_batch=BATCH,
        steps=options.steps,
        seed=1337,
    )
    for x, y in batches:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(session.step_count, options.steps)
        _, loss = model(x, y)
        session.backward(loss)
        if session.step(max_grad_norm=1.0):
            step = session.step_count
            last = step == options.steps
            if last or step % EVALUATE_EVERY == 0:
                validation = session.evaluate(few, lambda batch: model(*batch)[1], batch_size=8)
                if session.rank == 0:
                    print(f"step {step} validation loss {validation:.4f}", flush=True)
    weights = session.state_dict()
    if session.rank == 0:
        torch.save({"model": weights}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--out", type=Path, default=Path("gpt.pt"))
    options = parser.parse_args()
    ez.run(lambda session: train(session, options))


if __name__ == "__main__":
    main()
