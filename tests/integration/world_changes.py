"""Plays the agents' part of a planned change inside of the loops of a world that runs."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elasticzero.ipc.assignment import Assignment, Resume, Source
from elasticzero.ipc.channel import ChannelClosed
from elasticzero.ipc.messages import (
    AwaitsBoundary,
    Message,
    Prepare,
    PrepareFailed,
    Stopping,
    Switched,
    Withdraw,
)
from tests.integration.training_harness import Running, Worker

SEND_S = 5.0


@dataclass(slots=True)
class Change:
    """A change of a world without some of its workers, or with others."""

    running: Running
    leavers: Collection[int]
    """The ranks that leave."""
    token: str
    offers: dict[int, Prepare]
    """What each worker is sent, by its place among the workers."""
    store: socket.socket
    newcomers: Collection[int] = ()
    """The places of workers that come in."""

    @classmethod
    def without(cls, running: Running, leavers: Collection[int]) -> Change:
        """The change in which the workers at these places among those of `running` leave. Those
        that have left before must be closed."""
        token, store = secrets.token_hex(8), socket.socket()
        store.bind(("127.0.0.1", 0))
        running.stores.append(store)
        alive = [p for p, worker in enumerate(running.workers) if worker.exit_code is None]
        stay = [place for place in alive if place not in leavers]
        offers = {place: Prepare(token=token) for place in alive if place in leavers}
        for rank, place in enumerate(stay):
            assignment = replace(
                running.assignments[place],
                generation=running.assignments[place].generation + 1,
                token=token,
                rank=rank,
                group_rank=rank,
                world_size=len(stay),
                nodes=len(stay),
                master_port=store.getsockname()[1],
                resume=Resume(tier="live", step=-1),
            )
            offers[place] = Prepare(token=token, assignment=assignment)
            running.offered[place, token] = assignment
        return cls(running, leavers, token, offers, store)

    @classmethod
    def joined(cls, running: Running, count: int, *, waits: bool = True, **options: Any) -> Change:
        """The change into which `count` workers come, which wait at `session.restore` when this
        returns."""
        alive = [p for p, worker in enumerate(running.workers) if worker.exit_code is None]
        assert alive, running.logs()
        change = cls.without(running, ())
        size, first = len(alive) + count, running.assignments[alive[0]]
        sources = [
            Source(
                rank=rank,
                node=running.assignments[place].node,
                address=running.address_of(place),
            )
            for rank, place in enumerate(alive)
        ]
        resume = Resume(
            tier="live",
            step=-1,
            generation=first.generation,
            sources=sources if first.strategy != "ddp" else sources[:1],
        )
        for place, offer in change.offers.items():
            assert offer.assignment is not None
            assignment = replace(offer.assignment, world_size=size, nodes=size)
            change.offers[place] = replace(offer, assignment=assignment, joins=True)
            running.offered[place, change.token] = assignment
        for number in range(count):
            rank, place = len(alive) + number, len(running.workers)
            shared = change.offers[alive[0]].assignment
            assert shared is not None
            assignment = replace(
                shared,
                node=f"node{place}",
                rank=rank,
                local_rank=place,
                group_rank=rank,
                resume=resume,
                snapshot_root=str(running.pool.memory_of(place)),
            )
            assignment = replace(assignment, **options)
            running.pool.add(running, assignment)
            running.offered[place, change.token] = assignment
        change.newcomers = range(len(running.workers) - count, len(running.workers))
        if not waits:
            return change
        running.until(lambda: all(running.workers[p].all(AwaitsBoundary) for p in change.newcomers))
        return change

    def send(self, places: Collection[int] | None = None) -> None:
        """Offers the next world to these workers, by default to all."""
        for place, offer in self.offers.items():
            if places is None or place in places:
                worker = self.running.workers[place]
                fd = None
                if offer.assignment is not None and offer.assignment.rank == 0:
                    fd = self.store.fileno()
                with suppress(ChannelClosed):
                    worker.channel.send_with_fd(offer, fd, SEND_S)

    def withdraw(self, places: Collection[int] | None = None) -> None:
        for place in self.offers if places is None else places:
            self.tell(place, Withdraw(token=self.token, reason="the test withdraws it"))

    def tell(self, place: int, message: Message) -> None:
        with suppress(ChannelClosed):
            self.running.workers[place].channel.send(message)

    @property
    def staying(self) -> dict[int, Assignment]:
        """The assignments of the workers that stay, by their places."""
        return {p: o.assignment for p, o in self.offers.items() if o.assignment is not None}

    def switched(self, place: int) -> Switched | None:
        worker = self.running.workers[place]
        return next((m for m in worker.all(Switched) if m.token == self.token), None)

    def failures(self) -> list[PrepareFailed]:
        workers: list[Worker] = self.running.workers
        return [m for w in workers for m in w.all(PrepareFailed) if m.token == self.token]

    def done(self) -> bool:
        """Whether all that stay have gone over, and all that leave have ended."""
        workers = self.running.workers
        return all(
            workers[place].exit_code is not None
            if offer.assignment is None
            else self.switched(place) is not None or workers[place].exit_code is not None
            for place, offer in self.offers.items()
        ) and all(self.switched(place) is not None for place in self.newcomers)

    def complete(self) -> int:
        """Waits until it is done; returns the step."""
        self.running.until(self.done)
        steps = {place: self.switched(place) for place in (*self.staying, *self.newcomers)}
        assert None not in steps.values(), self.running.logs()
        numbers = {switched.step for switched in steps.values() if switched is not None}
        for place in self.leavers:
            stopping = self.running.workers[place].last(Stopping)
            assert stopping.switched == self.token and stopping.clean, stopping
            numbers.add(stopping.step)
        assert len(numbers) == 1, numbers
        return numbers.pop()
