"""Trains a small model whose result no world changes, and writes what it is.

Argument: JSON with epochs, batch, pause (seconds a step), out (a file), log (a directory), and at
will slow (a file: while it exists steps last longer), micro, virtual (samples of a slice, with
which there are dropout and a BatchNorm), clip, weighted, gather, stream, workers, optimizer (a name
in OPTIMIZERS), odd (an Odd model), half (parameters of 16 bits), views (the script keeps tensors
that share memory with parameters), keeps (a name in KEEPS), takes (the same, after each
step), scaled (parameters are changed before steps), looks (a forward after each step), meta (the
model has no values yet), unheard (no function is called at changes), evaluate (before the loop),
ask (a rank) and die ([rank, where]), both of the first world that the rank is in.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import elasticzero as ez
from elasticzero.checkpoint.io.reader import Checkpoint
from elasticzero.comm.control import ControlWord
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.worlds.next_world import Offer
from elasticzero.training.worlds.change import PartsOfWorld, WorldChange
from elasticzero.training.worlds.newcomer import Newcomer

SAMPLES = 46
SLOW_S = 0.25
"""A step then lasts so long: a busy machine may offer a change late, and connect its world late."""


def two_of(parameters: Iterable[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for each second parameter, and another one with two groups for the rest."""
    every = list(parameters)
    decayed: dict[str, Any] = {"params": every[1::4], "weight_decay": 0.1}
    return {
        "first": torch.optim.AdamW(every[::2], lr=0.01),
        "second": torch.optim.SGD([decayed, {"params": every[3::4]}], lr=0.05, momentum=0.9),
    }


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "two": two_of,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}
"""Adafactor works on whole parameters, and keeps what is not shaped like them."""


class Odd(nn.Module):
    """Has what few models have: a frozen layer, tied weights, a layer that some samples use,
    parameters that nothing uses, without an element and of one element, a convolution whose
    elements lie in another order, and a weight as the first forward has had it."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.conv = nn.Conv2d(1, 5, (1, 5))
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.rest, self.seldom = rest, nn.Linear(5, 2)
        self.unused, self.empty = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held = self.held or [self.first.weight]
        wide = self.conv(self.frozen(x)[:, None, None, :]).flatten(1)
        wide = nn.functional.linear(wide, self.held[0], self.first.bias)
        out: Tensor = self.rest(self.second(wide) * self.scale)
        chosen = x.sum(1, keepdim=True) > 2
        return out + self.seldom(x) * chosen if bool(chosen.any()) else out


def model_of(told: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    torch.set_default_device("meta" if told.get("meta") else "cpu")
    sliced = bool(told.get("virtual"))
    # A micro-batch of a stream may have one sample, of which there is no variance.
    norm = nn.BatchNorm1d(9) if sliced and not told.get("stream") else nn.LayerNorm(9)
    layers = [nn.Linear(5, 9), norm, nn.Tanh(), nn.Dropout(0.3 if sliced else 0.0), nn.Linear(9, 2)]
    dtype = torch.float32 if sliced else torch.float64
    model: nn.Module = nn.Sequential(*layers)
    model = Odd(model) if told.get("odd") else model
    torch.set_default_device("cpu")
    return model.to(torch.bfloat16 if told.get("half") else dtype)


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(5, generator=generator, dtype=torch.float64)
    return {"x": x, "index": torch.tensor(index), "tokens": torch.tensor(1 + index % 4)}


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index)


class Shards(IterableDataset[dict[str, Tensor]]):
    """Gives the samples as a stream."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(sample, range(SAMPLES))


class Counter:
    """Is tracked; counts epochs."""

    def __init__(self) -> None:
        self.epochs = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By sample: B."""
    x = batch["x"].to(next(model.parameters()).dtype)
    out: Tensor = model(x).double()
    return ((out - x[:, :2].sin()) ** 2).mean(1)


def pause_s(told: dict[str, Any]) -> float:
    slow = "slow" in told and Path(told["slow"]).exists()
    return SLOW_S if slow else float(told["pause"])


def die(told: dict[str, Any], rank: int, where: str) -> None:
    """Ends this process if the test asks for that."""
    if told.get("die") == [rank, where]:
        os.kill(os.getpid(), signal.SIGKILL)


def watch_change(told: dict[str, Any], rank: int) -> None:
    """Has this process end around what a change does, if the test asks for it."""
    enter, bring = ProcessGroups.enter, WorldChange.bring_state

    def bringing(change: WorldChange, offer: Offer, parts: PartsOfWorld) -> None:
        die(told, rank, "before the state is brought")
        bring(change, offer, parts)
        die(told, rank, "once the state is brought")

    def entering(groups: ProcessGroups, following: ProcessGroups) -> None:
        die(told, rank, "before its groups are exchanged")
        enter(groups, following)
        die(told, rank, "once its groups are exchanged")

    ProcessGroups.enter = entering  # type: ignore
    WorldChange.bring_state = bringing  # type: ignore


def meet(told: dict[str, Any], when: str) -> None:
    """Meets the other ranks as a library does that looks at the environment, if the test asks."""
    if told.get("meets") == when:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))


def frozen(parameter: Any) -> Tensor:
    """An average that Python's garbage collector does not know."""
    average: Tensor = parameter.detach().clone()
    gc.freeze()
    return average


KEEPS: dict[str, Callable[[Any], Tensor]] = {
    "a view": lambda parameter: parameter.data,
    "an average": lambda parameter: parameter.detach().clone(),
    "its rows": lambda parameter: parameter.to_local(),
    "values of its rows": lambda parameter: parameter.to_local().clone(),
    "a frozen average": frozen,
}
"""Names what a script may keep of a parameter of which it has rows."""


def viewing(told: dict[str, Any], model: nn.Module) -> Callable[[], None]:
    """Returns a check of tensors in the memory of parameters, which the script keeps at will."""
    meet(told, "with others")
    kept = [KEEPS[told["keeps"]](parameter) for parameter in model.parameters() if "keeps" in told]
    views = [parameter.data for parameter in model.parameters()] if told.get("views") else []

    def check() -> None:
        assert "keeps" not in told or kept
        for view, parameter in zip(views, model.parameters(), strict=bool(views)):
            assert torch.equal(view, parameter), "the script's tensor has the parameter's memory"

    return check


def watch_entry(told: dict[str, Any], rank: int) -> None:
    """Has this process end on its way into a world, if the test asks for it."""
    opening, joining = Newcomer.open_source, Newcomer.join

    def open_source(newcomer: Newcomer) -> Checkpoint:
        die(told, rank, "as it restores")
        return opening(newcomer)

    def join(newcomer: Newcomer) -> bool:
        die(told, rank, "before its loop")
        return joining(newcomer)

    Newcomer.open_source, Newcomer.join = open_source, join  # type: ignore


def ask_at_the_change(session: ez.Session) -> None:
    """Has this rank ask for a checkpoint of the boundary at which the world changes, once the word
    of all ranks is there."""
    decide = WorldChange.decide

    def deciding(change: WorldChange, word: ControlWord, *others: Any) -> Offer | None:
        offer = decide(change, word, *others)
        if offer is not None:
            session.checkpoint("left")
        return offer

    WorldChange.decide = deciding  # type: ignore


def changes_of(session: ez.Session, told: dict[str, Any], rank: int) -> list[list[int]]:
    """Returns the list of what the script is told of changes: [generation, rank, ranks, step]."""
    changes: list[list[int]] = []

    def changed() -> None:
        die(told, rank, "as its function is called")
        changes.append([session.generation, session.rank, session.world_size, session.step_count])

    if not told.get("unheard"):
        session.on_world_change(changed)
    return changes


def scale(session: ez.Session, told: dict[str, Any], model: nn.Module) -> None:
    """Changes parameters before a step, if the test asks for it."""
    if told.get("scaled") and model.__dict__.get("scaled_at") != session.step_count:
        model.__dict__["scaled_at"] = session.step_count
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(0.999)


def look(told: dict[str, Any], model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Computes a forward between two steps, with gradients, if the test asks for it; takes a tensor
    of parameters at a step, if the test asks for that."""
    if told.get("looks"):
        assert losses_of(model, batch).mean().isfinite()
    if "takes" in told:
        kept = [KEEPS[told["takes"]](parameter) for parameter in model.parameters()]
        model.__dict__["taken"] = kept


def train(session: ez.Session, told: dict[str, Any]) -> None:
    model, optimizer = session.prepare(model_of(told), OPTIMIZERS[told.get("optimizer", "AdamW")])
    scheduled = optimizer["first"] if isinstance(optimizer, dict) else optimizer
    assert session.steps_in(Samples(), global_batch=told["batch"], epochs=1), "known early"
    schedule = session.track("schedule", torch.optim.lr_scheduler.StepLR(scheduled, 3, gamma=0.8))
    counter = session.track("counter", Counter())
    session.restore()
    if told.get("evaluate"):
        session.evaluate(Samples(), lambda b: losses_of(model, b).mean())
    first, rank = session.generation, session.rank
    watch_change(told, rank)
    check_views = viewing(told, model)
    if told.get("ask") == rank:
        ask_at_the_change(session)
    changes = changes_of(session, told, rank)
    dataset: Any = Samples()
    if told.get("stream"):
        dataset = ez.Stream(Shards(), readers=8)
    values: list[Any] = []

    def end_epoch() -> None:
        counter.epochs += 1
        values.append(session.evaluate(Samples(), lambda b: losses_of(model, b).mean()))

    log = Path(told["log"]) / f"{os.getpid()}.jsonl"
    loop: Iterator[dict[str, Tensor]] = session.batches(
        dataset,
        global_batch=told["batch"],
        micro_batch=told.get("micro"),
        virtual_batch=told.get("virtual"),
        epochs=told["epochs"],
        num_workers=told.get("workers", 0),
        on_epoch_end=end_epoch,
    )
    indices: list[int] = []
    for batch in loop:
        if session.micro_batch.weight:
            indices += batch["index"].tolist()
        scale(session, told, model)
        losses = losses_of(model, batch)
        if told.get("gather"):
            session.backward(session.gather(losses).logsumexp(0))
        elif told.get("weighted"):
            tokens = batch["tokens"].to(losses.dtype)
            session.backward((losses * tokens).sum() / tokens.sum(), weight=tokens.sum())
        else:
            session.backward(losses.mean())
        if session.generation > first or rank >= told.get("world", 99):
            die(told, rank, "in the first step")
        if session.step(max_grad_norm=told.get("clip")):
            schedule.step()
            look(told, model, batch)
            with log.open("a") as file:
                world = [session.generation, session.rank, session.world_size]
                file.write(json.dumps([session.step_count, world, indices]) + "\n")
            indices = []
            time.sleep(pause_s(told))
    check_views()
    made = {"values": values, "changes": changes, "epochs": counter.epochs.item()}
    write(session, told, {**made, "rate": scheduled.param_groups[0]["lr"]})


def write(session: ez.Session, told: dict[str, Any], made: dict[str, Any]) -> None:
    """Writes what came of the training."""
    state = session.state_dict()
    if session.rank == 0:
        bits = {
            name: tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()
            if tensor.dim()
            else str(tensor.item())
            for name, tensor in state.items()
        }
        floats = {name: tensor.double().flatten().tolist() for name, tensor in state.items()}
        made |= {"bits": bits, "floats": floats, "step": session.step_count}
        Path(told["out"]).write_text(json.dumps(made))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])

    def begin(session: ez.Session) -> None:
        watch_entry(told, session.rank)
        meet(told, "early")
        train(session, told)

    ez.run(begin)
