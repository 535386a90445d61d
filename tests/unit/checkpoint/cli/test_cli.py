"""The checkpoint commands as a person or a script calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.format.layout import Group, Layout, TensorSpec
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.checkpoint.steps.catalog import read_manifest
from elasticzero.checkpoint.steps.tag_files import write_tag
from elasticzero.checkpoint.storage.disk import DiskDirectory, DiskStorage
from elasticzero.cli.main import main as launcher_main
from elasticzero.text import READER_GONE
from tests.unit.checkpoint.cases import draft_of, elements, flip, simple_layout, write_step

LAYOUT = simple_layout()
CONTENTS = elements(LAYOUT.tensors)
STEP_20 = "{}/ckpt/" + step_directory(20)
RANK_0 = f"{STEP_20}/{draft_of(LAYOUT).file_name(0)}"
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint directory with steps 10 and 20."""
    for step in (10, 20):
        write_step(tmp_path / "ckpt", draft_of(LAYOUT, step=step), CONTENTS)
    return tmp_path / "ckpt"


Output = pytest.CaptureFixture[str]


def damage(directory: Path, step: int) -> str:
    name = draft_of(LAYOUT).file_name(1)
    flip(directory / step_directory(step) / name, -1)
    return name


def test_list(directory: Path, capsys: Output) -> None:
    os.truncate(directory / step_directory(20) / draft_of(LAYOUT).file_name(0), 3)
    (directory / step_directory(30)).mkdir()
    assert main(["list", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "written", "generation"]
    assert lines[1].startswith("20 ") and "DAMAGED: " in lines[1] and "has 3 bytes" in lines[1]
    assert lines[2].startswith("10 ") and lines[2].endswith("whole")
    assert lines[3].startswith("step-000000000030: never committed")


def test_list_for_scripts(directory: Path, capsys: Output) -> None:
    assert main(["list", "--json", str(directory)]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in value["steps"]] == [20, 10]
    assert all(step["whole"] and step["ranks"] == 2 for step in value["steps"])
    assert value["uncommitted"] == []


def test_tags_are_listed_and_name_steps(directory: Path, capsys: Output) -> None:
    for tag in ("best", "small"):
        write_tag(DiskDirectory(directory), tag, 10)
    assert main(["list", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["tags", "state"]
    assert lines[1].split()[-2:] == ["-", "whole"]
    assert lines[2].split()[-3:] == ["best,", "small", "whole"]
    assert main(["list", "--json", str(directory)]) == 0
    listed = json.loads(capsys.readouterr().out)["steps"]
    assert [step["tags"] for step in listed] == [[], ["best", "small"]]
    for path in (directory / "tags" / "best", directory / step_directory(10)):
        assert main(["inspect", str(path)]) == 0
        assert "tags        best, small" in capsys.readouterr().out
        assert main(["inspect", "--json", str(path)]) == 0
        assert json.loads(capsys.readouterr().out)["tags"] == ["best", "small"]


def test_commands_take_a_tag_for_its_step(directory: Path, capsys: Output) -> None:
    write_tag(DiskDirectory(directory), "best", 10)
    damage(directory, 20)
    tag, target = str(directory / "tags" / "best.json"), str(directory.parent / "new")
    assert main(["verify", tag]) == 0
    assert capsys.readouterr().out == f"{directory / step_directory(10)}: good\n"
    assert main(["verify", str(directory)]) == 70
    assert main(["reshard", tag, target, "--world-size", "1", "-q"]) == 0
    assert main(["diff", tag, target, "-q"]) == 0
    assert "the same" in capsys.readouterr().out


def test_a_damaged_tag_is_said_and_the_rest_is_listed(directory: Path, capsys: Output) -> None:
    write_tag(DiskDirectory(directory), "best", 10)
    (directory / "tags" / "other.json").write_text("{")
    assert main(["list", str(directory)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and " best " in out
    assert err.startswith(f"warning: {directory}/tags/other.json is damaged: ")


def test_list_of_nothing(tmp_path: Path, capsys: Output) -> None:
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no checkpoint\n"


def test_inspect(directory: Path, capsys: Output) -> None:
    assert main(["inspect", str(directory)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["step"] == ["step", "20"]
    assert rows["generation"] == ["generation", "3", "(token", "token)"]
    assert rows["strategy"] == ["strategy", "zero2"]
    assert rows["world"] == ["world", "2", "ranks"]
    assert rows["tensors"] == ["tensors", "3,", "15.6", "KiB"]
    assert rows["written"][-2:] == ["just", "now"]
    assert rows["health"][1] == "whole"
    assert rows["state"][1] == "epoch"
    assert rows["1"] == ["1", "11.8", "KiB", draft_of(LAYOUT).file_name(1)]
    assert rows["model/w"] == ["model/w", "F64", "100x10", "7.8", "KiB", "even"]
    assert rows["optimizer/w/step"] == ["optimizer/w/step", "F32", "scalar", "4", "B", "rank", "0"]
    assert rows["model"] == ["model", "2", "15.6", "KiB"]


def test_inspect_for_scripts(directory: Path, capsys: Output) -> None:
    assert main(["inspect", "--json", str(directory / step_directory(10))]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["step"], value["state"]) == (10, {"epoch": 1})
    assert value["layout"]["tensors"]["model/w"] == {"dtype": "F64", "shape": [100, 10]}


def test_verify_good(directory: Path, capsys: Output) -> None:
    assert main(["verify", str(directory)]) == 0
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == ["good"] * 2


def test_verify_names_each_bad_file_and_range_of_every_step(
    directory: Path, capsys: Output
) -> None:
    name = damage(directory, 10)
    size = (directory / step_directory(10) / name).stat().st_size
    DiskStorage(directory / step_directory(20)).remove(name)
    assert main(["verify", str(directory)]) == 70
    lines = capsys.readouterr().out.splitlines()
    newer, older = (directory / step_directory(step) for step in (20, 10))
    assert lines[0] == f"{newer}: DAMAGED"
    assert lines[1].startswith(f"  {name}: ") and "is missing" in lines[1]
    assert lines[2:] == [
        f"{older}: DAMAGED",
        f"  {name}: bytes 0 to {size}: not what was written, or missing",
    ]


def test_verify_one_step_and_for_scripts(directory: Path, capsys: Output) -> None:
    name = damage(directory, 10)
    assert main(["verify", str(directory / step_directory(20))]) == 0
    capsys.readouterr()
    assert main(["verify", "--json", str(directory / step_directory(10))]) == 70
    (step,) = json.loads(capsys.readouterr().out)
    assert not step["good"]
    assert [(fault["file"], fault["start"]) for fault in step["faults"]] == [(name, 0)]


def test_verify_a_manifest_that_is_none(directory: Path, capsys: Output) -> None:
    (directory / step_directory(20) / "manifest.json").write_text("{}")
    assert main(["verify", str(directory)]) == 70
    assert "  manifest.json: " in capsys.readouterr().out


def test_reshard(directory: Path, tmp_path: Path, capsys: Output) -> None:
    target = str(tmp_path / "new")
    order = ["reshard", str(directory), target, "--world-size", "3", "--strategy", "zero3"]
    assert main(order) == 0
    step = Path(target) / step_directory(20)
    assert capsys.readouterr().out.startswith(f"{step}: 3 ranks")
    manifest = read_manifest(DiskStorage(step))
    assert (manifest.layout.world_size, manifest.strategy) == (3, "zero3")
    assert main(["verify", target]) == 0


def test_reshard_for_nodes_that_hold_everything(
    directory: Path, tmp_path: Path, capsys: Output
) -> None:
    order = ["reshard", str(directory), str(tmp_path / "new"), "--world-size", "4"]
    assert main([*order, "--strategy", "zero1", "--shard", "node", "--nodes", "2"]) == 0
    assert main(["verify", str(tmp_path / "new")]) == 0
    assert main(["diff", str(directory), str(tmp_path / "new")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "new")]) == 0
    expected = "world       4 ranks on 2 nodes, each of which had the whole state\n"
    assert expected in capsys.readouterr().out


def test_one_rank_is_one_rank(directory: Path, tmp_path: Path, capsys: Output) -> None:
    target = str(tmp_path / "one")
    assert main(["reshard", str(directory), target, "--world-size", "1"]) == 0
    assert main(["inspect", target]) == 0
    out = capsys.readouterr().out
    assert ": 1 rank, " in out and "\nworld       1 rank\n" in out


def test_an_export_of_a_damaged_step_leaves_nothing(
    directory: Path, tmp_path: Path, capsys: Output
) -> None:
    damage(directory, 20)
    order = ["export", str(directory), str(tmp_path / "hf"), "--max-shard-size", "8KB"]
    assert main(order) == 70
    assert "not what was written" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    assert main(order) == 70
    assert os.listdir(tmp_path / "hf") == []


def test_export(directory: Path, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "hf"
    order = ["export", str(directory), str(target), "--format", "hf", "--max-shard-size", "8KB"]
    assert main(order) == 0
    told, needed = capsys.readouterr().out.splitlines()
    assert "2 tensors, 15.6 KiB, in 2 files" in told
    assert "config.json (model.config.save_pretrained, or --config FILE)" in needed
    assert "for from_pretrained" in needed and "tokenizer" in needed
    read = safetensors.numpy.load_file(target / "model-00001-of-00002.safetensors")
    assert read["w"].tobytes() == CONTENTS["model/w"]


@pytest.mark.parametrize(
    ("order", "code", "complaint"),
    [
        (["list", "{}/nowhere"], 64, "does not exist"),
        (["inspect", "{}/nowhere"], 64, "does not exist"),
        (["verify", "{}/nowhere"], 64, "does not exist"),
        (["verify", "{}"], 64, "holds no checkpoint"),
        (["inspect", "nonsense://bucket/x"], 64, "no place that fsspec knows"),
        (["reshard", "{}", "{}/new", "--world-size", "2"], 64, "holds no checkpoint"),
        (["reshard", "{}/ckpt", "{}/new", "--world-size", "0"], 64, "0 ranks"),
        (["reshard", "{}/ckpt", "{}/ckpt", "--world-size", "1"], 64, "its own directory"),
        (["reshard", "{}/ckpt", "{}/new", "--world-size", "1" + "0" * 20], 64, "give 1 to 100000"),
        (
            ["reshard", "{}/ckpt", "{}/ckpt/step-000000000020/x", "--world-size", "1"],
            64,
            "lies in a step's directory (step-000000000020)",
        ),
        (["list", "{}/ckpt/step-000000000020"], 64, "is one step: list {}/ckpt, or look at"),
        (["list", "{}/ckpt/step-000000000020/"], 64, "is one step"),
        (["export", "{}/ckpt", "{}/ckpt"], 64, "{}/ckpt is a checkpoint directory"),
        (["export", "{}/ckpt", "{}/ckpt/hf"], 64, "{}/ckpt is a checkpoint directory"),
        (["export", "{}/ckpt", "{}/ckpt/hf", "--format", "dcp"], 64, "is a checkpoint directory"),
        (["export", "{}/ckpt", "{}/ckpt/step-000000000020/x"], 64, "lies in a step's directory"),
        (["export", "{}/ckpt", "{}/x", "--config", "{}/no"], 64, "cannot be read: No such file"),
        (["export", "{}/ckpt", "{}/x", "--what", "all"], 64, "--what all is not for --format hf"),
        (
            ["export", "{}/ckpt", "{}/x", "--format", "dcp", "--max-shard-size", "1GB"],
            64,
            "--max-shard-size is not for --format dcp",
        ),
        (["import", "{}", "{}/x", "--format", "hf"], 64, "holds no safetensors files"),
        (["import", "{}", "{}/x", "--format", "dcp"], 64, ".metadata does not exist"),
        (["import", "{}/no", "{}/x", "--format", "hf"], 64, "{}/no is empty or does not exist"),
        (["import", "{}/no", "{}/x", "--format", "dcp"], 64, "{}/no is empty or does not exist"),
        (["import", "{}/ckpt", "{}/x", "--format", "hf"], 64, "no import is needed"),
        (["import", "{}/ckpt", "{}/x", "--format", "dcp"], 64, "no import is needed"),
        (["import", STEP_20, "{}/x", "--format", "hf"], 64, "no import is needed"),
        (["import", RANK_0, "{}/x", "--format", "hf"], 64, "is one rank's part of"),
        (["diff", "{}/ckpt", "{}/nowhere"], 64, "does not exist"),
        (["diff", "{}/ckpt", "{}/ckpt", "--buffer-size", "1KB"], 64, "too small"),
    ],
)
def test_bad_input_is_one_line_and_a_code(
    directory: Path, capsys: Output, order: list[str], code: int, complaint: str
) -> None:
    where = str(directory.parent)
    assert main([part.format(where) for part in order]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and complaint.format(where) in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("size", ["", "x", "0", "5XB", "iB", "-1GB"])
def test_a_size_that_is_none(directory: Path, capsys: Output, size: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["export", str(directory), "new", f"--max-shard-size={size}"])
    assert caught.value.code == 2
    assert "size" in capsys.readouterr().err


def test_reshard_for_scripts_and_again(directory: Path, tmp_path: Path, capsys: Output) -> None:
    order = ["reshard", str(directory), str(tmp_path / "new"), "--world-size", "3", "--json", "-q"]
    order += ["--buffer-size", "8MiB", "--workers", "2"]
    for already in (False, True):
        assert main(order) == 0
        output = capsys.readouterr()
        told = json.loads(output.out)
        assert (told["step"], told["world_size"], told["already"]) == (20, 3, already)
        assert told["where"] == str(tmp_path / "new" / step_directory(20))
        assert output.err == ""
    assert main(order[:5]) == 0
    assert capsys.readouterr().out.endswith("(it existed already)\n")


def test_diff(directory: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["reshard", str(directory), str(tmp_path / "b"), "--world-size", "5"]) == 0
    capsys.readouterr()
    assert main(["diff", str(directory), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("the same: 3 tensors, in ")
    spoiled = CONTENTS | {"model/b": b"x" * 8 + CONTENTS["model/b"][8:]}
    write_step(tmp_path / "c", draft_of(LAYOUT, step=20, state={"epoch": 2}), spoiled)
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "c")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "model/b: 1 of 1000 elements differ, the first at index 0",
        "state differs: epoch",
        "different; 2 tensors are the same",
    ]
    assert main(["diff", "--json", str(tmp_path / "b"), str(tmp_path / "c")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["state"]) == (False, ["epoch"])
    assert told["tensors"] == [{"name": "model/b", "first": 0, "count": 1, "of": 1000}]


def test_import(directory: Path, tmp_path: Path, capsys: Output) -> None:
    hf, target = str(tmp_path / "hf"), str(tmp_path / "new")
    assert main(["export", str(directory), hf, "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["model.safetensors"]
    order = ["import", hf, target, "--format", "hf", "--world-size", "2", "--strategy", "zero3"]
    assert main([*order, "--step", "5"]) == 0
    where = Path(target) / step_directory(5)
    line = f"{where}: 2 ranks, 23.6 KiB, from {hf}\n"
    assert capsys.readouterr().out == line + "2 tensors, 0 values of state, 0 left out\n"
    assert main(["diff", "--model-only", target, str(directory)]) == 0


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_file_for_a_directory_names_the_format(tmp_path: Path, capsys: Output, kind: str) -> None:
    (tmp_path / "m.pt").touch()
    order = ["import", str(tmp_path / "m.pt"), str(tmp_path / "new"), "--format", kind]
    assert main(order) == 64
    assert "m.pt is a file, and --format" in (error := capsys.readouterr().err)
    assert "--format torch reads a file of torch.save" in error


def test_torchs_own_format(directory: Path, tmp_path: Path, capsys: Output) -> None:
    dcp, target = str(tmp_path / "dcp"), str(tmp_path / "new")
    assert main(["export", str(directory), dcp, "--format", "dcp", "--what", "all"]) == 0
    assert "3 tensors, 15.6 KiB, in 1 file, from" in capsys.readouterr().out
    assert main(["import", dcp, target, "--format", "dcp", "--world-size", "3"]) == 0
    assert main(["diff", str(directory), target]) == 0


def test_many_differences_are_summed_up(tmp_path: Path, capsys: Output) -> None:
    for name, count in (("a", 60), ("b", 30)):
        tensors = {f"model/{i:02d}": TensorSpec("U8", (2,)) for i in range(count)}
        layout = Layout(world_size=1, tensors=tensors, groups=(Group("even", tuple(tensors)),))
        write_step(tmp_path / name, draft_of(layout), elements(tensors))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["only in A: model/30", "only in A: model/31"]
    assert lines[-2:] == [
        "... and 10 more such lines (`--json` has all)",
        "different; 30 tensors are the same",
    ]


@pytest.mark.parametrize("alias", ["", "a", "=a", "a=", "a=a"])
def test_an_alias_that_is_none(capsys: Output, alias: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["import", "x", "y", "--format", "hf", f"--alias={alias}"])
    assert caught.value.code == 2
    assert "is not NAME=KEPT" in capsys.readouterr().err


def test_help_shows_every_command(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in ("list", "inspect", "verify", "reshard", "diff", "export", "import"):
        assert f"\n    {name} " in text


def test_no_command_at_all_names_them(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "{list,inspect,verify,reshard,diff,export,import}" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["-1", "1" + "0" * 18])
def test_a_step_that_none_can_have(
    directory: Path, tmp_path: Path, capsys: Output, step: str
) -> None:
    hf = str(tmp_path / "hf")
    assert main(["export", "-q", str(directory), hf]) == 0
    order = ["import", hf, str(tmp_path / "x"), "--format", "hf", f"--step={step}"]
    assert main(order) == 64
    assert f"step {step} must be between 0 and 9" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert main([*order[:-1], f"--step={10**18 - 1}", "-q"]) == 0
    assert main(["list", str(tmp_path / "x")]) == 0
    assert "999999999999999999" in capsys.readouterr().out


def test_sigterm_ends_a_command_as_ctrl_c_does(
    directory: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    write = DiskStorage.write

    def write_and_be_ended(self: DiskStorage, *args: Any, **kwargs: Any) -> None:
        write(self, *args, **kwargs)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(DiskStorage, "write", write_and_be_ended)
    with pytest.raises(SystemExit) as caught:
        main(["export", "-q", str(directory), str(tmp_path / "hf")])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing of the export is left\n"
    assert not (tmp_path / "hf").exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_no_command_imports_torch(directory: Path, tmp_path: Path) -> None:
    orders = [
        ["list", str(directory)],
        ["inspect", str(directory)],
        ["verify", str(directory)],
        ["reshard", str(directory), str(tmp_path / "new"), "--world-size", "3"],
        ["export", str(directory), str(tmp_path / "hf")],
        ["import", str(tmp_path / "hf"), str(tmp_path / "back"), "--format", "hf"],
        ["diff", str(directory), str(tmp_path / "new")],
    ]
    script = (
        "import sys; from elasticzero.checkpoint.cli.main import main\n"
        f"codes = [main(order) for order in {orders!r}]\n"
        "assert codes == [0] * 7, codes\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


NOT_FOR_A_LOOK = (
    "elasticzero.cli.commands",
    "elasticzero.launcher.cli.commands",
    "elasticzero.ops.cli.commands",
    "elasticzero.launcher.options.table",
    "elasticzero.checkpoint.cli.bulk",
    "elasticzero.checkpoint.rewrite.step_copy",
    "asyncio",
    "concurrent.futures",
    "fsspec",
    "google.protobuf",
    "grpc",
    "importlib.metadata",
    "logging",
    "numpy",
    "prometheus_client",
    "ssl",
    "tempfile",
    "tenacity",
    "torch",
)
"""What takes long to import, and other commands need."""


@pytest.mark.parametrize("command", ["list", "inspect"])
def test_a_look_imports_only_what_it_needs(directory: Path, command: str) -> None:
    script = (
        "import sys; from elasticzero.cli.main import main\n"
        f"assert main(['checkpoint', {command!r}, {str(directory)!r}]) == 0\n"
        f"found = sys.modules.keys() & set({NOT_FOR_A_LOOK!r})\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_the_module_is_a_program(directory: Path) -> None:
    order = [sys.executable, "-m", "elasticzero.checkpoint.cli", "verify", str(directory)]
    damage(directory, 20)
    done = subprocess.run(order, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (70, "")


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_output_that_cannot_be_written_is_one_line(directory: Path, command: str) -> None:
    order = [sys.executable, "-m", "elasticzero.checkpoint.cli", command, str(directory)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            order, cwd=ROOT, timeout=60, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_a_reader_that_goes_away_ends_the_command_without_a_word(directory: Path) -> None:
    """As `… | head` does; and not by the signal, which a broken connection would raise too."""
    order = [sys.executable, "-m", "elasticzero.checkpoint.cli", "list", str(directory)]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        order, cwd=ROOT, timeout=60, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def test_commands_leave_the_handling_of_broken_pipes_alone(directory: Path) -> None:
    """With SIGPIPE's default action the first connection that breaks ends the process."""
    before = signal.getsignal(signal.SIGPIPE)
    launcher_main(["checkpoint", "list", str(directory)])
    assert signal.getsignal(signal.SIGPIPE) is before is signal.SIG_IGN


def test_the_package_is_not_imported_under_its_bare_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import checkpoint"],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert "import this package as elasticzero.checkpoint" in done.stderr
