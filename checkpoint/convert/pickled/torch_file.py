"""Opens one file of `torch.save`: a state dict, or what a training loop has saved."""

from __future__ import annotations

from typing import Any

from elasticzero.checkpoint.convert.pickle_reader import Opaque
from elasticzero.checkpoint.convert.pickled.archive import Archive
from elasticzero.checkpoint.convert.pickled.values import is_tensor, read_values
from elasticzero.checkpoint.convert.pickled.walk import KeyPath, Saved, is_optimizer
from elasticzero.checkpoint.storage.urls import open_storage
from elasticzero.errors import UserError

_MODEL_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "network",
    "weights",
    "params",
)
"""Keys under which training loops save their model."""
_STEP_KEYS = ("global_step", "step", "iteration", "iter")


def open_file(url: str) -> Saved:
    """Opens a file of `torch.save`.

    Raises:
        UserError: The file is of another kind, or holds a single object.
        CheckpointDamaged: The file is damaged.
    """
    parent, _, name = str(url).rpartition("/")
    archive = Archive(open_storage(parent or ("/" if str(url).startswith("/") else ".")), name)
    tree = read_values(archive)
    if not isinstance(tree, dict):
        raise UserError(
            f"{archive.where} holds {kind_of(tree)}, not a dict: save the state_dict() of the "
            "model, or a dict of several"
        )
    return Saved(
        where=archive.where,
        tree=tree,
        model=model_path(tree),
        pickle_bytes=archive.pickle_bytes,
        step=step_of(tree),
    )


def kind_of(value: Any) -> str:
    """Returns the kind of a value that was saved, for a message."""
    if is_tensor(value):
        return "a tensor"
    return value.name if isinstance(value, Opaque) else type(value).__name__


def model_path(tree: dict[Any, Any]) -> KeyPath | None:
    """Returns the path of the model in what was saved; None: nothing says what is the model."""
    if keys := _model_keys(tree):
        return (keys[0],)
    if _has_tensors(tree):
        return ()
    models = [(key,) for key, value in tree.items() if _has_tensors(value)]
    below = [(top, key) for top, value in tree.items() for key in _model_keys(value)]
    for paths in (models, below):
        if paths:
            return paths[0] if len(paths) == 1 else None
    return None


def _model_keys(value: Any) -> list[str]:
    """Returns the keys of a dict under which training loops save their model."""
    return [key for key in _MODEL_KEYS if isinstance(value, dict) and _has_tensors(value.get(key))]


def step_of(tree: dict[Any, Any]) -> int | None:
    """Returns the step after which a training loop has saved, by the keys that such loops use."""
    for key in _STEP_KEYS:
        step = tree.get(key)
        if type(step) is int and step >= 0:
            return step
    return None


def _has_tensors(value: Any) -> bool:
    """Returns whether a value is a dict that has tensors under texts, and is of no optimizer."""
    if not isinstance(value, dict) or is_optimizer(value):
        return False
    return any(isinstance(key, str) and is_tensor(item) for key, item in value.items())
