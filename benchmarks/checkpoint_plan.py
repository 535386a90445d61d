"""How the arithmetic of a checkpoint grows with ranks and tensors; no tensor is made."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, from_json, to_json
from elasticzero.checkpoint.format.plan import plan
from elasticzero.checkpoint.format.shards import write_shard
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.storage.urls import open_directory

WORLDS = (1, 10, 100, 1_000, 10_000)
TENSORS = 1_000
ROWS, COLUMNS = 16_384, 4_096
REPEAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What the arithmetic costs at one world size."""

    ranks: int
    tensors: int
    manifest_bytes: int
    to_json_s: float
    from_json_s: float
    plan_s: float
    """One rank of a world half as large again works out its spans and where each byte lies."""
    copies: int
    """Byte ranges in that plan."""
    commit_s: float
    """Rank 0 finds the checksum files of all ranks and makes the manifest, on tmpfs; those of one
    tensor, as it reads no others' tensors."""


def layout(world: int, tensors: int = TENSORS) -> Layout:
    specs = {f"model/layers.{i}.weight": TensorSpec("F32", (ROWS, COLUMNS)) for i in range(tensors)}
    return Layout(world_size=world, tensors=specs, groups=(Group("fsdp_rows", tuple(specs)),))


def manifest(of: Layout) -> Manifest:
    return Manifest(step=1, generation=1, token="bench", strategy="zero3", layout=of, state={})


def growth() -> list[Growth]:
    return [measured(world) for world in WORLDS]


def measured(world: int) -> Growth:
    draft = manifest(layout(world))
    size = -(-ROWS * COLUMNS * 4 * TENSORS // world)
    files = tuple(ShardFile(draft.file_name(r), size, f"{r:032x}") for r in range(world))
    whole = replace(draft, files=files)
    text = to_json(whole)
    new = layout(world * 3 // 2 + 1)
    middle = new.world_size // 2
    return Growth(
        ranks=world,
        tensors=TENSORS,
        manifest_bytes=len(text),
        to_json_s=fastest(lambda: to_json(whole)),
        from_json_s=fastest(lambda: from_json(text, "")),
        plan_s=fastest(lambda: plan(draft.layout, new.spans(middle))),
        copies=len(plan(draft.layout, new.spans(middle))),
        commit_s=commit_s(world),
    )


def fastest(work: Callable[[], object]) -> float:
    return min(seconds(work) for _ in range(REPEAT))


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def commit_s(world: int) -> float:
    one = Layout(
        world_size=world,
        tensors={"x": TensorSpec("U8", (world,))},
        groups=(Group("even", ("x",)),),
    )
    draft = manifest(one)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        storage = commit.prepare(open_directory(folder), draft.step)
        for rank in range(world):
            write_shard(storage, draft, rank, [b"x"])
        return seconds(lambda: commit.commit(storage, draft, wait_s=60.0))


def table(growths: list[Growth]) -> str:
    lines = [
        "| ranks | tensors | manifest KiB | write it ms | read it ms | one rank plans ms "
        "| byte ranges | commit s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in growths:
        lines.append(
            f"| {row.ranks} | {row.tensors} | {row.manifest_bytes >> 10} "
            f"| {row.to_json_s * 1e3:.1f} | {row.from_json_s * 1e3:.1f} | {row.plan_s * 1e3:.1f} "
            f"| {row.copies} | {row.commit_s:.3f} |"
        )
    return "\n".join(lines)
