"""Reads a rank's micro-batches of a stream, and exchanges with the other ranks how far all have
read.

The ranks exchange whenever less than `LOW` global batches are decided, which all of them compute
alike. So batches are read ahead without a word between ranks, and an exchange, which is one sum
over a small table, follows every several steps.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from elasticzero.data.loader import RankSchedule, die_with_training_process, map_each, to_device
from elasticzero.data.position import UNKNOWN, DataPosition, GlobalBatch
from elasticzero.data.slices import slice_seed
from elasticzero.data.streams.dealing import units_of_process
from elasticzero.data.streams.plan import StreamPlan
from elasticzero.data.streams.reader import ReaderMark, mark_of
from elasticzero.data.streams.reader_process import (
    Command,
    Fill,
    Give,
    Open,
    ReaderProcess,
    collate_of_process,
)
from elasticzero.data.streams.sequence import place_width
from elasticzero.data.streams.source import Stream
from elasticzero.data.streams.transfer import Arena, Sent, forget_arenas
from elasticzero.errors import UserError

LOW, HIGH = 2, 8
"""Numbers of global batches: fewer decided ones begin an exchange, which decides more."""
COMMANDS = 16
"""Maximum number of commands that a process has not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReader:
    """Reads the samples of a stream and makes batches of them on a device."""

    dataset: Any
    """The object that the script gave, by which its use is recorded."""
    stream: Stream
    device: torch.device
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Returns the sum of the ranks' tables, which all ranks call together; None: there is one."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0

    def open(self, schedule: RankSchedule, position: DataPosition) -> StreamBatches:
        """Returns the micro-batches of a rank from a position on; all ranks call this together.

        Raises:
            UserError: The stream has fewer readers than there are ranks.
        """
        batches = StreamBatches(self, schedule, position)
        batches.learn_enough(position, position.epoch, position.offset)
        return batches


class StreamBatches:
    """Yields the micro-batches of one rank."""

    def __init__(
        self, reader: StreamReader, schedule: RankSchedule, position: DataPosition
    ) -> None:
        """Begins to read, here or in processes that load data, with `learn_enough`.

        Args:
            reader: The stream, the device and how samples are made batches.
            schedule: What this rank computes of the loop.
            position: Where in the data the batches begin.

        Raises:
            UserError: The stream has fewer readers than there are ranks.
        """
        assert isinstance(schedule.plan, StreamPlan)
        self._plan: StreamPlan = schedule.plan
        self._schedule = schedule
        self._reader = reader
        units = self._plan.units(schedule.rank, schedule.world_size, schedule.reader_groups)
        count, sliced = max(1, reader.num_workers), schedule.reader_groups is not None
        self._numbers = [
            [v for some in units for unit in units_of_process(some, p, count) for v in unit]
            for p in range(count)
        ]
        self._process_of = {v: p for p, numbers in enumerate(self._numbers) for v in numbers}
        self._filling = next(p for p, numbers in enumerate(self._numbers) if numbers)
        """The process that gives fillers."""
        self._turns: Sequence[Sequence[int]] = [*chain(*units)] if sliced else self._numbers
        """Readers whose samples of a batch follow each other, turn by turn."""
        self._commands: list[Any] = (
            [multiprocessing.SimpleQueue() for _ in range(count)]
            if reader.num_workers
            else [_LocalQueue()]
        )
        self._arena_owner = os.urandom(8).hex()
        # Besides those of all commands there is the part that is being joined.
        arena = Arena(self._arena_owner, slots=COMMANDS + 2)
        collate = collate_of_process(reader.collate_fn, count, arena, joined=not sliced)
        self._collates_here = collate is None
        loader: DataLoader[Any] = DataLoader(
            ReaderProcess(reader.stream, self._plan.order, self._commands, collate),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=reader.num_workers,
            prefetch_factor=COMMANDS if reader.num_workers else None,
            pin_memory=reader.device.type == "cuda",
            worker_init_fn=die_with_training_process if reader.num_workers else None,
            generator=torch.Generator().manual_seed(0),
        )
        self._answers = iter(loader)
        self._sent: deque[Command] = deque()
        """Commands that are not answered."""
        self._pending: deque[Give] = deque()
        """Commands for micro-batches that were not sent yet."""
        self._parts: deque[list[Any]] = deque()
        """Answered micro-batches."""
        self._opened: set[int] = set()
        self._at = position
        """The position of the next batch for which no command was made."""

    def __next__(self) -> Any:
        """Returns the next micro-batch, on the device."""
        self._send_ahead()
        while not self._parts:
            self._receive()
        parts = self._parts.popleft()
        self._send_ahead()
        if self._reader.collate_fn is not None and self._collates_here:
            samples = [sample for part in parts for sample in part]
            return to_device(self._reader.collate_fn(samples), self._reader.device)
        return join_parts([to_device(part, self._reader.device) for part in parts])

    def look_ahead(self, batch: GlobalBatch, after: DataPosition) -> None:
        """Makes sure that the batch after this one can be named.

        All ranks call this together, once for each batch.

        Args:
            batch: The global batch that begins.
            after: The position after it.
        """
        self._plan.forget_before(batch.epoch)
        if self._plan.lacks(after, LOW) is not None:
            self.learn_enough(after, batch.epoch, batch.start)

    def in_world(self, schedule: RankSchedule, position: DataPosition) -> StreamBatches:
        """Begins to read anew, for another rank has read what this one reads from now on."""
        self.close()
        return self._reader.open(schedule, position)

    def close(self) -> None:
        """Tells the processes that load data to end; does not wait for them, since a generation
        that ends is not to wait for a sample."""
        for commands in self._commands:
            commands.put(None)
        forget_arenas(self._arena_owner)

    def learn_enough(self, position: DataPosition, epoch: int, drawn: int) -> None:
        """Exchanges with all ranks until `LOW` batches from `position` on can be named; all ranks
        call this together.

        Args:
            position: A position in the data.
            epoch: The epoch that is read now.
            drawn: Number of samples of it that need not be read again.
        """
        while (lacking := self._plan.lacks(position, LOW)) is not None:
            self._learn(lacking, drawn if lacking == epoch else 0)
        self._send_ahead()

    def skip(self, epoch: int, start: int, stop: int) -> None:
        """Reads samples of an epoch that are not used; all ranks call this together, before the
        first batch or between two.

        Args:
            epoch: The epoch.
            start: Place of the first of them, which the readers give next.
            stop: Place after the last, or after the end of the epoch.
        """
        plan = self._plan
        while start < stop and not (plan.of(epoch).whole and start >= plan.of(epoch).decided):
            until = min(stop, plan.of(epoch).decided)
            if until > start:
                self._open(epoch, start)
                counts_V = plan.drawn(epoch, until) - plan.drawn(epoch, start)
                self._send_give(Give(epoch, self._in_turn(counts_V.tolist()), use=False))
                start = until
            else:
                self._learn(epoch, start)

    def _learn(self, epoch: int, drawn: int) -> None:
        """Exchanges with all ranks how far the readers have read in an epoch."""
        plan = self._plan
        drawn_V = plan.drawn(epoch, drawn)
        running = int((plan.of(epoch).total_V == UNKNOWN).sum())
        ahead = -(-HIGH * plan.global_batch // running) + 2
        self._open(epoch, drawn)
        self._send_each(
            Fill(epoch, {v: int(drawn_V[v]) for v in numbers}, ahead) for numbers in self._numbers
        )
        report: dict[int, Any] = {}
        while not report:
            report = self._receive()
        width = 4 + place_width(self._reader.stream)
        table = torch.zeros(plan.order.readers, width, dtype=torch.int64)
        for number, row in report.items():
            table[number] = torch.tensor(row)
        if self._reader.sum_over_ranks is not None:
            table = self._reader.sum_over_ranks(table)
        plan.learn(epoch, table[:, 0].tolist(), table[:, 1:].tolist())

    def _open(self, epoch: int, drawn: int) -> None:
        """Opens the readers of an epoch, of which so many samples are used, unless they are."""
        if epoch in self._opened:
            return
        self._opened.add(epoch)
        drawn_V = self._plan.drawn(epoch, drawn)
        rows, fresh = self._plan.rows.get(epoch), ReaderMark.beginning(self._reader.stream)
        readers, of = self._plan.readers_in(epoch), self._plan.epoch_of(epoch)
        for commands, numbers in zip(self._commands, self._numbers, strict=True):
            marks = {v: mark_of(rows[v]) if rows else fresh for v in numbers if v in readers}
            commands.put(Open(epoch, of, marks, {v: int(drawn_V[v]) for v in marks}))

    def _send_ahead(self) -> None:
        """Sends the commands for the batches that can be named, as far as they fit."""
        while len(self._sent) + len(self._parts) < COMMANDS:
            if not self._pending:
                if self._plan.lacks(self._at, 1) is not None:
                    return
                step = self._plan.next(self._at)
                if step is None:
                    return
                batch, self._at = step
                self._pending.extend(self._gives(batch))
            self._send_give(self._pending.popleft())

    def _gives(self, batch: GlobalBatch) -> Iterator[Give]:
        """Yields what the rank's micro-batches of a batch consist of."""
        self._open(batch.epoch, batch.start)
        readers = self._in_turn(self._plan.counts(batch).tolist())
        if batch in self._schedule.left_out:
            yield Give(batch.epoch, readers, use=False)
            return
        for part in self._schedule.parts(batch, self._at.steps):
            size = part.weight
            seed = None
            if part.slices:
                at = self._at.dataset, batch.epoch, part.positions.start
                seed = slice_seed(self._plan.order.seed, *at, "read")
            filler = 0 if size else self._schedule.filler_samples
            yield Give(batch.epoch, readers[:size], filler=filler, seed=seed)
            readers = readers[size:]

    def _in_turn(self, counts: Sequence[int]) -> list[int]:
        """Returns the rank's readers in the order in which they give their samples: by process, so
        that a micro-batch has its samples of few, or by slice.

        Args:
            counts: Number of samples that each reader of the stream gives.
        """
        return [
            v
            for numbers in self._turns
            for turn in range(max([counts[v] for v in numbers], default=0))
            for v in numbers
            if turn < counts[v]
        ]

    def _send_give(self, give: Give) -> None:
        """Sends each process its share of a micro-batch."""
        if len(self._commands) == 1:
            self._send_each([give])
            return
        shares: list[list[int]] = [[] for _ in self._commands]
        for v in give.readers:
            shares[self._process_of[v]].append(v)
        self._send_each(
            replace(give, readers=share, filler=give.filler if process == self._filling else 0)
            for process, share in enumerate(shares)
        )

    def _send_each(self, commands: Iterable[Command]) -> None:
        for number, command in enumerate(commands):
            self._commands[number].put(command)
            if number == 0:
                self._sent.append(command)

    def _receive(self) -> dict[int, Any]:
        """Takes the answers of all processes to a command; returns the report if it was `Fill`."""
        command = self._sent.popleft()
        answers = [next(self._answers) for _ in self._commands]
        if isinstance(command, Fill):
            return {number: row for answer in answers for number, row in answer.items()}
        if isinstance(command, Give) and command.use:
            parts = [answer for answer in answers if answer is not None]
            # Parts that are joined are copied by that.
            taken = methodcaller("tensor" if len(parts) > 1 else "own_tensor")
            self._parts.append([map_each(Sent, taken, answer) for answer in parts])
        return {}


class _LocalQueue:
    """Holds the commands where the training process loads data itself."""

    def __init__(self) -> None:
        self._commands: deque[Command | None] = deque()

    def put(self, command: Command | None) -> None:
        self._commands.append(command)

    def get(self) -> Command | None:
        return self._commands.popleft()

    def empty(self) -> bool:
        return not self._commands


def _unchanged(answer: Any) -> Any:
    return answer


def join_parts(parts: Sequence[Any]) -> Any:
    """Returns one batch of several that `default_collate` has made, of the same structure."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return {key: join_parts([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(join_parts, zip(*parts, strict=True)))
    if isinstance(first, (list, tuple)):
        if first and isinstance(first[0], (str, bytes)):
            return [text for part in parts for text in part]
        return [join_parts(column) for column in zip(*parts, strict=True)]
    raise UserError(
        f"a stream's batch has a {type(first).__name__}, of which parts cannot be joined: give "
        "collate_fn="
    )
