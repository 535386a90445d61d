"""Opens what `import` reads, by its format, and says what comes in and what is left out."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticzero.checkpoint.convert import huggingface
from elasticzero.checkpoint.convert.import_plan import Import, ImportOptions
from elasticzero.checkpoint.format.manifest import TREE
from elasticzero.errors import UserError
from elasticzero.options.values import path_argument
from elasticzero.text import print_error, print_result, shown, size_text, table_text

if TYPE_CHECKING:
    from elasticzero.checkpoint.convert.pickled.walk import Saved

FORMATS = {
    "hf": "safetensors of Hugging Face",
    "dcp": "torch.distributed.checkpoint",
    "torch": "a file of torch.save, also Lightning's",
    "trainer": "a directory of transformers' Trainer",
    "accelerate": "a directory of Accelerator.save_state",
    "deepspeed": "a directory of DeepSpeed's ZeRO, or a universal checkpoint",
    "megatron": "a directory of Megatron-core's format torch_dist",
}
_OF_PICKLES = ("names", "without", "track")
"""Options that only formats of pickles have."""
_MAX_LINES = 20
"""Maximum number of lines about what is left out; `--list` shows all."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of `import` that select what is imported, and its names."""
    command.add_argument(
        "--format",
        choices=tuple(FORMATS),
        required=True,
        help="; ".join(f"{name} reads {what}" for name, what in FORMATS.items()) + ".",
    )
    command.add_argument(
        "--list",
        action="store_true",
        help="Nothing is written: the tensors are listed under the names that they get, and what "
        "is left out.",
    )
    command.add_argument("--model-only", action="store_true", help="Only the model is imported.")
    command.add_argument(
        "--names",
        type=path_argument("--names", os.environ),
        metavar="FILE",
        help="The file has the names of the optimizer's parameters, one a line, in the "
        "optimizer's order, for state that is keyed by number.",
    )
    command.add_argument(
        "--without",
        action="append",
        metavar="PATH",
        help="The value under this path (keys joined by /) is left out; may be repeated.",
    )
    command.add_argument(
        "--map",
        action="append",
        type=_prefixes,
        metavar="FROM=TO",
        help="What is under the path FROM (keys joined by /) is imported as if it were under TO, "
        "as in app/model=model; with dcp it may be repeated, and else TO is model.",
    )
    command.add_argument(
        "--track",
        action="append",
        type=_assignment,
        metavar="NAME=PATH",
        help="The value under PATH is the state of the object that the script tracks as NAME, "
        "such as a scheduler; may be repeated.",
    )


def open_import(args: argparse.Namespace) -> Import:
    """Opens what the arguments name.

    Raises:
        UserError: It cannot be imported, or an option is of another format.
        CheckpointDamaged: A file is damaged.
    """
    if args.map is not None and args.format == "hf":
        raise UserError("--map is not for --format hf")
    if args.format in ("hf", "dcp"):
        if unfit := [name for name in _OF_PICKLES if getattr(args, name) is not None]:
            raise UserError(f"--{unfit[0]} is not for --format {args.format}")
        return _open_plain(args)
    from elasticzero.checkpoint.convert.pickled.contents import name_contents

    options = ImportOptions(
        model_only=args.model_only,
        names=None if args.names is None else _names(Path(args.names)),
        without=tuple(args.without or ()),
        model=_model_of(args),
        tracked=dict(args.track or ()),
    )
    return name_contents(_open_saved(args), options)


def _model_of(args: argparse.Namespace) -> str | None:
    """Returns the path that `--map` says is the model's."""
    maps = args.map or []
    if len(maps) > 1 or any(target.rstrip("/") != "model" for _, target in maps):
        raise UserError(f"--map takes one FROM=model with --format {args.format}")
    return maps[0][0] if maps else None


def _open_saved(args: argparse.Namespace) -> Saved:
    if args.format == "torch":
        from elasticzero.checkpoint.convert.pickled.torch_file import open_file

        return open_file(args.path)
    if args.format == "deepspeed":
        from elasticzero.checkpoint.convert.pickled.deepspeed import open_deepspeed

        return open_deepspeed(args.path)
    if args.format == "megatron":
        from elasticzero.checkpoint.convert.pickled.megatron import open_megatron

        return open_megatron(args.path, model_only=args.model_only)
    from elasticzero.checkpoint.convert.pickled.directories import open_directory_of_state

    return open_directory_of_state(args.path)


def _open_plain(args: argparse.Namespace) -> Import:
    kinds = "" if args.format == "dcp" else " or a .safetensors file"
    if Path(args.path).is_file() and not (kinds and args.path.endswith(".safetensors")):
        raise UserError(
            f"{args.path} is a file, and --format {args.format} reads a directory{kinds}: "
            f"--format torch reads {FORMATS['torch']}"
        )
    if args.format == "hf":
        return Import(foreign=huggingface.open_hf(args.path))
    from elasticzero.checkpoint.convert.dcp_import import plan_dcp

    return plan_dcp(args.path, model_only=args.model_only, maps=args.map or ())


def print_listing(opened: Import, *, as_json: bool) -> None:
    """Prints the names, dtypes and shapes of the tensors, and what is left out."""
    specs = opened.foreign.specs
    if as_json:
        print_result(json.dumps(_listing(opened)))
        return
    rows = [
        [name, spec.dtype, "x".join(map(str, spec.shape)) or "scalar", size_text(spec.nbytes)]
        for name, spec in specs.items()
    ]
    print_result(table_text(("tensor", "dtype", "shape", "size"), rows), end="")
    if opened.left_out:
        lines = [[left.path, left.reason] for left in opened.left_out]
        print_result(table_text(("left out", "because"), lines), end="")
    for note in opened.foreign.notes:
        print_result(shown(note))
    print_result(opened.summary())


def _listing(opened: Import) -> dict[str, Any]:
    return {
        "tensors": {
            name: {"dtype": spec.dtype, "shape": list(spec.shape)}
            for name, spec in opened.foreign.specs.items()
        },
        "values": opened.values,
        "state": opened.foreign.state.get(TREE, {}),
        "left_out": {left.path: left.reason for left in opened.left_out},
        "notes": list(opened.foreign.notes),
    }


def print_notes(opened: Import) -> None:
    """Prints on stderr what the user should know, and what is left out."""
    for note in opened.foreign.notes:
        print_error(shown(note))
    for left in opened.left_out[:_MAX_LINES]:
        print_error(f"left out: {shown(left.path)}: {shown(left.reason)}")
    if len(opened.left_out) > _MAX_LINES:
        print_error(f"... and {len(opened.left_out) - _MAX_LINES} more (`--list` shows all)")


def _names(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--names {path} cannot be read: {error}") from None
    return tuple(line.strip() for line in lines if line.strip())


def _prefixes(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM=TO")
    return old, new


def _assignment(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path
