"""The scripts of docs/porting.md: each as it was runs, and as it becomes goes through a killed node
with the result of a run that nothing disturbs.

Where a script is compared before and after, both take their samples in order: a session shuffles in
another way than torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.clusters import elasticzero, events_in

PORTS = Path(__file__).resolve().parents[2] / "examples" / "ports"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
IN_DOUBLE = {"self.x[index],": "self.x[index].double(),"}
SEQUENTIAL = {"report_to=[],": "report_to=[], train_sampling_strategy='sequential',"}
IN_ORDER = {
    "nanogpt_before": {
        "torch.randint(split - CONTEXT, (BATCH,))": (
            "BATCH * (accumulation * step + micro) + torch.arange(BATCH)"
        )
    },
    "nanogpt_after": {"seed=1337,\n": "shuffle=False,\n"},
    "classifier_before": {
        **IN_DOUBLE,
        "network().to(device)": "network().double()",
        "shuffle=True": "shuffle=False",
        "torch.autocast(device.type, half)": "torch.autocast(device.type, half, enabled=False)",
    },
    "classifier_after": {
        **IN_DOUBLE,
        "        network(),\n": "        network().double(),\n",
        "shuffle=True": "shuffle=False",
        "BATCH, SLICE = 64, 16": "BATCH = SLICE = 64",
        '        precision="fp16" if cuda else "bf16",\n': "",
    },
    "lora_before": SEQUENTIAL,
    "lora_after": SEQUENTIAL,
}
"""Edits make a script take its samples in their order; the classifier has whole batches as well,
and 64 bits: with 16 the last bit of a sum is seen in the loss after some steps."""


def in_order(name: str, folder: Path) -> Path:
    text = (PORTS / f"{name}.py").read_text()
    for line, other in IN_ORDER[name].items():
        assert line in text, line
        text = text.replace(line, other)
    script = folder / f"{name}.py"
    script.write_text(text)
    return script


def run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def through_a_killed_node(
    script: Path, folder: Path, job: str, step: int, options: list[str], arguments: list[str]
) -> str:
    """Trains on three nodes, of which one is killed; what the workers have printed."""
    command = ["local", "--nodes", "3", "--job", job, "--log-dir", str(folder / "logs")]
    command += ["--fault", f"kill-node@{step}", *options, str(script), *arguments]
    run(elasticzero(*command), folder)
    worlds = {
        event["generation"]: event
        for event in events_in(folder / "logs" / job)
        if event["event"] == "world"
    }
    first, *_, last = (worlds[generation] for generation in sorted(worlds))
    assert (first["world_size"], last["world_size"]) == (3, 2)
    assert last["resume_step"] > 0
    return "".join(path.read_text() for path in (folder / "logs" / job).glob("*/0.log"))


def saved(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name."""
    if path.suffix == ".safetensors":
        return load_file(path)
    tensors: dict[str, Any] = torch.load(path, weights_only=True)
    return {
        f"{part}.{name}": tensor
        for part in ("model", "average")
        for name, tensor in tensors.get(part, {}).items()
    }


def check_close(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys() and tensors
    for name, tensor in expected.items():
        assert tensor.dtype in (torch.float64, torch.int64), name
        assert (tensors[name] - tensor).abs().max() < 1e-9, name


def figures(output: str, name: str) -> list[float]:
    """The numbers that a script has printed under a name."""
    return [float(text) for text in re.findall(rf"{name} ([\d.]+)", output)]


GPT = ["--dtype", "float64", "--steps", "60"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_ported_gpt_has_the_weights_of_the_script_before(tmp_path: Path, job: str) -> None:
    before, after = (in_order(f"nanogpt_{when}", tmp_path) for when in ("before", "after"))
    run([sys.executable, str(before), *GPT, "--out", "before.pt"], tmp_path)
    arguments = [*GPT, "--out", str(tmp_path / "after.pt")]
    through_a_killed_node(after, tmp_path, job, 20, ["--strategy", "zero2"], arguments)
    check_close(saved(tmp_path / "after.pt"), saved(tmp_path / "before.pt"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_gpt_as_it_stands_goes_through_a_killed_node(tmp_path: Path, job: str) -> None:
    script = str(PORTS / "nanogpt_after.py")
    as_it_was = [*TORCHRUN, "--nproc-per-node", "2", str(PORTS / "nanogpt_before.py"), *GPT]
    [*_, before] = figures(run(as_it_was, tmp_path), "validation loss")
    alone = run([sys.executable, script, *GPT, "--out", "alone.pt"], tmp_path)
    arguments = [*GPT, "--out", str(tmp_path / "after.pt")]
    options = ["--strategy", "zero2"]
    after = through_a_killed_node(Path(script), tmp_path, job, 20, options, arguments)
    check_close(saved(tmp_path / "after.pt"), saved(tmp_path / "alone.pt"))
    losses = figures(alone, "validation loss")
    assert figures(after, "validation loss")[-1] == losses[-1]
    assert losses[-1] == pytest.approx(before, rel=0.1)  # with other windows


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_classifier_as_it_stands_goes_through_a_killed_node(tmp_path: Path, job: str) -> None:
    """It has BatchNorm, AMP and an average of the weights, which are equal to the last bit."""
    script = PORTS / "classifier_after.py"
    before = run([sys.executable, str(PORTS / "classifier_before.py")], tmp_path)
    alone = run(
        [sys.executable, str(script), "--out", "alone.pt"],
        tmp_path,
        ELASTICZERO_DETERMINISTIC="1",
    )
    options = ["--strategy", "zero1", "--deterministic"]
    arguments = ["--out", str(tmp_path / "after.pt")]
    after = through_a_killed_node(script, tmp_path, job, 40, options, arguments)
    expected, tensors = saved(tmp_path / "alone.pt"), saved(tmp_path / "after.pt")
    assert tensors.keys() == expected.keys() and len(expected) > 20
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert figures(after, "accuracy")[-1] == figures(alone, "accuracy")[-1] > 0.9
    assert figures(before, "accuracy")[-1] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_ported_classifier_has_the_weights_of_the_script_before(tmp_path: Path) -> None:
    outputs = [
        run(
            [sys.executable, str(in_order(f"classifier_{when}", tmp_path)), "--out", f"{when}.pt"],
            tmp_path,
        )
        for when in ("before", "after")
    ]
    check_close(saved(tmp_path / "after.pt"), saved(tmp_path / "before.pt"))
    assert figures(outputs[0], "accuracy") == figures(outputs[1], "accuracy")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_of_the_trainer_go_through_a_killed_node(tmp_path: Path, job: str) -> None:
    """They equal those of an undisturbed run, and of transformers' own Trainer, in float64; but the
    Trainer sums the losses in 32 bits."""
    script = in_order("lora_after", tmp_path)
    options = ["--strategy", "zero2"]
    arguments = ["--float64", "--out", str(tmp_path / "adapters"), "--batch", "8"]
    outputs = {"killed": through_a_killed_node(script, tmp_path, job, 30, options, arguments)}
    for when in ("before", "after"):
        alone = str(in_order(f"lora_{when}", tmp_path))
        command = [sys.executable, alone, "--float64", "--out", when, "--batch", "24"]
        outputs[when] = run(command, tmp_path)
        expected = saved(tmp_path / when / "adapter_model.safetensors")
        check_close(saved(tmp_path / "adapters" / "adapter_model.safetensors"), expected)
    losses = {when: figures(output, "training loss") for when, output in outputs.items()}
    assert len(losses["before"]) == 1
    assert losses["killed"] == pytest.approx(losses["before"], rel=1e-6)
    assert losses["after"] == pytest.approx(losses["before"], rel=1e-6)
