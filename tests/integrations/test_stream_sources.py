"""Streams of Hugging Face's datasets: each sample once, and the same batches after a resume.

`make integrations` runs these in an environment that has the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero.data.datasets import as_stream
from elasticzero.data.loader import RankSchedule
from elasticzero.data.position import DataPosition
from elasticzero.data.streams.loader import StreamReader
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import Stream, stream_order
from elasticzero.serialization import decode, encode

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(120)]
datasets = pytest.importorskip("datasets", reason="`make integrations` has it")
SIZES = (40, 75, 8, 61, 90)


def write(folder: Path, kind: str) -> list[str]:
    """Writes files of numbered samples."""
    paths = []
    first = 0
    for file, size in enumerate(SIZES):
        rows = [{"number": n, "text": f"sample {n}"} for n in range(first, first + size)]
        first += size
        path = folder / f"{file}.{kind}"
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(str(path), batch_size=16)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths


def rows(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"number": number, "text": f"sample {number}"}


def dataset_of(kind: str, folder: Path) -> Any:
    if kind == "generator":
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"count": sum(SIZES)})
    name = {"parquet": "parquet", "jsonl": "json"}[kind]
    files = write(folder, kind)
    return datasets.load_dataset(name, data_files=files, split="train", streaming=True)


def train(
    stream: Stream, position: DataPosition, workers: int, steps: int
) -> tuple[list[list[int]], DataPosition]:
    """Returns the samples of so many global batches, and the position after them as it is
    stored."""
    plan = StreamPlan(order=stream_order(stream, 1, True), global_batch=16, epochs=2)
    schedule = RankSchedule(plan=plan, rank=0, world_size=1)
    position = plan.start(position, 0)
    reader = StreamReader(
        dataset=stream, stream=stream, device=torch.device("cpu"), num_workers=workers
    )
    data = reader.open(schedule, position)
    batches: list[list[int]] = []
    for batch, after in schedule.steps(position):
        if len(batches) == steps:
            break
        data.look_ahead(batch, after)
        [part] = schedule.parts(batch, 1)
        samples = next(data)
        assert len(samples["text"]) == part.weight
        assert samples["text"] == [f"sample {n}" for n in samples["number"].tolist()]
        batches.append(samples["number"].tolist())
        position = after
    data.close()
    return batches, decode(DataPosition, json.loads(json.dumps(encode(position))))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "generator"])
def test_each_sample_is_given_once_and_a_resume_goes_on(kind: str, tmp_path: Path) -> None:
    stream = as_stream(dataset_of(kind, tmp_path))
    assert stream is not None
    whole, _ = train(stream, DataPosition(), 0, 1000)
    count = sum(SIZES)
    used = [number for batch in whole for number in batch]
    assert sorted(used[:count]) == sorted(used[count:]) == list(range(count))
    assert used[:count] != used[count:]
    for kept in (3, 17, 20):
        first, position = train(stream, DataPosition(), 2, kept)
        rest, _ = train(stream, position, 2, 1000)
        assert [sorted(batch) for batch in first + rest] == [sorted(batch) for batch in whole]


def test_files_are_shards(tmp_path: Path) -> None:
    stream = as_stream(dataset_of("parquet", tmp_path))
    assert stream is not None
    assert stream_order(stream, 0, True).shards == len(SIZES)
    assert stream_order(stream, 0, True).readers == 60
