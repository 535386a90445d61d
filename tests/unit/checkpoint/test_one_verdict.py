"""Whether a step is good: every tool says the same of every damage that a look can see."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticzero import checkpoint
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX
from elasticzero.checkpoint.io.reader import open_step
from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.steps.retention import RetentionPolicy, apply_retention
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.errors import ElasticZeroError, UserError
from elasticzero.launcher.snapshots.checkpoint_probe import CheckpointProbe
from elasticzero.spans import Span
from elasticzero.state.model import LoadTarget
from tests.unit.checkpoint.damage_cases import signed

STEP = "step-000000000020"
SAVED: dict[str, Any] = {
    "model": {"w": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)},
    "array": np.arange(4.0),
    "epoch": 1,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory with steps 10 and 20."""
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    for step in (10, 20):
        checkpoint.save(root, SAVED, step=step, state={"note": "n"})
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def shard(step: Path) -> Path:
    return next(step.glob("rank-*.safetensors"))


def sums(step: Path) -> Path:
    return next(step.glob(f"rank-*{SUMS_SUFFIX}"))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest that its digest vouches for."""

    def harm(step: Path) -> None:
        value = json.loads((step / MANIFEST_NAME).read_bytes())
        change(value)
        (step / MANIFEST_NAME).write_bytes(signed(value))

    return harm


def tree(value: Any) -> Callable[[Path], None]:
    return edited(lambda manifest: manifest["state"].update({"$tree": value}))


def longer(step: Path) -> None:
    with shard(step).open("ab") as file:
        file.write(b"\0")


def renamed(manifest: dict[str, Any], name: str) -> None:
    layout = manifest["layout"]
    layout["tensors"][name] = layout["tensors"].pop("model/w")
    for group in layout["groups"]:
        group["tensors"] = [
            name if tensor_name == "model/w" else tensor_name for tensor_name in group["tensors"]
        ]
    manifest["state"]["$tree"]["model"]["w"] = {"$tensor": name}


def replaced(find: Callable[[Path], Path], make: Callable[[Path], None]) -> Callable[[Path], None]:
    def harm(step: Path) -> None:
        path = find(step)
        path.unlink()
        make(path)

    return harm


def deep(manifest: dict[str, Any]) -> None:
    value: Any = 1
    for _ in range(900):
        value = [value]
    manifest["state"]["note"] = value


def manifest_of(step: Path) -> Path:
    return step / MANIFEST_NAME


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no digest": edited(lambda m: m["files"][0].update(digest=None)),
    "a shard one byte too long": longer,
    "a shard one byte too short": lambda s: os.truncate(shard(s), shard(s).stat().st_size - 1),
    "no shard": lambda s: shard(s).unlink(),
    "no checksums": lambda s: sums(s).unlink(),
    "an edited manifest": lambda s: manifest_of(s).write_bytes(
        manifest_of(s).read_bytes().replace(b'"epoch":1', b'"epoch":2')
    ),
    "a manifest cut off": lambda s: os.truncate(manifest_of(s), 100),
    "an empty manifest": lambda s: os.truncate(manifest_of(s), 0),
    "a manifest of another step": edited(lambda m: m.update(step=21)),
    "a nesting that is no dict": tree([1]),
    "a nesting of a tensor that is not there": tree({"w": {"$tensor": "v"}}),
    "a nesting with an unknown mark": tree({"w": {"$set": [1]}}),
    "a nesting with a key twice": tree({"$map": [[1, 2], [1, 3]]}),
    "a nesting with a key that is a list": tree({"$map": [[{"a": 1}, 2]]}),
    "a nesting with an array of bfloat16": tree({"w": {"$array": "model/b"}}),
    "a state nested too deep": edited(deep),
    "a name that is no Unicode": edited(lambda m: renamed(m, "model/\ud800")),
    "a name that safetensors takes": edited(lambda m: renamed(m, "__metadata__")),
    "a shard that is a pipe": replaced(shard, os.mkfifo),
    "checksums that are a pipe": replaced(sums, os.mkfifo),
    "a manifest that is a pipe": replaced(manifest_of, os.mkfifo),
    "a shard that is a directory": replaced(shard, os.mkdir),
    "a shard that is a device": replaced(shard, lambda p: p.symlink_to("/dev/zero")),
    "a manifest that is a device": replaced(manifest_of, lambda p: p.symlink_to("/dev/zero")),
}


def raises(work: Callable[[], object]) -> bool:
    try:
        work()
    except ElasticZeroError:
        return True
    return False


def command(*arguments: object) -> int:
    return main([str(word) for word in arguments])


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    assert command("list", "--json", root) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    return bool(next(row["whole"] for row in rows if row["step"] == 20))


def inspected(root: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    if command("inspect", "--json", root / STEP) != 0:
        return False
    return bool(json.loads(capsys.readouterr().out)["whole"])


def looked_at_by_an_agent(root: Path) -> bool:
    seen = threading.Event()
    look = CheckpointProbe(str(root), seen.set)
    look.poll({})
    assert seen.wait(60)
    return look.poll({}).step == 20


def read_by_a_session(root: Path) -> None:
    opened = open_step(DiskDirectory(root).step(STEP))
    for name, spec in opened.manifest.layout.tensors.items():
        dtype = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}[spec.dtype]
        out = torch.empty(spec.shape, dtype=dtype)
        opened.load([LoadTarget(name, Span(0, spec.numel), out)])


def counted_by_retention(root: Path) -> bool:
    """Of two good steps to keep, 30 and 20 are those exactly when 20 is good: then 10 goes."""
    checkpoint.save(root, SAVED, step=30)
    directory = DiskDirectory(root)
    apply_retention(
        directory,
        catalog.read_manifest(directory.step("step-000000000030")),
        RetentionPolicy(last=2),
    )
    return not (root / "step-000000000010" / MANIFEST_NAME).exists()


def verdicts(root: Path, aside: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, bool]:
    """Whether each tool takes step 20 for good."""
    step = root / STEP
    export = ("export", "-q", step)
    copies = [
        shutil.copytree(root, aside / name, symlinks=True, copy_function=same) for name in "ab"
    ]
    return {
        "fault": catalog.step_error_text(DiskStorage(step)) is None,
        "newest_good": catalog.newest_good(DiskDirectory(root)) == 20,
        "resolve": catalog.resolve(root).where == str(step),
        "list": listed(root, capsys),
        "inspect": inspected(root, capsys),
        "verify": command("verify", step) == 0,
        "verify of all": command("verify", root) == 0,
        "reshard": command("reshard", "-q", step, aside / "c", "--world-size", 2) == 0,
        "diff": command("diff", "-q", step, step) == 0,
        "export hf": command(*export, aside / "hf") == 0,
        "export torch": command(*export, aside / "all.pt", "--format", "torch", "--what", "all")
        == 0,
        "export dcp": command(*export, aside / "dcp", "--format", "dcp", "--what", "all") == 0,
        "load": not raises(lambda: checkpoint.load(step)),
        "load into": not raises(lambda: checkpoint.load(step, {"model/b": SAVED["model"]["b"]})),
        "load_state": not raises(lambda: checkpoint.load_state(step)),
        "an agent": looked_at_by_an_agent(root),
        "a session": not raises(lambda: read_by_a_session(root)),
        "save": raises(lambda: checkpoint.save(copies[0], SAVED, step=20)),
        "retention": counted_by_retention(Path(copies[1])),
    }


def same(source: str, target: str) -> None:
    """As `shutil.copy`, for pipes too."""
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy(source, target, follow_symlinks=False)


def test_a_good_step_is_good_for_every_tool(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_tool = verdicts(root, tmp_path, capsys)
    assert all(by_tool.values()), by_tool


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_step_is_bad_for_every_tool(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """`verify` called a step good that `list` called damaged, and `reshard` took it."""
    DAMAGE[name](root / STEP)
    by_tool = verdicts(root, tmp_path, capsys)
    assert not any(by_tool.values()), [tool for tool, good in by_tool.items() if good]
    left = {path.name for path in tmp_path.iterdir()} - {"a", "b", "checkpoints"}
    assert all(not list((tmp_path / directory).rglob("*.*")) for directory in left), left


def plain_file(path: Path, name: str) -> Path:
    """A safetensors file with one tensor of that name."""
    table = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    return path


def test_an_import_refuses_a_name_that_is_no_unicode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It became a checkpoint whose rank files, and exports, no safetensors library opened."""
    source = plain_file(tmp_path / "model.safetensors", "w\ud800")
    order = ["import", "-q", "--format", "hf", str(source), str(tmp_path / "new")]
    assert main(order) == 64
    assert r"'model/w\ud800'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_export_refuses_a_name_that_safetensors_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its prefix the name is safetensors' own, and the file could not be opened."""
    checkpoint.save(tmp_path / "run", {"model/__metadata__": torch.ones(2)})
    assert main(["export", "-q", str(tmp_path / "run"), str(tmp_path / "hf")]) == 64
    assert "'__metadata__'" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_conversion_that_arrays_do_not_have_is_refused(tmp_path: Path) -> None:
    """numpy has no bfloat16: the resharded step could not have been loaded."""
    checkpoint.save(tmp_path / "run", {"model/w": torch.ones(2), "model/a": np.ones(3)})
    order = ["reshard", "-q", str(tmp_path / "run"), str(tmp_path / "new"), "--world-size", "1"]
    assert main([*order, "--dtype", "bf16"]) == 64
    assert not (tmp_path / "new").exists() or os.listdir(tmp_path / "new") == []


def test_state_whose_keys_become_one_is_refused(tmp_path: Path) -> None:
    """JSON has string keys only: one of the two values would be lost."""
    with pytest.raises(UserError, match="the key '1' appears twice"):
        checkpoint.save(tmp_path, {"w": torch.ones(1)}, state={"x": {1: "a", "1": "b"}})
    assert os.listdir(tmp_path) == []
