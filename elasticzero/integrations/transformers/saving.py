"""Writes a trainer's model in the form of transformers."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from elasticzero.errors import OperatorError
from elasticzero.session import Session

NAMED = re.compile(r"checkpoint-(\d+)")


def state_dict(session: Session, model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole model's state on rank 0; all ranks call this together.

    Names of one tensor share their memory, as in the model, by which transformers knows them.
    """
    state = session.state_dict()
    if not state:
        return {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(parameter), name)]
    return state


def save_checkpoint(trainer: transformers.Trainer, session: Session) -> None:
    """Writes the folder `checkpoint-<step>` of the model and the trainer's state, and removes
    those beyond `save_total_limit`; all ranks call this together.

    A folder that has this name is whole. The optimizer's state is in the session's checkpoints.
    """
    state, args = trainer.state, trainer.args
    folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
    if state.best_global_step and state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if args.should_save:
        shutil.rmtree(unfinished, ignore_errors=True)
    trainer.save_model(str(unfinished), _internal_call=True)
    if not args.should_save:
        return
    state.save_to_json(str(unfinished / "trainer_state.json"))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))  # noqa: SLF001 - no public name
    for old in _beyond(args, state):
        shutil.rmtree(old, ignore_errors=True)


def _beyond(args: Any, state: Any) -> list[Path]:
    """Returns the oldest folders beyond the limit, without the best one."""
    if not args.save_total_limit or args.save_total_limit < 1:
        return []
    numbered = [
        (int(m[1]), p) for p in Path(args.output_dir).iterdir() if (m := NAMED.fullmatch(p.name))
    ]
    paths = [path for _, path in sorted(numbered)]
    best = state.best_model_checkpoint
    kept = paths[-args.save_total_limit :]
    if best is not None and Path(best) in paths[: -args.save_total_limit] and len(kept) > 1:
        kept = kept[1:]
    return [path for path in paths if path not in kept and str(path) != best]


def load_best_model(trainer: transformers.Trainer) -> None:
    """Gives each rank the weights of the best folder, which all nodes must see."""
    best = trainer.state.best_model_checkpoint
    if not Path(best).is_dir():
        raise OperatorError(
            f"load_best_model_at_end: this node does not see {best}, which rank 0 of another "
            "generation has written: give output_dir= on storage that all nodes share"
        )
    trainer._load_best_model()  # noqa: SLF001 - no public name
