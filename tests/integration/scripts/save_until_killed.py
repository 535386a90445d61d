"""Saves one step after the other as one rank of two; forks such processes on demand.

Imports once and forks for each line of JSON on its input: `[directory, rank, generation, first
step, last step, seconds to wait for the other rank]`. Answers with the process's id. `null` waits
until all of them have ended.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.disk import DiskDirectory
from elasticzero.checkpoint.manifest import Group, Layout, Manifest, step_directory
from elasticzero.checkpoint.reader import spec_of
from elasticzero.checkpoint.retention import Keep, tidy
from elasticzero.checkpoint.writer import Piece, Terms, write_checkpoint
from elasticzero.errors import ElasticZeroError, StorageError

WORLD_SIZE = 2


def state(generation: int, step: int) -> dict[str, torch.Tensor]:
    """What that generation has at that step: 4 MB."""
    source = torch.Generator().manual_seed(generation * 1_000_003 + step)
    whole = {f"model/w{i}": torch.rand(250_000, generator=source) for i in range(4)}
    return whole | {"optimizer/step": torch.tensor(float(step))}


def save(directory: Path, rank: int, generation: int, step: int, wait_s: float) -> None:
    whole = state(generation, step)
    layout = Layout(
        world_size=WORLD_SIZE,
        tensors={name: spec_of(tensor) for name, tensor in whole.items()},
        groups=(Group("even", tuple(whole)),),
    )
    manifest = Manifest(
        step=step,
        generation=generation,
        token=f"g{generation:06d}-{generation:016x}",
        strategy="saved",
        layout=layout,
        state={"step": step},
    )
    pieces = [
        Piece(name, whole[name].reshape(-1)[span.start : span.stop])
        for name, span in layout.spans(rank).items()
    ]
    place = DiskDirectory(directory)
    written = write_checkpoint(place, manifest, rank, pieces, Terms(wait_s=wait_s))
    if written.committed:
        tidy(place, manifest, Keep(last=2))
    deadline_s = time.monotonic() + wait_s
    while not commit.stands(place.step(step_directory(step))):
        if time.monotonic() > deadline_s:
            raise StorageError(f"step {step} was not committed")
        time.sleep(0.001)


def run(directory: str, rank: int, generation: int, first: int, last: int, wait_s: float) -> None:
    for step in range(first, last + 1):
        try:
            save(Path(directory), rank, generation, step, wait_s)
        except ElasticZeroError as error:
            print(error, file=sys.stderr, flush=True)
            return


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        if order is None:
            while True:
                try:
                    os.wait()
                except ChildProcessError:
                    break
            print("ended", flush=True)
            continue
        child = os.fork()
        if child == 0:
            run(*order)
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
