"""`checkpoint.save` and `load` from several real processes, without an agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import elasticzero.checkpoint
from elasticzero.checkpoint.commit import read_manifest
from elasticzero.checkpoint.disk import DiskStorage

ROOT = Path(__file__).resolve().parents[2]
WORLD = 3

SCRIPT = """
import datetime, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import elasticzero.checkpoint
from elasticzero.errors import CheckpointMismatch, StorageError, UserError

rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(directory + ".store", world)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30)
)
mesh = init_device_mesh("cpu", (world,))
rows, few = torch.arange(35.0).reshape(7, 5), torch.arange(4.0).reshape(2, 2)
tensors = {
    "rows": distribute_tensor(rows, mesh, [Shard(0)]),
    "few": distribute_tensor(few, mesh, [Shard(0)]),
    "same": distribute_tensor(few, mesh, [Replicate()]),
    "plain": torch.arange(10),
    "scalar": torch.tensor(4.5),
}
elasticzero.checkpoint.save(directory, tensors, step=5, state={"lr": 0.1})
into = {
    "rows": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)]),
    "few": distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]),
    "same": distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]),
    "plain": torch.zeros(10, dtype=torch.int64),
}
elasticzero.checkpoint.load(directory, into)
assert torch.equal(into["rows"].full_tensor(), rows)
assert torch.equal(into["few"].full_tensor(), few)
assert torch.equal(into["same"].full_tensor(), few)
assert torch.equal(into["plain"], torch.arange(10))
try:
    elasticzero.checkpoint.save(directory, tensors, step=5)
except UserError as error:
    assert "holds a checkpoint already" in str(error), error
else:
    raise AssertionError("saved over a checkpoint")
columns = {"columns": distribute_tensor(rows, mesh, [Shard(1)])}
try:
    elasticzero.checkpoint.save(directory, columns, step=6)
except UserError as error:
    assert "columns is a DTensor placed" in str(error), error
else:
    raise AssertionError("saved a tensor cut by columns")
unlike = dict(plain=torch.zeros(3) if rank == 1 else torch.zeros(3, dtype=torch.float64))
try:
    elasticzero.checkpoint.save(directory, unlike, step=7, wait_s=5.0)
except (CheckpointMismatch, StorageError) as error:
    text = "another rank could not save" if rank else "must save the same tensors"
    assert text in str(error), error
else:
    raise AssertionError("committed a checkpoint whose ranks disagree")
dist.destroy_process_group()
"""


def test_three_ranks_save_together_and_one_process_loads(tmp_path: Path) -> None:
    directory = str(tmp_path / "ckpt")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(WORLD), directory],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(outputs)
    loaded = elasticzero.checkpoint.load(directory)
    assert torch.equal(loaded["rows"], torch.arange(35.0).reshape(7, 5))
    assert torch.equal(loaded["few"], torch.arange(4.0).reshape(2, 2))
    assert torch.equal(loaded["same"], loaded["few"])
    assert torch.equal(loaded["plain"], torch.arange(10))
    assert loaded["scalar"] == 4.5
    assert elasticzero.checkpoint.load_state(directory) == {"lr": 0.1}
    manifest = read_manifest(DiskStorage(Path(directory) / "step-000000000005"))
    assert {name: g.rule for g in manifest.layout.groups for name in g.tensors} == {
        "rows": "fsdp_rows",
        "few": "fsdp_rows",
        "same": "even",
        "plain": "even",
        "scalar": "even",
    }
