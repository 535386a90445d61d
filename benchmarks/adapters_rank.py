"""Trains by a framework, by itself or by its adapter; rank 0 prints the seconds of each step.

python benchmarks/adapters_rank.py transformers|lightning|accelerate theirs|ours STEPS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WARM_UP = 10
"""Steps that are not counted."""
WORDS, LENGTH, BATCH = 1000, 64, 8


class Texts(Dataset[Any]):
    """Made-up sequences of words."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model() -> nn.Module:
    """Returns a language model of 3.5 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    gpt: nn.Module = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4)
    )
    return gpt


def by_transformers(ours: bool, steps: int, folder: str) -> list[float]:
    home = "elasticzero.integrations.transformers" if ours else "transformers"
    trainer = import_module(home).Trainer
    from transformers import TrainerCallback, TrainingArguments

    ends_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends_s.append(time.perf_counter())

    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer(model(), args, train_dataset=Texts(), callbacks=[Clock()]).train()
    return ends_s


def by_lightning(ours: bool, steps: int, folder: str) -> list[float]:
    import lightning as L

    if ours:
        from elasticzero.integrations.lightning import Elastic
    ends_s: list[float] = []

    class Clock(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            ends_s.append(time.perf_counter())

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5, fused=True)

    trainer = L.Trainer(
        accelerator="cpu",
        strategy=Elastic() if ours else "ddp",
        devices=1 if ours else 2,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), DataLoader(Texts(), batch_size=BATCH, shuffle=True))
    return ends_s


def by_accelerate(ours: bool, steps: int, folder: str) -> list[float]:
    home = "elasticzero.integrations.accelerate" if ours else "accelerate"
    accelerator = import_module(home).Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-5, fused=True)
    loader = DataLoader(Texts(), batch_size=BATCH, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    ends_s: list[float] = []
    for batch in loader:
        accelerator.backward(net(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        if len(ends_s) == steps:
            break
    accelerator.end_training()
    return ends_s


TRAIN = {
    "transformers": by_transformers,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
}


def main() -> None:
    framework, whose, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ends_s = TRAIN[framework](whose == "ours", WARM_UP + steps, folder)
    seconds = [after - before for before, after in pairwise(ends_s)]
    print(json.dumps({"seconds": seconds[WARM_UP:]}), flush=True)


if __name__ == "__main__":
    main()
