"""A small 32-bit model, trained in another precision or compiled; rank 0 writes what it found.

Argument: JSON with strategy, steps and out (a file), and at will precision, compile, backend (of
the compiler), micro, bad (indices of samples, each of which makes the loss of its batch NaN), spike
(the same, which makes it large), pause (seconds a step), die ([rank, batch]: the batch after which
this rank kills itself) with saved (a directory) and beyond (a step: the rank waits for a checkpoint
of a later one there), log (a file that gets a line for each batch and rank), parts (the model has
no forward of its own), several (two optimizers) and odd (other arguments of rank 2).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory

SAMPLES = 40
GLOBAL_BATCH = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2)
        )
        self.leave = nn.Linear(16, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.dtypes: set[str] = set()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.enter(x)
        if not torch.compiler.is_compiling():
            self.dtypes.add(str(x.dtype))
        for block in self.blocks:
            x = x + block(x)
        self.norm(self.leave(x).detach())
        return {"out": self.leave(x) * self.scale}


class Parts(nn.Module):
    """Has no forward: the script calls its part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Model()


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return {"x": x, "y": torch.stack([x.sum(), x[0] * 2]), "index": torch.tensor(index)}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def several_of(parameters: Any) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    all_parameters = list(parameters)
    return {
        "muon": torch.optim.Muon([p for p in all_parameters if p.dim() == 2], lr=0.01),
        "adamw": optimizer_of([p for p in all_parameters if p.dim() != 2]),
    }


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])["out"]
    assert out.dtype == torch.float32
    loss: Tensor = (out - batch["y"]).square().mean()
    return loss


def use_backend(name: str) -> None:
    """Has `torch.compile` use this backend where a call names none."""
    plain = torch.compile

    def compile_with(*args: Any, **options: Any) -> Any:
        return plain(*args, **(options | {"backend": name, "mode": None}))

    torch.compile = compile_with


def train(session: ez.Session, told: dict[str, Any]) -> None:
    if session.rank == 2 and "odd" in told:
        told = {k: v for k, v in told.items() if k not in ("precision", "compile")} | told["odd"]
    if "backend" in told:
        use_backend(told["backend"])
    torch.manual_seed(1)
    whole, _ = session.prepare(
        Parts() if told.get("parts") else Model(),
        several_of if told.get("several") else optimizer_of,
        strategy=told["strategy"],
        precision=told.get("precision", "fp32"),
        compile=told.get("compile", False),
    )
    model: Any = whole.part if told.get("parts") else whole
    session.restore()
    applied = []
    batches = session.batches(
        Samples(),
        global_batch=GLOBAL_BATCH,
        micro_batch=told.get("micro"),
        steps=told["steps"],
        shuffle=False,
    )
    for batch in batches:
        loss = squares(model, batch)
        for word, factor in (("bad", float("nan")), ("spike", 1e3)):
            if set(batch["index"].tolist()) & set(told.get(word, [])):
                loss = loss * factor
        session.backward(loss)
        applied.append(session.step())
        batch_number = session.epoch * SAMPLES // GLOBAL_BATCH + session.batch_indices[0] // 8
        if "log" in told:
            line = [session.generation, session.rank, session.step_count, batch_number, applied[-1]]
            with open(told["log"], "a") as log:
                log.write(json.dumps(line) + "\n")
        if told.get("die") == [session.rank, batch_number] and session.generation == 1:
            while (newest_good(open_directory(told["saved"])) or 0) <= told["beyond"]:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        time.sleep(told.get("pause", 0.0))
    value = session.evaluate(Samples(), lambda batch: squares(model, batch), batch_size=5)
    names = sorted(session.state_dict())
    outcome: dict[str, Any] = {
        "loss": value,
        "dtypes": sorted(model.dtypes),
        "applied": applied,
        "names": names,
    }
    outcome["count"] = session.step_count
    if told.get("compile"):
        outcome["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    Path(f"{told['out']}-{session.rank}").write_text(json.dumps(outcome))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, told))
