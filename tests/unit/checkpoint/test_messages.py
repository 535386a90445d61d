"""What the checkpoint tools say where nothing is damaged, but something stood in the way."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.io.writer import TensorPiece, WriteResult, write_checkpoint
from elasticzero.checkpoint.steps import commit
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import CheckpointDamaged, ElasticZeroError
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget
from tests.unit.checkpoint.cases import draft_of, simple_layout

Output = pytest.CaptureFixture[str]
W = torch.arange(3000.0)


def test_the_loser_of_a_race_reports_the_other_save(tmp_path: Path) -> None:
    """The winner removes the loser's files, which was "No such file or directory"."""
    start = threading.Barrier(4, timeout=60)

    def save(number: int) -> str:
        start.wait()
        try:
            checkpoint.save(tmp_path, {"w": W + number}, step=1)
        except ElasticZeroError as error:
            return str(error)
        return "saved"

    for _ in range(8):
        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(save, range(4)))
        assert told.count("saved") == 1, told
        for text in set(told) - {"saved"}:
            assert "another save of this step came first" in text or "holds a checkpoint" in text
        assert checkpoint.load(tmp_path)["w"].shape == W.shape
        names = os.listdir(tmp_path / "step-000000000001")
        assert len(names) == 3, names
        shutil.rmtree(tmp_path / "step-000000000001")


def test_a_save_whose_files_the_winner_removed_is_not_an_error(tmp_path: Path) -> None:
    directory = DiskDirectory(tmp_path)
    draft = draft_of(simple_layout(world_size=1), token="mine")

    def pieces() -> Any:
        for name, span in draft.layout.spans(0).items():
            dtype = torch.float32 if name == "optimizer/w/step" else torch.float64
            yield TensorPiece(name, torch.ones(len(span), dtype=dtype))
        checkpoint.save(tmp_path, {"w": W}, step=draft.step)
        for path in (tmp_path / "step-000000000007").glob("*mine*"):
            path.unlink()

    written = write_checkpoint(directory, draft, 0, pieces())
    assert isinstance(written, WriteResult) and not written.committed
    assert commit.is_good(directory.step("step-000000000007"))


def test_a_step_removed_while_read_is_not_called_missing_files(tmp_path: Path) -> None:
    step = Path(checkpoint.save(tmp_path, {"w": W}, step=1))
    opened = open_step(DiskStorage(step))
    shutil.rmtree(step)
    with pytest.raises(CheckpointDamaged, match="the step was removed while it was read"):
        opened.load([LoadTarget("w", Span(0, 3000), torch.empty(3000))])


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2", "C128"])
def test_a_dtype_that_is_not_held_is_named(tmp_path: Path, capsys: Output, dtype: str) -> None:
    """`its header is wrong` was said of files that are right."""
    table = {"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}
    text = json.dumps(table).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0")
    source, target = str(tmp_path / "m.safetensors"), str(tmp_path / "new")
    assert main(["import", "-q", "--format", "hf", source, target]) == 64
    assert (
        f"tensor 'w' has the dtype {dtype}, which no checkpoint here can" in capsys.readouterr().err
    )
    assert not (tmp_path / "new").exists()


def test_export_says_under_which_names_and_what_is_not_converted(
    tmp_path: Path, capsys: Output
) -> None:
    small = torch.ones(4, dtype=torch.float8_e4m3fn)
    checkpoint.save(tmp_path / "run", {"model": {"w": W, "q": small}})
    for what, text in (("model", "those of model.state_dict()"), ("all", '"model"')):
        order = ["export", "-q", str(tmp_path / "run"), str(tmp_path / what), "--format", "dcp"]
        assert main([*order, "--what", what, "--dtype", "bf16"]) == 0
        printed = capsys.readouterr()
        assert text in printed.out
        assert (
            "--dtype bf16 leaves float8 and its scales as they are: 1 tensor, the first model/q"
            in printed.err
        )
