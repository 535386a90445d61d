"""Compares the costs of 120,000 tiny tensors with safetensors' own, by turns on one machine.

Run: python benchmarks/checkpoint_many.py [--tensors N] [--rounds N]

CPU time counts, of all threads, so that other work on the machine matters little. Wanted: save plus
load at most 3 times safetensors' own save plus load, reshard at most twice our save plus load.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ratio import Ratio
from safetensors.torch import load_file, save_file

from elasticzero import checkpoint
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshard
from elasticzero.checkpoint.storage.urls import open_directory, open_storage

MOST_OF_SAFETENSORS, MOST_OF_RESHARD = 3.0, 2.0


def cpu_s(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def one_round(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the CPU seconds of each operation."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plain, run, target = root / "plain.safetensors", root / "run", root / "resharded"
        seconds = {
            "safetensors": cpu_s(lambda: save_file(tensors, plain))
            + cpu_s(lambda: load_file(plain)),
            "save": cpu_s(lambda: checkpoint.save(run, tensors)),
            "load": cpu_s(lambda: checkpoint.load(run)),
        }
        (step,) = run.iterdir()
        shape = TargetShape(world_size=4)
        source, directory = open_storage(str(step)), open_directory(target)
        seconds["reshard"] = cpu_s(lambda: reshard(source, directory, shape))
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=120_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tensors = {
        f"model/layers.{index // 100}.block.{index % 100}.weight": torch.full((8,), float(index))
        for index in range(args.tensors)
    }
    rounds = [one_round(tensors) for _ in range(args.rounds)]
    both = [seconds["save"] + seconds["load"] for seconds in rounds]
    plain = Ratio.of(both, [seconds["safetensors"] for seconds in rounds])
    rewriting = Ratio.of([seconds["reshard"] for seconds in rounds], both)
    for seconds in rounds:
        print(json.dumps({name: round(value, 3) for name, value in seconds.items()}))
    print(
        f"save + load / safetensors: {plain.median:.2f} (wanted: at most {MOST_OF_SAFETENSORS:g})"
    )
    print(f"reshard / save + load: {rewriting.median:.2f} (wanted: at most {MOST_OF_RESHARD:g})")


if __name__ == "__main__":
    main()
