"""Checkpoints as DeepSpeed lays them out, written with torch.save and without DeepSpeed.

The layout is what DeepSpeed's zero_to_fp32.py and ds_to_universal.py document.
`make integrations` reads what the real package writes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticzero.checkpoint.api import load
from elasticzero.checkpoint.cli.main import main
from elasticzero.checkpoint.convert.import_plan import Import, ImportOptions
from elasticzero.checkpoint.convert.pickled.contents import name_contents
from elasticzero.checkpoint.convert.pickled.deepspeed import open_deepspeed
from elasticzero.errors import CheckpointDamaged, UserError
from tests.unit.checkpoint.convert.pickled.cases import spoil, written

Tensors = dict[str, torch.Tensor]


@dataclass
class fragment_address:
    numel: int
    start: int


class ZeroStageEnum(IntEnum):
    disabled, optimizer_states, gradients, weights = range(4)


class LossScaler:
    scale = 1.0


@pytest.fixture(autouse=True, scope="module")
def names_of_deepspeed() -> Iterator[None]:
    """Lets the classes above be pickled under DeepSpeed's names."""
    modules = {
        "deepspeed.utils.tensor_fragment": fragment_address,
        "deepspeed.runtime.zero.config": ZeroStageEnum,
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    }
    kept = dict(sys.modules)
    for name, kind in modules.items():
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:number]), ModuleType(".".join(parts[:number])))
        setattr(sys.modules[name], kind.__name__, kind)
        kind.__module__ = name
    yield
    for name in set(sys.modules) - set(kept):
        if name.startswith("deepspeed"):
            del sys.modules[name]


def read(path: Path, **options: Any) -> Import:
    return name_contents(open_deepspeed(str(path)), ImportOptions(**options))


def flattened(tensors: Sequence[torch.Tensor], padding: Sequence[int], ranks: int) -> Any:
    """Returns each rank's part of the vector of some tensors, as stages 1 and 2 have it."""
    pieces = [
        p for t, n in zip(tensors, padding, strict=True) for p in (t.reshape(-1), torch.zeros(n))
    ]
    flat = torch.cat(pieces)
    used = flat.numel()
    flat = torch.cat([flat, torch.zeros(-used % (2 * ranks))])
    parts = list(flat.chunk(ranks)) if flat.numel() else [flat] * ranks
    return [part.clone() for part in parts], flat.numel() - used


def partitioned(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Returns each rank's vector of its parts of some tensors, as stage 3 has it."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        size = ceil(tensor.numel() / ranks)
        padded = torch.cat([tensor.reshape(-1), torch.zeros(size * ranks - tensor.numel())])
        for rank in range(ranks):
            parts[rank].append(padded[rank * size : (rank + 1) * size])
    return [torch.cat(part) if part else torch.zeros(0) for part in parts]


class Job:
    """A job's state, and how DeepSpeed saves it."""

    def __init__(self, groups: Sequence[Sequence[tuple[int, ...]]], ranks: int) -> None:
        self.ranks = ranks
        self.groups: list[Tensors] = [
            {f"layer{g}.{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
            for g, shapes in enumerate(groups)
        ]
        self.parameters = {n: t for group in self.groups for n, t in group.items()}
        self.exp_avg = {n: torch.randn_like(t) for n, t in self.parameters.items()}
        self.frozen = {"frozen.weight": torch.randn(3, 5).bfloat16()}
        self.buffers = {"norm.running_mean": torch.randn(3)}
        self.param_groups = [
            {"lr": 0.1 + g, "betas": (0.9, 0.95), "params": [g]} for g in range(len(groups))
        ]

    def model_state(self, module: Tensors, **others: Any) -> dict[str, Any]:
        return {
            "module": {**module, **self.buffers},
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [{n: t.shape for n, t in group.items()} for group in self.groups],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {"head.weight": "layer0.0"},
            "lr_scheduler": {"last_batch_iteration": 6},
            "global_steps": 7,
            "ds_config": {"train_batch_size": 8},
            "mine": "kept",
            **others,
        }

    def save_flattened(self, path: Path, stage: int, *, alignment: int = 0, mode: str = "") -> None:
        """Saves as stages 1 and 2 do; `mode` is elastic or bf16."""
        path.mkdir(parents=True)
        half = {n: t.bfloat16() for n, t in self.parameters.items()}
        module = {**half, **self.frozen, "head.weight": half["layer0.0"]}
        torch.save(self.model_state(module), path / "mp_rank_00_model_states.pt")
        paddings = [[alignment] * len(group) for group in self.groups]
        vectors = [
            (
                flattened(list(group.values()), padding, self.ranks),
                flattened([self.exp_avg[n] for n in group], padding, self.ranks),
            )
            for group, padding in zip(self.groups, paddings, strict=True)
        ]
        for rank in range(self.ranks):
            last = rank == self.ranks - 1
            flat, base, mappings = [], [], []
            for group, padding, ((parts, extra), (averages, _)) in zip(
                self.groups, paddings, vectors, strict=True
            ):
                lean = parts[rank][: parts[rank].numel() - (extra if last else 0)]
                flat.append(lean)
                average = averages[rank][: lean.numel()] if mode == "elastic" else averages[rank]
                base.append({"step": torch.tensor(7.0), "exp_avg": average})
                size, start, mapping = parts[0].numel(), 0, {}
                for (name, tensor), after in zip(group.items(), padding, strict=True):
                    low = max(start, rank * size)
                    high = min(start + tensor.numel(), (rank + 1) * size)
                    if low < high:
                        mapping[name] = fragment_address(high - low, low - rank * size)
                    start += tensor.numel() + after
                mappings.append(mapping)
            state: Any = {"state": dict(enumerate(base)), "param_groups": self.param_groups}
            zero = {
                "loss_scaler": LossScaler(),
                "clip_grad": 0.0,
                "base_optimizer_state": base if mode == "elastic" else state,
                "single_partition_of_fp32_groups": flat,
                "zero_stage": ZeroStageEnum(stage),
                "partition_count": [self.ranks] * len(self.groups),
                "param_slice_mappings": mappings,
            }
            if alignment:
                zero["param_alignment_paddings"] = paddings
            prefix = "bf16_" if mode == "bf16" else ""
            torch.save(
                {"optimizer_state_dict": zero},
                path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )

    def save_partitioned(self, path: Path) -> None:
        """Saves as stage 3 does."""
        path.mkdir(parents=True)
        vectors = [partitioned(list(group.values()), self.ranks) for group in self.groups]
        averages = [partitioned([self.exp_avg[n] for n in g], self.ranks) for g in self.groups]
        frozen = {n: t.float() for n, t in self.frozen.items()}
        fragments = [
            {n: partitioned([t], self.ranks)[rank].bfloat16() for n, t in frozen.items()}
            for rank in range(self.ranks)
        ]
        for rank in range(self.ranks):
            module = {name: torch.empty(0) for name in (*self.parameters, *self.frozen)}
            state = self.model_state(
                module,
                frozen_param_shapes={n: t.shape for n, t in self.frozen.items()},
                frozen_param_fragments=fragments[rank],
            )
            torch.save(state, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            zero = {
                "zero_stage": ZeroStageEnum.weights,
                "loss_scaler": LossScaler(),
                "partition_count": self.ranks,
                "optimizer_state_dict": {
                    "state": {
                        g: {"step": torch.tensor(7.0), "exp_avg": average[rank]}
                        for g, average in enumerate(averages)
                    },
                    "param_groups": self.param_groups,
                },
                "fp32_flat_groups": [vector[rank] for vector in vectors],
            }
            torch.save(
                {"optimizer_state_dict": zero},
                path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )

    def save_universal(self, path: Path, *, flat: bool) -> None:
        """Saves as ds_to_universal.py does; `flat` as it does of stage 3."""
        (path / "zero").mkdir(parents=True)
        module = {**{n: t.bfloat16() for n, t in self.parameters.items()}, **self.frozen}
        frozen = {n: t.reshape(-1) for n, t in self.frozen.items()}
        others = {
            "frozen_param_shapes": {n: t.shape for n, t in self.frozen.items()},
            "frozen_param_fragments": frozen,
        }
        ranks = "zero_pp_rank_0_" if flat else ""
        torch.save(
            self.model_state(module, **(others if flat else {})),
            path / f"{ranks}mp_rank_00_model_states.pt",
        )
        for name, tensor in self.frozen.items():  # as with --inject_missing_state
            (path / "zero" / name).mkdir()
            torch.save({"param": tensor.float()}, path / "zero" / name / "fp32.pt")
        for name, tensor in self.parameters.items():
            (path / "zero" / name).mkdir()
            for kind, value in (("fp32", tensor), ("exp_avg", self.exp_avg[name])):
                saved = value.reshape(-1) if flat else {"param": value, "cat_dim": 0}
                torch.save(saved, path / "zero" / name / f"{kind}.pt")
            if not flat:
                torch.save(torch.tensor(7.0), path / "zero" / name / "step.pt")
        inner = {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": self.param_groups}
        groups: dict[str, Any] = {
            "param_groups": self.param_groups,
            "zero_stage": ZeroStageEnum.weights,
        }
        torch.save(
            groups | ({"optimizer_state_dict": inner} if flat else {}),
            path / "zero/optimizer_state.pt",
        )

    def check(self, seen: Import, target: Path, **shape: Any) -> None:
        """Checks that an import has the job's state."""
        state = seen.foreign.state
        assert seen.step == 7
        assert state["aliases"] == {"head.weight": "layer0.0"}
        back = load(written(seen, target, **shape))
        expected = {**self.parameters, **self.frozen, **self.buffers}
        assert back["model"].keys() == expected.keys()
        assert all(torch.equal(back["model"][n], t) for n, t in expected.items())
        for name, average in self.exp_avg.items():
            entries = back["optimizer"]["state"][name]
            assert torch.equal(entries["exp_avg"], average)
            assert torch.equal(entries["step"], torch.tensor(7.0))
            assert f"optimizer/{name}/exp_avg" in seen.foreign.specs
        assert (back["mine"], back["lr_scheduler"]) == ("kept", {"last_batch_iteration": 6})

    def check_groups(self, seen: Import) -> None:
        for group, stored in zip(self.groups, seen.foreign.state["groups"], strict=True):
            assert stored["names"] == list(group)
        assert seen.foreign.state["groups"][-1]["options"]["lr"] == 0.1 + len(self.groups) - 1


def job(ranks: int = 2) -> Job:
    torch.manual_seed(0)
    return Job([[(3, 5), (7,)], [(4,), (2, 3, 2), ()]], ranks)


SHAPES = st.lists(
    st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20)
@given(SHAPES, st.integers(1, 5), st.sampled_from(["1", "2", "elastic", "bf16", "aligned", "3"]))
def test_any_shapes_and_ranks_come_in_whole(
    shapes: list[list[tuple[int, ...]]], ranks: int, layout: str
) -> None:
    saved = Job(shapes, ranks)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "global_step7"
        if layout == "3":
            saved.save_partitioned(path)
        elif layout == "aligned":
            saved.save_flattened(path, 2, alignment=3)
        else:
            mode = layout if layout in ("elastic", "bf16") else ""
            saved.save_flattened(path, 2 if layout == "2" else 1, mode=mode)
        saved.check(read(path), Path(directory) / "run")


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["flattened", "partitioned", "universal"]))
def test_a_spoiled_file_is_refused_in_words(data: st.DataObject, layout: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "step"
        saved = job()
        match layout:
            case "flattened":
                saved.save_flattened(path, 1)
            case "partitioned":
                saved.save_partitioned(path)
            case _:
                saved.save_universal(path, flat=False)
        victim = data.draw(st.sampled_from(sorted(path.rglob("*.pt"))))
        victim.write_bytes(spoil(data, victim.read_bytes()))
        with suppress(UserError, CheckpointDamaged):
            written(read(path), Path(directory) / "run")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_of_zero(tmp_path: Path, stage: int) -> None:
    saved = job(3)
    if stage == 3:
        saved.save_partitioned(tmp_path / "out" / "global_step7")
    else:
        saved.save_flattened(tmp_path / "out" / "global_step7", stage)
    (tmp_path / "out" / "latest").write_text("global_step7\n")
    seen = read(tmp_path / "out")
    saved.check(seen, tmp_path / "run", strategy="zero3")
    saved.check_groups(seen)
    assert "optimizer_state_dict/loss_scaler" in {left.path for left in seen.left_out}


@pytest.mark.parametrize("flat", [False, True])
def test_a_universal_checkpoint(tmp_path: Path, flat: bool) -> None:
    saved = job()
    saved.save_universal(tmp_path / "universal", flat=flat)
    seen = read(tmp_path / "universal")
    saved.check(seen, tmp_path / "run")
    saved.check_groups(seen)


def test_a_step_in_the_group_goes_to_each_parameter(tmp_path: Path) -> None:
    """Apex' and DeepSpeed's own fused Adam keep it there."""
    saved = job()
    path = tmp_path / "global_step7"
    saved.param_groups = [{**group, "step": 7} for group in saved.param_groups]
    saved.save_flattened(path, 1)
    for file in path.glob("*optim_states.pt"):
        values = torch.load(file, weights_only=False)
        for entries in values["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            del entries["step"]
        torch.save(values, file)
    saved.check(read(path), tmp_path / "run")


def test_a_missing_or_changed_file_is_found(tmp_path: Path) -> None:
    saved = job(3)
    path = tmp_path / "global_step7"
    saved.save_flattened(path, 1)
    last = path / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    data = last.read_bytes()
    values = torch.load(last, weights_only=False)
    last.unlink()
    with pytest.raises(CheckpointDamaged, match="of 2 ranks, and 3 ranks have saved"):
        read(path)
    zero = values["optimizer_state_dict"]
    zero["param_slice_mappings"][0] = {"layer0.1": fragment_address(2, 0)}
    torch.save(values, last)
    with pytest.raises(CheckpointDamaged, match="lies elsewhere than the order of its group"):
        read(path)
    zero["param_slice_mappings"] = [{}, {}]
    zero["single_partition_of_fp32_groups"][0] = torch.zeros(1)
    torch.save(values, last)
    with pytest.raises(CheckpointDamaged, match=r"a vector of .* elements ends before"):
        read(path)
    zero["single_partition_of_fp32_groups"][0] = torch.zeros(40)
    torch.save(values, last)
    with pytest.raises(CheckpointDamaged, match="elements, and its parameters have"):
        read(path)
    last.write_bytes(data[:2000])
    with pytest.raises(CheckpointDamaged, match="is cut off or damaged"):
        read(path)
    (path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointDamaged, match="lacks the file of a rank"):
        read(path)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("mp_rank_01_model_states.pt", "of tensor parallelism: make a universal"),
        ("layer_01-model_states.pt", "of pipelines or experts: make a universal"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "of pipelines or experts"),
    ],
)
def test_other_parallelism_is_refused_by_name(tmp_path: Path, file: str, sentence: str) -> None:
    job().save_flattened(tmp_path / "step", 1)
    torch.save({}, tmp_path / "step" / file)
    with pytest.raises(UserError, match=sentence):
        read(tmp_path / "step")


def test_directories_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    torch.save({}, tmp_path / "a" / "x.pt")
    with pytest.raises(UserError, match="has no model states of DeepSpeed"):
        read(tmp_path / "a")
    (tmp_path / "a" / "latest").write_text("../b")
    with pytest.raises(CheckpointDamaged, match="names no directory"):
        read(tmp_path / "a")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job().save_flattened(tmp_path / "out", 1)
    order = ["import", "-q", str(tmp_path / "out"), str(tmp_path / "run"), "--format", "deepspeed"]
    assert main(order) == 0
    shown = capsys.readouterr()
    assert "step-000000000007" in shown.out
    assert "left out: optimizer_state_dict/loss_scaler" in shown.err
