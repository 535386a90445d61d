"""A model takes its first values from files under each strategy; a mistake ends the job in a
line."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from elasticzero.ipc.assignment import Resume
from tests.integration.clusters import elasticzero
from tests.integration.training_harness import Pool
from tests.integration.training_memory import LAYERS, WIDTH, Inputs, build

SCRIPT = Path(__file__).parent / "training_memory.py"
WHOLE_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


def written_model(directory: Path) -> torch.nn.Module:
    """Writes a model that has other values than the script's, in bfloat16."""
    directory.mkdir()
    model = build(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    save_file(dict(model.state_dict()), directory / "model.safetensors")
    return model.float()


def train_by_hand(model: torch.nn.Module, steps: int) -> dict[str, float]:
    data = Inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    for step in range(steps):
        batch = torch.stack([data[4 * step + i] for i in range(4)])
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.double().sum().item() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "meta"),
    [
        pytest.param("ddp", False, marks=pytest.mark.slow),
        pytest.param("zero2", True, marks=pytest.mark.slow),
        ("zero3", True),
    ],
)
def test_it_trains_from_the_values_of_the_files(
    strategy: str, meta: bool, pool: Pool, tmp_path: Path
) -> None:
    """Under zero3 no rank has the whole model, which is built on meta; and a run that goes on needs
    no files."""
    expected = train_by_hand(written_model(tmp_path / "hf"), 2)
    told = {"strategy": strategy, "dtype": "float32", "micro": 2, "meta": meta}
    told |= {"load": str(tmp_path / "hf"), "out": str(tmp_path / "out")}
    resume, built = Resume(tier="fresh"), 0
    for ranks, steps in ((2, 1), (3, 2)):
        options: dict[str, Any] = {
            "checkpoint_dir": str(tmp_path / "checkpoints"),
            "generation": steps,
            "resume": resume,
        }
        running = pool.start(SCRIPT, [json.dumps(told | {"steps": steps})], ranks, **options)
        assert running.finish() == steps
        peaks = [json.loads((tmp_path / f"out-built-{rank}").read_text()) for rank in range(2)]
        built = built or max(peaks)
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        resume = Resume(tier="storage", step=steps)
    assert (built < 0.7 * WHOLE_BYTES) == (strategy == "zero3" and meta)
    weights = json.loads((tmp_path / "out-weights-0").read_text())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert weights[name] == pytest.approx(value, abs=1e-3), name


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("zero1", 3, marks=pytest.mark.slow),
        ("zero2", 3),
        ("zero3", 2),
    ],
)
def test_the_optimizer_goes_on_from_the_files(
    strategy: str, ranks: int, pool: Pool, tmp_path: Path
) -> None:
    """They number the parameters, and have another rate than the script."""
    model, data = build(torch.float64), Inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, fused=True)
    for step in (3, 2, 1, 0):  # the last step is the job's first
        if step == 0:
            saved = {"net": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, tmp_path / "epoch3.pt")
        batch = torch.stack([data[4 * step + i] for i in range(4)]).double()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    told: dict[str, Any] = {"strategy": strategy, "dtype": "float64", "micro": 2, "steps": 1}
    told |= {"load": str(tmp_path / "epoch3.pt"), "load_optimizer": True, "meta": True}
    told |= {"out": str(tmp_path / "out")}
    assert pool.start(SCRIPT, [json.dumps(told)], ranks).finish() == 1
    weights = json.loads(Path(f"{tmp_path}/out-weights-0").read_text())
    assert weights.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert weights[name] == pytest.approx(value.sum().item(), rel=1e-9), name


def test_files_that_only_rank_0_finds_wrong_end_the_job_in_a_line(tmp_path: Path) -> None:
    written_model(tmp_path / "hf")
    told = {"strategy": "zero3", "dtype": "float32", "micro": 2, "meta": True}
    told |= {"load": str(tmp_path / "hfs"), "out": str(tmp_path / "out")}
    arguments = ["local", "--nodes", "2", "--log-dir", str(tmp_path / "logs"), str(SCRIPT)]
    done = subprocess.run(
        elasticzero(*arguments, json.dumps(told)),
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 64, done.stderr
    assert f"{tmp_path}/hfs is empty or does not exist" in done.stderr
    assert "Traceback" not in done.stderr
