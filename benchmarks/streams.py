"""Reads streams beside torch's DataLoader over the same source, in one process.

    python benchmarks/streams.py [--pairs 15] [--record]

throughput  samples a second with data workers, no training in between
step        time in the data path for each step of 50 ms, where batches are ready
resume      time to the first batch, 10 million samples into a stream that can seek
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from performance_page import about_in_words, machine, present_commit, publish, record
from ratio import Ratio
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elasticzero.data.loader import BatchReader, RankSchedule
from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import BatchPlan, SampleOrder
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import Stream, stream_order

CPU = torch.device("cpu")
SHARDS, GLOBAL_BATCH, STEP_S = 64, 64, 0.05
TOKENS = 2048
KINDS = {"tokens": 600, "compressed": 60}
"""Samples of a shard: 8 KB read from a file as they are, and 48 KB that are decompressed."""
PEER = "DataLoader over the stream"
LEAST_THROUGHPUT, MOST_STEP_MS, MOST_RESUME_S = 0.95, 0.5, 2.0

Sample = dict[str, Any]


def write(folder: Path, kind: str) -> None:
    """Writes the shards of a kind: a table of offsets, and the samples."""
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        parts = []
        for _ in range(KINDS[kind]):
            if kind == "tokens":
                parts.append(random.integers(0, 50_000, TOKENS, np.int32).tobytes())
            else:
                parts.append(zlib.compress(random.integers(0, 16, 48 << 10, np.uint8).tobytes(), 1))
        ends = np.cumsum([len(part) for part in parts]).tolist()
        head = struct.pack(f"<{len(ends) + 1}q", 0, *ends)
        (folder / f"{kind}-{shard}").write_bytes(head + b"".join(parts))


def read(folder: Path, kind: str, shard: int, start: int) -> Iterator[Sample]:
    """Yields the samples of a shard from `start` on."""
    count = KINDS[kind]
    with (folder / f"{kind}-{shard}").open("rb") as file:
        offsets = struct.unpack(f"<{count + 1}q", file.read(8 * (count + 1)))
        file.seek(offsets[start], 1)
        for number in range(start, count):
            data = file.read(offsets[number + 1] - offsets[number])
            if kind == "tokens":
                value = torch.from_numpy(np.frombuffer(bytearray(data), np.int32))
            else:
                value = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8)
            yield {"value": value, "number": number}


class Shards(IterableDataset[Sample]):
    """Gives the same samples to a DataLoader, divided among its workers."""

    def __init__(self, reads: Callable[[int, int], Iterator[Sample]]) -> None:
        self._reads = reads

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for shard in range(first, SHARDS, step):
            yield from self._reads(shard, 0)


class Indexed(torch.utils.data.Dataset[Sample]):
    """Samples that have an index."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Sample:
        return {"value": torch.full((TOKENS,), index, dtype=torch.int32), "number": index}


def seconds_of_loader(reads: Callable[[int, int], Iterator[Sample]], workers: int) -> float:
    began_s = time.perf_counter()
    for _ in DataLoader(Shards(reads), batch_size=GLOBAL_BATCH, num_workers=workers):
        pass
    return time.perf_counter() - began_s


def opened(
    stream: Stream, workers: int, position: DataPosition | None = None, **loop: Any
) -> tuple[Any, RankSchedule, DataPosition]:
    plan = StreamPlan(order=stream_order(stream, 0, True), global_batch=GLOBAL_BATCH, **loop)
    schedule = RankSchedule(plan=plan, rank=0, world_size=1)
    at = plan.start(position or DataPosition(), 0)
    reader = StreamReader(dataset=stream, stream=stream, device=CPU, num_workers=workers)
    return reader.open(schedule, at), schedule, at


def seconds_of_stream(reads: Callable[[int, int], Iterator[Sample]], workers: int) -> float:
    began_s = time.perf_counter()
    data, schedule, at = opened(Stream(range(SHARDS), reads), workers, epochs=1)
    for batch, after in schedule.steps(at):
        data.look_ahead(batch, after)
        for _ in schedule.parts(batch, 1):
            next(data)
    data.close()
    return time.perf_counter() - began_s


def throughput(folder: Path, kind: str, workers: int, pairs: int) -> dict[str, Any]:
    reads = partial(read, folder, kind)
    seconds: dict[str, list[float]] = {"loader": [], "stream": []}
    for _ in range(pairs):
        seconds["loader"].append(seconds_of_loader(reads, workers))
        seconds["stream"].append(seconds_of_stream(reads, workers))
    return {"kind": kind, "workers": workers, "samples": SHARDS * KINDS[kind], "seconds": seconds}


def step_seconds(data: Any, schedule: RankSchedule, at: DataPosition, steps: int) -> list[float]:
    """Returns the time in the data path of each step."""
    waits = []
    batches = schedule.steps(at)
    for _ in range(steps):
        began_s = time.perf_counter()
        batch, after = next(batches)
        data.look_ahead(batch, after)
        for _ in schedule.parts(batch, 1):
            next(data)
        waits.append(time.perf_counter() - began_s)
        time.sleep(STEP_S)
    data.close()
    return waits[10:]


def steps_of_each(folder: Path, workers: int, steps: int) -> dict[str, list[float]]:
    reads = partial(read, folder, "tokens")
    stream = step_seconds(*opened(Stream(range(SHARDS), reads), workers, epochs=9), steps)
    plan = BatchPlan(order=SampleOrder(samples=100_000), global_batch=GLOBAL_BATCH, epochs=1)
    schedule = RankSchedule(plan=plan, rank=0, world_size=1)
    at = plan.start(DataPosition(), 0)
    reader = BatchReader(dataset=Indexed(), device=CPU, num_workers=workers)
    indexed = step_seconds(reader.open(schedule, at), schedule, at, steps)
    loader: list[float] = []
    batches = iter(DataLoader(Shards(reads), batch_size=GLOBAL_BATCH, num_workers=workers))
    for _ in range(steps):
        began_s = time.perf_counter()
        next(batches)
        loader.append(time.perf_counter() - began_s)
        time.sleep(STEP_S)
    return {"stream": stream, "index": indexed, PEER: loader[10:]}


def resume_seconds(used: int = 10_000_000, shards: int = 20_000, size: int = 1_000) -> float:
    """Returns the time to the first batch after so many samples of shards that are made up."""

    def numbers(shard: int, start: int) -> Iterator[Sample]:
        for number in range(start, size):
            yield {"value": torch.full((TOKENS,), shard), "number": number}

    stream = Stream(range(shards), numbers)
    order = stream_order(stream, 0, True)
    rows = []
    for reader in range(order.readers):
        count = used // order.readers + (reader < used % order.readers)
        skip = count % order.window
        rows.append([-1, count, skip, *divmod(count - skip, size)])
    position = DataPosition(offset=used, order=order.inputs, stream=rows)
    began_s = time.perf_counter()
    data, _, _ = opened(stream, 0, position, epochs=1)
    next(data)
    took_s = time.perf_counter() - began_s
    data.close()
    return took_s


def tables(figures: dict[str, Any]) -> str:
    heads = (
        "samples | workers | DataLoader, a second | stream, a second | ratio | 95 % range | wanted"
    )
    lines = [f"| {heads} | |"]
    lines.append("|" + "---|" * 8)
    for case in figures["throughput"]:
        loader, stream = case["seconds"]["loader"], case["seconds"]["stream"]
        ratio = Ratio.of(loader, stream)
        rates = [case["samples"] / statistics.median(seconds) for seconds in (loader, stream)]
        met = "met" if ratio.high >= LEAST_THROUGHPUT else "NOT met"
        lines.append(
            f"| {case['kind']} | {case['workers']} | {rates[0]:,.0f} | {rates[1]:,.0f} | "
            f"{ratio.median:.2f} | {ratio.low:.2f} to {ratio.high:.2f} | "
            f"≥ {LEAST_THROUGHPUT} | {met} |"
        )
    heads = "median, ms | mean, ms | beyond DataLoader, ms | wanted"
    lines += ["", f"| time in the data path of a 50 ms step | {heads} | |", "|" + "---|" * 6]
    means_ms = {name: statistics.mean(seconds) * 1e3 for name, seconds in figures["steps"].items()}
    for name, seconds in figures["steps"].items():
        beyond_ms = means_ms[name] - means_ms[PEER]
        judged = "met" if beyond_ms <= MOST_STEP_MS else "NOT met"
        verdict = (
            ["", "", ""] if name == PEER else [f"{beyond_ms:.2f}", f"≤ {MOST_STEP_MS}", judged]
        )
        row = [name, f"{statistics.median(seconds) * 1e3:.2f}", f"{means_ms[name]:.2f}", *verdict]
        lines.append(f"| {' | '.join(row)} |")
    resume_s = figures["resume_s"]
    met = "met" if resume_s <= MOST_RESUME_S else "NOT met"
    lines += [
        "",
        f"First batch, 10 million samples in: {resume_s:.2f} s (≤ {MOST_RESUME_S:g} s: {met}).",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=15, help="turns of each contender")
    parser.add_argument("--record", action="store_true", help="write the tables and the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            write(folder, kind)
        figures = {
            "throughput": [
                throughput(folder, kind, workers, options.pairs)
                for kind in KINDS
                for workers in (1, 2)
            ],
            "steps": steps_of_each(folder, 1, 10 + 20 * options.pairs),
            "resume_s": statistics.median(resume_seconds() for _ in range(3)),
        }
    text = tables(figures)
    print(text)
    if options.record:
        about = machine("torch")
        command = f"python benchmarks/streams.py {' '.join(sys.argv[1:])}".strip()
        setting = f"{about_in_words(about, present_commit())}, torch {about['torch']}."
        publish("streams", f"```\n{command}\n```\n\n{setting}\n\n{text}")
        path = record(
            f"streams-{date.today()}", {"machine": about, "command": command, "found": figures}
        )
        print(path)


if __name__ == "__main__":
    main()
