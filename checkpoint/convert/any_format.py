"""Tells by its files which program wrote a checkpoint, and opens it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from elasticzero.checkpoint.convert.huggingface import open_hf
from elasticzero.checkpoint.convert.import_plan import Import, ImportOptions
from elasticzero.checkpoint.storage.urls import open_storage

Plan = Callable[[ImportOptions], Import]
"""Names what an opened checkpoint has, as the options ask for it."""

_TORCH_FILE = re.compile(r".*\.(pt|pth|bin|ckpt)")
_OF_DEEPSPEED = re.compile(r"latest(_universal)?|zero|(bf16_|fp16_)?zero_pp_rank_.*|mp_rank_\d+_.*")
_OF_SAVE_STATE = re.compile(r"(optimizer|scheduler|random_states|rng_state|pytorch_model_fsdp).*")
"""Files and directories of a Trainer's checkpoint, or of `save_state`, besides weights."""


def open_any(url: str, *, model_only: bool) -> Plan:
    """Opens a checkpoint of any format that `import` reads.

    Args:
        url: A file or a directory, a path or a URL.
        model_only: True: only the model is to be read, which safetensors are preferred for.

    Raises:
        UserError: No program that is known writes such files.
        CheckpointDamaged: A file is damaged.
    """
    if _TORCH_FILE.fullmatch(url.rpartition("/")[2]):
        from elasticzero.checkpoint.convert.pickled.contents import name_contents
        from elasticzero.checkpoint.convert.pickled.torch_file import open_file

        return partial(name_contents, open_file(url))
    names = [] if url.endswith(".safetensors") else open_storage(url).names()
    has_weights = any(name.endswith(".safetensors") for name in names)
    plan = None if model_only and has_weights else _plan_of_directory(url, names)
    if plan is not None:
        return plan
    foreign = open_hf(url)
    return lambda _: Import(foreign=foreign)


def _plan_of_directory(url: str, names: list[str]) -> Plan | None:
    """Returns what opens a directory; None: it can have nothing but weights.

    Args:
        url: The directory.
        names: The files and directories in it.
    """
    from elasticzero.checkpoint.convert.pickled.contents import name_contents

    if ".metadata" in names:
        from elasticzero.checkpoint.convert.dcp_import import megatron_backend, plan_dcp
        from elasticzero.checkpoint.convert.pickled.megatron import open_megatron

        if megatron_backend(open_storage(url)) is None:
            return lambda options: plan_dcp(url, model_only=options.model_only)
        return lambda options: name_contents(
            open_megatron(url, model_only=options.model_only), options
        )
    if any(_OF_DEEPSPEED.fullmatch(name) for name in names):
        from elasticzero.checkpoint.convert.pickled.deepspeed import open_deepspeed

        return partial(name_contents, open_deepspeed(url))
    if any(_OF_SAVE_STATE.fullmatch(name) for name in names):
        from elasticzero.checkpoint.convert.pickled.directories import open_directory_of_state

        return partial(name_contents, open_directory_of_state(url))
    return None
