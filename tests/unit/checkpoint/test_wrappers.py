"""Tensors that wrap others come back through their inner tensors, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from elasticzero import checkpoint
from elasticzero.checkpoint.cli.main import main
from elasticzero.errors import CheckpointMismatch, UserError
from elasticzero.nested import flatten
from elasticzero.state.model import NamedModel


class Unknown(torch.Tensor):
    """Wraps codes and scales, and does not say so."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, bits: int = 8) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor, bits: int = 8) -> None:
        self.codes, self.scale, self.bits = codes, scale, bits

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale, args[0].bits)
        raise NotImplementedError(str(func))


class Quantized(Unknown):
    """Wraps them as torchao and quanto do."""

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], {"bits": self.bits, "device": torch.device("cpu")}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], context["bits"])


class Copying(Quantized):
    """Gives a copy of its codes."""

    @property
    def codes(self) -> Tensor:
        return self._codes.clone()

    @codes.setter
    def codes(self, value: Tensor) -> None:
        self._codes = value


def quantized(value: int = 3, kind: Any = Quantized, **options: Any) -> Any:
    codes = torch.full((2, 3), value, dtype=torch.int8)
    return kind(codes, torch.full((2,), value / 2), **options)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("as_parameter", [False, True])
def test_a_wrapper_is_filled_in_place(tmp_path: Path, as_parameter: bool) -> None:
    def made(value: int) -> Any:
        wrapper = quantized(value)
        return nn.Parameter(wrapper, requires_grad=False) if as_parameter else wrapper

    nested = {"model": {"w": made(3), "b": torch.ones(2)}, "list": [made(4), (made(5), 7)]}
    checkpoint.save(tmp_path, nested)
    into: Any = {
        "model": {"w": made(0), "b": torch.zeros(2)},
        "list": [made(0), (made(0), 0)],
    }
    loaded = checkpoint.load(tmp_path, into=into)
    assert loaded["model"]["w"] is into["model"]["w"] and loaded["list"][0] is into["list"][0]
    assert same(loaded["model"]["w"], quantized(3)) and same(loaded["list"][0], quantized(4))
    assert same(loaded["list"][1][0], quantized(5)) and loaded["list"][1][1] == 7
    assert loaded["model"]["b"].tolist() == [1.0, 1.0]


def test_a_wrapper_at_the_root_and_a_wrapper_of_a_wrapper(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": Quantized(quantized(3), torch.ones(1))})
    into = {"w": Quantized(quantized(0), torch.zeros(1))}
    assert checkpoint.load(tmp_path, into=into)["w"] is into["w"]
    assert same(into["w"].codes, quantized(3)) and into["w"].scale.tolist() == [1.0]


def test_without_into_it_is_a_dict_of_its_inner_tensors(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": {"w": quantized()}}, state={"epoch": 3})
    loaded = checkpoint.load(tmp_path)["model"]["w"]
    assert loaded["codes"].dtype == torch.int8 and loaded["scale"].tolist() == [1.5, 1.5]
    assert checkpoint.load_state(tmp_path) == {"epoch": 3}
    assert main(["reshard", "-q", str(tmp_path), f"{tmp_path}2", "--world-size", "3"]) == 0
    into = {"model": {"w": quantized(0)}}
    assert same(checkpoint.load(f"{tmp_path}2", into=into)["model"]["w"], quantized())


@pytest.mark.parametrize("other", [{"bits": 4}, {"kind": type("Other", (Quantized,), {})}])
def test_another_class_or_other_options_are_refused(tmp_path: Path, other: Any) -> None:
    checkpoint.save(tmp_path, {"w": quantized()})
    into = quantized(0, **other)
    with pytest.raises(CheckpointMismatch, match=r"'w' was saved as .*Quantized of \[2, 3\], "):
        checkpoint.load(tmp_path, into={"w": into})
    assert same(into, quantized(0))


def test_unknown_wrappers_are_refused_and_no_directory_is_left(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    cases = [
        (quantized(kind=Unknown), "'model/w' is a Unknown, which has no memory of its own and"),
        (fake, "'model/w' is a FakeTensor, which has no memory of its own"),
        (quantized(kind=Copying), "'model/w' is a Copying that gives a copy of its 'codes'"),
    ]
    for value, message in cases:
        with pytest.raises(UserError, match=message):
            checkpoint.save(tmp_path / "run", {"model": {"w": value, "b": torch.ones(2)}})
        assert not (tmp_path / "run").exists()
    checkpoint.save(tmp_path / "plain", {"model": {"w": torch.ones(2, 3)}})
    for value, message in cases:
        with pytest.raises(UserError, match=message):
            checkpoint.load(tmp_path / "plain", into={"model": {"w": value}})


def test_plain_subclasses_are_plain(tmp_path: Path) -> None:
    class Plain(torch.Tensor):
        pass

    checkpoint.save(
        tmp_path, {"w": torch.ones(3).as_subclass(Plain), "e": nn.Buffer(torch.ones(1))}
    )
    into = {"w": torch.zeros(3).as_subclass(Plain)}
    assert checkpoint.load(tmp_path, into=into)["w"].tolist() == [1.0] * 3


def test_sessions_refuse_wrappers_by_name() -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(quantized(), requires_grad=False)
    with pytest.raises(UserError, match="parameter 'weight' is a Quantized, which has no memory"):
        NamedModel(model)
    with pytest.raises(UserError, match=r"'tracked/ema' is a Quantized, .* which is refused here"):
        flatten({"ema": quantized()}, "tracked", {})
