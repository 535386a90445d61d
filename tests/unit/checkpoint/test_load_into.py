"""What `load(into=…)` fills, and where `save` writes: rightly, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticzero import checkpoint
from elasticzero.checkpoint.cli.main import main
from elasticzero.errors import UserError

W = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "run", {"w": W, "c": torch.complex(W, W + 1)})
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.empty(2, 3, device="meta"), "w is on the meta device"),
        (torch.zeros(1, 3).expand(2, 3), "w has several elements in the same memory"),
        (torch.zeros(1).expand(2, 3), "w has several elements in the same memory"),
        (torch.zeros(4).as_strided((2, 3), (1, 1)), "w has several elements in the same memory"),
        (torch.nn.LazyLinear(2).weight, "w is a lazy parameter that is not initialized"),
        (torch.eye(2, 3).to_sparse(), "w is a tensor of layout torch.sparse_coo"),
    ],
)
def test_tensors_that_cannot_be_filled_are_refused(
    saved: Path, tensor: torch.Tensor, complaint: str
) -> None:
    """A meta tensor stayed as it was; an expanded one held the last element everywhere."""
    with pytest.raises(UserError, match=complaint):
        checkpoint.load(saved, {"w": tensor})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 2).t(),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(4, 3)[1:3],
        torch.zeros(2, 4, 3)[:, 1],
        torch.zeros(2, 3, requires_grad=True),
    ],
)
def test_views_without_overlap_are_filled(saved: Path, tensor: torch.Tensor) -> None:
    loaded = checkpoint.load(saved, {"w": tensor})
    assert loaded["w"] is tensor and torch.equal(tensor.detach(), W)


def test_conjugate_and_negative_views_are_saved_and_filled(tmp_path: Path) -> None:
    """They ended in torch's own error about `resolve_conj` or `resolve_neg`."""
    c = torch.complex(W, W + 1)
    checkpoint.save(tmp_path, {"conj": c.conj(), "neg": c.conj().imag, "array": W.numpy()[::-1]})
    loaded = checkpoint.load(tmp_path)
    assert torch.equal(loaded["conj"], c.conj().resolve_conj())
    assert torch.equal(loaded["neg"], -(W + 1))
    assert np.array_equal(loaded["array"], W.numpy()[::-1])
    into = {"conj": torch.zeros_like(c).conj(), "neg": torch.zeros_like(c).conj().imag}
    assert into["conj"].is_conj() and into["neg"].is_neg()
    checkpoint.load(tmp_path, into)
    assert torch.equal(into["conj"], c.conj()) and torch.equal(into["neg"], -(W + 1))


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("memory://", "names no place: give memory://DIRECTORY"),
        ("memory:///", "names no place"),
        ("s3://", "names no place: give s3://BUCKET/DIRECTORY"),
        ("s3:///run", "names no place"),
        ("gs://", "names no place"),
        ("file://", "names no directory"),
        ("s3:/bucket/run", "neither a path nor a URL: give s3://"),
        (Path("s3://bucket/run"), "neither a path nor a URL: give s3://"),
        ("memory:", "neither a path nor a URL"),
    ],
)
def test_urls_that_name_no_place_write_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any, complaint: str
) -> None:
    """Local directories called "memory:" and "s3:" were written."""
    monkeypatch.chdir(tmp_path)
    for work in (
        lambda: checkpoint.save(url, {"w": W}),
        lambda: checkpoint.load(url),
    ):
        with pytest.raises(UserError, match=complaint):
            work()
    assert os.listdir(tmp_path) == []


def test_a_file_url_with_a_question_mark_is_that_path(tmp_path: Path) -> None:
    """All from the question mark on was dropped, and another directory written."""
    checkpoint.save(f"file://{tmp_path}/what?", {"w": W})
    assert os.listdir(tmp_path) == ["what?"]


@pytest.mark.parametrize("place", ["run/step-000000000009", "step-000000000001/below"])
def test_a_save_into_a_step_s_directory_is_refused(tmp_path: Path, place: str) -> None:
    """It was written, and no load found it."""
    with pytest.raises(UserError, match="lies in a step's directory"):
        checkpoint.save(tmp_path / place, {"w": W}, step=2)
    assert os.listdir(tmp_path) == []


def test_a_directory_of_other_files_is_refused_alike(tmp_path: Path, saved: Path) -> None:
    """`save` took it, `reshard` and `import` did not."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds other things \(thesis.tex\)"):
        checkpoint.save(foreign, {"w": W})
    assert main(["reshard", "-q", str(saved), str(foreign), "--world-size", "1"]) == 64
    assert os.listdir(foreign) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"w": torch.zeros([1] * 66)}, "w cannot be kept in a checkpoint: a shape has 66"),
        ({"w": torch.nn.LazyLinear(2).weight}, "w is a lazy parameter"),
        ({"w": W, "n": 10**5000}, "'n' is an integer of 16610 bits"),
        ({"w": W, "n": {10**5000: 1}}, "integer of 16610 bits"),
        ({"w": W, "d": torch.zeros(1, dtype=torch.complex128)}, "d cannot be kept in a checkpoint"),
    ],
)
def test_what_no_file_holds_is_refused_by_name(tmp_path: Path, value: Any, complaint: str) -> None:
    """Each ended in a traceback from within."""
    with pytest.raises(UserError, match=complaint):
        checkpoint.save(tmp_path, value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_state_is_kept_to_its_depth_and_refused_beyond(tmp_path: Path, kind: type) -> None:
    """900 levels ended in a RecursionError from within json."""

    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = {7: value} if kind is dict else kind([value])
        return value

    kept = {"w": W, "deep": nested(63)}
    checkpoint.save(tmp_path / "a", kept)
    assert checkpoint.load(tmp_path / "a")["deep"] == kept["deep"]
    assert main(["inspect", "--json", str(tmp_path / "a")]) == 0
    assert main(["diff", "-q", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    out = str(tmp_path / "out")
    assert main(["export", "-q", str(tmp_path / "a"), out, "--format", "dcp", "--what", "all"]) == 0
    assert main(["import", "-q", out, str(tmp_path / "b"), "--format", "dcp"]) == 0
    assert checkpoint.load(tmp_path / "b")["deep"] == kept["deep"]
    for depth in (64, 900, 100_000):
        with pytest.raises(UserError, match="nested too deep"):
            checkpoint.save(tmp_path / "c", {"w": W, "deep": nested(depth)})
    with pytest.raises(UserError, match="nested more than 200 deep"):
        checkpoint.save(tmp_path / "c", {"w": W}, state={"deep": nested(900)})
    assert not (tmp_path / "c").exists()
