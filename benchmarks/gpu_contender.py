"""One contender of benchmarks/gpu.py: it trains a GPT on one rank, so many steps at each turn.

    gpu_contender.py NAME cuda|cpu SOCKET

Torch's own strategies run it as it is; ours run it under an agent. All contenders exist at the same
time, and the one whose turn it is trains: their ratios are taken within seconds of each other.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from elasticzero.spans import STRATEGIES

CLIP = 1.0
SEQUENCES = 512
"""Different sequences, in the processor's memory."""
ENDLESS = 10_000_000
"""Steps of a training that ends when it has no more turns."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes the size of the model and of a batch."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int


SHAPES = {"cuda": Shape(768, 12, 12, 50304, 1024, 8), "cpu": Shape(64, 2, 4, 512, 32, 4)}
"""GPT-2 small, and a model for a rehearsal."""


class Block(nn.Module):
    """A block of a transformer: attention, and two linear layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.inputs(self.norm(x)).split(width, 2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return result


class GPT(nn.Module):
    """A GPT whose first and last matrix are one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.Sequential(*[Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        result: Tensor = self.head(self.norm(self.blocks(self.words(x) + places)))
        return result


class Sequences(Dataset[Tensor]):
    """Sequences of random tokens that are read again and again."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(1)
        size = (SEQUENCES, shape.tokens)
        self._tokens = torch.randint(shape.vocabulary, size, generator=generator)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return self._tokens[index % SEQUENCES]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    logits = model(x)[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, x[:, 1:].flatten())


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


@dataclass(slots=True)
class Turns:
    """The contender's end of the benchmark's socket: turns come in, seconds of steps go out."""

    name: str
    device: torch.device
    path: str

    def take(self, batches: Iterable[Tensor], step: Callable[[Tensor], None]) -> None:
        """Trains through all turns, one after another."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.path)
            with connection.makefile("rw") as stream:
                self._take(batches, step, stream)

    def _take(self, batches: Iterable[Tensor], step: Callable[[Tensor], None], stream: Any) -> None:
        self._send(stream, {"name": self.name, **self._facts()})
        remaining = int(stream.readline() or 0)
        seconds: list[float] = []
        before_s = time.perf_counter()
        for x in batches:
            if not remaining:
                return
            step(x)
            self._synchronize()
            now_s = time.perf_counter()
            seconds.append(now_s - before_s)
            before_s = now_s
            if len(seconds) == remaining:
                peak_bytes = self._release()
                self._send(stream, {"seconds": seconds, "peak_bytes": peak_bytes})
                remaining, seconds = int(stream.readline() or 0), []
                before_s = time.perf_counter()

    def _send(self, stream: Any, document: dict[str, Any]) -> None:
        stream.write(json.dumps(document) + "\n")
        stream.flush()

    def _facts(self) -> dict[str, Any]:
        if self.device.type == "cpu":
            return {"torch": torch.__version__}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "nccl": nccl}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _release(self) -> int | None:
        """Frees the memory that the next contender needs; returns the peak so far in bytes."""
        if self.device.type == "cpu":
            return None
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated()


def trained_by_torch(kind: str, shape: Shape, device: torch.device) -> Callable[[Tensor], None]:
    """Returns a step of a plain loop or of torch's own strategy."""
    model: Any = GPT(shape).to(device)
    kind, _, addition = kind.partition("+")
    optimizer: Any = None
    if kind != "plain":
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
    if kind == "FSDP2":
        model = fully_sharded(model)
    elif kind == "DDP":
        ids = [0] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True
        )
    if addition == "ZRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-4, fused=True
        )
    else:
        optimizer = adam(model.parameters())
    called: Any = torch.compile(model) if addition == "compile" else model

    def step(x: Tensor) -> None:
        x = x.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=kind != "FSDP2"):
            loss = loss_of(called, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def fully_sharded(model: GPT) -> nn.Module:
    """Returns the model under torch's FSDP2, which computes in bf16 by its own policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def train(session: Any, turns: Turns, shape: Shape) -> None:
    """Trains under an agent, with the strategy of its options."""
    torch.manual_seed(0)
    compiled = turns.name.endswith("+compile")
    model, _ = session.prepare(GPT(shape), adam, precision="bf16", compile=compiled)
    session.restore()

    def step(x: Tensor) -> None:
        session.backward(loss_of(model, x))
        session.step(max_grad_norm=CLIP)

    batch = shape.batch * session.world_size
    turns.take(session.batches(Sequences(shape), global_batch=batch, steps=ENDLESS), step)


def main() -> None:
    name, place, path = sys.argv[1:]
    device, shape = (
        torch.device(place, 0) if place == "cuda" else torch.device(place),
        SHAPES[place],
    )
    torch.set_float32_matmul_precision("high")
    turns = Turns(name, device, path)
    if name.partition("+")[0] in STRATEGIES:
        import elasticzero

        elasticzero.run(lambda session: train(session, turns, shape))
        return
    torch.manual_seed(0)
    if place == "cuda":
        torch.cuda.set_device(device)
    step = trained_by_torch(name, shape, device)
    pinned = device.type == "cuda"
    turns.take(DataLoader(Sequences(shape), batch_size=shape.batch, pin_memory=pinned), step)
    sys.stdout.flush()
    os._exit(0)  # groups of one rank need no end


if __name__ == "__main__":
    main()
