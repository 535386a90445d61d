"""A generation begins with the parts frozen, and in eval(), that the script had so before it."""

from __future__ import annotations

import torch
from torch import nn

from elasticzero.data.position import DataPosition
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.script_flags import ScriptFlags

CPU = torch.device("cpu")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def begun(model: nn.Module) -> ScriptFlags:
    return ScriptFlags(dict(model.named_parameters()), dict(model.named_modules()))


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_nothing_is_kept_where_the_script_changes_nothing() -> None:
    model = network()
    model.requires_grad_(False).eval()
    frozen = begun(model)
    assert frozen.state_dict() == {} and frozen.change() == ""
    auxiliary = AuxiliaryState(CPU, flags=begun(network()))
    assert "flags" not in auxiliary.capture(0, DataPosition()).json


def test_a_part_that_was_frozen_on_the_way_is_frozen_again() -> None:
    model, anew = network(), network()
    frozen = begun(model)
    model[0].requires_grad_(False)  # type: ignore[index]
    assert frozen.change() == "frozen parameters '0.bias', '0.weight'"
    following = begun(anew)
    following.load_state_dict(frozen.state_dict())
    assert trained(anew) == ["1.weight", "1.bias"]
    again = begun(network())
    again.load_state_dict(following.state_dict())  # captured before the script changed any
    assert again.state_dict() == frozen.state_dict()


def test_a_part_that_was_unfrozen_on_the_way_is_trained_again() -> None:
    model, anew = network(), network()
    for layers in (model, anew):
        layers[0].requires_grad_(False)  # type: ignore[index]
    frozen, following = begun(model), begun(anew)
    model.get_parameter("0.bias").requires_grad_()
    assert frozen.change() == "unfrozen parameter '0.bias'"
    following.load_state_dict(frozen.state_dict())
    assert trained(anew) == trained(model) == ["0.bias", "1.weight", "1.bias"]


def test_a_part_that_computes_as_in_an_evaluation_does_so_again() -> None:
    """As a batch norm whose statistics a script holds fixed from one step on."""
    model, anew, edited = network(), network(), network()
    flags, following, other = begun(model), begun(anew), begun(edited.eval())
    model[0].eval()  # type: ignore[index]
    assert flags.change() == "called eval() of module '0'"
    following.load_state_dict(flags.state_dict())
    assert [module.training for module in anew.modules()] == [True, False, True]
    model.eval()
    assert flags.change() == "called eval() of the model"
    other.load_state_dict(flags.state_dict())
    assert not any(module.training for module in edited.modules())


def test_a_script_that_begins_otherwise_goes_on_with_its_own() -> None:
    model, edited = network(), network()
    frozen = begun(model)
    model[0].requires_grad_(False)  # type: ignore[index]
    edited[1].requires_grad_(False)  # type: ignore[index]
    following = begun(edited)
    following.load_state_dict(frozen.state_dict())
    assert trained(edited) == ["0.weight", "0.bias"] and following.change() == ""


def test_lines_that_run_again_freeze_nothing_twice() -> None:
    """Loops that training has passed put the state back, also where nothing was kept."""
    model = network()
    frozen = begun(model)
    before = frozen.state_dict()
    model[0].requires_grad_(False)  # type: ignore[index]
    frozen.load_state_dict(before)
    assert len(trained(model)) == 4
