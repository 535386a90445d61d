"""A small double-precision model of which each global batch uses another part.

Argument: JSON with strategy and steps, and at will micro, clip, blocks (the experts are a list),
reentrant (of checkpointing), twice (the first layer runs twice), compile, wrong (its mistake),
bucket_bytes (of zero1 and zero2), averages (a file for an average of the weights of each step),
norms (a file for the norm of each step's gradient), hook (what is done to gradients), sums (a file
for what that has returned).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.parallel.buckets import layout

SAMPLES = 40
EXPERTS = 4


class Model(nn.Module):
    """Experts of which a sample uses one or none, one that none uses, a tied, a frozen and a 0-dim
    parameter."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        experts = [nn.Linear(5, 5, dtype=torch.float64) for _ in range(EXPERTS)]
        if told.get("blocks"):
            self.experts = nn.ModuleList(experts)
        for number, expert in enumerate(experts if not told.get("blocks") else []):
            setattr(self, f"expert{number}", expert)
        self.never = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.rarely = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.full((2, 3), -float("inf")), requires_grad=False)
        self.words = nn.Embedding(9, 5, sparse=told.get("words") == "sparse")
        self.told = told

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self._run(self.first, x)
        for number in range(EXPERTS):
            chosen = kind == number
            if chosen.any():
                name = f"experts.{number}" if self.told.get("blocks") else f"expert{number}"
                expert = self.get_submodule(name)
                x = x + chosen[:, None] * self._run(expert, x)
        if (kind == EXPERTS).any():
            x = x * torch.where(kind == EXPERTS, self.rarely, 1.0)[:, None]
        if "words" in self.told:
            x = x + self.words(kind.clamp(max=8))
        if self.told.get("wrong") == "thaw":
            x = x * self.first.bias.requires_grad_()
        if self.told.get("twice"):
            x = self._run(self.first, x)
        output: Tensor = self.last(x) * self.scale + self.tied(x)
        return output

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if "reentrant" not in self.told:
            return torch.tanh(layer(x))
        reentrant = self.told["reentrant"]
        if reentrant and not x.requires_grad:
            x = x.clone().requires_grad_()
        result: Tensor = checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=reentrant)
        return result


class Samples(Dataset[dict[str, Tensor]]):
    """Most samples use few of the experts; the kinds change in the course of the data."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        kinds = (0, 0, 9, 1, 9, 2, 9, 9) if index < SAMPLES // 2 else (3, 9, 4, 0, 9, 9, 2, 9)
        return {
            "x": torch.randn(5, generator=generator, dtype=torch.float64),
            "y": torch.randn(3, generator=generator, dtype=torch.float64),
            "kind": torch.tensor(kinds[index % 8]),
        }


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.2)


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    squared: Tensor = (model(batch["x"], batch["kind"]) - batch["y"]) ** 2
    return squared.mean()


def add_to_averages(averages: dict[str, Tensor], model: nn.Module) -> None:
    """An average as scripts keep it: it reads each parameter as soon as the step is over."""
    for name, parameter in model.named_parameters():
        averages.setdefault(name, torch.zeros_like(parameter.detach())).lerp_(
            parameter.detach(), 0.3
        )


def clamp(name: str, elements: Tensor) -> Tensor | None:
    """A function for `session.on_gradients`: elementwise clipping, and the square of the norm."""
    square = elements.square().sum()
    elements.clamp_(-0.02, 0.02)
    return None if name == "scale" else square


def add_noise(name: str, elements: Tensor) -> None:
    elements.add_(torch.randn_like(elements), alpha=0.01)


HOOKS: dict[str, Callable[[str, Tensor], Tensor | None]] = {"clamp": clamp, "noise": add_noise}


def train(session: ez.Session, told: dict[str, Any]) -> None:
    layout.BUCKET_BYTES = told.get("bucket_bytes", layout.BUCKET_BYTES)
    averages: dict[str, Tensor] = {}
    norms = [session.gradient_norm]
    torch.manual_seed(1)
    plain = Model(told).double()
    plain.first.bias.requires_grad_(told.get("wrong") != "thaw")
    model, _ = session.prepare(plain, optimizer_of, strategy=told["strategy"])
    hook = session.on_gradients(HOOKS[told["hook"]]) if told.get("hook") else None
    sums: list[dict[str, float]] = []
    session.restore()
    if told.get("compile"):
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    for batch in session.batches(
        Samples(), global_batch=6, micro_batch=told.get("micro"), steps=told["steps"], shuffle=False
    ):
        session.backward(squares(model, batch))
        if told.get("wrong") == "late":
            squares(model, batch).backward()
        if session.step(max_grad_norm=told.get("clip")):
            norms.append(session.gradient_norm)
            sums.append(hook.sums if hook is not None else {})
            if told.get("averages"):
                add_to_averages(averages, plain)
    if told.get("norms"):
        Path(f"{told['norms']}-{session.rank}").write_text(json.dumps(norms))
    if told.get("sums"):
        Path(f"{told['sums']}-{session.rank}").write_text(json.dumps(sums))
    if told.get("averages"):
        values = {name: tensor.tolist() for name, tensor in averages.items()}
        Path(f"{told['averages']}-{session.rank}").write_text(json.dumps(values))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
