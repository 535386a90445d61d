"""Lets accelerate, through which a trainer evaluates, work in the process group of a generation."""

from __future__ import annotations

import os

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

from elasticzero.integrations.launch_environment import LaunchEnvironment


def join_generation(trainer: transformers.Trainer, device: torch.device) -> None:
    """Makes accelerate take the generation's group; RANK and its like are in the environment."""
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # or it chooses another
    _begin_anew(trainer, device)
    trainer.create_accelerator_and_postprocess()


def stand_alone(trainer: transformers.Trainer, launch: LaunchEnvironment) -> None:
    """Makes accelerate take this process for one alone, which yet knows its rank."""
    _begin_anew(trainer, own_device(trainer.args.device, launch))
    trainer.create_accelerator_and_postprocess()
    tell_rank(trainer, launch)


def tell_rank(trainer: transformers.Trainer, launch: LaunchEnvironment) -> None:
    """Tells a process alone its rank, so that rank 0 only writes and prints."""
    state = trainer.args.distributed_state
    state.process_index, state.local_process_index = launch.rank, launch.local_rank


def own_device(device: torch.device, launch: LaunchEnvironment) -> torch.device:
    """Returns the device of this rank: a process alone takes the first GPU."""
    return torch.device("cuda", launch.local_rank) if device.type == "cuda" else device


def _begin_anew(trainer: transformers.Trainer, device: torch.device) -> None:
    args = trainer.args
    GradientState._reset_state()  # noqa: SLF001 - as TrainingArguments does
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - likewise
    args.distributed_state = PartialState(cpu=device.type == "cpu")
    args.distributed_state.device = device
    args.__dict__["_setup_devices"] = device
    args._n_gpu = 0 if device.type == "cpu" else 1  # noqa: SLF001 - no public way
