"""Writes the script of a draw: one file, which runs by plain torch, by an agent, and by hand."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable

from tests.integration.generator.changes import CHANGES
from tests.integration.generator.draws import EPOCHS, GLOBAL_BATCH, STEPS, Draw
from tests.integration.generator.elements import Element
from tests.support import kept_state

HEAD = '''\
"""{title}

By plain torch: python FILE '{{"plain": true, "out": "plain.pt"}}'
Through a fault: elasticzero local --nodes 2 --fault kill-node@4 FILE '{{"pause": 0.1}}'
"""

import collections
import copy
import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint
from torch.utils.data import Dataset, default_collate

import elasticzero as ez

SEED, STEPS, ROWS, GLOBAL_BATCH, MICRO_BATCH = {seed}, {steps}, {rows}, {batch}, {micro}
SINCE, CLIP, WEIGHTED, DIFFERENTIATED = {since}, {clip}, {weighted}, {differentiated}
EPOCHS, EACH_EPOCH, HAS_EPOCH_END = {epochs}, {each_epoch}, {has_epoch_end}
D = torch.{dtype}
KEPT = {{}}
SESSION = None
told = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {{}}


class Rows(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, 6, generator=drawn, dtype=torch.float64)
        self.y = torch.randn(ROWS, generator=drawn, dtype=torch.float64)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        weight = float(index % 3 > 0)
        return {{"x": self.x[index], "y": self.y[index], "i": index % 10, "weight": weight}}


DATA = Rows()
PROBE, PROBE_I = DATA.x[:4].to(D), torch.arange(4)


def listed(optimizer):
    return list(optimizer.values()) if isinstance(optimizer, dict) else [optimizer]


def die(place):
    """Ends this rank where the test says so."""
    if SESSION is not None and told.get("die") == [SESSION.rank, SESSION.step_count, place]:
        os.kill(os.getpid(), signal.SIGKILL)
'''

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 5)
        self.twin = nn.Linear(6, 5)
        self.leave = nn.Linear(5, 1)
{init}

    def forward(self, x, i):
        h = torch.tanh(self.enter(x)) + 0.5 * torch.tanh(self.twin(x))
{hidden}
        if self.training:
            die("forward")
        return self.leave(h)


def make_model(seed):
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(D)
    try:
        return Model()
    finally:
        torch.set_default_dtype(before)
"""

LOOP = '''
def losses_of(model, batch):
    x, i = batch["x"].to(D), batch["i"]
    if DIFFERENTIATED:
        x = x.detach().requires_grad_()
    output = model(x, i)
    losses = (output.squeeze(1).double() - batch["y"]).square()
{losses}
    return losses


def loss_of(losses, batch):
    if not WEIGHTED:
        return losses.mean()
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def numbers_of(value):
    """Whole tensors without gradients, and numbers."""
    if isinstance(value, dict):
        return {key: numbers_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers_of(item) for item in value]
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return value


def result_of(model, optimizer, state):
    rest = {"buffers": dict(model.named_buffers())}
    rest["rates"] = [float(group["lr"]) for o in listed(optimizer) for group in o.param_groups]
{rest}
    rest = numbers_of(rest)
    return {"state": numbers_of(state), "rest": rest}


def plain():
    """Trains in this process by torch alone, each global batch whole."""
    model = make_model(SEED)
    made(model)
    optimizer = make_optimizer(list(model.parameters()), model)
    prepared(model, optimizer, None)
    schedule = make_schedule(listed(optimizer)[0], STEPS)
    batches = [range(at, min(at + GLOBAL_BATCH, ROWS)) for at in range(0, ROWS, GLOBAL_BATCH)]
    for n in range(STEPS):
        batch = default_collate([DATA[index] for index in batches[n % len(batches)]])
        begin(model, optimizer, n)
        loss = loss_of(losses_of(model, batch), batch)
        touched(model, n)
        loss.backward()
        graded(model, n)
        if CLIP is not None:
            groups = [group for one in listed(optimizer) for group in one.param_groups]
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], CLIP)
        for one in listed(optimizer):
            one.step()
        model.zero_grad()
        step_schedule(schedule, optimizer, n + 1)
        stepped(model, optimizer, n + 1, None)
        if (n + 1) % len(batches) == 0:
            epoch_end(model, optimizer, None)
            if EACH_EPOCH:
                between(model, optimizer, None)
    finish(model, optimizer)
    result = result_of(model, optimizer, model.state_dict())
    tensors = [value for value in result["state"].values() if isinstance(value, Tensor)]
    assert all(bool((value.to(torch.complex128).abs() < 1e4).all()) for value in tensors), (
        "the script diverges"
    )
    torch.save(result, told["out"])


def batches_of(session, at_epoch_end, after_loop):
    """One loop over all epochs, or one loop for each."""
    options = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "shuffle": False}
    if HAS_EPOCH_END:
        options["on_epoch_end"] = at_epoch_end
    if EACH_EPOCH:
        for _ in range(EPOCHS):
            yield from session.batches(DATA, epochs=1, **options)
            after_loop()
    else:
        yield from session.batches(DATA, epochs=EPOCHS, steps=told.get("steps"), **options)


def train(session):
    global SESSION
    SESSION = session
    model = make_model(SEED + 1 + session.rank if told.get("restored") else SEED)
    made(model)
    model, optimizer = session.prepare(
        model, lambda parameters: make_optimizer(parameters, model), strategy=STRATEGY
    )
    prepared(model, optimizer, session)
    total = session.steps_in(DATA, global_batch=GLOBAL_BATCH, epochs=EPOCHS)
    schedule = make_schedule(listed(optimizer)[0], total)
    if schedule is not None:
        session.track("schedule", schedule)
    session.restore()
    ends = [partial(function, model, optimizer, session) for function in (epoch_end, between)]
    for batch in batches_of(session, *ends):
        die("begin")
        begin(model, optimizer, session.step_count)
        losses = losses_of(model, batch)
        touched(model, session.step_count)
        weight = {"weight": batch["weight"].sum()} if WEIGHTED else {}
        session.backward(loss_of(losses, batch), **weight)
        graded(model, session.step_count)
        die("backward")
        if session.step(max_grad_norm=CLIP):
            die("stepped")
            step_schedule(schedule, optimizer, session.step_count)
            stepped(model, optimizer, session.step_count, session)
            die("changed")
        time.sleep(told.get("pause", 0.0))
    finish(model, optimizer)
    result = result_of(model, optimizer, session.state_dict())
    if session.rank == 0 and "out" in told:
        torch.save(result, told["out"])


if __name__ == "__main__":
    plain() if told.get("plain") else ez.run(train)
'''


def render(draw: Draw) -> str:
    """Returns the text of a draw's script."""
    title = textwrap.fill(f"{draw}.", 96)
    head = HEAD.format(
        title=title,
        seed=draw.seed,
        steps=STEPS,
        rows=draw.rows,
        batch=GLOBAL_BATCH,
        micro=draw.micro,
        since=draw.since,
        clip=draw.clip,
        weighted=draw.weighted,
        differentiated="autograd.grad" in draw.loss.losses,
        dtype=draw.dtype,
        epochs=EPOCHS,
        each_epoch=draw.each_epoch,
        has_epoch_end=any(element.epoch_end for element in draw.elements),
    )
    parts = [
        head,
        f"\n\nSTRATEGY = {draw.strategy!r}\n",
        *_sources(draw.pieces),
        *(f"\n\n{piece.top.strip()}\n" for piece in draw.pieces if piece.top),
        *_network(draw),
        *_functions(draw),
        _loop(draw),
    ]
    return "".join(parts)


def _sources(pieces: Iterable[Element]) -> list[str]:
    names = dict.fromkeys(name for piece in pieces for name in piece.sources)
    return [f"\n\n{inspect.getsource(getattr(kept_state, name)).strip()}\n" for name in names]


def _network(draw: Draw) -> list[str]:
    """Returns the model, and where elements are modules of their own those before it."""
    texts, init, hidden = [], [], []
    for index, element in enumerate(_inside(draw)):
        if draw.nested:
            texts.append(_part(index, element))
            init.append(f"self.part{index} = Part{index}()")
            hidden.append(f"h = self.part{index}(h, i)")
        else:
            init.append(element.init)
            hidden.append(element.hidden)
    return [*texts, "\n", MODEL.format(init=_lines(init, 8), hidden=_lines(hidden, 8))]


def _inside(draw: Draw) -> list[Element]:
    """Returns the elements that are part of the network."""
    return [element for element in draw.elements if element.init or element.hidden]


def _part(index: int, element: Element) -> str:
    return (
        f"\n\nclass Part{index}(nn.Module):\n"
        f"    def __init__(self):\n        super().__init__()\n{_lines([element.init], 8)}\n\n"
        f"    def forward(self, h, i):\n{_lines([element.hidden], 8)}\n        return h\n"
    )


def _functions(draw: Draw) -> list[str]:
    """Returns the functions that the loop calls, and those that make optimizer and schedule."""
    made = _lines([element.made for element in (*draw.elements, draw.loss)], 4)
    return [
        f"\n\ndef made(model):\n{made}\n",
        f"\n\ndef make_optimizer(parameters, model):\n{_lines([draw.optimizer.made], 4)}\n",
        f"\n\ndef make_schedule(optimizer, total):\n{_lines([draw.schedule.made], 4)}\n",
        f"\n\ndef step_schedule(schedule, optimizer, n):\n{_lines([draw.schedule.stepped], 4)}\n",
        _function(draw, "prepared", "model, optimizer, session"),
        _function(draw, "begin", "model, optimizer, n"),
        _function(draw, "touched", "model, n"),
        _function(draw, "graded", "model, n"),
        _function(draw, "stepped", "model, optimizer, n, session", "@torch.no_grad()\n"),
        _function(draw, "epoch_end", "model, optimizer, session", "@torch.no_grad()\n"),
        _function(draw, "between", "model, optimizer, session", "@torch.no_grad()\n"),
        _function(draw, "finish", "model, optimizer"),
    ]


def _function(draw: Draw, name: str, arguments: str, decorator: str = "") -> str:
    """Returns a function that does what the elements do at one place.

    Args:
        draw: The draw.
        name: Name of the function, and of the elements' field.
        arguments: The function's arguments.
        decorator: A line before it.
    """
    owners, texts = _owners(draw), []
    for element in (*draw.elements, draw.optimizer):
        text = getattr(element, name).strip("\n")
        text = text.replace("OWNER", owners.get(element.name, "model"))
        if text and name == "stepped" and element in CHANGES:
            text = f"if n > SINCE:\n{textwrap.indent(text, '    ')}"
        texts.append(text)
    return f"\n\n{decorator}def {name}({arguments}):\n{_lines(texts, 4)}\n"


def _owners(draw: Draw) -> dict[str, str]:
    """Returns, by the name of an element of the network, the text that names its module."""
    if not draw.nested:
        return {}
    return {element.name: f"model.part{index}" for index, element in enumerate(_inside(draw))}


def _loop(draw: Draw) -> str:
    losses = _lines([draw.loss.losses], 4)
    rest = _lines([element.rest for element in draw.elements], 4)
    return "\n" + LOOP.replace("{losses}", losses).replace("{rest}", rest)


def _lines(texts: Iterable[str], indent: int) -> str:
    """Returns texts one below the other; a line that does nothing where there are none."""
    text = "\n".join(text.strip("\n") for text in texts if text.strip())
    return textwrap.indent(text or "pass", " " * indent)
