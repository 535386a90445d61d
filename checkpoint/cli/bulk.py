"""Implements the commands that read a whole checkpoint: reshard, diff, export, import."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar, get_args

from elasticzero.checkpoint.cli import foreign
from elasticzero.checkpoint.convert import huggingface
from elasticzero.checkpoint.format.layout import TensorSpec
from elasticzero.checkpoint.rewrite import reshard, step_copy
from elasticzero.checkpoint.rewrite.diff import CheckpointDiff, compare
from elasticzero.checkpoint.rewrite.progress import ProgressBar
from elasticzero.checkpoint.rewrite.sources import CAST_DTYPES, unconverted
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.base import Readable
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ExitCode, UserError
from elasticzero.options.values import path_argument
from elasticzero.spans import STRATEGIES, ShardOver
from elasticzero.text import bytes_of, count_text, print_error, print_result, shown, size_text

_T = TypeVar("_T")
_DIFFERENT = 1
"""Exit code of `diff` where the checkpoints differ; POSIX `diff` has the same one."""
_MAX_LINES = 20
"""Maximum number of lines that `diff` prints for one kind of difference; `--json` prints all."""


def _add_reshard(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=_path("path"), help=catalog.RESOLVABLE)
    command.add_argument(
        "target", type=_path("target"), help="The step is written into this checkpoint directory."
    )
    command.add_argument(
        "--world-size",
        type=int,
        required=True,
        metavar="N",
        help="The checkpoint is written for N ranks.",
    )
    command.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="The tensors are distributed over the ranks as this strategy does. (default: as in "
        "the checkpoint)",
    )
    command.add_argument(
        "--shard",
        choices=get_args(ShardOver),
        default="world",
        help="The state is divided among all ranks, or among those of each node, and then every "
        "node writes a part of each shard. (default: world)",
    )
    command.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="With --shard node, the ranks are those of N nodes, as many on each.",
    )
    _add_dtype(command)
    _add_copy_options(command)
    command.set_defaults(run_command=_reshard)


def _add_diff(command: argparse.ArgumentParser) -> None:
    command.add_argument("a", type=_path("a"), help=catalog.RESOLVABLE)
    command.add_argument("b", type=_path("b"), help="It is compared with this checkpoint.")
    command.add_argument(
        "--model-only", action="store_true", help="Only the tensors of the model are compared."
    )
    _add_copy_options(command, workers=False)
    command.set_defaults(run_command=_diff)


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=_path("path"), help=catalog.RESOLVABLE)
    command.add_argument(
        "target",
        type=_path("target"),
        help="The files are written into this new directory; with torch, this is the new file.",
    )
    command.add_argument(
        "--format",
        choices=("hf", "dcp", "torch"),
        default="hf",
        help="hf writes safetensors of Hugging Face, dcp writes torch.distributed.checkpoint, "
        "torch writes one file for torch.load. (default: hf)",
    )
    command.add_argument(
        "--max-shard-size",
        type=_bytes,
        metavar="SIZE",
        help="With hf, no file is larger than SIZE, such as 500MB or 2GiB. (default: 5GB)",
    )
    command.add_argument(
        "--config",
        type=_path("--config"),
        help="With hf, this config.json of the model is copied beside the weights.",
    )
    command.add_argument(
        "--what",
        choices=("model", "all"),
        default="model",
        help="With dcp and torch, model writes the model's tensors under the keys of its own "
        "state_dict(), and "
        'all writes all state as {"model": ..., "optimizer": ...}. (default: model)',
    )
    _add_dtype(command)
    _add_copy_options(command)
    command.set_defaults(run_command=_export)


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=_path("path"), help="This directory or file is imported.")
    command.add_argument(
        "target",
        nargs="?",
        type=_path("target"),
        help="The step is written into this checkpoint directory.",
    )
    foreign.add_options(command)
    command.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="The checkpoint is that of step N. (default: what was saved says it, or 0)",
    )
    command.add_argument(
        "--world-size",
        type=int,
        default=1,
        metavar="N",
        help="The checkpoint is written for N ranks. (default: 1)",
    )
    command.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="The tensors are distributed over the ranks as this strategy does. (default: evenly)",
    )
    command.add_argument(
        "--alias",
        type=_alias,
        action="append",
        metavar="NAME=KEPT",
        help="NAME and KEPT are two names of one tensor in the model; it is stored under KEPT.",
    )
    _add_dtype(command)
    _add_copy_options(command)
    command.set_defaults(run_command=_import)


def _add_dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=tuple(CAST_DTYPES),
        help="The model's floating-point tensors of 16 to 64 bits are converted, which needs "
        "torch; "
        "float8 tensors and their scales, optimizer state and master weights stay as they are.",
    )
    command.add_argument(
        "--allow-overflow",
        action="store_true",
        help="With --dtype, finite values beyond its range become infinite; without, they end the "
        "command.",
    )


def _add_copy_options(command: argparse.ArgumentParser, *, workers: bool = True) -> None:
    command.add_argument(
        "--buffer-size",
        type=_bytes,
        default=step_copy.DEFAULT_BUFFER_BYTES,
        metavar="SIZE",
        help="The buffers of all threads together use SIZE bytes of memory; more is faster "
        "where many "
        "ranks "
        "wrote the checkpoint. (default: 64MiB)",
    )
    command.add_argument(
        "-q", "--quiet", action="store_true", help="No progress is shown on stderr."
    )
    if workers:
        command.add_argument(
            "--workers",
            type=int,
            metavar="N",
            help="N threads copy. (default: two per core, at most 8)",
        )


def _path(name: str) -> Callable[[str], str]:
    return path_argument(name, os.environ)


BULK_COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "reshard": _add_reshard,
    "diff": _add_diff,
    "export": _add_export,
    "import": _add_import,
}
"""The function that adds a command's options and its `run_command` to a parser, by command."""


def _reshard(args: argparse.Namespace) -> int:
    source = catalog.resolve(args.path)
    shape = reshard.TargetShape(
        world_size=args.world_size,
        strategy=args.strategy,
        dtype=args.dtype,
        allow_overflow=args.allow_overflow,
        shard=args.shard,
        nodes=args.nodes,
    )

    def work(copy_options: step_copy.CopyOptions) -> step_copy.CopyResult:
        _report_unconverted(args, catalog.read_manifest(source).layout.tensors)
        return reshard.reshard(source, open_directory(args.target), shape, copy_options)

    hint = "finished rank files stay in {}, and the same command goes on from there"
    return _report_copy(
        _run_with_progress(args, work, hint.format(args.target)), args, source.where
    )


def _diff(args: argparse.Namespace) -> int:
    a, b = catalog.resolve(args.a), catalog.resolve(args.b)

    def work(copy_options: step_copy.CopyOptions) -> CheckpointDiff:
        return compare(a, b, model_only=args.model_only, copy_options=copy_options)

    result = _run_with_progress(args, work, "the two were not compared to the end")
    if args.json:
        print_result(
            json.dumps({"a": a.where, "b": b.where, "same": result.same, **asdict(result)})
        )
    else:
        print_result(_comparison_text(result, a.where, b.where), end="")
    return 0 if result.same else _DIFFERENT


def _comparison_text(result: CheckpointDiff, a: str, b: str) -> str:
    if result.same:
        return f"the same: {count_text(result.equal_tensors, 'tensor')}, in {a} and {b}\n"
    kinds = [
        [f"only in A: {name}" for name in result.only_a],
        [f"only in B: {name}" for name in result.only_b],
        [f"{name}: {left} in A, {right} in B" for name, left, right in result.specs],
        [
            f"{d.name}: {d.count} of {d.of} elements differ, the first at index {d.first}"
            for d in result.tensors
        ],
        [f"state differs: {path}" for path in result.state],
    ]
    lines = [shown(f"A: {a}"), shown(f"B: {b}")]
    for kind in kinds:
        lines += map(shown, kind[:_MAX_LINES])
        if len(kind) > _MAX_LINES:
            lines.append(f"... and {len(kind) - _MAX_LINES} more such lines (`--json` has all)")
    lines.append(f"different; {count_text(result.equal_tensors, 'tensor')} are the same")
    return "\n".join(lines) + "\n"


def _export(args: argparse.Namespace) -> int:
    source = catalog.resolve(args.path)

    def work(copy_options: step_copy.CopyOptions) -> huggingface.ExportResult:
        _report_unconverted(args, catalog.read_manifest(source).layout.tensors)
        if args.format in ("dcp", "torch"):
            return _export_for_torch(args, source, copy_options)
        if args.what == "all":
            raise UserError("--what all is not for --format hf, which holds models only")
        most = args.max_shard_size or huggingface.DEFAULT_MAX_SHARD_BYTES
        options = huggingface.HfExportOptions(
            max_shard_bytes=most,
            dtype=args.dtype,
            allow_overflow=args.allow_overflow,
            config=None if args.config is None else Path(args.config),
        )
        return huggingface.export_hf(source, args.target, options, copy_options)

    done = _run_with_progress(args, work, "nothing of the export is left")
    if args.json:
        print_result(json.dumps({**asdict(done), "source": source.where}))
        return 0
    print_result(
        f"{done.where}: {count_text(done.tensors, 'tensor')}, {size_text(done.bytes)}, in "
        f"{count_text(len(done.files), 'file')}, from {source.where}"
    )
    for note in done.notes:
        print_result(note)
    if args.format == "hf":
        print_result(huggingface.missing_files_text(done.where, has_config=args.config is not None))
    else:
        print_result(
            'keys: "model", "optimizer" and what else was saved; load the model as '
            '{"model": model.state_dict()}'
            if args.what == "all"
            else "keys: those of model.state_dict(), without a prefix (--what all nests them)"
        )
    return 0


def _export_for_torch(
    args: argparse.Namespace, source: Readable, copy_options: step_copy.CopyOptions
) -> huggingface.ExportResult:
    """Exports to one of the two formats that torch reads.

    Args:
        args: The command's parsed arguments.
        source: The checkpoint's step.
        copy_options: Memory, threads and progress of the copy.
    """
    _reject_options(args, args.format, "max_shard_size", "config")
    from elasticzero.checkpoint.convert.dcp_export import DcpExportOptions, export_dcp
    from elasticzero.checkpoint.convert.torch_export import export_torch

    options = DcpExportOptions(
        everything=args.what == "all", dtype=args.dtype, allow_overflow=args.allow_overflow
    )
    export = export_dcp if args.format == "dcp" else export_torch
    return export(source, args.target, options, copy_options)


def _import(args: argparse.Namespace) -> int:
    shape = reshard.TargetShape(
        world_size=args.world_size,
        strategy=args.strategy,
        dtype=args.dtype,
        allow_overflow=args.allow_overflow,
    )
    opened = foreign.open_import(args)
    checkpoint = opened.foreign
    if args.alias:
        checkpoint = reshard.tie_aliases(checkpoint, dict(args.alias))
        opened = replace(opened, foreign=checkpoint)
    if args.list:
        foreign.print_listing(opened, as_json=args.json)
        return 0
    if args.target is None:
        raise UserError("the checkpoint directory to write into is missing (--list needs none)")
    foreign.print_notes(opened)
    _report_unconverted(args, checkpoint.specs)
    step = (opened.step or 0) if args.step is None else args.step

    def work(copy_options: step_copy.CopyOptions) -> step_copy.CopyResult:
        directory = open_directory(args.target)
        return reshard.import_foreign(checkpoint, directory, step, shape, copy_options)

    done = _run_with_progress(args, work, "nothing of the import is left")
    if args.json:
        counts = {"values": opened.values, "left_out": len(opened.left_out)}
        tensors = len(checkpoint.specs)
        print_result(
            json.dumps({**asdict(done), "source": args.path, "tensors": tensors, **counts})
        )
        return 0
    _report_copy(done, args, args.path)
    print_result(opened.summary())
    return 0


def _reject_options(args: argparse.Namespace, kind: str, *names: str) -> None:
    """Raises `UserError` for options that a format does not have."""
    if unfit := [name for name in names if getattr(args, name) is not None]:
        raise UserError(f"--{unfit[0].replace('_', '-')} is not for --format {kind}")


def _report_unconverted(args: argparse.Namespace, specs: Mapping[str, TensorSpec]) -> None:
    """Prints the tensors that `--dtype` does not convert."""
    if args.dtype is not None and (names := unconverted(specs)):
        print_error(
            f"--dtype {args.dtype} leaves float8 and its scales as they are: "
            f"{count_text(len(names), 'tensor')}, the first {shown(names[0])}"
        )


def _run_with_progress(
    args: argparse.Namespace, work: Callable[[step_copy.CopyOptions], _T], left: str
) -> _T:
    """Runs a long command and shows its progress.

    Args:
        args: The command's parsed arguments.
        work: Does the work of the command.
        left: The state of the target after an interrupt, for the message.
    """
    stream = None if args.quiet else sys.stderr
    workers = getattr(args, "workers", None)
    try:
        with _sigterm_as_ctrl_c(), ProgressBar(stream) as progress:
            return work(
                step_copy.CopyOptions(
                    buffer_bytes=args.buffer_size, workers=workers, progress=progress
                )
            )
    except KeyboardInterrupt:
        print_error(f"interrupted: {left}")
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Makes SIGTERM end the block as Ctrl-C does, so that the command cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report_copy(done: step_copy.CopyResult, args: argparse.Namespace, source: str) -> int:
    if args.json:
        print_result(json.dumps({**asdict(done), "source": source}))
        return 0
    extra = (
        f" ({count_text(done.kept, 'rank')} of them had been written before)" if done.kept else ""
    )
    extra = " (it existed already)" if done.already else extra
    print_result(
        f"{done.where}: {count_text(done.world_size, 'rank')}, {size_text(done.bytes)}, "
        f"from {source}{extra}"
    )
    return 0


def _alias(text: str) -> tuple[str, str]:
    alias, _, kept = text.partition("=")
    if not alias or not kept or alias == kept:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=KEPT")
    return alias, kept


def _bytes(text: str) -> int:
    try:
        value = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least one byte")
    return value
