"""Gathers updated parameters from the ranks' chunks, while the script goes on to its next forward.

A module waits for the buckets of its own parameters before its forward. Whatever else reads a
parameter meanwhile (an average of weights, a printed norm) waits as well: until its bucket is
gathered, a parameter is of a class whose every use by torch waits first. Functions of extension
modules that torch's dispatch does not see are the exception, outside of a module's forward.

Shapes: E elements of a bucket with its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elasticzero.parallel.buckets.exchange import begin_all_gather, is_launched
from elasticzero.parallel.buckets.layout import FlatBucket
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.step_clock import wait_for
from elasticzero.torch_internals.tensors import call_around_compiling

_WAIT = "_elasticzero_wait"


class PendingParameter(nn.Parameter):
    """Waits, at any use, for the parameter's newest elements, which come from other ranks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _pending([args, kwargs or {}]):
            wait = tensor.__dict__.get(_WAIT)
            if wait is not None:
                wait()
            _become(tensor, nn.Parameter)  # also of a copy that was made meanwhile
        return func(*args, **(kwargs or {}))


def _pending(value: Any) -> Iterable[PendingParameter]:
    if type(value) is PendingParameter:
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _pending(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _pending(entry)


def _become(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    parameter.__class__ = kind


class _NotBegun:
    """Stands for a gather that could not begin or end, since a peer is gone."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def _needed_by(
    parameters: Iterable[nn.Parameter], bucket_of: Mapping[int, FlatBucket]
) -> list[FlatBucket]:
    """Returns the buckets of some parameters, each once."""
    return list({bucket_of[id(parameter)]: None for parameter in parameters})


def stepped_together(buckets: Sequence[FlatBucket]) -> list[Sequence[FlatBucket]]:
    """Returns the buckets in the parts in which they are stepped.

    Where no rank waits for elements of another, that is one part: a step of many parameters is few
    launches. Else each part has twice as many buckets as the one before it, whose gathers run
    meanwhile: the first gathers, which the next forward waits for, begin as early as they can. On
    the CPU, where nothing is launched, each gather does.

    Args:
        buckets: The buckets in the order of the next forward.
    """
    if not buckets or buckets[0].world_size == 1:
        return [buckets]
    if not is_launched(buckets[0].flat_E):
        return [[bucket] for bucket in buckets]
    parts: list[Sequence[FlatBucket]] = []
    start = 0
    while start < len(buckets):
        stop = min(2 * start + 1, len(buckets))
        parts.append(buckets[start:stop])
        start = stop
    return parts


class ParameterGather:
    """Brings the parameters of flat buckets up to date on all ranks of a row."""

    def __init__(
        self, model: nn.Module, buckets: Sequence[FlatBucket], mesh: Mesh, traffic: Traffic
    ) -> None:
        """Makes each module wait for its own parameters before its forward.

        Args:
            model: The model whose modules have the parameters.
            buckets: The buckets, whose parameters are up to date.
            mesh: The rows of ranks; the ranks of a row have the chunks of a bucket.
            traffic: Counts what is sent.
        """
        self._traffic = traffic
        self._works: dict[FlatBucket, list[Any]] = {}
        """The gathers that are under way."""
        self._broken: set[FlatBucket] = set()
        """The buckets whose gather has failed."""
        self._awaits_compiler = True
        self._compiled = False
        """Compiled code depends on the class of parameters, so that each gather is waited for."""
        self._needed: list[tuple[list[nn.Parameter], list[FlatBucket]]] = []
        """The parameters of each module that waits, and the buckets that it waits for."""
        self.enter_world(buckets, mesh)
        if not buckets or mesh.shards == 1:
            return
        bucket_of = self._bucket_of()
        for module in model.modules():
            parameters = [p for p in module.parameters(recurse=False) if id(p) in bucket_of]
            if parameters:
                needed = _needed_by(parameters, bucket_of)
                self._needed.append((parameters, needed))
                module.register_forward_pre_hook(self._hook(needed), prepend=True)

    def enter_world(self, buckets: Sequence[FlatBucket], mesh: Mesh) -> None:
        """Gathers other buckets of the same parameters, which are up to date. Modules keep their
        hooks, by which a compiler would see a change."""
        self.buckets = buckets
        self._mesh = mesh
        self._broken.clear()
        self._waits = {id(bucket): self._waiter(bucket) for bucket in buckets}
        bucket_of = self._bucket_of()
        for parameters, needed in self._needed:
            needed[:] = _needed_by(parameters, bucket_of)

    def _bucket_of(self) -> dict[int, FlatBucket]:
        return {id(p): bucket for bucket in self.buckets for p in bucket.parameters}

    def begin(self, bucket: FlatBucket) -> None:
        """Begins to gather a bucket, of which this rank's chunk is up to date.

        The wait for it raises the error of a lost peer: a step that has begun is taken to its end.
        """
        if bucket.world_size == 1:
            return
        chunks = bucket.chunks(bucket.flat_E)
        self._traffic.count_halves("parameters", bucket.flat_E.nbytes, self._mesh.shards, halves=1)
        try:
            self._works[bucket] = begin_all_gather(bucket.flat_E, chunks, self._mesh)
        except RuntimeError as error:
            self._works[bucket] = [_NotBegun(error)]
        self._awaits_compiler = self._awaits_compiler and not call_around_compiling(self._compiling)

    def leave_pending(self) -> None:
        """Lets the gathers that have begun end while the script goes on, where every use of their
        parameters can wait for them; waits for the others, as for one whose elements the script has
        other tensors of."""
        for bucket in list(self._works):
            exact = all(type(parameter) is nn.Parameter for parameter in bucket.parameters)
            if not exact or self._compiled or bucket.outside or bucket.has_readers():
                try:
                    self._finish(bucket)
                except RuntimeError as error:
                    self._works[bucket] = [_NotBegun(error)]
                continue
            for parameter in bucket.parameters:
                parameter.__dict__[_WAIT] = self._waits[id(bucket)]
                _become(parameter, PendingParameter)

    def up_to_date(self, bucket: FlatBucket) -> bool:
        """Returns whether all elements of a bucket are those of the newest step."""
        return bucket not in self._works and bucket not in self._broken

    def finish(self) -> None:
        """Waits for every gather; raises torch's error where a peer is gone."""
        for bucket in list(self._works):
            self._finish(bucket)

    def _compiling(self) -> None:
        self._compiled = True
        self.finish()

    def _finish(self, bucket: FlatBucket) -> None:
        works = self._works.pop(bucket, [])
        for parameter in bucket.parameters:
            if type(parameter) is PendingParameter:
                _become(parameter, nn.Parameter)
                parameter.__dict__.pop(_WAIT, None)
        self._broken.add(bucket)
        wait_for(works)
        self._broken.discard(bucket)

    def _waiter(self, bucket: FlatBucket) -> Callable[[], None]:
        def wait() -> None:
            self._finish(bucket)

        return wait

    def _hook(self, needed: list[FlatBucket]) -> Callable[..., None]:
        """Returns a plain function, which a copy of the model shares instead of copying it."""
        works = self._works

        def wait(module: nn.Module, inputs: Any) -> None:
            if torch.compiler.is_compiling():
                return  # `begin` waits for all then, and the trace has no hook
            for bucket in needed:
                if bucket in works:
                    self._finish(bucket)

        return wait
