"""`elasticzero checkpoint`: list, inspect, verify, reshard, export. Imports no torch."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from elasticzero.checkpoint import commit, convert, verify
from elasticzero.checkpoint.manifest import MANIFEST_NAME, Manifest
from elasticzero.checkpoint.storage import Directory, open_directory
from elasticzero.errors import ElasticZeroError, ExitCode, UserError
from elasticzero.records import encode

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Hang the commands in; each sets `run_command`, which takes the parsed arguments and returns
    the exit code."""
    command = subparsers.add_parser(
        "list",
        help="the steps in a directory, and which are whole by sizes (`verify` reads the bytes)",
    )
    command.add_argument("directory", help="checkpoint directory")
    command.add_argument("--json", action="store_true", help="for scripts")
    command.set_defaults(run_command=_list)

    command = subparsers.add_parser("inspect", help="what a checkpoint holds")
    command.add_argument("path", help="checkpoint directory (its newest good step), or one step's")
    command.add_argument("--json", action="store_true", help="for scripts")
    command.set_defaults(run_command=_inspect)

    command = subparsers.add_parser("verify", help="read every byte and compare its checksum")
    command.add_argument("path", help="checkpoint directory (every step in it), or one step's")
    command.add_argument("--json", action="store_true", help="for scripts")
    command.set_defaults(run_command=_verify)

    command = subparsers.add_parser("reshard", help="write a checkpoint for another world size")
    command.add_argument("path", help="checkpoint directory (its newest good step), or one step's")
    command.add_argument("target", help="checkpoint directory to write the step into")
    command.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks")
    command.add_argument("--strategy", choices=convert.STRATEGIES, help="deal tensors as this does")
    command.set_defaults(run_command=_reshard)

    command = subparsers.add_parser("export", help="write the model for other programs")
    command.add_argument("path", help="checkpoint directory (its newest good step), or one step's")
    command.add_argument("target", help="new directory")
    command.add_argument("--format", choices=("hf",), default="hf", help="Hugging Face safetensors")
    command.add_argument(
        "--max-shard-size",
        type=_bytes,
        default=convert.DEFAULT_MAX_SHARD_BYTES,
        metavar="SIZE",
        help="largest file, such as 500MB or 2GiB (default: 5GB)",
    )
    command.set_defaults(run_command=_export)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elasticzero checkpoint")
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    try:
        return int(args.run_command(args))
    except ElasticZeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def _list(args: argparse.Namespace) -> int:
    directory = _existing(args.directory)
    rows = [_listed(info) for info in commit.steps(directory)]
    left = [info.name for info in commit.uncommitted(directory)]
    if args.json:
        print(json.dumps({"steps": rows, "uncommitted": left}))
        return 0
    if not rows:
        print(f"{directory.where} holds no checkpoint")
    else:
        columns = ("step", "written", "generation", "strategy", "ranks", "tensors", "size", "state")
        table = [[str(row.get(column, "-")) for column in columns] for row in rows]
        for row, line in zip(rows, table, strict=True):
            line[6] = _size(row["bytes"]) if "bytes" in row else "-"
            line[7] = "whole" if row["whole"] else f"DAMAGED: {row['reason']}"
        _print_table(columns, table)
    for name in left:
        print(f"{name}: never committed (a save that failed, or is going on)")
    return 0


def _listed(info: commit.StepInfo) -> dict[str, Any]:
    storage = info.storage
    reason = commit.fault(storage)
    row: dict[str, Any] = {"step": info.step, "path": storage.where, "whole": reason is None}
    if reason is not None:
        row["reason"] = reason
    try:
        manifest = commit.read_manifest(storage)
        changed = (Path(storage.where) / MANIFEST_NAME).stat().st_mtime
    except (ElasticZeroError, OSError):
        return row
    return row | {
        "written": datetime.fromtimestamp(changed).isoformat(" ", "seconds"),
        "generation": manifest.generation,
        "strategy": manifest.strategy,
        "ranks": manifest.layout.world_size,
        "tensors": len(manifest.layout.tensors),
        "bytes": sum(file.bytes for file in manifest.files),
    }


def _inspect(args: argparse.Namespace) -> int:
    storage = commit.resolve(args.path)
    path, manifest = storage.where, commit.read_manifest(storage)
    if args.json:
        print(json.dumps({"path": path, **encode(manifest)}))
        return 0
    print(path)
    print(
        f"step {manifest.step}, written by generation {manifest.generation} "
        f"({manifest.strategy}, {_counted(manifest.layout.world_size, 'rank')}, "
        f"token {manifest.token})\n"
    )
    files = [[file.name, _size(file.bytes)] for file in manifest.files]
    _print_table(("file", "size"), files)
    print()
    _print_table(("tensor", "dtype", "shape", "size", "dealt"), _tensor_rows(manifest))
    kinds: dict[str, tuple[int, int]] = {}
    for name, spec in manifest.layout.tensors.items():
        count, total = kinds.get(name.split("/")[0], (0, 0))
        kinds[name.split("/")[0]] = (count + 1, total + spec.nbytes)
    print()
    _print_table(
        ("kind", "tensors", "size"), [[k, str(n), _size(b)] for k, (n, b) in kinds.items()]
    )
    if manifest.state:
        print(f"\nstate: {', '.join(manifest.state)} (`--json` shows it)")
    return 0


def _tensor_rows(manifest: Manifest) -> list[list[str]]:
    rows = []
    for group in manifest.layout.groups:
        for index, name in enumerate(group.tensors):
            spec = manifest.layout.tensors[name]
            dealt = f"rank {group.ranks[index]}" if group.rule == "whole" else group.rule
            shape = "x".join(map(str, spec.shape)) or "scalar"
            rows.append([name, spec.dtype, shape, _size(spec.nbytes), dealt])
    return rows


def _verify(args: argparse.Namespace) -> int:
    found = [info.storage for info in commit.steps(_existing(args.path))]
    report = []
    for step in found or [commit.resolve(args.path)]:
        bad = list(verify.faults(step))
        report.append({"path": step.where, "good": not bad, "faults": [asdict(f) for f in bad]})
        if args.json:
            continue
        print(f"{step.where}: {'DAMAGED' if bad else 'good'}", flush=True)
        for fault in bad:
            where = "" if fault.start is None else f": bytes {fault.start} to {fault.stop}"
            print(f"  {fault.file}{where}: {fault.reason}")
    if args.json:
        print(json.dumps(report))
    return int(ExitCode.DONE if all(step["good"] for step in report) else ExitCode.FAILED)


def _reshard(args: argparse.Namespace) -> int:
    source = commit.resolve(args.path)
    written = convert.reshard(source, open_directory(args.target), args.world_size, args.strategy)
    manifest = commit.read_manifest(written)
    total = sum(file.bytes for file in manifest.files)
    print(
        f"{written.where}: {_counted(args.world_size, 'rank')}, {_size(total)}, from {source.where}"
    )
    return 0


def _export(args: argparse.Namespace) -> int:
    source = commit.resolve(args.path)
    done = convert.export_hf(source, Path(args.target), args.max_shard_size)
    print(
        f"{done.path}: {_counted(done.tensors, 'tensor')}, {_size(done.bytes)}, in "
        f"{_counted(len(done.files), 'file')}, from {source.where}"
    )
    return 0


def _existing(url: str) -> Directory:
    directory = open_directory(url)
    if not directory.names() and not Path(directory.where).is_dir():
        raise UserError(f"{directory.where} is empty or does not exist")
    return directory


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    unit = match[2].upper() if match else ""
    if not match or (match[3] and not unit):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    value = int(float(match[1]) * (_BINARY_UNITS if match[3] else _UNITS)[unit])
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a size of at least one byte is wanted")
    return value


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _size(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` is no error
    sys.exit(main())
