"""Makes streams of webdataset's pipelines: a shard is a tar file, in which a resume skips."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from elasticzero.data.streams.iterable import samples_as_worker
from elasticzero.errors import UserError

_SPLITTERS = ("single_node_only", "split_by_node", "split_by_worker")
"""Stages that divide the tar files among ranks and data workers, for which readers stand here."""
_CHECK_EMPTY = "check_empty"
"""Stage that refuses a pipeline without samples, which one tar file may be."""
_OPENERS = ("StreamingOpen", "FileCache", "tarfile_samples", "url_opener")
_SAMPLE_BY_SAMPLE = (
    *("tar_file_expander", "tar_file_and_group_expander", "group_by_keys"),
    *("map", "map_dict", "map_tuple", "decode", "xdecode", "select", "associate", "to_tuple"),
    *("rename", "rename_keys", "extract_keys", "info", "log_keys"),
)
"""Stages of webdataset, after the opener, that give the same samples of a tar file each time."""
_INSTEAD = {
    "shuffle": "the session shuffles tar files, and samples within the shuffle_window of "
    "ez.Stream(dataset, shuffle_window=…)",
    "rsample": "it draws samples at random; choose them by their __key__, in .select",
    "batched": "the session makes the batches; give it collate_fn= if need be",
    "slice": "it would cut each tar file; give the session steps=",
    "cached": "it would give the samples of one tar file for another",
}
_SAME_AS = {
    "detshuffle": "shuffle",
    "listed": "batched",
    "unbatched": "batched",
    "unlisted": "batched",
    "islice": "slice",
    "Cached": "cached",
    "LMDBCached": "cached",
}


class TarFiles:
    """Reads a `webdataset.WebDataset`, or another pipeline of its stages, one tar file at a time.

    The pipeline's stages all run for each tar file; those that divide the tar files do not.
    """

    def __init__(self, pipeline: Any) -> None:
        """Raises `UserError` for a pipeline that would not give each sample once."""
        self._pipeline = pipeline
        self._list, *stages = pipeline.pipeline
        _check_beginning(self._list)
        if pipeline.repetitions != 1 or pipeline.nsamples > 0:
            raise _refused(
                ".repeat or .with_epoch", "the session counts epochs; give it epochs= or steps="
            )
        self._stages = [stage for stage in stages if _name_of(stage) not in _SPLITTERS]
        _check_stages(self._stages)
        self._stages = [stage for stage in self._stages if _name_of(stage) != _CHECK_EMPTY]

    @property
    def shards(self) -> int:
        return len(self._list.urls)

    def read(self, shard: int, start: int) -> Iterator[Any]:
        one, pipeline = copy.copy(self._list), copy.copy(self._pipeline)
        one.urls = [self._list.urls[shard]]
        pipeline.pipeline = [one, *self._stages]
        return islice(samples_as_worker(pipeline, 0, 0), start, None)


def _check_beginning(first: Any) -> None:
    """Raises `UserError` for a pipeline that does not begin with a list of tar files."""
    name = type(first).__name__
    if name == "ResampledShards":
        raise _refused("resampled=True", "it draws tar files at random, some twice and some never")
    if name != "SimpleShardList":
        raise UserError(
            f"the webdataset pipeline begins with {name}, which does not say what its tar files "
            "are: give webdataset.WebDataset their URLs, as a list or with braces"
        )
    if first.seed is not None:
        raise _refused("the seed of SimpleShardList", _INSTEAD["shuffle"])


def _check_stages(stages: list[Any]) -> None:
    """Raises `UserError` for a stage that would not give the same samples of a tar file each
    time."""
    opened = False
    for stage in stages:
        name = _name_of(stage)
        instead = _INSTEAD.get(_SAME_AS.get(name, name))
        if instead is not None and not _is_idle_shuffle(stage):
            where = "" if opened else ", or shardshuffle=" if "shuffle" in name else ""
            raise _refused(f".{name}{where}", instead)
        repeatable = name in (*_SAMPLE_BY_SAMPLE, *_OPENERS, _CHECK_EMPTY)
        repeatable = repeatable or _is_idle_shuffle(stage)
        if _is_webdatasets(stage) and not repeatable:
            raise _refused(f".{name}", "it is not known to give the same samples each time")
        if not _is_webdatasets(stage) and not opened:
            raise _refused(
                f"{name}, which comes before the tar files are opened",
                "a tar file that it leaves out is read by no rank; leave it out of the URLs",
            )
        opened = opened or name in _OPENERS


def _is_idle_shuffle(stage: Any) -> bool:
    """Returns whether the stage is the one that `shardshuffle=False` adds."""
    size = getattr(stage, "args", (None,))[:1]
    return _name_of(stage) == "shuffle" and size in ((False,), (0,), (1,))


def _name_of(stage: Any) -> str:
    """Returns what webdataset calls a stage: a function, with its arguments or without, or an
    object."""
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__name__", type(function).__name__)).strip("_")


def _is_webdatasets(stage: Any) -> bool:
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__module__", "")).split(".")[0] == "webdataset"


def _refused(what: str, why: str) -> UserError:
    return UserError(f"the webdataset pipeline has {what}: leave it out, for {why}")
