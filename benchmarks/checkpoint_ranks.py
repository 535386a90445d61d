"""One rank of benchmarks/checkpoint.py: it does what is timed, and rank 0 prints what was found.

Every variant of a case runs once a round, one after the other, so that each meets the machine as
its peers do. A time is that of the slowest rank, from a barrier on.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cache import forget, warm_memory
from checkpoint_state import STEP, State

from elasticzero.checkpoint.format.dtypes import byte_view
from elasticzero.checkpoint.format.plan import plan
from elasticzero.checkpoint.format.shards import open_shard
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.io.writer import SaveCoordination, write_checkpoint
from elasticzero.checkpoint.ram.staging import SharedMemoryStager
from elasticzero.checkpoint.ram.store import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.ram.transfer import persist
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.state.model import LoadTarget

CHUNK_BYTES = 8 << 20
Work = Callable[[], object]
Variant = Callable[[], AbstractContextManager[Work]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the ranks shall do; comes as JSON on the command line."""

    rank: int
    world: int
    meet: str
    """A file by which the ranks find each other."""
    place: str
    """The directory where everything is written."""
    shared: str
    """The directory of shared memory that the snapshots' slots lie in."""
    bytes: int
    """Of the state, over all ranks."""
    rounds: int
    cases: tuple[str, ...]
    cold: bool
    """Whether files leave the page cache before they are read."""


class Rank:
    """A rank with its state, and the cases that can be run on it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.place = Path(order.place)
        self.shared = Path(order.shared) / str(order.rank)
        self.state = State(order.bytes, order.rank, order.world)
        self.background = dist.new_group(backend="gloo")

    def run(self) -> None:
        cases: Mapping[str, Callable[[], Mapping[str, Variant]]] = {
            "stall": self.stall,
            "write": self.write,
            "load": self.load,
            "reshard": self.reshard,
        }
        for case in self.order.cases:
            if case == "files":
                self.files()
                continue
            variants = cases[case]()
            for _ in range(self.order.rounds):
                for name, variant in variants.items():
                    with variant() as work:
                        seconds = self.time(work, allocates=self.allocates(case, name))
                    del work  # and with it what it holds: it may be as large as the state
                    gc.collect()
                    self.tell({"case": case, "variant": name, "seconds": seconds})

    def allocates(self, case: str, variant: str) -> bool:
        """Whether a variant asks for much memory: buffers, page cache, files that lie in memory."""
        if case == "write":  # agents write past the page cache, where files lie on a disk
            in_memory = self.order.place.startswith("/dev/shm")
            return in_memory or variant != "elasticzero, from shared memory"
        return variant == "dcp.async_save"

    def tell(self, row: Mapping[str, object]) -> None:
        if self.order.rank == 0:
            print(json.dumps(row), flush=True)

    def time(self, work: Work, *, allocates: bool) -> float:
        """Seconds that the slowest rank needs. `allocates`: it finds free memory warm."""
        if allocates:
            dist.barrier()
            warm_memory(of=self.order.world)
        dist.barrier()
        started_s = time.perf_counter()
        work()
        took_s = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64)
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        return float(took_s)

    def fresh(self, name: str) -> Path:
        """An empty directory of that name, made by rank 0."""
        path = self.place / name
        dist.barrier()
        if self.order.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            os.sync()
        dist.barrier()
        return path

    def stall(self) -> dict[str, Variant]:
        """What training waits for while a save goes on in the background."""

        @contextmanager
        def memcpy() -> Iterator[Work]:
            warm = torch.ones(self.state.bytes, dtype=torch.uint8)

            def copy() -> None:
                start = 0
                for tensor in self.state.tensors.values():
                    stop = start + tensor.nbytes
                    warm[start:stop].view(tensor.dtype).copy_(tensor.reshape(-1))
                    start = stop

            yield copy

        @contextmanager
        def ours() -> Iterator[Work]:
            state, rank = self.state, self.order.rank
            with self.used_slots() as writer:
                yield lambda: writer.write(state.draft, rank, state.pieces(), ())

        @contextmanager
        def theirs() -> Iterator[Work]:
            path = self.fresh("dcp")
            saving: list[Any] = []
            state = self.state.dtensors()
            yield lambda: saving.append(
                dcp.async_save(state, checkpoint_id=path, process_group=self.background)
            )
            saving[0].result()
            self.fresh("dcp")

        return {"memcpy": memcpy, "elasticzero": ours, "dcp.async_save": theirs}

    def write(self) -> dict[str, Variant]:
        """From host memory to durable on storage."""

        @contextmanager
        def plain() -> Iterator[Work]:
            path = self.fresh("plain")
            yield lambda: write_plainly(path / str(self.order.rank), self.state.tensors)
            self.fresh("plain")

        @contextmanager
        def background() -> Iterator[Work]:
            path, order = self.fresh("ours"), self.order
            shard = ShardName(self.state.draft.generation, STEP, order.rank, order.world)
            store, directory = SnapshotStore(self.shared), open_directory(path)

            def save() -> None:
                sealing = threading.Thread(target=store.seal, args=(shard,))
                sealing.start()

                def sealed() -> Seal:
                    sealing.join()
                    return store.read_seal(shard)

                persist(store, shard, directory, sealed)
                if order.rank == 0:
                    commit.commit(commit.prepare(directory, STEP), self.state.draft, wait_s=600.0)

            with self.used_slots() as writer:
                writer.write(self.state.draft, order.rank, self.state.pieces(), ())
                yield save
            self.fresh("ours")

        @contextmanager
        def by_hand() -> Iterator[Work]:
            yield self.saves_ours(self.fresh("ours"))
            self.fresh("ours")

        @contextmanager
        def theirs() -> Iterator[Work]:
            path, state = self.fresh("dcp"), self.state.dtensors()
            yield lambda: dcp.save(state, checkpoint_id=path)
            self.fresh("dcp")

        @contextmanager
        def hugging_face() -> Iterator[Work]:
            path = self.fresh("safetensors")
            file = path / f"{self.order.rank}.safetensors"
            yield lambda: save_safetensors(file, self.state.tensors)
            self.fresh("safetensors")

        return {
            "plain write": plain,
            "elasticzero, from shared memory": background,
            "elasticzero, straight": by_hand,
            "dcp.save": theirs,
            "safetensors": hugging_face,
        }

    def files(self) -> None:
        """What the loads read."""
        self.saves_ours(self.fresh("ours"))()
        dcp.save(self.state.dtensors(), checkpoint_id=self.fresh("dcp"))
        path = self.fresh("safetensors") / f"{self.order.rank}.safetensors"
        save_safetensors(path, self.state.tensors)
        dist.barrier()

    def load(self) -> dict[str, Variant]:
        """Into the tensors that are there, at the world size that wrote."""
        path = self.place / "safetensors" / f"{self.order.rank}.safetensors"

        def hugging_face() -> None:
            for name, tensor in safetensors.torch.load_file(path).items():
                self.state.tensors[name].copy_(tensor)

        return self.reshard() | {"safetensors": self.filling("safetensors", hugging_face)}

    def reshard(self) -> dict[str, Variant]:
        """Into the tensors that are there, whatever the world size that wrote."""
        storage = open_directory(self.place / "ours").step(f"step-{STEP:012d}")
        step = self.place / "ours" / f"step-{STEP:012d}"
        old = open_step(storage).manifest
        ranges: list[tuple[int, int, memoryview]] = []
        for copy in plan(old.layout, self.state.spans):
            entry = open_shard(storage, old, copy.rank).entries[copy.name]
            flat = self.state.tensors[copy.name].reshape(-1)
            part = flat[copy.offset_in_target :][: len(copy.span_in_tensor)]
            at = entry.start + copy.span_in_shard.start * part.element_size()
            ranges.append((copy.rank, at, byte_view(part)))

        def plain() -> None:
            open_files = {
                rank: os.open(step / old.file_name(rank), os.O_RDONLY)
                for rank in {rank for rank, _, _ in ranges}
            }
            for rank, start, view in ranges:
                for at in range(0, len(view), CHUNK_BYTES):
                    part = view[at : at + CHUNK_BYTES]
                    assert os.preadv(open_files[rank], [part], start + at) == len(part)
            for descriptor in open_files.values():
                os.close(descriptor)

        def ours() -> None:
            state = self.state
            targets = [LoadTarget(n, span, state.tensors[n]) for n, span in state.spans.items()]
            open_step(storage).load(targets)

        def theirs() -> None:
            dcp.load(self.state.dtensors(), checkpoint_id=self.place / "dcp")

        return {
            "plain read": self.filling("ours", plain),
            "elasticzero": self.filling("ours", ours),
            "dcp.load": self.filling("dcp", theirs),
        }

    def filling(self, folder: str, work: Work) -> Variant:
        """A load that must end with the right elements in every tensor."""

        @contextmanager
        def variant() -> Iterator[Work]:
            self.state.clear()
            if self.order.cold:
                forget(self.place / folder)
            yield work
            if wrong := self.state.wrong():
                raise SystemExit(f"error: {folder}: loaded wrong: {wrong[:3]}")

        return variant

    def saves_ours(self, path: Path) -> Work:
        def agree(number: int) -> int:
            tensor = torch.tensor([number])
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            return int(tensor)

        directory, terms = open_directory(path), SaveCoordination(allreduce_max=agree)
        state, rank = self.state, self.order.rank
        return lambda: write_checkpoint(directory, state.draft, rank, state.pieces(), terms)

    @contextmanager
    def used_slots(self) -> Iterator[SharedMemoryStager]:
        """A snapshot writer that has filled each of its slots once, as in a run that goes on."""
        state, rank = self.state, self.order.rank
        writer, store = SharedMemoryStager(self.shared, rank), SnapshotStore(self.shared)
        writer.reserve(state.bytes + (1 << 20))
        for step in (STEP + 1, STEP + 2):
            writer.write(replace(state.draft, step=step), rank, state.pieces(), ())
            store.seal(ShardName(state.draft.generation, step, rank, self.order.world))
            dist.barrier()
        yield writer
        writer.close()
        shutil.rmtree(self.shared)
        dist.barrier()


def write_plainly(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The same bytes by write() in chunks, with one fsync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for tensor in tensors.values():
        view = byte_view(tensor)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            assert os.write(descriptor, chunk) == len(chunk)
    os.fsync(descriptor)
    os.close(descriptor)


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def start() -> Order:
    """What the command line orders; the ranks have found each other."""
    fields = json.loads(sys.argv[1])
    order = Order(**fields | {"cases": tuple(fields["cases"])})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{order.meet}", rank=order.rank, world_size=order.world
    )
    return order


def finish() -> None:
    """End at once: destroying a gloo group can hang."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    Rank(start()).run()
    finish()


if __name__ == "__main__":
    main()
