"""Trains on an island, and writes down what it has used and what it ends with.

`count` has a weight for each sample, which grows when the sample is used: so the weights of outer
steps that average say which samples count. `regress` is a regression by SGD, of which islands that
average after each step compute what one process does. `--ballast` adds elements that no step
changes, so that rounds take a while; a worker whose `TESTER_HOLD` names a file waits before its
loop until that is gone, and the file of `TESTER_PAUSE_FILE` says for how long a step rests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticzero as ez

FEATURES = 5


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x_NF = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(samples), x_NF, torch.sin(x_NF.sum(1, keepdim=True)))


class Counter(nn.Module):
    """Has a weight for each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weights_N = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def loss(self, index_B: Tensor, x_BF: Tensor, y_B1: Tensor) -> Tensor:
        return -self.weights_N[index_B].mean()


class Regression(nn.Module):
    """Is a small network."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def loss(self, index_B: Tensor, x_BF: Tensor, y_B1: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x_BF), y_B1)


def stream(options: argparse.Namespace) -> ez.Stream:
    """The same samples in shards of unlike lengths, of which some have none."""
    data, chance = dataset(options.samples), random.Random(options.shards)
    cuts = sorted(chance.randrange(options.samples + 1) for _ in range(options.shards - 1))
    shards = [*pairwise([0, *cuts, options.samples])]

    def read(shard: tuple[int, int], start: int) -> Iterator[Any]:
        yield from (data[i] for i in range(shard[0] + start, shard[1]))

    return ez.Stream(shards, read, readers=options.readers, shuffle_window=4)


def _steps_of(optimizer: torch.optim.Optimizer) -> int:
    """How many steps the state stands for that an optimizer begins with."""
    states = optimizer.state_dict()["state"].values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def tell_epoch(session: ez.Session, module: nn.Module) -> None:
    """Writes down which epoch has ended, and that all ranks can compute together then."""
    x_NF, y_N1 = dataset(20).tensors[1:]
    net = module.get_submodule("net")
    fn = lambda pair: nn.functional.mse_loss(net(pair[0]), pair[1])  # noqa: E731
    loss = session.evaluate(TensorDataset(x_NF, y_N1), fn)
    print(json.dumps({"ended": session.epoch, "loss": loss}), flush=True)


def train(session: ez.Session) -> None:
    module = (Counter if options.model == "count" else Regression)(options.samples)
    if options.ballast:
        module.register_parameter("ballast", nn.Parameter(torch.zeros(options.ballast)))
    optimizers: list[torch.optim.Optimizer] = []

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kind = torch.optim.Adam if options.adam else torch.optim.SGD
        optimizers.append(kind(params, lr=options.lr))
        return optimizers[0]

    session.prepare(module, make)
    session.restore()
    if options.tells_adam:
        print(json.dumps({"adam_steps": _steps_of(optimizers[0])}), flush=True)
    hold, slow = (Path(os.environ.get(f"TESTER_{name}", "")) for name in ("HOLD", "PAUSE_FILE"))
    print(json.dumps({"holds": hold.is_file()}), flush=True)
    while hold.is_file():
        time.sleep(0.002)
    data: Any = stream(options) if options.shards else dataset(options.samples)
    ends = partial(tell_epoch, session, module) if options.tells_epochs else None
    arguments: dict[str, Any] = {
        "global_batch": options.batch,
        "epochs": options.epochs,
        "on_epoch_end": ends,
        "virtual_batch": options.virtual,
    }
    for index_B, x_BF, y_B1 in session.batches(data, **arguments):
        used = index_B.tolist() if options.shards else session.batch_indices
        session.backward(module.loss(index_B, x_BF, y_B1))
        session.step()
        time.sleep(float(slow.read_text() or 0) if slow.is_file() else options.pause)
        line = {"used": used, "at_s": time.time(), "step": session.step_count}
        print(json.dumps(line), flush=True)
    names = [name for name, p in module.named_parameters() if name != "ballast"]
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in map(module.get_parameter, names)]
    flat = torch.cat([parameter.detach().flatten() for parameter in whole])
    print(json.dumps({"weights": flat.tolist()}), flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="count")
parser.add_argument("--samples", type=int, default=960)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--ballast", type=int, default=0, help="elements that no step changes")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--tells-epochs", action="store_true", help="print which epochs have ended")
parser.add_argument("--adam", action="store_true", help="train by Adam in place of SGD")
parser.add_argument("--tells-adam", action="store_true", help="print with what state it begins")
parser.add_argument("--virtual", type=int, help="samples in a slice")
parser.add_argument("--shards", type=int, default=0, help="train on a stream of so many")
parser.add_argument("--readers", type=int, default=16)
parser.add_argument("--pause", type=float, default=0.02)

if __name__ == "__main__":
    options = parser.parse_args()
    ez.run(train)
