"""An agent that seals and saves what its two workers capture, each of them a process.

An order is `[memory, directory, generation, first step, last step]`; the ids are the agent's and
then the workers', by rank. The workers capture one step after the other; every second one, and the
last, is to become a checkpoint. Once one of them has gone the other stops, and the agent brings the
newest snapshot that it holds whole to storage.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.ipc.channel import Channel, ChannelClosed
from elasticzero.ipc.messages import Captured, Saved, SnapshotHeld
from elasticzero.launcher.snapshots.checkpoint_saver import CheckpointSaver
from elasticzero.launcher.snapshots.roles import SnapshotRole
from elasticzero.launcher.snapshots.save_events import SaveEvent, SaveFinished
from tests.integration.scripts.processes import fork, serve
from tests.integration.scripts.save_until_killed import WORLD_SIZE, draft, pieces, state, token

RANKS = tuple(range(WORLD_SIZE))
LIMIT_S = 30.0


def newest_whole(memory: SnapshotStore) -> set[tuple[int, int]]:
    """Generation and step of the newest snapshot that has all its shards, if there is one."""
    whole = [(s.generation, s.step) for s in memory.held() if s.ranks == RANKS]
    return set(whole[-1:])


def work(endpoint: socket.socket, memory: Path, rank: int, generation: int, steps: range) -> None:
    """Capture one step after the other, each when the one before is kept, or saved."""
    channel, writer = Channel(endpoint), SharedMemoryStager(memory, rank)
    needed = newest_whole(SnapshotStore(memory))
    whole = state(generation, steps[0])
    with suppress(ChannelClosed):
        for step in steps:
            manifest = draft(generation, step, whole)
            writer.write(manifest, rank, pieces(manifest, rank, whole), needed)
            captured = Captured(
                step=step,
                generation=generation,
                rank=rank,
                world_size=WORLD_SIZE,
                checkpoint=step % 2 == 0 or step == steps[-1],
            )
            channel.send(captured)
            whole = state(generation, step + 1)
            awaited: set[type] = {SnapshotHeld, Saved} if captured.checkpoint else {SnapshotHeld}
            while awaited:
                message = channel.receive()
                assert isinstance(message, SnapshotHeld | Saved) and message.step == step, message
                assert message.error is None, message
                awaited.remove(type(message))
            needed = {(generation, step)}


def attend(workers: Iterable[socket.socket], memory: Path, directory: str, generation: int) -> None:
    """Be the agent of these workers until they have gone, and save what they leave."""
    told, wake = os.pipe()

    def tell() -> None:
        os.write(wake, b".")

    store = SnapshotStore(memory)
    saver = CheckpointSaver(store, directory, RetentionPolicy(last=2), tell)
    saver.begin(
        SnapshotRole(
            generation=generation,
            token=token(generation),
            world_size=WORLD_SIZE,
            ranks=RANKS,
        )
    )
    channels = {worker: Channel(worker) for worker in workers}
    while channels:
        ready = select.select([told, *map(socket.socket.fileno, channels)], [], [])[0]
        if told in ready:
            os.read(told, 4096)
        for worker in [worker for worker in channels if worker.fileno() in ready]:
            try:
                for message in channels[worker].drain():
                    assert isinstance(message, Captured)
                    saver.captured(message)
            except ChannelClosed:
                del channels[worker]
                for other in channels:
                    with suppress(OSError):
                        other.shutdown(socket.SHUT_WR)
        for news in saver.events():
            for channel in channels.values():
                with suppress(ChannelClosed):
                    channel.send(_message(news))
    _wait_for(lambda: not saver.unsealed() and not saver.saving)
    for held, step in newest_whole(store):
        saver.save_held(ShardName(held, step, rank, WORLD_SIZE) for rank in RANKS)
    _wait_for(lambda: not saver.saving)
    saver.close()
    errors = [news.error for news in saver.events() if news.error is not None]
    assert not errors, errors


def _message(news: SaveEvent) -> SnapshotHeld | Saved:
    if isinstance(news, SnapshotHeld):
        return news
    assert isinstance(news, SaveFinished), news
    return Saved(step=news.step, generation=news.generation, error=news.error)


def _wait_for(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def start(memory: str, directory: str, generation: int, first: int, last: int) -> list[int]:
    pairs = [socket.socketpair() for _ in RANKS]

    def alone(work: Callable[[], None], kept: Iterable[socket.socket]) -> None:
        """With its own ends of the channels alone: then who dies is missed."""
        for end in {end for pair in pairs for end in pair}.difference(kept):
            end.close()
        work()

    root, steps = Path(memory), range(first, last + 1)
    endpoints = [pair[0] for pair in pairs]
    ids = [fork(partial(alone, partial(attend, endpoints, root, directory, generation), endpoints))]
    for rank, (_, endpoint) in enumerate(pairs):
        ids.append(
            fork(partial(alone, partial(work, endpoint, root, rank, generation, steps), [endpoint]))
        )
    for pair in pairs:
        for end in pair:
            end.close()
    return ids


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(start)
