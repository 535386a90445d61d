"""Of a directory with several weights, the ones are read that the program of their kind reads."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.huggingface import open_hf
from elasticzero.errors import CheckpointDamaged, UserError
from elasticzero.ipc.agent_client import STANDALONE, AgentClient
from elasticzero.snapshots.pretrained.model import Pretrained
from elasticzero.spans import Span

DIFFUSERS = "diffusion_pytorch_model"


def write(directory: Path, name: str, value: float) -> None:
    """Writes one file, or an index of two shards, whose weight has this value."""
    directory.mkdir(exist_ok=True)
    tensors = {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}
    if name.endswith(".safetensors"):
        save_file(tensors, directory / name, {"format": "pt"})
        return
    stem = name.removesuffix(".safetensors.index.json")
    files = {key: f"{stem}-0000{i}-of-00002.safetensors" for i, key in enumerate(tensors, 1)}
    for key, file in files.items():
        save_file({key: tensors[key]}, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (directory / name).write_text(json.dumps(index))


def value_in(directory: Path) -> float:
    foreign = open_hf(str(directory))
    source = foreign.open_source(1 << 20)
    chunk = next(iter(source.chunks("model/weight", Span(0, 1))))
    return float(torch.frombuffer(bytearray(chunk), dtype=torch.float32)[0])


@pytest.mark.parametrize(
    ("names", "reader"),
    [
        (("model.safetensors", "model.safetensors.index.json"), "Transformers"),
        ((f"{DIFFUSERS}.safetensors.index.json", f"{DIFFUSERS}.safetensors"), "diffusers"),
        (("model.safetensors", "model.fp16.safetensors"), "Transformers"),
        (("model.safetensors.index.json", "model.fp16.safetensors.index.json"), "Transformers"),
        ((f"{DIFFUSERS}.safetensors", f"{DIFFUSERS}.fp16.safetensors"), "diffusers"),
        (("model.safetensors.index.json", "consolidated.safetensors"), "Transformers"),
    ],
)
def test_the_first_of_two_is_read_and_a_line_says_so(
    tmp_path: Path, names: tuple[str, str], reader: str
) -> None:
    where = tmp_path / "hf"
    for value, name in enumerate(reversed(names)):
        write(where, name, float(value))
    assert value_in(where) == 1.0
    (note,) = open_hf(str(where)).notes
    assert note == (
        f"{where} has more weights than one model: {names[0]} is read, as {reader} does, and "
        f"{names[1]} is not"
    )


def test_one_answer_needs_no_line(tmp_path: Path) -> None:
    for number, name in enumerate(
        ["model.safetensors", "model.safetensors.index.json", "x.fp16.safetensors", "a.safetensors"]
    ):
        write(tmp_path / str(number), name, 3.0)
        assert value_in(tmp_path / str(number)) == 3.0
        assert open_hf(str(tmp_path / str(number))).notes == ()


def test_the_config_may_name_the_weights(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", 1.0)
    write(tmp_path, "other.safetensors", 2.0)
    for config, value in (
        ({"transformers_weights": "other.safetensors"}, 2.0),
        ({"transformers_weights": "gone.safetensors"}, 1.0),
        ({"transformers_weights": 5}, 1.0),
        ([], 1.0),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert value_in(tmp_path) == value
    (tmp_path / "config.json").write_text("{")
    assert value_in(tmp_path) == 1.0


def test_an_index_without_its_shards_matters_only_where_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors.index.json", 1.0)
    for shard in tmp_path.glob("*-of-*"):
        shard.unlink()
    with pytest.raises(CheckpointDamaged, match="which its index names"):
        open_hf(str(tmp_path))
    write(tmp_path, "model.safetensors", 2.0)
    assert value_in(tmp_path) == 2.0


def test_several_unknown_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.safetensors", 1.0)
    write(tmp_path, "b.safetensors", 1.0)
    with pytest.raises(UserError, match="2 safetensors files and not one index"):
        open_hf(str(tmp_path))


def test_import_and_prepare_say_it_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "hf"
    write(where, "model.safetensors.index.json", 1.0)
    write(where, "model.safetensors", 2.0)
    assert main(["import", str(where), str(tmp_path / "new"), "--format", "hf", "-q"]) == 0
    assert capsys.readouterr().err.count("model.safetensors is read, as Transformers does") == 1
    model = nn.Linear(2, 2)
    caplog.set_level(logging.WARNING)
    pretrained = Pretrained(model, where, AgentClient(None, STANDALONE))
    pretrained.fill(model.weight)
    assert model.weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert caplog.text.count("model.safetensors is read, as Transformers does") == 1


@pytest.mark.slow
def test_any_mixture_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Transformers' own choice is the judge, for every set of files that has plain safetensors."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_head=1, n_embd=4, vocab_size=4, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    names = (
        "model.safetensors",
        "model.safetensors.index.json",
        "model.fp16.safetensors",
        "model.fp16.safetensors.index.json",
        "other.safetensors",
        "pytorch_model.bin",
    )
    kinds = [s for n in range(1, 7) for s in itertools.combinations(names, n)]
    for number, kind in enumerate(kinds):
        for stated in (None, "other.safetensors"):
            if not {"model.safetensors", "model.safetensors.index.json"} & {*kind}:
                continue
            if stated is not None and stated not in kind:
                continue
            where = tmp_path / f"{number}-{stated is not None}"
            where.mkdir()
            for value, name in enumerate(kind):
                model = GPT2LMHeadModel(config)
                torch.nn.init.constant_(model.transformer.wte.weight, float(value + 1))
                parts = where / "parts"
                shards = 100 if name.endswith(".json") else "5GB"
                if name.endswith(".bin"):
                    (where / name).write_bytes(b"not read")
                    continue
                variant = "fp16" if ".fp16." in name else None
                model.save_pretrained(parts, variant=variant, max_shard_size=shards)
                for file in parts.iterdir():
                    plain = file.name == "model.safetensors" and name == "other.safetensors"
                    file.rename(where / (name if plain else file.name))
            if stated is not None:
                path = where / "config.json"
                text = json.loads(path.read_text()) | {"transformers_weights": stated}
                path.write_text(json.dumps(text))
            theirs = GPT2LMHeadModel.from_pretrained(where).transformer.wte.weight
            source = open_hf(str(where)).open_source(1 << 20)
            chunk = next(iter(source.chunks("model/transformer.wte.weight", Span(0, 1))))
            value_read = torch.frombuffer(bytearray(chunk), dtype=torch.float32)[0]
            assert value_read == theirs[0, 0], (kind, stated)
