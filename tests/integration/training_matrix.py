"""Saves from every strategy and world size, then loads each of these into every one.

Run by three processes; argument: JSON with rank, worlds, directory and dtype. Every tensor that a
rank holds after a load is compared, bit by bit, with the file's. With 16-bit parameters `ddp` has
no masters and keeps its optimizer's state in 16 bits too: there a load rounds, or makes masters
from the parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.io.writer import write_checkpoint
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.data.position import DataPosition, MicroBatch
from elasticzero.parallel import Setting, Strategy, create
from elasticzero.snapshots import manifest_draft, restore
from elasticzero.spans import STRATEGIES, Span
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import NamedModel
from tests.integration.training_exact import Model, Samples, groups, squares
from tests.support.meeting import joined, mesh_of_world

STEPS = 2


def build(
    name: str, place: tuple[int, int], dtype: torch.dtype, seed: int
) -> tuple[Strategy, AuxiliaryState]:
    torch.manual_seed(seed)
    rank, world_size = place
    plain = Model().to(dtype)
    named = NamedModel(plain)
    strategy = create(
        name,
        Setting(
            model=plain,
            named=named,
            factory=lambda _: torch.optim.AdamW(groups(plain), lr=0.01, amsgrad=True),
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            mesh=mesh_of_world(),
        ),
    )
    small = AuxiliaryState(
        torch.device("cpu"),
        named=named,
        groups=strategy.optimizers.groups,
    )
    return strategy, small


def train(strategy: Strategy, rank: int, world_size: int) -> None:
    samples = Samples()
    for step in range(STEPS):
        indices = range(step * 6 + rank * 6 // world_size, step * 6 + (rank + 1) * 6 // world_size)
        batch = {k: torch.stack([samples[i][k] for i in indices]) for k in ("x", "y")}
        strategy.expect(MicroBatch(positions=Span(0, 1), weight=1, last=True))
        strategy.backward(squares(strategy.model, batch).mean(), len(indices) / 6)
        strategy.finish(1.0, None)
        strategy.apply()


def save(name: str, rank: int, world_size: int, directory: Path, dtype: torch.dtype) -> None:
    strategy, small = build(name, (rank, world_size), dtype, seed=1)
    train(strategy, rank, world_size)
    author = manifest_draft.WriterInfo(
        rank=rank, world_size=world_size, generation=1, token="matrix", strategy=name
    )
    copy = small.capture(STEPS, DataPosition(loop=0, epoch=1, offset=2))
    draft, pieces = manifest_draft.draft(strategy.rank_state(), copy, author)
    write_checkpoint(DiskDirectory(directory / f"{name}-{world_size}"), draft, rank, pieces)


def check(source: Path, name: str, rank: int, world_size: int, dtype: torch.dtype) -> int:
    """Load into a model with other weights; returns the number of elements compared."""
    strategy, small = build(name, (rank, world_size), dtype, seed=100 + rank)
    stored = open_step(DiskStorage(source / step_directory(STEPS)))
    position = restore.restore_state(stored, strategy, small, rank)
    assert (position.epoch, position.offset) == (1, 2)
    author = manifest_draft.WriterInfo(
        rank=rank, world_size=world_size, generation=2, token="again", strategy=name
    )
    draft, pieces = manifest_draft.draft(
        strategy.rank_state(), small.capture(STEPS, position), author
    )
    specs = draft.layout.tensors
    whole = expected(ez_checkpoint.load(source), name, dtype)
    now = {n for n in specs if not n.startswith("rng/")}
    assert whole.keys() == now, whole.keys() ^ now
    spans, compared = draft.layout.spans(rank), 0
    for piece in pieces:
        if piece.name in whole:
            span = spans[piece.name]
            same(whole[piece.name].reshape(-1)[span.start : span.stop], piece.data, piece.name)
            compared += len(span)
    if name != "zero3":
        model = strategy.model
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        for parameter, tensor in inner.named_parameters():
            same(whole[f"model/{parameter}"], tensor.detach(), parameter)
    return compared


def expected(stored: dict[str, Tensor], name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What strategy `name` is to have after a load of these tensors."""
    whole = {n: t for n, t in stored.items() if not n.startswith("rng/")}
    if dtype != torch.bfloat16:
        return whole
    parameters = {n.rpartition("/")[0] for n in whole if n.endswith("/exp_avg")}
    if name == "ddp":
        whole = {n: t for n, t in whole.items() if not n.endswith("/master")}
        moments = {n for n in whole if n.split("/")[-1].startswith(("exp_avg", "max_exp_avg"))}
        return {n: t.to(dtype) if n in moments else t for n, t in whole.items()}
    for parameter in parameters:
        made = whole[parameter.replace("optimizer/", "model/", 1)]
        whole.setdefault(f"{parameter}/master", made.float())
    return {n: t.float() if n.startswith("optimizer/") else t for n, t in whole.items()}


def same(a: Tensor, b: Tensor, name: str) -> None:
    assert a.dtype == b.dtype, (name, a.dtype, b.dtype)
    assert torch.equal(a, b.reshape(a.shape)), name


def main(options: dict[str, Any]) -> None:
    rank, directory = options["rank"], Path(options["directory"])
    dtype, worlds = getattr(torch, options["dtype"]), options["worlds"]
    compared = 0
    for world_size in worlds:
        if rank < world_size:
            group = joined(rank, world_size, directory / f"saves-{world_size}")
            for name in STRATEGIES:
                save(name, rank, world_size, directory, dtype)
            group.close()
    for world_size in worlds:
        if rank < world_size:
            group = joined(rank, world_size, directory / f"loads-{world_size}")
            for name in STRATEGIES:
                for source in STRATEGIES:
                    for wrote in worlds:
                        stored = directory / f"{source}-{wrote}"
                        compared += check(stored, name, rank, world_size, dtype)
            dist.barrier()
            group.close()
    (directory / f"compared-{rank}").write_text(str(compared))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
