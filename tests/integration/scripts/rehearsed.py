"""A small model that keeps numbers in every way, and parts of this package that forget some of them
on request: what `elasticzero rehearse` is to find."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticzero as ez
from elasticzero.parallel.optimizers import groups, state, whole_state
from elasticzero.parallel.optimizers.whole_state import WholeState
from elasticzero.snapshots import restore
from elasticzero.state.auxiliary import AuxiliaryState, BoundaryCopy
from elasticzero.state.buffers import BufferCopy, ModelBuffers
from elasticzero.state.extra_state import ExtraStates
from elasticzero.state.model import MODEL

SAMPLES, WIDTH = 64, 5


class Head(nn.Module):
    """Its output depends on everything that it keeps."""

    calls: Tensor
    scratch: Tensor
    seen: Tensor | None

    def __init__(self, *, attribute: bool, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.gate = nn.Parameter(torch.ones(()))
        """Has a gradient of zero in the first steps."""
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.register_buffer("seen", None)
        self.notes = {"forwards": 0}
        self.uses_attribute = attribute
        self.forwards = 0

    def get_extra_state(self) -> dict[str, int]:
        return self.notes

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.scratch = self.scratch + 1
            self.seen = torch.zeros(()) if self.seen is None else self.seen + 1
            self.notes["forwards"] += 1
            self.forwards += self.uses_attribute
        scale = self.calls + self.scratch + self.notes["forwards"] + self.forwards
        if self.seen is not None:
            scale = scale + self.seen
        is_open = 0 if self.notes["forwards"] < 5 else 0.1
        output: Tensor = self.dropout(self.linear(x)) / (1 + 0.1 * scale) + is_open * self.gate
        return output


class Remembering(torch.optim.SGD):
    """Keeps a list with each parameter, a number with none, and another that its `state_dict`
    adds."""

    turns = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turns": self.turns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.turns = state_dict["turns"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "turns"})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        self.turns += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / state["steps"] + 0.001 * self.turns
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state[parameter].setdefault("norms", []).append(float(parameter.grad.norm()))
        return super().step(closure)


class Averaging(torch.optim.SGD):
    """Keeps tensors under a name that this package uses itself, and under one with a slash."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    for key in ("master", "slow/part"):
                        of_it = self.state[parameter]
                        of_it[key] = of_it.get(key, 0) * 0.9 + parameter
                        parameter.mul_(0.9).add_(of_it[key], alpha=0.02)
        return result


def put_in(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Puts a function in the place of a method, or of a module's function."""
    setattr(owner, name, function)


def forget(what: str) -> None:
    """Takes out of this package what keeps something, and the check that would find that out at the
    restore."""
    for name in ("check_shares", "check_optimizers", "check_modules"):
        put_in(restore, name, lambda *_, **__: None)
    PARTS[what].forget()


def forget_scratch() -> None:
    def stored_buffers(copy: BoundaryCopy) -> dict[str, Tensor]:
        return {MODEL + name: tensor for name, tensor in copy.buffers.saved.items()}

    put_in(BoundaryCopy, "stored_buffers", stored_buffers)


def forget_late_buffer() -> None:
    put = ModelBuffers.put

    def put_present(buffers: ModelBuffers, copy: BufferCopy) -> None:
        present = {n: t for n, t in copy.values.items() if n in buffers.now()}
        put(buffers, BufferCopy(values=present, aliases=copy.aliases))

    put_in(ModelBuffers, "put", put_present)


def forget_extra_state() -> None:
    put_in(ExtraStates, "put", lambda states, values: None)


def forget_in_optimizer(key: str) -> Callable[[], None]:
    def forget_key() -> None:
        whole = WholeState.of

        def without(optimizers: Any) -> WholeState:
            state = whole(optimizers)
            small = {name: tree for name, tree in state.small.items() if name != key}
            return WholeState(state.tensors, small)

        put_in(WholeState, "of", without)

    return forget_key


def forget_replaced_buffers() -> None:
    """Keeps the tensors that buffers had when they were first asked for."""
    tensor_of, first = ModelBuffers._tensor, dict[str, Tensor | None]()

    def first_tensor(buffers: ModelBuffers, name: str) -> Tensor | None:
        return first.setdefault(name, tensor_of(buffers, name))

    put_in(ModelBuffers, "_tensor", first_tensor)


def forget_in_stored_state(
    is_kept: Callable[[str, Tensor], bool],
) -> Callable[[], None]:
    """Keeps zeros in the place of tensors of optimizers."""

    def forget_tensors() -> None:
        stored = state.stored_state

        def without(kept: Mapping[str, Any]) -> dict[str, Tensor]:
            return {k: t if is_kept(k, t) else t * 0 for k, t in stored(kept).items()}

        for module in (groups, whole_state):
            put_in(module, "stored_state", without)

    return forget_tensors


def forget_zeros() -> None:
    """Takes a tensor of zeros for one that is not there."""
    stored = state.stored_state

    def without_zeros(kept: Mapping[str, Any]) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in stored(kept).items() if tensor.count_nonzero()}

    put_in(whole_state, "stored_state", without_zeros)


def forget_generators() -> None:
    put_in(AuxiliaryState, "restore_rng", lambda auxiliary, state: None)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Holds something that can be forgotten."""

    forget: Callable[[], None]
    named: str
    """What the verdict is to name."""
    optimizer: str = "adamw"
    fault: str = "kill-node"
    strategies: tuple[str, ...] = ("ddp",)


def is_not(key: str) -> Callable[[str, Tensor], bool]:
    return lambda name, tensor: name != state.stored_key(key)


PARTS: Mapping[str, Part] = {
    "replaced buffer": Part(
        forget=forget_replaced_buffers, named="buffer 'scratch'", strategies=("ddp", "zero3")
    ),
    "unsaved buffer": Part(forget=forget_scratch, named="buffer 'scratch'"),
    "late buffer": Part(
        forget=forget_late_buffer, named="buffer 'seen'", strategies=("ddp", "zero1")
    ),
    "extra state": Part(
        forget=forget_extra_state, named="extra state", strategies=("ddp", "zero3")
    ),
    "list": Part(forget=forget_in_optimizer("state"), named="['norms']", optimizer="remembering"),
    "number of no parameter": Part(
        forget=forget_in_optimizer("entries"), named="state['steps']", optimizer="remembering"
    ),
    "what state_dict adds": Part(
        forget=forget_in_optimizer("state_dicts"),
        named="optimizer attribute 'turns'",
        optimizer="remembering",
    ),
    "key of our own": Part(
        forget=forget_in_stored_state(is_not("master")),
        named="['master']",
        optimizer="averaging",
        strategies=("ddp", "zero1", "zero3"),
    ),
    "key with a slash": Part(
        forget=forget_in_stored_state(is_not("slow/part")),
        named="['slow/part']",
        optimizer="averaging",
        strategies=("ddp", "zero1"),
    ),
    "zeros": Part(forget=forget_zeros, named="['momentum_buffer']", optimizer="dampened"),
    "generator": Part(
        forget=forget_generators, named="generator", fault="kill-worker", strategies=("ddp",)
    ),
}
"""What can be forgotten."""
OPTIMIZERS: Mapping[str, Any] = {
    "adamw": torch.optim.AdamW,
    "remembering": Remembering,
    "averaging": Averaging,
    "dampened": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
}


def train(session: ez.Session, options: argparse.Namespace) -> None:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    x_NI = torch.randn(SAMPLES, WIDTH, generator=generator)
    data = TensorDataset(x_NI, x_NI.sum(1, keepdim=True).tanh())
    made = OPTIMIZERS[options.optimizer]
    head = Head(attribute=options.attribute, dropout=options.dropout)
    model, optimizer = session.prepare(head, lambda parameters: made(parameters, lr=0.05))
    if options.optimizer == "adamw":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        session.track("schedule", schedule)
    session.restore()
    for x, y in session.batches(data, global_batch=8, epochs=40):
        session.backward((model(x) - y).square().mean())
        if session.step() and options.optimizer == "adamw":
            schedule.step()
    raise AssertionError("the code behind the loop does not run")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attribute", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--forget", choices=PARTS)
    return parser.parse_args()


if __name__ == "__main__":
    given_options = parse()
    if given_options.forget:
        forget(given_options.forget)
    ez.run(lambda session: train(session, given_options))
