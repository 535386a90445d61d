"""A training in a session, whose checks are timed from outside: `check_costs.py` starts it.

Each function of TIMED is replaced by one that adds up the seconds it takes by itself, without those
of other such functions that it calls. The product has no such switch, and pays nothing for it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from training_ranks import BATCH, BLOCKS, Block, adam

import elasticzero as ez
from elasticzero.comm.control import ControlExchange
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.comm.rank_zero import SharedState
from elasticzero.consistency.replicas import ReplicaVerifier
from elasticzero.parallel import ddp, parameter_changes, partitioned, zero
from elasticzero.parallel.fsdp import strategy as fsdp
from elasticzero.parallel.fsdp import uses
from elasticzero.parallel.gradients import HiddenGradients
from elasticzero.parallel.parameter_changes import ParameterObjects
from elasticzero.snapshots import restore
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.boundary_values import BoundaryValues
from elasticzero.state.buffers import ModelBuffers
from elasticzero.state.rng import RngState
from elasticzero.torch_internals import hooks
from elasticzero.training import training_state
from elasticzero.training.training_state import TrainingState

SAMPLES = 512
BLOCKS_OF_MANY, LAYERS = 50, 10
"""Blocks of the model with 2,000 parameters, and layers of each, of four and of three buffers."""
LAYER_WIDTH = 32
WIDE = 2560
"""Width of the blocks with 105 million elements."""

OBJECTS, PLACES = "parameters are the same objects", "where parameters lie"
VALUES, HOOKS = "what changes before a step", "hooks on gradients"
GRADIENTS, FORWARDS = "gradients hidden and shown", "changes in a forward"
MASTERS, BUFFERS = "masters of 16 bits", "buffers looked at and copied"
FIRST, WAITS = "buffers of rank 0, packed", "waits for other ranks"
GENERATORS, OTHERS = "random generators", "tracked objects and options"
VERIFY, CAPTURES = "verification", "captures"
ROUND_TRIP, REST = "round trip", "all else at a boundary"
RESTORE = "all else of a restore"

TIMED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    (OBJECTS, ParameterObjects, ("difference",)),
    (PLACES, ddp.Replicated, ("take_changes",)),
    (PLACES, zero.FlatBuckets, ("take_changes",)),
    (PLACES, fsdp.FullyPartitioned, ("take_changes",)),
    (VALUES, BoundaryValues, ("mark", "copy", "learn")),
    (HOOKS, hooks.GradientHooks, ("names",)),
    (HOOKS, fsdp, ("check_hooks",)),
    (GRADIENTS, HiddenGradients, ("hide", "show", "require_none")),
    (GRADIENTS, ddp, ("check_frozen",)),
    (GRADIENTS, zero, ("check_frozen",)),
    (GRADIENTS, fsdp, ("check_frozen",)),
    (FORWARDS, parameter_changes.ForwardChanges, ("begin", "end")),
    (FORWARDS, uses, ("_is_changed",)),
    (MASTERS, partitioned, ("take_changed_values",)),
    (BUFFERS, ModelBuffers, ("check", "copy", "state")),
    (FIRST, SharedState, ("share",)),
    (WAITS, ProcessGroups, ("broadcast_bytes", "sum")),
    (WAITS, ControlExchange, ("collect",)),
    (GENERATORS, RngState, ("capture",)),
    (OTHERS, AuxiliaryState, ("capture",)),
    (VERIFY, ReplicaVerifier, ("digest_if_due", "compare_now")),
    (CAPTURES, StateStager, ("capture", "due")),
    (ROUND_TRIP, restore, ("check_shares", "check_optimizers", "check_modules")),
    (RESTORE, training_state, ("restore_state",)),
    (REST, TrainingState, ("at_boundary",)),
)
"""The timed functions: their kind, the class or module, and their names."""


class Meter:
    """Adds up the seconds that functions take by themselves, by their kind."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._kinds: list[str] = []
        """The kinds of the timed functions that run, the outermost first."""
        self._inner: list[float] = []
        """Seconds of timed functions inside of each of them."""

    def take(self) -> dict[str, float]:
        """Returns the seconds so far, and begins anew."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    @contextmanager
    def _timing(self, kind: str) -> Iterator[None]:
        if (kind == OTHERS and RESTORE in self._kinds) or self._kinds[-1:] == [ROUND_TRIP]:
            kind = ROUND_TRIP  # the restored state is taken once more
        self._kinds.append(kind)
        self._inner.append(0.0)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began_s
            self._kinds.pop()
            self._seconds[kind] += took_s - self._inner.pop()
            if self._inner:
                self._inner[-1] += took_s

    def _timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self._timing(kind):
                return function(*arguments, **options)

        return timed

    def replace_functions(self) -> None:
        """Puts timed functions in the place of those of TIMED."""
        for kind, owner, names in TIMED:
            for name in names:
                function = vars(owner)[name]
                if isinstance(function, classmethod):
                    timed: Any = classmethod(self._timed(kind, function.__func__))
                else:
                    timed = self._timed(kind, function)
                setattr(owner, name, timed)


def small_layers() -> nn.Module:
    """Returns a block of linear layers, each with a BatchNorm."""
    w = LAYER_WIDTH
    pairs = [(nn.Linear(w, w), nn.BatchNorm1d(w)) for _ in range(LAYERS)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def network(size: str) -> nn.Module:
    """Returns a model with 2,000 parameters, or one with 105 million elements in few."""
    torch.manual_seed(0)
    if size == "2000":
        return nn.Sequential(*[small_layers() for _ in range(BLOCKS_OF_MANY)])
    return nn.Sequential(*[Block(WIDE) for _ in range(BLOCKS)])


def train(session: ez.Session, size: str, warm_up: int, steps: int, out: Path) -> None:
    """Trains `warm_up` steps, and then `steps` that are timed."""
    meter = Meter()
    meter.replace_functions()
    model, _ = session.prepare(network(size), adam)
    meter.take()
    began_s = time.perf_counter()
    session.restore()
    restored_s, of_restore = time.perf_counter() - began_s, meter.take()
    before = session.step_count
    width = LAYER_WIDTH if size == "2000" else WIDE
    x = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.roll(1, 1))
    total = before + warm_up + steps
    for inputs, targets in session.batches(
        data, global_batch=BATCH * session.world_size, steps=total
    ):
        if session.step_count == before + warm_up:
            meter.take()
            began_s = time.perf_counter()
        session.backward(nn.functional.mse_loss(model(inputs), targets))
        session.step()
        if session.step_count == total:
            break  # what follows is the last checkpoint, and no step
    took_s, of_steps = time.perf_counter() - began_s, meter.take()
    if session.rank == 0:
        per_step = {kind: seconds / steps for kind, seconds in of_steps.items()}
        document = {"resumed": before > 0, "step_s": took_s / steps, "of_step_s": per_step}
        document |= {"restore_s": restored_s, "of_restore_s": of_restore}
        out.write_text(json.dumps(document))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="file for the seconds of rank 0")
    parser.add_argument("--size", choices=("2000", "105M"), default="2000")
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed")
    options = parser.parse_args()
    ez.run(
        lambda session: train(session, options.size, options.warm_up, options.steps, options.out)
    )
