"""Trains for a few steps with another program and saves its checkpoint: KIND DIRECTORY.

What was trained with several ranks also writes `whole.pt`, on rank 0: the model and the optimizer
as the program gathers them, and the model after one step more.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.integrations.foreign_models import TOKENS, build, norm_of_all

SAMPLES = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def by_dimensions(parameters: Any) -> torch.optim.Optimizer:
    """Returns an optimizer in whose first group weights decay, as the Trainer and others have."""
    trained = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(SAMPLES.repeat(4, 1)), batch_size=4)


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
            self.net = small_model().double()

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
    following = pl.Trainer(
        max_steps=9, accelerator="cpu", logger=False, enable_progress_bar=False,
        default_root_dir=out, enable_checkpointing=False,
    )  # fmt: skip
    module = Module()
    following.fit(module, loader(), ckpt_path=str(out / "last.ckpt"), weights_only=False)
    torch.save(module.net.state_dict(), out / "next.pt")


def transformers(out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Tokens(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": TOKENS, "labels": TOKENS}

    model = build("gpt2")
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=2, max_steps=4, save_steps=3,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    save_names(model, trainer.optimizer, out)
    torch.save(model.state_dict(), out / "next.pt")


def accelerate(out: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = small_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    save_names(model, optimizer, out)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, loader())
    for number, (samples,) in enumerate(data):
        if number == 3:
            accelerator.save_state(str(out / "state"))
        accelerator.backward(model(samples).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.save(accelerator.unwrap_model(model).state_dict(), out / "next.pt")


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=gathered)


def fsdp_of_accelerate(kind: str, out: Path) -> None:
    """Accelerate divides on the CPU what it takes for another device."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type=kind,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = small_model().double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(model(SAMPLES).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    accelerator.save_state(str(out / "state"))
    save_whole(model, optimizer.optimizer, step, out)


def sharded(out: Path) -> None:
    """FSDP2 of torch itself, saved by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = small_model().double()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(SAMPLES).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out / "state")
    save_whole(model, optimizer, step, out)


def save_whole(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Any, out: Path
) -> None:
    weights, state = copy.deepcopy(whole_state(model, optimizer))
    step()
    following, _ = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        saved = {"model": weights, "optimizer": state, "next": following}
        torch.save(saved, out / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def deepspeed(stage: int, out: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    # Compiled for minutes, and gloo is as good for two ranks.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    model = small_model()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    engine, *_ = ds.initialize(
        model=model,
        optimizer=by_dimensions(model.parameters()),
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


def megatron(out: Path) -> None:
    """Megatron-core's GPT, with all layers in one tensor and without, after a step of AdamW.

    Its attention needs CUDA: the loss is of the parameters alone.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    # It asks for these while it saves, also without a GPU.
    vars(torch.cuda)["synchronize"] = lambda: None
    vars(torch.cuda)["current_device"] = lambda: torch.device("cpu")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=16).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        norm_of_all(model.parameters()).square().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    names: dict[str, str] = {}
    for kind in ("alike", "apart"):
        sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": kind == "apart"})
        if kind == "apart":
            names = {n: s.key for n, s in sharded.items() if hasattr(s, "flattened_range")}
        state = optimizer.state_dict()
        by_number = get_param_id_to_sharded_param_map(sharded, model.parameters())
        optim_state_to_sharding_state(state, by_number, exclude_keys=("step",))
        state["state"]["common_step"] = 1
        (out / kind).mkdir()
        common = {"iteration": 1, "args": argparse.Namespace(lr=0.1)}
        content = {"model": sharded, "optimizer": state, **common}
        dist_checkpointing.save(content, str(out / kind))
    before = {names[n]: p.detach().clone() for n, p in model.named_parameters()}
    step()
    after = {names[n]: p.detach().clone() for n, p in model.named_parameters()}
    torch.save({"model": before, "next": after}, out / "whole.pt")
    dist.destroy_process_group()


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
        case "accelerate-fsdp":
            fsdp_of_accelerate("SHARDED_STATE_DICT", folder)
        case "accelerate-fsdp-full":
            fsdp_of_accelerate("FULL_STATE_DICT", folder)
        case "torch":
            sharded(folder)
        case "megatron":
            megatron(folder)
        case _:
            deepspeed(int(kind[-1]), folder)
