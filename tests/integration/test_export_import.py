"""A model trained here goes to transformers and to torch, and theirs come here, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elasticzero.checkpoint
from elasticzero.checkpoint.cli.main import main
from tests.support.cases import slow

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
TRAIN = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import elasticzero as ez

CONFIG, OUT, STEPS = {config!r}, sys.argv[1], int(sys.argv[2])


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {{"input_ids": torch.randint(0, 64, (12,), generator=generator)}}


def train(session):
    torch.manual_seed(session.generation)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG))
    model, optimizer = session.prepare(model, lambda p: torch.optim.AdamW(p, lr=1e-2))
    session.restore()
    for batch in session.batches(Text(), global_batch=8, steps=STEPS):
        ids = batch["input_ids"]
        session.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        session.step()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12)[None], use_cache=False).logits
    torch.save(logits, f"{{OUT}}.{{session.rank}}")


if __name__ == "__main__":
    ez.run(train)
"""


def trained(directory: Path, checkpoints: Path, steps: int) -> torch.Tensor:
    """Train on two nodes, and give the logits at the end."""
    script, out = directory / "train.py", directory / "logits"
    script.write_text(TRAIN.format(config=CONFIG))
    order = ["local", "--nodes", "2", "--strategy", "zero2", "--checkpoint-dir", str(checkpoints)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "elasticzero.cli.main",
            *order,
            str(script),
            str(out),
            str(steps),
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logits: torch.Tensor = torch.load(f"{out}.0")
    assert torch.equal(logits, torch.load(f"{out}.1"))
    return logits


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.Tensor]]:
    """The checkpoint directory of a small GPT-2 trained here, and its logits."""
    directory = tmp_path_factory.mktemp("gpt")
    yield directory / "ckpt", trained(directory, directory / "ckpt", 4)


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(12)[None], use_cache=False).logits
    return logits


def new_gpt() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))


@pytest.mark.parametrize("most", [slow("5GB"), "20KB"])
def test_transformers_loads_an_export_and_computes_the_same(
    gpt: tuple[Path, torch.Tensor], tmp_path: Path, most: str
) -> None:
    checkpoints, logits = gpt
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "model_type": "gpt2"}))
    target = tmp_path / "hf"
    order = ["export", str(checkpoints), str(target), "--max-shard-size", most]
    assert main([*order, "--config", str(config)]) == 0
    assert (target / "model.safetensors.index.json").exists() == (most == "20KB")
    model, told = transformers.GPT2LMHeadModel.from_pretrained(target, output_loading_info=True)
    assert not any(told.values()), told
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(logits_of(model), logits)


def test_a_run_goes_on_from_transformers_own_files(tmp_path: Path) -> None:
    torch.manual_seed(9)
    model = new_gpt()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    checkpoints = tmp_path / "ckpt"
    order = ["import", str(tmp_path / "theirs"), str(checkpoints), "--format", "hf"]
    assert main([*order, "--world-size", "3"]) == 0
    loaded = elasticzero.checkpoint.load(checkpoints)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[f"model/{name}"], parameter)
    assert torch.equal(trained(tmp_path, checkpoints, 0), logits_of(model))


@pytest.mark.slow
def test_a_run_goes_on_from_what_torch_saved_of_a_tied_model(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(9)
    model = new_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        torch_dcp.save(
            {"model": model_state, "optimizer": optimizer_state},
            checkpoint_id=tmp_path / "dcp",
            no_dist=True,
        )
    checkpoints = tmp_path / "ckpt"
    order = ["import", str(tmp_path / "dcp"), str(checkpoints), "--format", "dcp", "--step", "1"]
    assert main([*order, "--alias", "lm_head.weight=transformer.h.0.ln_1.weight"]) == 64
    assert main([*order, "--alias", "lm_head.weight=transformer.wte.weight"]) == 0
    assert torch.equal(trained(tmp_path, checkpoints, 0), logits_of(model))


def test_torch_reads_an_export_in_its_own_format(
    gpt: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoints, logits = gpt
    assert main(["export", str(checkpoints), str(tmp_path / "m"), "--format", "dcp"]) == 0
    dcp_to_torch_save(tmp_path / "m", tmp_path / "m.pt")
    model = new_gpt()
    model.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert torch.equal(logits_of(model), logits)
    other = new_gpt()
    state = other.state_dict()
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        torch_dcp.load(state, checkpoint_id=tmp_path / "m", no_dist=True)
    assert torch.equal(logits_of(other), logits)
    order = ["export", str(checkpoints), str(tmp_path / "all"), "--format", "dcp", "--what", "all"]
    assert main(order) == 0
    order = ["import", str(tmp_path / "all"), str(tmp_path / "back"), "--format", "dcp"]
    assert main([*order, "--step", "4", "--world-size", "3", "--strategy", "zero3"]) == 0
    assert main(["diff", str(checkpoints), str(tmp_path / "back")]) == 0


FSDP = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(path + ".store", world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
mesh = init_device_mesh("cpu", (world,))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 5) + rank).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model_state, optimizer_state = get_state_dict(model, optimizer)
columns = distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(1)])
state = {"model": model_state, "optimizer": optimizer_state, "epoch": 3, "columns": columns}
dcp.save(state, checkpoint_id=path)
options = StateDictOptions(full_state_dict=True)
whole_model, whole_optimizer = get_state_dict(model, optimizer, options=options)
if rank == 0:
    torch.save({"model": whole_model, "optimizer": whole_optimizer, "epoch": 3}, path + ".whole")
dist.barrier()
os._exit(0)  # gloo of torch 2.13 sometimes aborts where its group is destroyed
"""


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two ranks of FSDP2 wrote; beside it, in one file, the same state whole."""
    source = str(tmp_path_factory.mktemp("fsdp") / "dcp")
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", FSDP, str(rank), "2", source])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    assert len(list(Path(source).glob("*.distcp"))) == 2
    return source


@pytest.mark.parametrize("strategy", [slow("zero2"), "zero3"])
def test_what_fsdp_wrote_comes_here(fsdp: str, tmp_path: Path, strategy: str) -> None:
    target = str(tmp_path / "ckpt")
    order = ["import", fsdp, target, "--format", "dcp", "--world-size", "3", "--step", "3"]
    assert main([*order, "--strategy", strategy]) == 0
    whole = torch.load(fsdp + ".whole", weights_only=True)
    loaded = elasticzero.checkpoint.load(target)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["columns"], torch.arange(35.0).reshape(7, 5))
    assert loaded["model"].keys() == whole["model"].keys()
    for name, tensor in whole["model"].items():
        assert torch.equal(loaded["model"][name], tensor)
    for name, state in whole["optimizer"]["state"].items():
        for key, tensor in state.items():
            assert torch.equal(loaded["optimizer"]["state"][name][key], tensor), (name, key)
    assert loaded["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
