"""Plays the ranks of a world in threads of one process, with collectives and messages."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.parallel.buckets import reduce_scatter
from elasticzero.parallel.mesh import Mesh


class FakeGroup:
    """Ranks that are threads. Each collective is checked to be the same one on all of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent_bytes = 0
        self.local = threading.local()
        self.changed = threading.Condition()
        self.calls: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
        self.messages: dict[Any, deque[Tensor]] = defaultdict(deque)
        self.failed: list[BaseException] = []

    def begin(self, kind: str, tensor: Tensor, done: Callable[[list[Tensor]], None]) -> Call:
        """done: takes the tensors of all ranks once each has begun the collective."""
        rank, began = self.local.rank, self.local.began
        call = Call(self, (kind, began[kind]), tensor, tensor.clone(), done)
        began[kind] += 1
        with self.changed:
            self.calls[call.key][rank] = call
            self.changed.notify_all()
        return call

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Returns what `body` returns on each rank."""
        results: list[Any] = [None] * self.ranks

        def on(rank: int) -> None:
            self.local.rank, self.local.began = rank, defaultdict(int)
            try:
                results[rank] = body(rank)
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]
        return results

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Call | None:
        def put(tensors: list[Tensor]) -> None:
            stacked = torch.stack(tensors)
            tensor.copy_(stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.amax(0))

        call = self.begin(f"all-reduce {group}", tensor, put)
        if async_op:
            return call
        call.wait()
        return None

    def broadcast(self, tensor: Tensor, group: Any = None, group_src: int = 0) -> None:
        def put(tensors: list[Tensor]) -> None:
            tensor.copy_(tensors[group_src])

        self.begin(f"broadcast {group}", tensor, put).wait()

    def begin_messages(self, messages: list[Message]) -> list[Message]:
        for message in messages:
            message.begin(self)
        return messages

    def begin_reduce_scatter(
        self, flat_E: Tensor, chunks: Sequence[Tensor], received: Tensor | None, mesh: Mesh
    ) -> list[Call]:
        assert received is not None
        bounds = [0, *torch.tensor([len(chunk) for chunk in chunks]).cumsum(0).tolist()]
        shard = slice(bounds[mesh.shard], bounds[mesh.shard + 1])

        def put(tensors: list[Tensor]) -> None:
            others = [t[shard] for rank, t in enumerate(tensors) if rank != mesh.shard]
            received.copy_(torch.stack(others))

        return [self.begin("reduce-scatter", flat_E, put)]


@dataclass
class Call:
    """One rank's part in a collective."""

    group: FakeGroup
    key: tuple[str, int]
    tensor: Tensor
    at_begin: Tensor
    done: Callable[[list[Tensor]], None]

    def wait(self) -> None:
        group = self.group
        with group.changed:
            group.changed.wait_for(
                lambda: group.failed or len(group.calls[self.key]) == group.ranks, timeout=10
            )
            calls = group.calls[self.key]
        assert len(calls) == group.ranks, f"{self.key}: only ranks {list(calls)} have begun it"
        assert torch.equal(self.tensor, self.at_begin), "a bucket under way has changed"
        assert {call.tensor.shape for call in calls.values()} == {self.tensor.shape}
        self.done([calls[rank].at_begin for rank in range(group.ranks)])


class Message:
    """One message of a rank to another, at either end."""

    def __init__(self, function: Any, tensor: Tensor, peer: int, group: Any, tag: int) -> None:
        self.is_sent, self.tensor = function is dist.isend, tensor
        self.peer, self.way = peer, (group, tag)
        self.at_begin = tensor.clone()

    def begin(self, group: FakeGroup) -> None:
        self.group, rank = group, group.local.rank
        self.key = (*self.way, rank, self.peer) if self.is_sent else (*self.way, self.peer, rank)
        if self.is_sent:
            with group.changed:
                group.sent_bytes += self.tensor.nbytes
                group.messages[self.key].append(self.at_begin)
                group.changed.notify_all()

    def wait(self) -> None:
        if self.is_sent:
            assert torch.equal(self.tensor, self.at_begin), "a message under way has changed"
            return
        with self.group.changed:
            messages = self.group.messages[self.key]
            self.group.changed.wait_for(lambda: self.group.failed or messages, timeout=10)
            assert messages, f"{self.key}: nothing has come"
            self.tensor.copy_(messages.popleft())


def patched(made: FakeGroup, patch: pytest.MonkeyPatch) -> FakeGroup:
    """Puts the collectives of `made` in the place of torch's."""
    patch.setattr(dist, "all_reduce", made.all_reduce)
    patch.setattr(dist, "broadcast", made.broadcast)
    patch.setattr(dist, "P2POp", Message)
    patch.setattr(dist, "batch_isend_irecv", made.begin_messages)
    patch.setattr(reduce_scatter, "begin_reduce_scatter", made.begin_reduce_scatter)
    return made
