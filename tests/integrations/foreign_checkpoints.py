"""Trains for a few steps with another program and saves its checkpoint: KIND DIRECTORY."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4)


def save_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer, out: Path) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    (out / "names.txt").write_text("\n".join(order))


def lightning(out: Path) -> None:
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"lr": 0.1})
            self.net = small_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    saving = ModelCheckpoint(dirpath=out, monitor="loss", save_last=True)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        default_root_dir=out, callbacks=[saving],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader())
    save_names(module, trainer.optimizers[0], out)


def transformers(out: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Tokens(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            ids = torch.arange(8) + index
            return {"input_ids": ids, "labels": ids}

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=16)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=2, max_steps=3, save_steps=3,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    save_names(model, trainer.optimizer, out)


def accelerate(out: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    save_names(model, optimizer, out)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, loader())
    for (samples,) in data:
        accelerator.backward(model(samples).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(out / "state"))


def deepspeed(stage: int, out: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    model = small_model()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1]},
    ]
    engine, *_ = ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
        },
    )
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 3).bfloat16()).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(out), tag="global_step3", client_state={"epoch": 1})


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    match kind:
        case "lightning":
            lightning(folder)
        case "transformers":
            transformers(folder)
        case "accelerate":
            accelerate(folder)
        case _:
            deepspeed(int(kind[-1]), folder)
