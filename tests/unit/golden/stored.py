"""Makes what is stored: documents and keys in etcd, files of checkpoints and snapshots, and the
parts of the training state that are JSON."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elasticzero.checkpoint.format import names
from elasticzero.checkpoint.format.finite import Range
from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.manifest import Manifest, ShardFile, to_json, with_own_file
from elasticzero.checkpoint.format.shards import shard_header, shard_specs, write_shard
from elasticzero.checkpoint.io.writer import write_checkpoint
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps.commit import commit, prepare
from elasticzero.checkpoint.steps.tag_files import TagFile, write_tag
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.data.position import DataPosition
from elasticzero.data.sampling import SampleOrder
from elasticzero.data.streams.dealing import StreamOrder
from elasticzero.launcher.islands.documents import REPORTS as REPORTS_OF_ISLANDS
from elasticzero.launcher.islands.documents import STATE
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Failure,
    Member,
    Proposal,
    Report,
    Run,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.rounds.documents import IslandReport, Rounds
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.job_run import RUN
from elasticzero.launcher.store.job_token import KEY as TOKEN
from elasticzero.launcher.store.job_token import Record as TokenRecord
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    NEXT,
    WORLD,
    reports_of,
)
from elasticzero.options.settings import SpikeLimit
from elasticzero.parallel.buckets.choice import BucketChoice
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.serialization import encode
from elasticzero.snapshots.manifest_draft import WriterInfo, draft
from elasticzero.state.auxiliary import BoundaryCopy, encode_state
from elasticzero.state.buffers import BufferCopy
from elasticzero.state.model import TRACKED, RankState
from elasticzero.state.rng import RngState
from elasticzero.training.step_guard import StepGuard
from tests.unit.golden.records import full, full_and_least, least, line

DOCUMENTS: Mapping[str, type[Any]] = {
    f"{MEMBERS}node": Member,
    WORLD: World,
    f"{ALARM}7": Alarm,
    f"{reports_of(7)}node": Report,
    CONTROL: Control,
    NEXT: Proposal,
    DONE: Done,
    TOKEN: TokenRecord,
    RUN: Run,
    STATE: Rounds,
    f"{REPORTS_OF_ISLANDS}node": IslandReport,
}
"""Kinds of the documents in etcd, by key."""
RECORDS: tuple[type[Any], ...] = (BucketPlan, DataPosition, Manifest, Range, TagFile)
"""Kinds of the other records that are stored."""
STEP = 1200
GENERATION = 7
SAVE_TOKEN = "g000007-0123456789abcdef"


def etcd() -> dict[str, str]:
    """Returns each document under its whole key, with all fields, and with those it must have."""
    made: dict[str, str] = {}
    for key, kind in DOCUMENTS.items():
        made |= full_and_least(f"{job_prefix('job')}{key}", kind, to_bytes)
    world = full(World)
    without_zone = replace(world, members=(world.members[0], least(Member)))
    made[f"{job_prefix('job')}{WORLD} one-zone"] = line(to_bytes(without_zone))
    failed = full(Report, failure=least(Failure))
    made[f"{job_prefix('job')}{reports_of(7)}node least-failure"] = line(to_bytes(failed))
    return made


LAYOUT = Layout(
    world_size=2,
    tensors={
        "model/weight": TensorSpec("F32", (3, 5)),
        "model/small": TensorSpec("BF16", (7,)),
        "optimizer/weight/exp_avg": TensorSpec("F64", (5, 2)),
        "rng/torch/0": TensorSpec("U8", (4,)),
        "rng/torch/1": TensorSpec("U8", (4,)),
        "model/empty": TensorSpec("I64", (0, 3)),
    },
    groups=(
        Group("even", ("model/weight", "model/small")),
        Group("fsdp_rows", ("optimizer/weight/exp_avg",)),
        Group("whole", ("rng/torch/0", "rng/torch/1", "model/empty"), (0, 1, 1)),
    ),
)
"""Has tensors of each rule."""


def _manifest(layout: Layout = LAYOUT, **chosen: Any) -> Manifest:
    return Manifest(
        step=STEP,
        generation=GENERATION,
        token=SAVE_TOKEN,
        strategy="zero2",
        layout=layout,
        state={"step": STEP, "text": "é", "numbers": [1, 2.5, None, True]},
        **chosen,
    )


def _shard_bytes(manifest: Manifest, rank: int) -> Iterable[bytes]:
    """Returns bytes for a rank's tensors, which are small numbers of their dtypes."""
    size = sum(spec.nbytes for spec in shard_specs(manifest, rank).values())
    yield bytes((7 * i + rank) % 50 for i in range(size))


def _files(folder: Path) -> dict[str, str]:
    """Returns every file below a folder: small ones as a line, others by size and digest."""
    made = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        text = line(data)
        if len(text) > 4000 or (text.startswith("hex") and len(data) > 500):
            text = f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"
        made[f"file {path.relative_to(folder)}"] = text
    return made


def checkpoints(folder: Path) -> dict[str, str]:
    """Returns names, layouts, manifests, and each file of checkpoints and snapshots."""
    made = {f"name {name}": text for name, text in _names().items()}
    replicas = replace(LAYOUT, world_size=2, replicas=2)
    for name, layout in {"layout": LAYOUT, "layout-replicas": replicas}.items():
        made[f"{name} json"] = json.dumps(layout.json())
        made[f"{name} digest"] = layout.digest()
        for rank in range(2):
            made[f"{name} spans {rank}"] = json.dumps(
                {n: [s.start, s.stop] for n, s in layout.spans(rank).items()}
            )
    drafted = _manifest(tags=("best", "last"))
    made["manifest draft"] = line(to_json(drafted))
    of_rank = with_own_file(drafted, 1, ShardFile(drafted.file_name(1), 4321, "0" * 32))
    made["manifest own-file"] = line(to_json(of_rank))
    made["shard head"] = line(shard_header(drafted, 0)[0][8:]).rstrip()
    made |= _files(_written(folder))
    return made


def _names() -> dict[str, str]:
    return {
        "manifest": names.MANIFEST_NAME,
        "sums": names.SUMS_SUFFIX,
        "tags": names.TAGS_DIRECTORY,
        "shard": names.shard_file_name(3, 16, SAVE_TOKEN),
        "step": names.step_directory(STEP),
        "most": names.step_directory(names.MAX_STEP),
        "tag": names.tag_file_name("best-1.5"),
        "snapshot": f"{names.generation_directory(GENERATION)}/{names.step_directory(STEP)}",
        "snapshot-manifest": names.snapshot_manifest_name(3, 16),
        "snapshot-draft": names.snapshot_draft_name(3, 16),
    }


def _written(folder: Path) -> Path:
    """Writes a checkpoint of two ranks, a tag, and a snapshot before and after it is sealed."""
    directory, manifest = DiskDirectory(folder / "checkpoints"), _manifest(tags=("best",))
    storage = prepare(directory, STEP)
    for rank in range(2):
        write_shard(storage, manifest, rank, _shard_bytes(manifest, rank))
    commit(storage, manifest, wait_s=1.0)
    write_tag(directory, "best", STEP)
    for name in ("drafted", "sealed"):
        store = SnapshotStore(folder / name)
        step = store.path(GENERATION, STEP)
        step.mkdir(parents=True)
        head, _ = shard_header(manifest, 1)
        (step / manifest.file_name(1)).write_bytes(head + b"".join(_shard_bytes(manifest, 1)))
        part = Range("model/weight", "F32", len(head), len(head) + 16)
        store.write_draft(manifest, 1, [part])
        store.finish_draft(ShardName(manifest.generation, manifest.step, 1, 2))
        if name == "sealed":
            store.seal(ShardName(GENERATION, STEP, 1, 2))
    return folder


_FULL = full(DataPosition)
FULL_POSITION = replace(_FULL, skipped=tuple(replace(batch, step=0) for batch in _FULL.skipped))
"""A batch that is skipped already has no step to come."""
POSITIONS = {
    "full": FULL_POSITION,
    "least": DataPosition(),
}


def state(folder: Path) -> dict[str, str]:
    """Returns what the manifest of a job's checkpoint says besides tensors, and the whole files of
    a small training state."""
    made = {f"position {name}": json.dumps(encode(p)) for name, p in POSITIONS.items()}
    samples = SampleOrder(samples=100, seed=5)
    stream = StreamOrder(shards=3, readers=6, window=16, seed=5, contents="shards of a folder")
    made["order samples"] = json.dumps(samples.inputs)
    made["order stream"] = json.dumps(stream.inputs)
    made |= {f"guard {name}": json.dumps(guard.state_dict()) for name, guard in _guards().items()}
    choice = BucketChoice(["a", "b"], torch.device("cpu"))
    made["buckets least"] = json.dumps(choice.state_dict())
    made["buckets full"] = json.dumps(encode(full(BucketPlan)))
    tensors: dict[str, torch.Tensor] = {}
    tracked = {"rates": [0.1, None], "nested": {"mean": torch.ones(2), 3: ("x", True)}}
    made["tracked"] = json.dumps(encode_state(tracked, f"{TRACKED}thing", tensors))
    made["tracked tensors"] = json.dumps(list(tensors))
    return made | _files(_training_state(folder))


def _guards() -> dict[str, StepGuard]:
    """Returns a guard that keeps nothing of losses, and one that keeps all there is, after some
    steps."""
    spike = SpikeLimit(action="skip", deviations=6.0, steps=2)
    guards = {"least": StepGuard(), "full": StepGuard("skip", spike, scales=True)}
    for guard in guards.values():
        for norm, loss in ((1.0, 2.5), (1.5, 2.25), (math.inf, 2.0)):
            guard.judge(norm, loss)
    return guards


def _training_state(folder: Path) -> Path:
    """Writes the state of one rank, as a capture describes it."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    share = RankState()
    share.add_even({"model/weight": torch.arange(6.0).reshape(2, 3)})
    share.add_whole({"optimizer/weight/exp_avg": torch.ones(2, 3)}, (0,))
    tensors: dict[str, torch.Tensor] = {}
    tracked = encode_state({"mean": torch.zeros(2)}, f"{TRACKED}average", tensors)
    copy = BoundaryCopy(
        step=STEP,
        position=FULL_POSITION,
        buffers=BufferCopy(values=(count := {"count": torch.tensor(3)}), saved=count),
        rng=RngState.capture(torch.device("cpu")),
        json={"tracked": {"average": tracked}, "groups": [], "aliases": {"model/a": "model/b"}},
        tensors=tensors,
    )
    writer = WriterInfo(
        rank=0, world_size=1, generation=GENERATION, token=SAVE_TOKEN, strategy="ddp"
    )
    manifest, pieces = draft(share, copy, writer)
    write_checkpoint(DiskDirectory(folder), manifest, 0, pieces)
    return folder
