"""The command `plan`: its table, its JSON, and its errors."""

from __future__ import annotations

import json

import pytest

from elasticzero.cli.main import main


def test_the_table_names_the_first_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7e9", "--nodes", "8", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert "64 ranks" in out
    divided = [[name, shard] for name in ("zero1", "zero2", "zero3") for shard in ("world", "node")]
    assert [line.split()[:2] for line in out.splitlines()[4:11]] == [["ddp", "-"], *divided]
    assert "zero2 is the first that fits" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [],
            "Assumed: parameters, gradients and optimizer state in fp32 (--dtype), the forward in "
            'bf16 (--precision, session.prepare(…, precision="bf16")).',
        ),
        (
            ["--precision", "fp32"],
            "Assumed: parameters, gradients and optimizer state in fp32 (--dtype), the forward too "
            "(--precision).",
        ),
        (
            ["--dtype", "bf16"],
            "Assumed: parameters and gradients in bf16 (--dtype), with masters and optimizer state "
            "in fp32. ddp keeps no masters, so that small updates are lost: it is no first choice.",
        ),
    ],
    ids=["by default", "fp32", "16-bit parameters"],
)
def test_the_plan_says_what_it_assumes(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--params", "1e9", *options]) == 0
    assert capsys.readouterr().out.splitlines()[1] == sentence


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("params", ["1e6", "1e9", "8e9", "20e9", "1e12"])
def test_no_first_choice_trains_in_16_bits_without_masters(
    params: str, precision: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice for 7 B parameters was ddp in bf16, which loses small updates."""
    sizes = ["--params", params, "--nodes", "2", "--gpus", "8"]
    assert main(["plan", *sizes, "--dtype", dtype, "--precision", precision, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    chosen = set(plan["first_that_fits"].values())
    rows = [row for row in plan["strategies"] if row["strategy"] in chosen]
    assert all(row["masters"] > 0 or dtype == "fp32" for row in rows)
    assert [row["lacks_masters"] for row in plan["strategies"]].count(True) == (dtype != "fp32")


def test_copies_for_a_forward_in_16_bits_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """zero3 gathers in 16 bits, and makes no copies besides."""

    def buffers(precision: str) -> dict[str, int]:
        sizes = ["--params", "1e9", "--gpus", "8", "--precision", precision]
        assert main(["plan", *sizes, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["strategies"]
        return {row["strategy"]: row["buffers"] for row in rows}

    same, copied = buffers("fp32"), buffers("bf16")
    copies = {name: copied[name] - same[name] for name in same}
    assert copies == {"ddp": 2 * 10**9, "zero1": 2 * 10**9, "zero2": 2 * 10**9, "zero3": 0}


def test_state_within_nodes_needs_what_one_node_needs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--params", "7e9", "--gpus", "8"]

    def totals(*options: str) -> dict[tuple[str, str | None], int]:
        assert main([*arguments, *options, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["strategies"]
        return {(row["strategy"], row["shard"]): row["total"] for row in rows}

    both, one = totals("--nodes", "4"), totals()
    for strategy in ("zero1", "zero2", "zero3"):
        assert both[strategy, "node"] == one[strategy, "world"] > both[strategy, "world"]
    assert both["ddp", None] == one["ddp", None]
    only = totals("--nodes", "4", "--shard", "node")
    assert only == {key: total for key, total in both.items() if key[1] != "world"}


def test_each_way_to_divide_has_a_first_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--params", "70e9", "--nodes", "8", "--gpus", "8"]
    assert main(arguments) == 0
    sentence = "The first that fits is zero3 with --shard world, none with --shard node."
    assert sentence in capsys.readouterr().out


def test_json_has_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--params", "7B", "--gpus", "8", "--gpu-memory", "40GB", "--json"]
    assert main([*arguments, "--dtype", "bf16"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["first_that_fits"] == {"world": "zero2"}
    ddp = plan["strategies"][0]
    assert (ddp["weights"], ddp["checkpoint"]) == (14 * 10**9, 42 * 10**9)


def test_state_in_host_memory_has_a_column_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--params", "70B", "--gpus", "8", "--cpu-offload", "--dtype", "bf16"]
    assert main(arguments) == 0
    heads, *rows = capsys.readouterr().out.splitlines()[3:8]
    assert "state in a node's RAM" in heads
    assert [row.split()[2] for row in rows][3:] == ["0"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["first_that_fits"] == {"world": "zero3"}
    whole, offloaded = plan["strategies"][2], plan["strategies"][3]
    assert whole["node_state"] == 0 and offloaded["total"] == offloaded["buffers"]
    assert offloaded["node_state"] == 70 * 10**9 * (2 + 4 + 2 + 8 + 4)


def test_a_strategy_that_refuses_the_optimizer_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--params", "7e9", "--gpus", "8", "--optimizer", "adamw8bit"]
    assert main(["plan", *arguments, "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[4:7]] == ["ddp", "zero1", "zero2"]
    assert "13.2 GiB" in out.splitlines()[4]
    assert "zero3 refuses adamw8bit, which packs its state by blocks" in out


def test_mirrors_have_a_column_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--params", "7B", "--nodes", "8", "--dtype", "fp32"]
    arguments += ["--redundancy", "mirror"]
    assert main(arguments) == 0
    assert "mirrors" in capsys.readouterr().out.splitlines()[3]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert [row["mirrors"] for row in rows] == [0, *3 * [14 * 10**9, 0]]


def test_a_model_that_no_strategy_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1e12"]) == 0
    assert "None fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--params", "many"],
        ["--params", "nan"],
        ["--params", "7B", "--nodes", "0"],
        ["--params", "7B", "--gpu-memory", "80 lakes"],
    ],
)
def test_bad_numbers_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 64
    assert arguments[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--params", "0"], "--params 0: a model has at least 1 parameter"),
        (["--params", "7B", "--frozen-params", "8B"], "--frozen-params 8e+09: the whole model has"),
        (["--params", "7B", "--layer-params", "8B"], "--layer-params 8e+09: the whole model has"),
        (["--params", "7B", "--outer-params", "8B"], "--outer-params 8e+09: the whole model has"),
        (["--params", "7B", "--gpu-memory", "80"], "--gpu-memory 80 B: activations and CUDA leave"),
        (["--params", "7B", "--activations", "90GiB"], "--gpu-memory 80.0 GiB: activations and CU"),
    ],
)
def test_numbers_that_make_no_plan_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 without a unit was 80 bytes, of which training state might take a negative number."""
    assert main(["plan", *arguments]) == 64
    output, error = capsys.readouterr()
    assert not output
    assert error.startswith(f"error: {text}")
