"""The state that benchmarks/checkpoint.py saves and loads: a rank's part, for each program."""

from __future__ import annotations

import zlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.writer import TensorPiece

ROWS, COLUMNS = 4096, 1024
LAYER_BYTES = 3 * 4 * (ROWS + 1) * COLUMNS
"""A layer's weight and bias in single precision, with Adam's two moments of each."""
STEP = 1


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


class State:
    """A rank's part of a state of `size` bytes or so; the ranks have found each other."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.layout = layout(size, world)
        self.spans = self.layout.spans(rank)
        self.tensors = {name: self._right(name).clone() for name in self.spans}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.draft = Manifest(
            step=STEP,
            generation=1,
            token=f"bench{world}",
            strategy="zero3",
            layout=self.layout,
            state={"step": STEP},
        )
        self._mesh = init_device_mesh("cpu", (world,))

    def pieces(self) -> list[TensorPiece]:
        """For ElasticZero."""
        return [TensorPiece(name, tensor.reshape(-1)) for name, tensor in self.tensors.items()]

    def dtensors(self) -> dict[str, DTensor]:
        """For torch."""
        state = {}
        for name, spec in self.layout.tensors.items():
            rest = spec.shape[1:]
            local = self.tensors.get(name, torch.empty(0)).reshape(-1, *rest)
            stride = (COLUMNS, 1) if rest else (1,)
            state[name] = DTensor.from_local(
                local, self._mesh, [Shard(0)], shape=torch.Size(spec.shape), stride=stride
            )
        return state

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def wrong(self) -> list[str]:
        """The tensors that do not hold what they did at first."""
        return [n for n, t in self.tensors.items() if not torch.equal(t, self._right(n))]

    def _right(self, name: str) -> torch.Tensor:
        span = self.spans[name]
        return whole(name, self.layout.tensors[name]).reshape(-1)[span.start : span.stop]
