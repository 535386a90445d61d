"""Carries out the tasks of an island: fetches contributions, means and outer states, and computes
what follows from them.

A thread works on one task at a time, another one computes digests of contributions, and the agent's
loop never waits for them. A task that fails may be given again; what it was about to make is not
there then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import xxhash

from elasticzero.errors import StorageError, one_line
from elasticzero.ipc.round_wire import Bytes, Piece, RoundWire
from elasticzero.ipc.rounds import PARTS, JoinRounds, encoded_name, outer_name, sent_name
from elasticzero.launcher.islands.files import RoundFiles, size_of
from elasticzero.launcher.islands.outer import OuterOptimizer, write_mean
from elasticzero.launcher.protocol.rounds.documents import Contributor, Outer, Sum, Unreachable
from elasticzero.launcher.protocol.rounds.island import SumUp, TakeOuter, TakeSum

PIECE_BYTES = 4 << 20
"""Bytes of a file that are fetched at a time."""
HEAD = ""
"""Stands for the head of this island where a task names an island; no island has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSent:
    """Asks for the digest of a contribution of this island, whose file is whole: as other islands
    read it, encoded where `DiLoCo.wire` says so."""

    fragment: int
    incarnation: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSent:
    """Fetches a contribution of this island from its head, as the head keeps it."""

    fragment: int
    incarnation: str
    number: int


ToDo = SumUp | TakeSum | TakeOuter | PrepareSent | TakeSent


_Tasks = queue.SimpleQueue[tuple[ToDo, Mapping[str, str]] | None]
NONE_SUMMED: Mapping[str, str] = MappingProxyType({})


class Source(Protocol):
    """Reads files of another agent by range."""

    @property
    def where(self) -> str: ...

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Tells the outcome of a task."""

    task: ToDo
    result: Sum | Unreachable | str | None = None
    """Result that it was to make, names of what could not be fetched, or a digest; None: the state
    is there, if there is no error."""
    error: str = ""
    """Why it has failed; empty: it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Holds what the islands of a job have in common."""

    wires: Sequence[RoundWire]
    """How the elements of each fragment are sent."""
    optimizer: OuterOptimizer


def agreed_in(join: JoinRounds) -> Agreed:
    """Returns what the islands have in common, by what workers have said of it."""
    settings = join.settings
    return Agreed(
        wires=[RoundWire(format=settings.wire, shape=shape) for shape in join.fragments],
        optimizer=OuterOptimizer(lr=settings.outer_lr, momentum=settings.outer_momentum),
    )


class Exchange:
    """Works on the tasks that it is given, one after the other, in threads."""

    def __init__(
        self,
        files: RoundFiles,
        agreed: Agreed,
        open_source: Callable[[str], Source | None],
        on_end: Callable[[Exchanged], None],
        count_bytes: Callable[[int], None],
    ) -> None:
        """Starts the threads.

        Args:
            files: The files of this node.
            agreed: What the islands have in common.
            open_source: Returns the files of another agent, by the name of its island, or `HEAD`;
                None: it is this one, or is gone.
            on_end: Called by the threads with the outcome of each task.
            count_bytes: Called by a thread with the bytes that have come from another island.
        """
        self._files = files
        self._wires, self._optimizer = agreed.wires, agreed.optimizer
        self._open_source = open_source
        self._on_end, self._count_bytes = on_end, count_bytes
        self._transfers, self._digests, self._is_closed = _Tasks(), _Tasks(), False
        self._threads = [
            threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True)
            for tasks, name in (
                (self._transfers, "elasticzero-rounds"),
                (self._digests, "elasticzero-round-digests"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, task: ToDo, digests: Mapping[str, str] = NONE_SUMMED) -> None:
        """Has a task done.

        Args:
            task: The task.
            digests: Digest of the contribution of each island that is summed up, if any are.
        """
        tasks = self._digests if isinstance(task, PrepareSent) else self._transfers
        tasks.put((task, digests))

    def close(self) -> None:
        """Ends the threads after their present tasks, for which it does not wait long."""
        self._is_closed = True
        for tasks in (self._transfers, self._digests):
            tasks.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def _work(self, tasks: _Tasks) -> None:
        while (item := tasks.get()) is not None and not self._is_closed:
            task, digests = item
            try:
                outcome = self._do(task, digests)
            except Exception as error:  # noqa: BLE001 - the top of a thread's work: told
                outcome = Exchanged(task=task, error=one_line(error))
            self._on_end(outcome)

    def _do(self, task: ToDo, digests: Mapping[str, str]) -> Exchanged:
        match task:
            case SumUp():
                return self._sum_up(task, digests)
            case TakeSum():
                return self._take_sum(task)
            case TakeOuter():
                return self._take_outer(task)
            case PrepareSent():
                return self._prepare(task)
            case TakeSent():
                return self._take_sent(task)

    def _prepare(self, task: PrepareSent) -> Exchanged:
        """Encodes a contribution, and leaves in this node's file what others decode of it: so what
        is left out stays in the island's parameters, and comes with its next contribution."""
        name, wire = (
            sent_name(task.fragment, task.incarnation, task.number),
            self._wires[task.fragment],
        )
        if wire.is_lossy and wire.nbytes:
            values_E = np.memmap(self._files.path(name), wire.shape.dtype, "r+")
            with self._files.making(encoded_name(name), wire.nbytes) as data:
                for piece in wire.pieces():
                    data[piece.bytes] = wire.encode(values_E[piece.elements], piece)
            for piece in wire.pieces():
                values_E[piece.elements] = wire.decode(data[piece.bytes], piece)
        return Exchanged(task=task, result=self._files.digest(read_name(name, wire)))

    def _sum_up(self, task: SumUp, digests: Mapping[str, str]) -> Exchanged:
        """Computes the mean of contributions while they come, and the outer state after it."""
        wire = self._wires[task.fragment]
        parts = [
            _Part(
                contributor, task.fragment, wire, self._open_source(contributor.island), self._files
            )
            for contributor in task.contributors
        ]
        name, of_mean = mean_name(task.fragment, task.attempt), wire.of_mean(len(parts))
        try:
            with self._files.making(name, of_mean.nbytes) as data:
                for piece, into in zip(wire.pieces(), of_mean.pieces(), strict=True):
                    sent = [(part.samples, part.read(piece)) for part in parts]
                    if of_mean.joins(into):
                        data[into.bytes] = of_mean.joined(sent, piece)
                    else:
                        values = [(count, wire.decode(come, piece)) for count, come in sent]
                        count = piece.elements.stop - piece.elements.start
                        write_mean(values, mean_P := np.empty(count, wire.shape.dtype))
                        data[into.bytes] = of_mean.encode(mean_P, into)
                    size = piece.bytes.stop - piece.bytes.start
                    self._count_bytes(size * sum(part.is_foreign for part in parts))
                for part in parts:
                    part.verify(digests.get(part.island))
        except _Missing as missing:
            unreachable = Unreachable(attempt=task.attempt, islands=(missing.island,))
            return Exchanged(task=task, result=unreachable, error=str(missing))
        mean = self._files.digest(name)
        outer = self._step(task.fragment, of_mean, task.base, name)
        return Exchanged(task=task, result=Sum(attempt=task.attempt, mean=mean, outer=outer))

    def _take_sum(self, task: TakeSum) -> Exchanged:
        """Fetches a mean, and computes the outer state after it."""
        name = mean_name(task.fragment, task.sum.attempt)
        wire = self._wires[task.fragment].of_mean(task.contributions)
        self._fetch(task.sources, name, wire.nbytes, task.sum.mean)
        outer = self._step(task.fragment, wire, task.base, name)
        return Exchanged(task=task, result=replace(task.sum, outer=outer))

    def _take_outer(self, task: TakeOuter) -> Exchanged:
        """Fetches an outer state."""
        number, outer = task.fragment, task.outer
        names = [outer_name(number, outer.round, outer.digest, part) for part in PARTS]
        for name in names:
            self._fetch(task.sources, name, size_of(self._wires[number].shape), None)
        if self._files.digest(*names) != outer.digest:
            for name in names:  # what is there counts as whole
                self._files.remove(name)
            raise StorageError(f"the outer state of round {outer.round} came with other bytes")
        return Exchanged(task=task)

    def _take_sent(self, task: TakeSent) -> Exchanged:
        """Fetches a contribution of the island, and decodes what was rounded for others."""
        name = sent_name(task.fragment, task.incarnation, task.number)
        wire = self._wires[task.fragment]
        fetched = read_name(name, wire)
        self._fetch((HEAD,), fetched, wire.nbytes, None)
        if fetched != name:
            data = self._files.data(fetched, wire.nbytes)
            with self._files.making(name, size_of(wire.shape)) as values:
                values_E = values.view(wire.shape.dtype)
                for piece in wire.pieces():
                    values_E[piece.elements] = wire.decode(data[piece.bytes], piece)
        return Exchanged(task=task)

    def _step(self, number: int, wire: RoundWire, base: Outer, mean: str) -> str:
        """Makes the files of the outer state after a mean; returns its digest.

        Args:
            number: Number of the fragment.
            wire: How the mean is sent.
            base: The state before.
            mean: Name of the file with the mean.
        """
        stepped, size = wire.shape.elements - wire.shape.averaged, size_of(wire.shape)
        following = [f"{mean}-{part}" for part in PARTS]
        with ExitStack() as stack:
            arrays = [stack.enter_context(self._files.making(name, size)) for name in following]
            for array, part in zip(arrays, PARTS, strict=True):
                name = outer_name(number, base.round, base.digest, part)
                array[:] = self._files.data(name, size)
            data = self._files.data(mean, wire.nbytes)
            parameters_E, momentum_E = (array.view(wire.shape.dtype) for array in arrays)
            for piece in wire.pieces():
                mean_P, place = wire.decode(data[piece.bytes], piece), piece.elements
                averaged = max(0, min(stepped, place.stop) - place.start)
                parameters_P, momentum_P = parameters_E[place], momentum_E[place]
                first = slice(averaged)
                self._optimizer.step(parameters_P[first], momentum_P[first], mean_P[first])
                parameters_P[averaged:] -= mean_P[averaged:]
        digest = self._files.digest(*following)
        for name, part in zip(following, PARTS, strict=True):
            path = self._files.path(outer_name(number, base.round + 1, digest, part))
            self._files.path(name).rename(path)
        return digest

    def _fetch(self, sources: Sequence[str], name: str, nbytes: int, digest: str | None) -> None:
        """Fetches a file from the first island that answers.

        Args:
            sources: Islands that have it.
            name: Its name, there and here.
            nbytes: Its size.
            digest: Digest of its bytes; None: it is not known.

        Raises:
            StorageError: No island has given it.
        """
        error = "no island has it"
        for island in sources:
            source = self._open_source(island)
            if source is None:
                continue
            try:
                with self._files.making(name, nbytes) as data:
                    for start in range(0, nbytes, PIECE_BYTES):
                        part = data[start : start + PIECE_BYTES]
                        _read(source, name, start, part)
                        self._count_bytes(part.nbytes)
                if digest in (None, self._files.digest(name)):
                    return
                error = f"{source.where}/{name} has other bytes than it has told of"
            except (OSError, StorageError) as failure:
                error = one_line(failure)
        raise StorageError(error)


class _Missing(Exception):
    """Says that a contribution cannot be had."""

    def __init__(self, island: str, why: str) -> None:
        super().__init__(f"the contribution of {island} cannot be had: {why}")
        self.island = island


class _Part:
    """Reads one contribution, from this node or another one, and digests what it reads."""

    def __init__(
        self,
        contributor: Contributor,
        fragment: int,
        wire: RoundWire,
        source: Source | None,
        files: RoundFiles,
    ) -> None:
        """Opens a contribution.

        Args:
            contributor: Whose it is.
            fragment: Number of the fragment.
            wire: How its elements are sent.
            source: The other node's files; None: it is in this node's.
            files: This node's files.
        """
        self.island, self.samples = contributor.island, contributor.samples
        name = sent_name(fragment, contributor.incarnation, contributor.number)
        self._name = read_name(name, wire)
        self._source, self._files, self.is_foreign = source, files, source is not None
        self._hasher = xxhash.xxh3_128()

    def read(self, piece: Piece) -> Bytes:
        """Returns the bytes of the next piece; raises `_Missing`."""
        data: Bytes = np.empty(piece.bytes.stop - piece.bytes.start, np.uint8)
        try:
            if self._source is not None:
                _read(self._source, self._name, piece.bytes.start, data)
            else:
                self._read_here(piece.bytes.start, data)
        except (OSError, StorageError) as error:
            raise _Missing(self.island, one_line(error)) from error
        self._hasher.update(data.data)
        return data

    def _read_here(self, start: int, into: Bytes) -> None:
        with self._files.open_file(self._name) as file:
            file.seek(start)
            if file.readinto(into.data) != into.nbytes:  # type: ignore[attr-defined]
                raise StorageError(f"{self._files.path(self._name)} is too short")

    def verify(self, digest: str | None) -> None:
        """Raises `_Missing` unless all that was read has this digest."""
        if self._hasher.hexdigest() != digest:
            raise _Missing(self.island, "its bytes are not those that it has told of")


def _read(source: Source, name: str, start: int, into: Bytes) -> None:
    """Reads bytes of another node's file, from `start` on.

    Args:
        source: The other node's files.
        name: Name of the file.
        start: Place of the first byte.
        into: Where they go.

    Raises:
        StorageError: They did not come.
    """
    if source.read_into(name, start, into.data) != into.nbytes:
        raise StorageError(f"{source.where}/{name} is too short")


def read_name(sent: str, wire: RoundWire) -> str:
    """Returns the name of the file with a contribution as other islands read it.

    Args:
        sent: Name of the file that the workers have written.
        wire: How its elements are sent.
    """
    return encoded_name(sent) if wire.is_lossy and wire.nbytes else sent


def mean_name(fragment: int, attempt: int) -> str:
    """Returns the name of the file with the mean of an attempt to close a round."""
    return f"mean-{fragment}-{attempt}"
