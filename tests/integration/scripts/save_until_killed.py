"""Saves one step after the other, each of two ranks in a process of its own.

An order is `[directory, generation, first step, last step, seconds to wait for the other rank]`,
and perhaps True besides: rank 0 stops itself (SIGSTOP) when it has seen all shards of the first
step, just before its manifest.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elasticzero.checkpoint.format.dtypes import tensor_spec
from elasticzero.checkpoint.format.layout import Group, Layout
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.writer import SaveCoordination, TensorPiece, write_checkpoint
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.steps.retention import RetentionPolicy, apply_retention
from elasticzero.checkpoint.storage.base import Storage
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import ElasticZeroError, StorageError
from tests.integration.scripts.processes import fork, serve

WORLD_SIZE = 2


def state(generation: int, step: int) -> dict[str, torch.Tensor]:
    """What that generation has at that step: 4 MB."""
    source = torch.Generator().manual_seed(generation * 1_000_003 + step)
    whole = {f"model/w{i}": torch.rand(250_000, generator=source) for i in range(4)}
    return whole | {"optimizer/step": torch.tensor(float(step))}


def draft(generation: int, step: int, whole: Mapping[str, torch.Tensor]) -> Manifest:
    layout = Layout(
        world_size=WORLD_SIZE,
        tensors={name: tensor_spec(tensor) for name, tensor in whole.items()},
        groups=(Group("even", tuple(whole)),),
    )
    return Manifest(
        step=step,
        generation=generation,
        token=token(generation),
        strategy="saved",
        layout=layout,
        state={"step": step},
    )


def token(generation: int) -> str:
    return f"g{generation:06d}-{generation:016x}"


def pieces(manifest: Manifest, rank: int, whole: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
    return [
        TensorPiece(name, whole[name].reshape(-1)[span.start : span.stop])
        for name, span in manifest.layout.spans(rank).items()
    ]


def save(directory: Path, rank: int, generation: int, step: int, wait_s: float) -> None:
    whole = state(generation, step)
    manifest = draft(generation, step, whole)
    place = DiskDirectory(directory)
    terms = SaveCoordination(wait_s=wait_s)
    written = write_checkpoint(place, manifest, rank, pieces(manifest, rank, whole), terms)
    if written.committed:
        apply_retention(place, manifest, RetentionPolicy(last=2))
    deadline_s = time.monotonic() + wait_s
    while not commit.is_good(place.step(step_directory(step))):
        if time.monotonic() > deadline_s:
            raise StorageError(f"step {step} was not committed")
        time.sleep(0.001)


def stop_before_the_manifest() -> None:
    """Stops this process once, when it goes on to create a manifest."""
    check = commit._check_readable

    def stop(storage: Storage, data: bytes) -> None:
        check(storage, data)
        commit._check_readable = check
        os.kill(os.getpid(), signal.SIGSTOP)

    commit._check_readable = stop


def run(
    directory: str,
    rank: int,
    generation: int,
    first: int,
    last: int,
    wait_s: float,
    stops: bool = False,
) -> None:
    if stops and rank == 0:
        stop_before_the_manifest()
    for step in range(first, last + 1):
        try:
            save(Path(directory), rank, generation, step, wait_s)
        except ElasticZeroError as error:
            print(error, file=sys.stderr, flush=True)
            return


def start(directory: str, *order: Any) -> list[int]:
    return [fork(partial(run, directory, rank, *order)) for rank in range(WORLD_SIZE)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(start)
