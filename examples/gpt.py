"""Trains a small byte-level GPT on the source files of Python's own standard library.

Every machine with Python has the text. Files are split in two, for training and for validation.

    python examples/gpt.py                                       one process
    elasticzero local --nodes 3 --strategy zero2 examples/gpt.py three nodes on this machine

Shapes: B samples of a micro-batch, T tokens of context, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, Subset

import elasticzero as ez

VOCABULARY = 256
PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")
VALIDATION_EVERY = 10
"""One file in this many, in order of name, is kept for validation."""


def source_files() -> list[Path]:
    """The standard library's modules by name, without those that differ from build to build."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in library.glob("*.py") if not path.name.startswith("_sysconfigdata")]
    for package in PACKAGES:
        files += (library / package).glob("*.py")
    return sorted(files, key=lambda path: path.relative_to(library).as_posix())


def read_text(files: Iterable[Path], max_bytes: int) -> bytes:
    """The files laid end to end, no more than `max_bytes` of them."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


class Windows(Dataset[dict[str, Tensor]]):
    """Text cut in windows of `context` bytes; the byte to predict is always the next one."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes_N = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes_N) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.context
        window = self.bytes_N[start : start + self.context + 1].long()
        return {"x": window[:-1], "y": window[1:]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of the model; `width` is a multiple of `heads`."""

    layers: int
    width: int
    heads: int
    context: int


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer; each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q_BHTd, k_BHTd, v_BHTd = (part.transpose(1, 2) for part in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        x_BTD = x_BTD + self.attention_out(seen.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))
        output: Tensor = x_BTD + self.mlp_out(hidden)
        return output


class GPT(nn.Module):
    """A decoder-only transformer with learned positions: bytes to the next byte's logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("_out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers))
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x_BT: Tensor) -> Tensor:
        places = torch.arange(x_BT.shape[1], device=x_BT.device)
        x_BTD = self.tokens(x_BT) + self.positions(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def next_byte_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over all bytes of the batch, in nats."""
    logits_BTV = model(batch["x"])
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch["y"].flatten())


def train(session: ez.Session, options: argparse.Namespace) -> None:
    """Entered again whenever the world changes; the session knows where training stands."""
    files = source_files()
    validation_files = files[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    training_files = [path for path in files if path not in validation_files]
    data = Windows(read_text(training_files, options.data_bytes), options.context)
    held_out = Windows(read_text(validation_files, options.data_bytes), options.context)
    torch.manual_seed(options.seed)
    plain = GPT(
        Shape(
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            context=options.context,
        )
    )
    model, optimizer = session.prepare(
        plain.double() if options.float64 else plain,
        lambda parameters: torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.1),
        strategy=options.strategy,
    )
    length = {
        "global_batch": options.global_batch,
        "epochs": None if options.steps else options.epochs,
        "steps": options.steps,
    }
    total_steps = session.steps_in(data, **length)  # the same in every world

    def rate(step: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, total_steps // 10))
        return warm_up * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, step / total_steps))) / 2)

    scheduler = session.track("scheduler", LambdaLR(optimizer, rate))
    session.restore()

    batches = session.batches(data, micro_batch=options.micro_batch, seed=options.seed, **length)
    traced = -1
    for batch in batches:
        if options.trace and session.rank == 0 and session.step_count != traced:
            traced = session.step_count
            _trace(session)
        loss = next_byte_loss(model, batch)
        session.backward(loss)
        if session.step(max_grad_norm=1.0):
            scheduler.step()
            session.log(loss=loss.item())
            if session.rank == 0 and _due(session.step_count, options.log_every):
                print(f"step {session.step_count} loss {loss.item():.4f}", flush=True)

    few = Subset(held_out, range(min(options.eval_samples, len(held_out))))
    if session.rank == 0:
        print(f"evaluating {len(few)} samples", flush=True)
    validation = session.evaluate(
        few, lambda batch: next_byte_loss(model, batch), batch_size=options.eval_batch
    )
    if session.rank == 0:
        print(f"validation loss {validation:.6f}", flush=True)


def _trace(session: ez.Session) -> None:
    """Write down which samples the step that begins now takes."""
    place = {"generation": session.generation, "step": session.step_count + 1}
    samples = [int(index) for index in session.batch_indices]
    print(json.dumps({"trace": {**place, "samples": samples}}), flush=True)


def _due(step: int, every: int) -> bool:
    return step == 1 or step % every == 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of one run, which are the same on all nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    option = parser.add_argument
    option("--layers", type=int, default=4, help="transformer blocks (default %(default)s)")
    option("--width", type=int, default=128, help="size of a token's vector (%(default)s)")
    option("--heads", type=int, default=4, help="attention heads a block (%(default)s)")
    option("--context", type=int, default=128, help="bytes in a sample (%(default)s)")
    option("--global-batch", type=int, default=24, help="samples in a step (%(default)s)")
    option("--micro-batch", type=int, help="samples at once on one worker (all of its part)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="steps to train (200, unless --epochs is given)")
    length.add_argument("--epochs", type=int, help="passes over the text")
    option("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    option("--seed", type=int, default=0, help="of weights and order of samples (%(default)s)")
    option("--data-bytes", type=int, default=2_000_000, help="text to use at most (%(default)s)")
    option("--strategy", help="ddp, zero1, zero2 or zero3 (the launcher's)")
    option("--eval-samples", type=int, default=256, help="validation samples (%(default)s)")
    option("--eval-batch", type=int, default=16, help="samples in an evaluation (%(default)s)")
    option("--float64", action="store_true", help="compute in double precision")
    option("--trace", action="store_true", help="write down the samples of each step")
    option("--log-every", type=int, default=10, help="steps between lines (%(default)s)")
    options = parser.parse_args(arguments)
    if options.steps is None and options.epochs is None:
        options.steps = 200
    return options


if __name__ == "__main__":
    chosen = parse()
    ez.run(lambda session: train(session, chosen))
