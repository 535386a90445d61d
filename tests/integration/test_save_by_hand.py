"""`checkpoint.save` and `load` from several real processes, without an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elasticzero.checkpoint
from elasticzero.checkpoint.steps.catalog import read_manifest
from elasticzero.checkpoint.storage.disk import DiskStorage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WORLD = 3

SCRIPT = """
import datetime, os, sys
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
odd = dict(plain=torch.zeros(3), extra=object() if rank == 1 else 1)
try:
    elasticzero.checkpoint.save(directory, odd, step=8)
except (UserError, StorageError) as error:
    text = ("" if rank == 1 else "rank 1 failed: ") + "'extra' is a object"
    assert text in str(error), error
else:
    raise AssertionError("saved what one rank cannot")
unlike = dict(plain=torch.zeros(3) if rank == 1 else torch.zeros(3, dtype=torch.float64))
try:
    elasticzero.checkpoint.save(directory, unlike, step=7, wait_s=5.0)
except (CheckpointMismatch, StorageError) as error:
    assert "must save the same tensors" in str(error), error
    assert not rank or "rank 0 failed: " in str(error), error
else:
    raise AssertionError("committed a checkpoint whose ranks disagree")
dist.barrier()
os._exit(0)  # gloo of torch 2.13 sometimes aborts where its group is destroyed
"""


MESHES = """
import datetime, os, sys
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from elasticzero import checkpoint
from elasticzero.errors import UserError

rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(directory + ".store", world)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
)
pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "rows"))
line = init_device_mesh("cpu", (4,))

def trained(mesh, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

def whole(state):
    flat = {}
    for name, tensor in state[0].items():
        flat[name] = tensor.full_tensor()
    for name, values in state[1]["state"].items():
        for key, value in values.items():
            flat[name + key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return flat

model, optimizer = trained(pairs, 1)
expected = whole(get_state_dict(model, optimizer))
mine = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
step = checkpoint.save(directory, {**mine, "lr": [0.1]}, step=1)
for mesh in (pairs, line):
    other, fresh = trained(mesh, 2)
    into = dict(zip(("model", "optimizer"), get_state_dict(other, fresh)))
    kept = into["model"]["0.weight"]
    saved = checkpoint.load(directory, {**into, "lr": None})
    assert saved["lr"] == [0.1] and saved["model"]["0.weight"] is kept
    set_state_dict(
        other, fresh, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    found = whole(get_state_dict(other, fresh))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
if rank == 0:
    torch.save(expected, directory + ".expected")

rows = torch.arange(21.0).reshape(7, 3)
turned = {"x": distribute_tensor(rows, pairs, [Shard(0), Replicate()]), "y": torch.arange(9)}
checkpoint.save(directory, turned, step=2)
back = {"x": distribute_tensor(torch.zeros(7, 3), line, [Shard(0)]), "y": torch.zeros(9).long()}
checkpoint.load(directory, back)
assert torch.equal(back["x"].full_tensor(), rows) and torch.equal(back["y"], torch.arange(9))

def refused(tensors, text):
    try:
        checkpoint.save(directory, tensors, step=3)
    except UserError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

refused({"x": distribute_tensor(rows, pairs, [Shard(0), Shard(0)])}, "x is a DTensor placed")
refused({"x": distribute_tensor(rows, pairs, [Replicate(), Shard(1)])}, "x is a DTensor placed")
both = {"a": turned["x"], "b": distribute_tensor(rows, pairs, [Replicate(), Shard(0)])}
refused(both, "a and b are sharded over different ranks ([0, 2], [0, 1])")
dist.barrier()
os._exit(0)  # gloo of torch 2.13 sometimes aborts where its group is destroyed
"""


FAILING = """
import datetime, os, resource, signal, sys, time
from collections.abc import Mapping
import torch, torch.distributed as dist
from elasticzero import checkpoint
from elasticzero.errors import ElasticZeroError, StorageError

rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(directory + ".store", world)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=600)
)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

class Broken(Mapping):
    def __getitem__(self, key): return torch.ones(3)
    def __iter__(self): return iter(["a"])
    def __len__(self): return 1
    def items(self): raise RuntimeError("the rank's own bug")

class Unreadable(torch.Tensor):
    def detach(self): raise RuntimeError("no elements today")

def fails(kind, words, where=directory, tensors={"w": torch.ones(100_000)}):
    began_s = time.monotonic()
    try:
        checkpoint.save(where, tensors, step=1)
    except Exception as error:
        if rank == 2:
            assert type(error) is kind and words in str(error), repr(error)
        else:
            assert type(error) is StorageError, repr(error)
            assert f"rank 2 failed: " in str(error) and words in str(error), error
    else:
        raise AssertionError(words)
    assert time.monotonic() - began_s < 60, "the others waited"
    dist.barrier()
    assert not os.path.exists(directory) or os.listdir(directory) == [], os.listdir(directory)

odd = rank == 2
fails(RuntimeError, "the rank's own bug", tensors=Broken() if odd else {"w": torch.ones(3)})
fails(TypeError, "", where=object() if odd else directory)
fails(RuntimeError, "no elements today",
      tensors={"w": torch.ones(9).as_subclass(Unreadable) if odd else torch.ones(9)})
if odd:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
fails(StorageError, "File too large")
if odd:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
step = checkpoint.save(directory, {"w": torch.ones(100_000)}, step=1)
assert torch.equal(checkpoint.load(step)["w"], torch.ones(100_000))
dist.barrier()
os._exit(0)  # gloo of torch 2.13 sometimes aborts where its group is destroyed
"""


def test_any_error_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    """The others waited for the group's timeout, half an hour by default, and named no rank."""
    run_ranks(FAILING, WORLD, str(tmp_path / "ckpt"))
    assert elasticzero.checkpoint.load(tmp_path / "ckpt")["w"].numel() == 100_000


def run_ranks(script: str, world: int, directory: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(world), directory],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)


def test_fsdp2_on_meshes_of_two_dimensions_writes_each_copy_once(tmp_path: Path) -> None:
    directory = str(tmp_path / "ckpt")
    run_ranks(MESHES, 4, directory)
    expected = torch.load(directory + ".expected", weights_only=True)
    step = Path(directory) / "step-000000000001"
    files = read_manifest(DiskStorage(step)).files
    assert len(files) == 2, "each of the two that hold the first copy writes"
    assert sum(file.bytes for file in files) < 2 * 4096 + 3.5 * 4 * (5 * 7 + 7 + 7 * 3 + 3)
    saved = elasticzero.checkpoint.load(step)
    assert saved["model"] and saved["optimizer"]["state"]
    for name, tensor in saved["model"].items():
        assert torch.equal(tensor, expected[name])
    for name, values in saved["optimizer"]["state"].items():
        assert all(torch.equal(value, expected[name + key]) for key, value in values.items())


def test_three_ranks_save_together_and_one_process_loads(tmp_path: Path) -> None:
    directory = str(tmp_path / "ckpt")
    run_ranks(SCRIPT, WORLD, directory)
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
