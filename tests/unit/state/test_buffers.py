"""Buffers are found, copied and put back as modules have them at that moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticzero.errors import UserError
from elasticzero.state.buffers import BufferCopy, ModelBuffers, unfold_buffers
from elasticzero.state.model import NamedModel


class Keeper(nn.Module):
    saved: Tensor
    late: Tensor | None
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("saved", torch.zeros(3))
        self.register_buffer("late", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def values(copy: BufferCopy) -> dict[str, list[Any]]:
    return {name: [tensor.dtype, tensor.tolist()] for name, tensor in copy.values.items()}


def add_one(tensor: Tensor) -> None:
    if tensor.stride() != (0,):  # torch changes no expanded one in place
        tensor.add_(1)


CHANGES: dict[str, Any] = {
    "in place": lambda m: add_one(m.saved),
    "through data": lambda m: add_one(m.saved.data),
    "replaced": lambda m: setattr(m, "saved", m.saved + 1),
    "longer": lambda m: setattr(m, "saved", torch.cat([m.saved, torch.ones(1)])),
    "wider": lambda m: setattr(m, "saved", m.saved.real.double() + 1),
    "expanded": lambda m: setattr(m, "saved", torch.ones(1).expand(3)),
    "a view": lambda m: setattr(m, "saved", torch.arange(6.0)[::2]),
    "with a graph": lambda m: setattr(m, "saved", nn.Parameter(torch.ones(3)) * 2),
    "complex": lambda m: setattr(m, "saved", (m.saved.to(torch.complex64) * 1j).conj()),
    "negated": lambda m: setattr(m, "saved", (m.saved.to(torch.complex64) * 1j).conj().imag),
    "set": lambda m: setattr(m, "late", torch.ones(2)),
    "unset": lambda m: setattr(m, "late", None),
    "tied": lambda m: setattr(m, "late", m.saved),
    "scratch in place": lambda m: m.scratch.add_(1),
    "scratch through data": lambda m: m.scratch.data.add_(1),
    "scratch replaced": lambda m: setattr(m, "scratch", m.scratch + 1),
}


@given(
    before=st.lists(st.sampled_from(list(CHANGES)), max_size=4),
    after=st.lists(st.sampled_from(list(CHANGES)), max_size=4),
)
def test_a_copy_comes_back_whatever_has_changed_since(before: list[str], after: list[str]) -> None:
    module = Keeper()
    buffers = ModelBuffers(module)
    buffers.begin()
    for change in before:
        CHANGES[change](module)
    copy = buffers.copy()
    kept, tied = values(copy), module.late is module.saved
    for change in after:
        CHANGES[change](module)
    assert values(copy) == kept, "a copy does not move with the model"
    buffers.put(copy)
    assert values(buffers.copy()) == kept
    assert (module.late is module.saved) == tied
    assert (module.late is None) == ("late" in copy.unset)


def test_a_buffer_keeps_its_memory_where_the_value_fits() -> None:
    module = Keeper()
    buffers, memory = ModelBuffers(module), module.saved.data_ptr()
    copy = buffers.copy()
    module.saved.add_(1)
    buffers.put(copy)
    assert module.saved.data_ptr() == memory and module.saved.tolist() == [0, 0, 0]


def test_what_is_not_saved_is_state_from_its_first_change_on() -> None:
    module = Keeper()
    buffers = ModelBuffers(module)
    module.scratch.add_(1)  # the script makes it anew
    buffers.begin()
    assert not buffers.copy().changed and list(buffers.state()) == ["saved"]
    buffers.put(buffers.copy())
    assert not buffers.copy().changed, "what is put back is no change"
    module.scratch.add_(1)
    assert buffers.copy().changed["scratch"].tolist() == [2, 2]
    assert sorted(buffers.state()) == ["saved", "scratch"]
    other = ModelBuffers(Keeper())
    other.begin(frozenset({"scratch"}))
    assert "scratch" in other.copy().changed, "a restored one stays state"


def test_a_buffer_that_is_registered_late_is_refused_if_it_would_be_saved() -> None:
    module = Keeper()
    buffers = ModelBuffers(module)
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    assert "cache" not in buffers.copy().values
    module.register_buffer("later", torch.zeros(1))
    with pytest.raises(UserError, match=r"buffer 'later' was registered after session.prepare"):
        buffers.copy()


def test_expanded_buffers_get_memory_of_their_own() -> None:
    module = Keeper()
    module.saved = torch.ones(1).expand(3)
    unfold_buffers(module)
    assert module.saved.stride() == (1,) and module.saved.tolist() == [1, 1, 1]


class Strange(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_that_cannot_be_kept_is_refused_by_name() -> None:
    NamedModel(nn.Sequential(Strange({"a": (1, torch.ones(2), None)})))
    with pytest.raises(UserError, match=r"get_extra_state of Strange .*'0._extra_state/a'"):
        NamedModel(nn.Sequential(Strange({"a": object()})))


def test_entries_that_a_module_adds_by_itself_are_refused_by_name() -> None:
    class Adds(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight.scale"] = torch.ones(1)

    def hook(_: nn.Module, state: dict[str, Tensor], prefix: str, __: Any) -> None:
        state[prefix + "weight.scale"] = torch.ones(1)

    hooked = nn.Linear(1, 1)
    hooked.register_state_dict_post_hook(lambda m, s, p, _: hook(m, s, p, None))
    for module in (Adds(1, 1), hooked):
        with pytest.raises(UserError, match=r"a Tensor under '0.weight.scale' that is no"):
            NamedModel(nn.Sequential(module))


def test_sparse_buffers_are_left_alone_or_refused() -> None:
    module = nn.Module()
    module.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
    ModelBuffers(module).begin()
    module.register_buffer("saved", torch.eye(2).to_sparse())
    with pytest.raises(UserError, match=r"buffer 'saved' is sparse"):
        ModelBuffers(module).begin()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_buffers_of_a_format_that_no_checkpoint_has_are_refused(dtype: torch.dtype) -> None:
    """One that the model does not save is left alone until it changes."""
    module = nn.Linear(1, 1)
    module.register_buffer("angles", torch.ones(2).to(dtype), persistent=False)
    buffers = NamedModel(module).buffers
    buffers.begin()
    buffers.copy()
    module.angles = torch.zeros(2).to(dtype)
    with pytest.raises(UserError, match=r"buffer 'angles' is of torch.complex.* complex64 alone"):
        buffers.copy()
    module.register_buffer("turns", torch.ones(2).to(dtype))
    with pytest.raises(UserError, match=r"buffer 'turns' is of torch.complex"):
        NamedModel(module)
    module.turns = torch.ones(2).to(torch.complex64)
    NamedModel(module)
