"""What `session.prepare` says of modules: sparse embeddings and batch statistics."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from elasticzero.errors import UserError
from elasticzero.spans import STRATEGIES
from elasticzero.training.module_checks import (
    batch_norm_note,
    check_modules,
    refuse_wrappers,
    watch_batch_norms,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_with_its_name_by_zero3_alone(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"words": kind(4, 2, sparse=True)})
    for strategy in set(STRATEGIES) - {"zero3"}:
        check_modules(model, strategy, CPU, alone=False)
    with pytest.raises(UserError, match="'words' is an embedding with sparse=True"):
        check_modules(model, "zero3", CPU, alone=True)


class Holder(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])


def test_zero3_needs_each_parameter_in_a_part_with_a_forward() -> None:
    model = Holder()
    check_modules(model, "zero3", CPU, alone=False)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    for strategy in set(STRATEGIES) - {"zero3"}:
        check_modules(model, strategy, CPU, alone=False)
    with pytest.raises(UserError, match="parameter 'scale' is in no part of the model with a"):
        check_modules(model, "zero3", CPU, alone=False)
    model.__dict__["forward"] = model.nets[0].forward
    check_modules(model, "zero3", CPU, alone=False)


def test_parts_of_a_model_without_forward_share_no_parameter_under_zero3() -> None:
    model = Holder()
    model.nets[1][0].weight = model.nets[0].weight  # type: ignore[index]
    check_modules(model, "zero2", CPU, alone=False)
    with pytest.raises(UserError, match=r"its parts 'nets\.0' and 'nets\.1' share a parameter"):
        check_modules(model, "zero3", CPU, alone=False)
    again = Holder()
    again.add_module("alias", again.nets[0])
    check_modules(again, "zero3", CPU, alone=False)


def test_a_synchronized_batch_norm_needs_a_gpu() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.raises(UserError, match="'0' is a SyncBatchNorm"):
        check_modules(model, "ddp", CPU, alone=False)
    check_modules(model, "ddp", CPU, alone=True)
    check_modules(model, "ddp", torch.device("cuda"), alone=False)


def test_batch_norm_is_named_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    note = batch_norm_note(model, CPU)
    assert note is not None
    assert "'0' and 1 more are BatchNorms: their" in note
    assert "GroupNorm" in note and "virtual_batch=" in note
    one = batch_norm_note(nn.Sequential(nn.BatchNorm1d(3)), CPU)
    assert one is not None and "'0' is a BatchNorm: its" in one
    assert "convert_sync_batchnorm" in (batch_norm_note(model, torch.device("cuda")) or "")


def test_other_models_have_no_note() -> None:
    assert batch_norm_note(nn.Sequential(nn.LayerNorm(3)), CPU) is None
    assert batch_norm_note(nn.Sequential(nn.SyncBatchNorm(3)), CPU) is None


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_is_refused_but_in_one_process(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"words": kind(4, 2, max_norm=1.0)})
    for strategy in set(STRATEGIES) - {"zero3"}:
        check_modules(model, strategy, CPU, alone=True)
        with pytest.raises(UserError, match="'words' is an embedding with max_norm="):
            check_modules(model, strategy, CPU, alone=False)
    with pytest.raises(UserError, match="'words' is an embedding with max_norm="):
        check_modules(model, "zero3", CPU, alone=True)


def test_a_wrapper_that_averages_gradients_again_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A DistributedDataParallel around the prepared model trained otherwise, in silence."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    refuse_wrappers(model)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", nn.Module.__init__)
    wrapper = nn.parallel.DistributedDataParallel()  # type: ignore[call-arg]
    with pytest.raises(UserError, match="average gradients once more"):
        wrapper.module = model
    wrapper.module = other
    nn.ModuleList([model])
    gc.collect()
    before = len(torch.nn.modules.module._global_module_registration_hooks)
    del model
    gc.collect()
    assert len(torch.nn.modules.module._global_module_registration_hooks) == before - 1


def test_parameters_in_one_memory_are_refused_where_they_are_laid_anew() -> None:
    there, back = nn.Linear(3, 2), nn.Linear(2, 3)
    model = nn.ModuleDict({"there": there, "back": back})
    back.weight.data = there.weight.data.t()
    check_modules(model, "ddp", CPU, alone=False)
    with pytest.raises(UserError, match=r"'back.weight' and 'there.weight' share memory"):
        check_modules(model, "zero1", CPU, alone=False)
    flat = torch.zeros(12)
    back.weight.data, there.weight.data = flat[:6].view(3, 2), flat[6:].view(2, 3)
    for strategy in STRATEGIES:
        check_modules(model, strategy, CPU, alone=False)


@pytest.mark.parametrize(
    ("norm", "shape", "refused"),
    [
        (nn.BatchNorm1d(3), (1, 3), True),
        (nn.BatchNorm1d(3), (2, 3), False),
        (nn.BatchNorm1d(3), (1, 3, 2), False),
        (nn.BatchNorm2d(3), (1, 3, 1, 1), True),
        (nn.BatchNorm2d(3), (1, 3, 2, 1), False),
        (nn.BatchNorm1d(3).eval(), (1, 3), False),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), (1, 3), True),
    ],
)
def test_a_batch_norm_of_one_value_is_refused_where_torch_fails(
    norm: nn.Module, shape: tuple[int, ...], refused: bool
) -> None:
    model = nn.ModuleDict({"norm": norm})
    values = torch.zeros(shape)
    if refused:
        with pytest.raises(ValueError, match="more than 1 value"):
            norm(values)
    watch_batch_norms(model)
    if not refused:
        norm(values)
        return
    with pytest.raises(UserError, match="'norm', a BatchNorm, has one value of each channel"):
        norm(values)
