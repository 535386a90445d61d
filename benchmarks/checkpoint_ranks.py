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
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cache import forget, warm_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elasticzero.checkpoint import commit
from elasticzero.checkpoint.capture import SnapshotWriter
from elasticzero.checkpoint.dtypes import byte_view
from elasticzero.checkpoint.manifest import Group, Layout, Manifest, TensorSpec
from elasticzero.checkpoint.persist import persist
from elasticzero.checkpoint.plan import plan
from elasticzero.checkpoint.reader import Target, open_step
from elasticzero.checkpoint.shards import open_shard
from elasticzero.checkpoint.snapshot import Seal, ShardName, SnapshotStore
from elasticzero.checkpoint.storage import open_directory
from elasticzero.checkpoint.writer import Piece, Terms, write_checkpoint

ROWS, COLUMNS = 4096, 1024
LAYER_BYTES = 3 * 4 * (ROWS + 1) * COLUMNS
"""A layer's weight and bias in single precision, with Adam's two moments of each."""
CHUNK_BYTES = 8 << 20
STEP = 1
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


def layout(size: int, world: int) -> Layout:
    """A model and its moments of about `size` bytes, dealt by rows as FSDP2 does."""
    tensors = {}
    for layer in range(max(1, round(size / LAYER_BYTES))):
        for part, shape in (("weight", (ROWS, COLUMNS)), ("bias", (COLUMNS,))):
            name = f"layers.{layer}.{part}"
            tensors[f"model/{name}"] = TensorSpec("F32", shape)
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer/{name}/{moment}"] = TensorSpec("F32", shape)
    return Layout(world_size=world, tensors=tensors, groups=(Group("fsdp_rows", tuple(tensors)),))


def whole(name: str, spec: TensorSpec) -> torch.Tensor:
    """A tensor's elements, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(spec.shape, generator=generator)


class Rank:
    """A rank's state, and the cases that can be run on it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.place = Path(order.place)
        self.shared = Path(order.shared) / str(order.rank)
        self.layout = layout(order.bytes, order.world)
        self.spans = self.layout.spans(order.rank)
        self.tensors = {n: self._own(n).clone() for n in self.spans}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.draft = Manifest(
            step=STEP,
            generation=1,
            token=f"bench{order.world}",
            strategy="zero3",
            layout=self.layout,
            state={"step": STEP},
        )
        self.mesh = init_device_mesh("cpu", (order.world,))
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

    def tell(self, found: Mapping[str, object]) -> None:
        if self.order.rank == 0:
            print(json.dumps(found), flush=True)

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
            warm = torch.ones(self.bytes, dtype=torch.uint8)

            def copy() -> None:
                start = 0
                for tensor in self.tensors.values():
                    stop = start + tensor.nbytes
                    warm[start:stop].view(tensor.dtype).copy_(tensor.reshape(-1))
                    start = stop

            yield copy

        @contextmanager
        def ours() -> Iterator[Work]:
            with self.used_slots() as writer:
                yield lambda: writer.write(self.draft, self.order.rank, self.pieces(), ())

        @contextmanager
        def theirs() -> Iterator[Work]:
            path, saving = self.fresh("dcp"), []
            state = self.dtensors()
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
            yield lambda: write_plainly(path / str(self.order.rank), self.tensors)
            self.fresh("plain")

        @contextmanager
        def background() -> Iterator[Work]:
            path, order = self.fresh("ours"), self.order
            shard = ShardName(self.draft.generation, STEP, order.rank, order.world)
            store, directory = SnapshotStore(self.shared), open_directory(path)

            def save() -> None:
                sealing = threading.Thread(target=store.seal, args=(shard,))
                sealing.start()

                def sealed() -> Seal:
                    sealing.join()
                    return store.read_seal(shard)

                persist(store, shard, directory, sealed)
                if order.rank == 0:
                    commit.commit(commit.prepare(directory, STEP), self.draft, wait_s=600.0)

            with self.used_slots() as writer:
                writer.write(self.draft, order.rank, self.pieces(), ())
                yield save
            self.fresh("ours")

        @contextmanager
        def by_hand() -> Iterator[Work]:
            yield self.saves_ours(self.fresh("ours"))
            self.fresh("ours")

        @contextmanager
        def theirs() -> Iterator[Work]:
            path, state = self.fresh("dcp"), self.dtensors()
            yield lambda: dcp.save(state, checkpoint_id=path)
            self.fresh("dcp")

        @contextmanager
        def hugging_face() -> Iterator[Work]:
            path = self.fresh("safetensors")
            yield lambda: save_safetensors(path / f"{self.order.rank}.safetensors", self.tensors)
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
        dcp.save(self.dtensors(), checkpoint_id=self.fresh("dcp"))
        path = self.fresh("safetensors") / f"{self.order.rank}.safetensors"
        save_safetensors(path, self.tensors)
        dist.barrier()

    def load(self) -> dict[str, Variant]:
        """Into the tensors that are there, at the world size that wrote."""
        path = self.place / "safetensors" / f"{self.order.rank}.safetensors"

        def hugging_face() -> None:
            for name, tensor in safetensors.torch.load_file(path).items():
                self.tensors[name].copy_(tensor)

        return self.reshard() | {"safetensors": self.filling("safetensors", hugging_face)}

    def reshard(self) -> dict[str, Variant]:
        """Into the tensors that are there, whatever the world size that wrote."""
        storage = open_directory(self.place / "ours").step(f"step-{STEP:012d}")
        step = self.place / "ours" / f"step-{STEP:012d}"
        old = open_step(storage).manifest
        ranges: list[tuple[int, int, memoryview]] = []
        for copy in plan(old.layout, self.spans):
            entry = open_shard(storage, old, copy.rank).entries[copy.name]
            flat = self.tensors[copy.name].reshape(-1)
            part = flat[copy.offset_in_wanted :][: len(copy.span_in_tensor)]
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
            targets = [Target(n, span, self.tensors[n]) for n, span in self.spans.items()]
            open_step(storage).load(targets)

        def theirs() -> None:
            dcp.load(self.dtensors(), checkpoint_id=self.place / "dcp")

        return {
            "plain read": self.filling("ours", plain),
            "elasticzero": self.filling("ours", ours),
            "dcp.load": self.filling("dcp", theirs),
        }

    def filling(self, folder: str, work: Work) -> Variant:
        """A load that must end with the right elements in every tensor."""

        @contextmanager
        def variant() -> Iterator[Work]:
            for tensor in self.tensors.values():
                tensor.zero_()
            if self.order.cold:
                forget(self.place / folder)
            yield work
            wrong = [n for n, t in self.tensors.items() if not torch.equal(t, self._own(n))]
            if wrong:
                raise SystemExit(f"error: {folder}: loaded wrong: {wrong[:3]}")

        return variant

    def saves_ours(self, path: Path) -> Work:
        def agree(number: int) -> int:
            tensor = torch.tensor([number])
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            return int(tensor)

        directory, terms = open_directory(path), Terms(agree=agree)
        rank = self.order.rank
        return lambda: write_checkpoint(directory, self.draft, rank, self.pieces(), terms)

    @contextmanager
    def used_slots(self) -> Iterator[SnapshotWriter]:
        """A snapshot writer that has filled each of its slots once, as in a run that goes on."""
        writer, store = SnapshotWriter(self.shared, self.order.rank), SnapshotStore(self.shared)
        writer.reserve(self.bytes + (1 << 20))
        for step in (STEP + 1, STEP + 2):
            writer.write(replace(self.draft, step=step), self.order.rank, self.pieces(), ())
            store.seal(ShardName(self.draft.generation, step, self.order.rank, self.order.world))
            dist.barrier()
        yield writer
        writer.close()
        shutil.rmtree(self.shared)
        dist.barrier()

    def pieces(self) -> list[Piece]:
        return [Piece(name, tensor.reshape(-1)) for name, tensor in self.tensors.items()]

    def dtensors(self) -> dict[str, DTensor]:
        state = {}
        for name, spec in self.layout.tensors.items():
            rest = spec.shape[1:]
            local = self.tensors.get(name, torch.empty(0)).reshape(-1, *rest)
            stride = (COLUMNS, 1) if rest else (1,)
            state[name] = DTensor.from_local(
                local, self.mesh, [Shard(0)], shape=torch.Size(spec.shape), stride=stride
            )
        return state

    def _own(self, name: str) -> torch.Tensor:
        span = self.spans[name]
        return whole(name, self.layout.tensors[name]).reshape(-1)[span.start : span.stop]


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
