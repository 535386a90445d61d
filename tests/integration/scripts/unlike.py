"""The training of `regression.py` in which single ranks or nodes are unlike the others, as a tester
says.

`--change RANK:WHAT@STEP`, in the first generation, after that step: `add` adds to an element of a
parameter, `bit` flips a low bit of one, `tracked` changes a tracked object, `lr` the learning
rate. `--unlike RANK:NAME=VALUE`, or the variable TESTER_UNLIKE of a node, `NAME=VALUE`, stand for
another setting in the script of that rank or node.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

import regression
import torch
from torch import nn
from torch.utils.data import Subset

import elasticzero as ez


class Counter:
    """A tracked object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def change(what: str, model: nn.Module, optimizer: torch.optim.Optimizer, counter: Counter) -> None:
    """Make this rank's state another than that of its peers."""
    weight = next(p for name, p in model.named_parameters() if name.endswith("2.weight"))
    with torch.no_grad():
        if what == "add":
            weight.view(-1)[3] += 1.0
        elif what == "bit":
            weight.view(-1).view(torch.int64)[3] ^= 1 << 30
        elif what == "tracked":
            counter.count += 1
        elif what == "lr":
            optimizer.param_groups[0]["lr"] *= 1.5
        else:
            raise ValueError(what)


def train(session: ez.Session, options: argparse.Namespace) -> None:
    rank, _, setting = options.unlike.partition(":")
    settings = os.environ.get("TESTER_UNLIKE", "").split()
    settings += [setting] if rank == str(session.rank) else []
    odd = dict(word.split("=", 1) for word in settings)

    def setting_of(name: str, value: Any) -> Any:
        """This setting in the script of this node."""
        return type(value)(odd[name]) if name in odd else value

    factory = getattr(torch.optim, setting_of("optimizer", "AdamW"))
    strategy = odd.get("strategy")
    model, optimizer = session.prepare(
        regression.network(setting_of("hidden", 17)),
        lambda parameters: factory(parameters, lr=setting_of("lr", 1e-2), weight_decay=0.05),
        strategy=strategy,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    scheduler = session.track("scheduler", schedule)
    counter = session.track("counter", Counter())
    session.restore()
    data = regression.dataset()
    for x, y in session.batches(
        Subset(data, range(setting_of("samples", len(data)))),
        global_batch=setting_of("global_batch", 12),
        micro_batch=setting_of("micro_batch", options.micro_batch),
        epochs=setting_of("epochs", options.epochs),
        seed=setting_of("seed", 3),
        shuffle=bool(setting_of("shuffle", 1)),
        drop_last=bool(setting_of("drop_last", 0)),
    ):
        regression.pause(options.pause)
        session.backward(regression.loss_of(model(x), y))
        if session.step(max_grad_norm=1.0):
            scheduler.step()
            place = {"generation": session.generation, "rank": session.rank}
            for match in re.finditer(r"(\d+):(\w+)@(\d+)", options.change):
                at = (1, int(match[1]), int(match[3]))
                if at == (session.generation, session.rank, session.step_count):
                    change(match[2], model, optimizer, counter)
                    print(json.dumps({"changed": place}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--change", default="")
    parser.add_argument("--unlike", default="")
    parser.add_argument("--micro-batch", type=int, default=4)
    chosen = parser.parse_args()
    ez.run(lambda session: train(session, chosen))
