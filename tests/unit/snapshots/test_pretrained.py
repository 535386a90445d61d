"""A model takes its first values from safetensors files, or is refused in a sentence."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from elasticzero.errors import CheckpointMismatch, StorageError, UserError
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.ipc.assignment import Resume
from elasticzero.parallel.materialize import Materializer
from elasticzero.snapshots.pretrained.model import Pretrained

CPU = torch.device("cpu")
LINK = AgentClient(None, STANDALONE)


class Tied(nn.Module):
    """Has two names for one weight, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.get_buffer("scale"))


class Bare(nn.Module):
    """Has a parameter that it cannot initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = Tied()
    model.norm.running_mean.uniform_()  # type: ignore[union-attr]
    return model


def write_in_two_files(directory: Path, tensors: dict[str, Tensor]) -> None:
    directory.mkdir()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("form", ["one file", "several files", "the other name", "both names"])
@pytest.mark.parametrize("meta", [False, True])
def test_all_values_are_those_of_the_files(tmp_path: Path, form: str, meta: bool) -> None:
    source, where = trained(), tmp_path / "hf"
    tensors = state_of(source)
    if form == "one file":
        where.mkdir()
        save_model(source, str(where / "model.safetensors"))
    elif form == "several files":
        del tensors["head.weight"]
        write_in_two_files(where, tensors)
    elif form == "the other name":
        del tensors["embed.weight"]
        write_in_two_files(where, tensors)
    else:
        write_in_two_files(where, tensors)
    with torch.device("meta" if meta else "cpu"):
        model = Tied()
    stored = Pretrained(model, where, LINK)
    materializer = Materializer(model, CPU, stored)
    materializer.materialize(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if stored.has(tensor):
            stored.fill(tensor)
    expected = source.state_dict()
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert model.get_buffer("scale").tolist() == [1.0]


def test_numbers_are_converted_and_any_order_of_memory_is_filled(tmp_path: Path) -> None:
    values = torch.randn(4, 3)
    save_file({"weight": values.bfloat16()}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4, bias=False)
    model.weight.data = torch.empty(3, 4).t()
    Pretrained(model, str(tmp_path), LINK).fill(model.weight)
    assert torch.equal(model.weight, values.bfloat16().float())
    assert model.weight.stride() == (1, 4)


def test_a_module_needs_no_reset_where_files_have_all_it_owns(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Bare()
    with pytest.raises(UserError, match="the model itself, a Bare, has tensors on the meta device"):
        Materializer(model, CPU)
    save_file({"weight": torch.tensor([3.0, 4.0])}, tmp_path / "model.safetensors")
    Materializer(model, CPU, Pretrained(model, tmp_path, LINK)).materialize(model)
    assert model.weight.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tier", ["fresh", "storage"])
def test_only_rank_0_of_a_beginning_reads(rank: int, tier: str, tmp_path: Path) -> None:
    """The others know which tensors will have values, without the files."""
    resume = Resume(tier="storage", step=3) if tier == "storage" else Resume(tier="fresh")
    link = AgentClient(None, replace(STANDALONE, rank=rank, world_size=2, resume=resume))
    with torch.device("meta"):
        model = Bare()
    gone = tmp_path / "gone"
    if rank == 0 and tier == "fresh":
        with pytest.raises(UserError, match="gone is empty or does not exist"):
            Pretrained(model, gone, link)
        return
    stored = Pretrained(model, gone, link)
    assert stored.has(model.weight)
    Materializer(model, CPU, stored).materialize(model)
    assert not model.weight.is_meta


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {"weight": torch.ones(3)},
            r"'weight' is F32 \[3\] in the files, and F32 \[2\] in",
        ),
        ({"weight": torch.ones(2).char()}, r"'weight' is I8 \[2\] in the files, and F32 \[2\]"),
        (
            {"model.weight": torch.ones(2)},
            "the files have no tensor 'weight'; they have 'model.weight', for example",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tensors: dict[str, Tensor], text: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=text) as caught:
        Pretrained(Bare(), tmp_path, LINK)
    assert f"load='{tmp_path}'" in str(caught.value)


def test_what_only_the_files_have_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elasticzero")
    tensors = {"weight": torch.ones(2), "a": torch.ones(1), "b": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    Pretrained(Bare(), tmp_path, LINK)
    text = f"the model begins with 8 B of values from {tmp_path}; the model has no 'a', 'b'"
    assert text in caplog.text


def test_other_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"takes the path of a file or of a directory .* not a Bare"
    ):
        Pretrained(Bare(), Bare(), LINK)  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=r"model\.safetensors says its header has 8 bytes"):
        Pretrained(Bare(), tmp_path, LINK)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    model = Bare()
    stored = Pretrained(model, tmp_path, LINK)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StorageError, match="cannot read weight in "):
        stored.fill(model.weight)


class Root(nn.Module):
    """Initialises its parts too, as many models do, and has a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("angles").copy_(torch.arange(4.0))
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter)


@pytest.mark.parametrize("stand_ins", [False, True])
@pytest.mark.parametrize("on_cpu", [(), ("blocks.0.weight",)])
def test_what_modules_make_comes_before_what_files_have(
    tmp_path: Path, stand_ins: bool, on_cpu: tuple[str, ...]
) -> None:
    """A module's own method may change the rest of the model, which is filled after it."""
    source = Root()
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Root()
    for name in on_cpu:
        model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(torch.zeros(3, 3))
    stored = Pretrained(model, tmp_path, LINK)
    materializer = Materializer(model, CPU, stored)
    if stand_ins:
        materializer.put_stand_ins(model)
        for block in model.blocks:
            materializer.materialize(block)
    materializer.materialize(model)
    for name in on_cpu:
        stored.fill(model.get_parameter(name))
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())
    assert model.get_buffer("angles").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_two_names_of_one_tensor_must_have_the_same_values(tmp_path: Path) -> None:
    tensors = state_of(trained())
    tensors["head.weight"] = tensors["head.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match="are one tensor in the model, and differ"):
        Pretrained(Tied(), tmp_path, LINK)


def test_a_name_on_the_hub_is_no_path() -> None:
    with pytest.raises(UserError, match=r"huggingface_hub\.snapshot_download gives the path"):
        Pretrained(Bare(), "nobody/no-model", LINK)
