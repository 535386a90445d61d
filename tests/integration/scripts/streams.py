"""Trains on a stream in float64, and writes down which samples this rank computes.

Argument: the kind of the stream, and how the job is to go. Streams of other packages are in
`sources.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import regression
import sources
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

import elasticzero as ez

SIZES = (50, 3, 97, 0, 61, 80, 40)
"""Samples of each shard; as many as `regression` has in all."""
READERS = 14
Sample = tuple[Tensor, Tensor, int]


def samples_of(shard: int, start: int = 0) -> Iterator[Sample]:
    first = sum(SIZES[:shard])
    data = regression.dataset()
    for number in range(first + start, first + SIZES[shard]):
        x, y = data[number]
        yield x, y, number


class Whole(IterableDataset[Sample]):
    """Gives everything, wherever it is iterated; a data worker would get half of it."""

    def __iter__(self) -> Iterator[Sample]:
        step = 1 if get_worker_info() is None else 2
        for shard in range(len(SIZES)):
            yield from list(samples_of(shard))[::step]


class Divided(IterableDataset[Sample]):
    """Divides its shards among data workers."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        assert worker is not None
        for shard in range(worker.id, len(SIZES), worker.num_workers):
            yield from samples_of(shard)


KINDS = ("seeks", "skips", "workers", "iterable", *sources.KINDS)


def stream_of(kind: str) -> Any:
    if kind in sources.KINDS:
        return sources.KINDS[kind].dataset(sources.Numbered(regression.dataset()))
    shards = range(len(SIZES))
    if kind == "seeks":
        return ez.Stream(shards, samples_of, readers=7, shuffle_window=5)
    if kind == "skips":
        return ez.Stream(shards, lambda shard: samples_of(shard), readers=14, shuffle_window=5)
    if kind == "workers":
        return ez.Stream.of_workers(Divided(), readers=7, shuffle_window=5)
    assert kind == "iterable"
    return Whole()


def columns(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `x`, `y` and the numbers of a batch, which datasets of Hugging Face give by name."""
    if isinstance(batch, dict):
        return batch["x"], batch["y"], batch["number"]
    x, y, numbers = batch
    return x, y, numbers


def padded(samples: list[Sample]) -> list[Tensor]:
    """Makes a batch as a script's own `collate_fn` does."""
    x, y, numbers = zip(*samples, strict=True)
    return [torch.stack(x), torch.stack(y), torch.tensor(numbers)]


def train(session: ez.Session, options: argparse.Namespace) -> None:
    model, _ = session.prepare(
        regression.network(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05),
    )
    session.restore()
    stream = stream_of(options.kind)
    for batch in session.batches(
        stream,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        epochs=options.epochs,
        num_workers=options.workers,
        seed=3,
        collate_fn=padded if options.collate else None,
    ):
        x, y, numbers = columns(batch)
        counts = session.micro_batch.weight
        used = numbers.tolist() if counts else []  # else it only fills up
        trace = {"generation": session.generation, "step": session.step_count + 1, "samples": used}
        # In one write, of which a kill leaves all or nothing.
        print(json.dumps({"trace": trace}) + "\n", end="", flush=True)
        regression.pause(options.pause)
        session.backward(regression.loss_of(model(x), y))
        session.step(max_grad_norm=1.0)

    def loss_of(batch: Any) -> Any:
        x, y, _ = columns(batch)
        return regression.loss_of(model(x), y)

    loss = session.evaluate(stream, loss_of)
    print(json.dumps({"loss": loss}) + "\n", end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--collate", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    chosen = parser.parse_args()
    ez.run(lambda session: train(session, chosen))
