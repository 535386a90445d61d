"""Runs the readers of one process that loads data, by commands of the training process.

Each process gets the same number of commands, and answers each but `Open` once, in their order.
While none waits it reads ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from elasticzero.data.loader import map_tensors
from elasticzero.data.position import UNKNOWN
from elasticzero.data.seeding import generators_seeded
from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.data.streams.reader import Reader, ReaderMark, any_sample, open_readers
from elasticzero.data.streams.source import Stream
from elasticzero.data.streams.transfer import Arena, InMessage


@dataclass(frozen=True, slots=True)
class Open:
    """Opens the readers of an epoch, for those of every process, in place of what is open of it."""

    epoch: int
    """The epoch as other commands name it."""
    of: int
    """The epoch of the stream, on which the order of shards and samples depends."""
    marks: Mapping[int, ReaderMark]
    """Where the readers of this process go on."""
    drawn: Mapping[int, int]
    """Number of samples of each that are used already."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Reads so many samples of each reader beyond those that are used, and reports."""

    epoch: int
    drawn: Mapping[int, int]
    ahead: int


@dataclass(frozen=True, slots=True)
class Give:
    """Gives a part of a micro-batch: the next sample of each reader that is named."""

    epoch: int
    readers: Sequence[int]
    filler: int = 0
    """Gives any sample so many times, where the rank has none."""
    use: bool = True
    """False: the samples are left out."""
    seed: int | None = None
    """Seed of what is drawn while they are collated; None: it is not fixed."""


Command = Open | Fill | Give
Report = dict[int, tuple[int, ...]]
"""Maps each reader of a process to the number of samples that it has read, and the numbers of its
row in `plan.py`."""


class Commands(Protocol):
    """Holds the commands for one process, which end with a None."""

    def get(self) -> Command | None: ...
    def empty(self) -> bool: ...


class ReaderProcess(IterableDataset[Any]):
    """Presents the answers of a process to torch's `DataLoader`."""

    def __init__(
        self,
        stream: Stream,
        order: StreamOrder,
        commands: Sequence[Commands],
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        """Takes what the process reads; it is told by commands when.

        Args:
            stream: The stream.
            order: What the order of its samples depends on.
            commands: The commands of each process, by its number.
            collate_fn: Collates a part of a micro-batch; None: its samples are handed over.
        """
        self._stream = stream
        self._order = order
        self._commands = commands
        self._collate = collate_fn
        self._readers: dict[int, dict[int, Reader]] = {}
        """The open readers of each epoch."""
        self._ahead = 0
        """Number of samples that readers read ahead."""
        self._last: list[Any] = []
        """A sample that was given before, if there is one."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        commands = self._commands[info.id if info is not None else 0]
        in_process = info is None
        while True:
            while not in_process and commands.empty() and self._read_ahead():
                pass
            match commands.get():
                case None:
                    return
                case Open() as command:
                    self._open(command)
                case Fill() as command:
                    yield self._fill(command)
                case Give() as command:
                    answer = self._give(command)
                    yield answer if in_process else map_tensors(InMessage.of, answer)

    def _open(self, command: Open) -> None:
        opened = open_readers(self._stream, self._order, command.of, command.marks)
        for number, reader in opened.items():
            for _ in range(reader.read, command.drawn[number]):
                reader.take()
        self._readers[command.epoch] = opened

    def _read_ahead(self) -> bool:
        """Reads samples that were not asked for yet; returns whether there were any to read."""
        for readers in self._readers.values():
            running = [r for r in readers.values() if r.total == UNKNOWN]
            behind = min(running, key=lambda reader: reader.waiting, default=None)
            if behind is not None and behind.waiting < self._ahead:
                behind.read_window()
                return True
        return False

    def _fill(self, command: Fill) -> Report:
        self._ahead = command.ahead
        report: Report = {}
        for number, reader in self._readers[command.epoch].items():
            drawn = command.drawn[number]
            while reader.total == UNKNOWN and reader.read < drawn + command.ahead:
                reader.read_window()
            mark = reader.mark(drawn)
            row = (reader.total, mark.count, mark.skip, *mark.place)
            report[number] = (reader.read, *row)
        return report

    def _give(self, command: Give) -> Any:
        for epoch in [epoch for epoch in self._readers if epoch < command.epoch]:
            del self._readers[epoch]
        samples = [self._readers[command.epoch][number].take() for number in command.readers]
        if not command.use:
            return None
        if command.filler:
            samples = (self._last or [any_sample(self._stream, self._order)]) * command.filler
        self._last = samples[:1] or self._last
        if not samples:
            return None
        if self._collate is None:
            return samples
        with nullcontext() if command.seed is None else generators_seeded(command.seed):
            return self._collate(samples)


def collate_of_process(
    collate_fn: Callable[[list[Any]], Any] | None, processes: int, arena: Arena, *, joined: bool
) -> Callable[[list[Any]], Any] | None:
    """Returns what collates a part of a micro-batch where it was read; None: the whole is collated
    by the training process, since only parts of `default_collate` can be joined.

    Args:
        collate_fn: What the script has given; None: `default_collate`.
        processes: Number of processes that load data.
        arena: Where tensors are put for the training process.
        joined: A micro-batch may have parts of several processes.
    """
    if collate_fn is None:
        return default_collate if processes <= 1 else arena.collate
    return None if joined and processes > 1 else collate_fn
