"""Data of torchdata, webdataset, litData and mosaicml-streaming: each sample once in every world,
and what would not be so is refused.

`make integrations` runs these in an environment that has the packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from elasticzero.data.datasets import as_stream
from elasticzero.data.loop_arguments import LoopArguments
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.source import Stream, stream_order
from elasticzero.errors import UserError
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.training.argument_checks import check_tracked
from tests.integration.scripts import regression
from tests.integration.scripts.sources import KINDS, SAMPLES, SIZES, Numbered, mosaic
from tests.unit.data.streams.test_schedules import Job
from tests.unit.data.test_loop_arguments import resolved

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # which the packages give of themselves
]
for package in ("torchdata", "webdataset", "litdata"):
    pytest.importorskip(package, reason="`make integrations` has it")
streaming = mosaic()
STREAMS = ("stateful-loader", "webdataset", "litdata", "mosaic")


@pytest.fixture(scope="module")
def data() -> Numbered:
    return Numbered(regression.dataset())


def made(kind: str, data: Numbered, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a script gives the session, over files in `folder`."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("STREAM_DATA", str(folder))
    KINDS[kind].write(data, folder)
    return KINDS[kind].dataset(data)


class OfPackage(Job):
    """Trains on what a package gives, generation by generation."""

    dataset: Any = None

    def stream(self) -> Stream:
        dataset = resolved(self.dataset, global_batch=1).dataset
        return Stream(dataset, readers=self.readers, shuffle_window=self.window)

    def numbers(self) -> list[list[int]]:
        return [[number for *_, number in samples] for samples in self.committed.values()]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("seed", range(3))
def test_each_sample_is_in_one_committed_step_in_every_world(
    kind: str, seed: int, data: Numbered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    dataset = made(kind, data, tmp_path / "data", monkeypatch)
    loop = {"global_batch": 10, "epochs": 2}
    jobs = [OfPackage([], 6, 4, loop, seed=seed), OfPackage([], 6, 4, loop, seed=seed)]
    for job in jobs:
        job.dataset = dataset
        if kind == "stateful-loader":
            job.readers = 4  # of its one shard
    whole, disturbed = jobs
    whole.generation(1, 1000, 1000)
    while not disturbed.ended:
        steps = random.randint(1, 20)
        disturbed.generation(random.randint(1, 4), steps, random.randint(0, steps))
    assert list(map(sorted, disturbed.numbers())) == list(map(sorted, whole.numbers()))
    used = [number for numbers in whole.numbers() for number in numbers]
    assert sorted(used[:SAMPLES]) == sorted(used[SAMPLES:]) == list(range(SAMPLES))
    assert used[:SAMPLES] != used[SAMPLES:]
    for x, y, number in next(iter(whole.committed.values())):
        assert [x.tolist(), y.tolist()] == [part.tolist() for part in data[number][:2]]


@pytest.mark.parametrize("kind", ["webdataset", "litdata", "mosaic"])
def test_files_are_shards_and_a_shard_is_read_from_any_sample(
    kind: str, data: Numbered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = as_stream(made(kind, data, tmp_path / "data", monkeypatch))
    assert stream is not None
    source: Any = stream.source
    assert stream_order(stream, 0, True).shards == source.shards > 4
    numbers = [[s[2] for s in source.read(shard, 0)] for shard in range(source.shards)]
    assert sorted(number for samples in numbers for number in samples) == list(range(SAMPLES))
    if kind == "webdataset":
        assert tuple(map(len, numbers)) == SIZES
    for shard, samples in enumerate(numbers):
        for start in (1, len(samples) - 1, len(samples)):
            assert [s[2] for s in source.read(shard, start)] == samples[start:]


@pytest.mark.parametrize("kind", ["webdataset", "litdata"])
def test_the_ranks_of_the_environment_divide_nothing(
    kind: str, data: Numbered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages look at them to divide their files; mosaicml-streaming's would begin to meet
    the others."""
    made(kind, data, tmp_path / "data", monkeypatch)
    for name in ("RANK", "GLOBAL_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = KINDS[kind].dataset(data)
    if kind == "litdata":
        assert len(dataset) < SAMPLES  # which it would divide
    stream = as_stream(dataset)
    assert stream is not None
    source: Any = stream.source
    numbers = [s[2] for shard in range(source.shards) for s in source.read(shard, 0)]
    assert sorted(numbers) == list(range(SAMPLES))


def test_a_stateful_loader_is_taken_over(data: Numbered) -> None:
    indexed = resolved(KINDS["indexed-loader"].dataset(data))
    assert (indexed.dataset, indexed.global_batch, indexed.micro_batch) == (data, 15, 5)
    assert (indexed.num_workers, indexed.shuffle, indexed.sampler) == (2, True, None)
    stream = resolved(KINDS["stateful-loader"].dataset(data))
    assert isinstance(stream.schedule(0, 1, None).plan, StreamPlan)
    assert (stream.global_batch, stream.num_workers) == (15, 2)


def loader_of(data: Numbered) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=5)


def test_a_stateful_loader_within_an_epoch_is_refused(data: Numbered) -> None:
    loader = loader_of(data)
    next(iter(loader))
    with pytest.raises(UserError, match="has been iterated already, but the session keeps"):
        resolved(loader)
    resumed = loader_of(data)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="was given a state by load_state_dict"):
        resolved(resumed)


def test_a_stateful_loader_is_not_tracked(data: Numbered) -> None:
    with pytest.raises(UserError, match="leave this StatefulDataLoader out"):
        check_tracked("loader", loader_of(data), Optimizers({}, []), "ddp")


def pipeline(*stages: Callable[[Any], Any], **options: Any) -> Callable[[str], Any]:
    """Makes a pipeline of the tar file of this name."""

    def make(url: str) -> Any:
        import webdataset

        dataset = webdataset.WebDataset(url, **{"shardshuffle": False, **options})
        for stage in stages:
            dataset = stage(dataset)
        return dataset

    return make


def of_stages(url: str) -> Any:
    import webdataset as wds

    return wds.DataPipeline(
        wds.SimpleShardList(url), wds.shuffle(7), wds.tarfile_to_samples(), wds.decode()
    )


def of_another_list(url: str) -> Any:
    import webdataset as wds

    return wds.DataPipeline(wds.ResampledShards(url), wds.tarfile_to_samples())


def of_a_loader(url: str) -> Any:
    import webdataset as wds

    return wds.WebLoader(pipeline()(url), batch_size=4)


def every_second(urls: Iterator[Any]) -> Iterator[Any]:
    for number, url in enumerate(urls):
        if number % 2:
            yield url


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipeline(shardshuffle=100), ".shuffle, or shardshuffle=: leave it out, for the session"),
        (pipeline(shardshuffle=100, detshuffle=True), ".detshuffle, or shardshuffle=: leave"),
        (pipeline(lambda p: p.shuffle(50)), r"has \.shuffle: leave it out, .*shuffle_window"),
        (of_stages, r"has \.shuffle, or shardshuffle="),
        (pipeline(resampled=True), "resampled=True: .* draws tar files at random"),
        (of_another_list, "resampled=True: .* draws tar files at random"),
        (pipeline(lambda p: p.rsample(0.5)), "rsample: .* draws samples at random"),
        (pipeline(lambda p: p.repeat(2)), "the session counts epochs"),
        (pipeline(lambda p: p.with_epoch(100)), "the session counts epochs"),
        (pipeline(lambda p: p.batched(4)), "the session makes the batches"),
        (pipeline(lambda p: p.listed(4)), "the session makes the batches"),
        (pipeline(lambda p: p.slice(4)), "would cut each tar file"),
        (pipeline(lambda p: p.mcached()), "the samples of one tar file for another"),
        (pipeline(nodesplitter=every_second), "every_second, which comes before the tar files"),
        (of_a_loader, "begins with DataLoader, which does not say what its tar files are"),
    ],
)
def test_a_pipeline_that_would_not_give_each_sample_once_is_refused(
    make: Callable[[str], Any],
    message: str,
    data: Numbered,
    tmp_path: Path,
) -> None:
    KINDS["webdataset"].write(data, tmp_path)
    with pytest.raises(UserError, match=message):
        as_stream(make(f"{tmp_path}/1.tar"))


def twice(samples: Iterator[Any]) -> Iterator[Any]:
    for sample in samples:
        yield from (sample, sample)


def test_a_pipeline_has_its_stages_for_each_tar_file(data: Numbered, tmp_path: Path) -> None:
    import webdataset as wds

    KINDS["webdataset"].write(data, tmp_path)
    urls = f"{tmp_path}/{{0..1}}.tar"
    made_ = [
        wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node)
        .decode()
        .select(lambda sample: sample["json"] % 2 == 0)
        .map(lambda sample: sample["json"])
        .compose(twice),
        wds.DataPipeline(
            wds.SimpleShardList(urls),
            wds.split_by_node,
            wds.split_by_worker,
            wds.tarfile_to_samples(),
            wds.decode(),
            wds.select(lambda sample: sample["json"] % 2 == 0),
            wds.map(lambda sample: sample["json"]),
            twice,
        ),
    ]
    for dataset in made_:
        source: Any = Stream(dataset).source
        assert list(source.read(1, 0)) == [50, 50, 52, 52]
        assert list(source.read(1, 3)) == [52]
        assert len(list(source.read(0, 0))) == 50


def test_a_tar_file_without_samples_is_a_shard_of_none(tmp_path: Path, data: Numbered) -> None:
    import tarfile

    import webdataset as wds

    KINDS["webdataset"].write(data, tmp_path)
    tarfile.open(tmp_path / "6.tar", "w").close()
    dataset = wds.WebDataset(f"{tmp_path}/{{0..6}}.tar", shardshuffle=False)
    source: Any = Stream(dataset).source
    assert not list(source.read(6, 0))


def test_a_weighted_mosaic_dataset_is_refused(data: Numbered, tmp_path: Path) -> None:
    for name in "ab":
        KINDS["mosaic"].write(data, tmp_path / name)

    def dataset(**weights: float) -> Any:
        streams = [
            streaming.Stream(local=str(tmp_path / "a"), **weights),
            streaming.Stream(local=str(tmp_path / "b"), **dict.fromkeys(weights, 1)),
        ]
        return streaming.StreamingDataset(streams=streams, batch_size=1)

    whole = as_stream(dataset())
    assert whole is not None
    for weights in ({"repeat": 2.0}, {"choose": 10}, {"proportion": 3.0}):
        with pytest.raises(UserError, match="weights its streams"):
            as_stream(dataset(**weights))
    with pytest.raises(UserError, match="weights its streams"):
        as_stream(
            streaming.StreamingDataset(local=str(tmp_path / "a"), epoch_size=100, batch_size=1)
        )


def test_what_litdata_draws_from_several_is_refused(
    data: Numbered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litdata import CombinedStreamingDataset

    dataset = made("litdata", data, tmp_path / "data", monkeypatch)
    with pytest.raises(UserError, match="CombinedStreamingDataset divides itself by the ranks"):
        as_stream(CombinedStreamingDataset([dataset, dataset]))
    mixed = Stream.mixed({Stream(dataset): 1.0, Stream(dataset): 2.0})
    assert stream_order(mixed, 0, True).shards > 4


def test_loaders_of_streaming_packages_are_taken_over(
    data: Numbered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litdata import StreamingDataLoader

    loaders = {"litdata": StreamingDataLoader, "mosaic": streaming.StreamingDataLoader}
    for kind, loader in loaders.items():
        dataset = made(kind, data, tmp_path / kind, monkeypatch)
        loop: LoopArguments = resolved(loader(dataset, batch_size=5, num_workers=2))
        assert (loop.dataset, loop.global_batch, loop.num_workers) == (dataset, 15, 2)
