"""A small regression in float64 that writes down which samples each global batch holds.

The dataset does not divide by the batch, nor the batch by the world.
"""

from __future__ import annotations

import argparse
import errno
import functools
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticzero as ez
from elasticzero.parallel import mirror

SAMPLES = 331
SMALL_BUCKET_BYTES = 400
"""Bytes of a bucket, of which the model then has several."""
OVER = "over"
"""The file with which a tester has training end at the end of an epoch."""
LINK = os.link


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x_NI, torch.sin(x_NI @ torch.ones(6, 3, dtype=torch.float64)))


def steps_per_epoch(global_batch: int) -> int:
    return math.ceil(SAMPLES / global_batch)


def network(hidden: int = 17, *, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(2)
    norms = [nn.BatchNorm1d(hidden)] if batch_norm else []
    return nn.Sequential(
        nn.Linear(6, hidden), *norms, nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def pause(pause_s: float) -> None:
    """Slow a step by so many seconds, or by what a tester's file says meanwhile."""
    began_s = time.monotonic()
    while (left_s := began_s + wanted_pause_s(pause_s) - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.02))


def wanted_pause_s(pause_s: float) -> float:
    try:
        return float(Path(os.environ["TESTER_PAUSE_FILE"]).read_text())
    except (KeyError, FileNotFoundError):
        return pause_s


class Holds:
    """Places where ranks wait while a tester wants them to: a file in `directory` that is named
    after the place and the generation lists the ranks."""

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def wait(self, place: str, generation: int, rank: int) -> None:
        """Say that this rank is there, by a file of its own, and stay as long as it is held."""
        if self._directory is None or not (hold := self._hold(place, generation)):
            return
        (self._directory / f"{place}-{generation}-at-{rank}").touch()
        while str(rank) in hold:
            time.sleep(0.01)
            hold = self._hold(place, generation)

    @property
    def over(self) -> bool:
        """Tells whether a tester wants training to end."""
        return self._directory is not None and (self._directory / OVER).exists()

    def _hold(self, place: str, generation: int) -> list[str]:
        assert self._directory is not None
        try:
            return (self._directory / f"{place}-{generation}").read_text().split()
        except FileNotFoundError:
            return []


class Waiting:
    """A tracked object without state, which waits in the middle of a restore."""

    def __init__(self, session: ez.Session, holds: Holds) -> None:
        self._session, self._holds = session, holds

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        self._holds.wait("restore", self._session.generation, self._session.rank)


def wait_while_saving(session: ez.Session, holds: Holds, save_every: int) -> None:
    """Wait where a checkpoint's part is in memory and not yet under its name."""

    def wait_and_link(path: Path, name: Path) -> None:
        step = session.step_count
        if step and save_every and step % save_every == 0:
            holds.wait("save", session.generation, session.rank)
        LINK(path, name)

    os.link = wait_and_link  # type: ignore[assignment]


def wait_within_steps(
    session: ez.Session, model: nn.Module, optimizer: torch.optim.Optimizer, holds: Holds
) -> None:
    """Waits inside a backward, once the last layer's gradients are on their way to other ranks;
    before gradients go to the rank that keeps a live copy; between the last sum over ranks and the
    optimizer's step; and while parameters are gathered: before the step of further buckets, which
    zero1 and zero2 gather in parts, or in a forward, where zero3 gathers one layer after the
    other."""
    buckets = 0

    def inside(place: str) -> None:
        holds.wait(place, session.generation, session.rank)

    def reduce(*_: Any) -> None:
        nonlocal buckets
        buckets = 0
        inside("reducing")

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        layer.register_full_backward_pre_hook(reduce)
    for layer in layers[1:]:
        layer.register_forward_pre_hook(lambda *_: inside("gathering"))
    exchange = mirror.Mirrors.exchange

    def wait_and_exchange(*arguments: Any) -> Any:
        inside("mirroring")
        return exchange(*arguments)

    mirror.Mirrors.exchange = wait_and_exchange  # type: ignore[method-assign, assignment]
    step = optimizer.step

    @functools.wraps(step)
    def step_and_wait(*args: Any, **options: Any) -> Any:
        nonlocal buckets
        inside("gathering" if buckets else "between")
        buckets += 1
        return step(*args, **options)

    optimizer.step = step_and_wait  # type: ignore[method-assign]


def ask_for_checkpoints(session: ez.Session, asks: str | None) -> None:
    """Asks for what a tester's file says of this step: a list of step, ranks and tag."""
    with suppress(FileNotFoundError):
        for step, ranks, tag in json.loads(Path(asks).read_text()) if asks else ():
            if session.step_count == step and session.rank in ranks:
                session.checkpoint(tag=tag)


def train(session: ez.Session, options: argparse.Namespace) -> None:
    holds = Holds(options.holds)
    if options.holds:
        # The release before, which also runs this script, has these elsewhere.
        from elasticzero.parallel.buckets import all_reduce, layout
        from elasticzero.parallel.fixed_order import layout as fixed_layout

        layout.BUCKET_BYTES = fixed_layout.MESSAGE_BYTES = SMALL_BUCKET_BYTES
        all_reduce.BUCKET_BYTES = all_reduce.FIRST_BUCKET_BYTES = SMALL_BUCKET_BYTES
    model, optimizer = session.prepare(
        network(options.hidden, batch_norm=options.batch_norm),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05),
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    scheduler = session.track("scheduler", schedule)
    if options.holds:
        session.track("waiting", Waiting(session, holds))
        wait_while_saving(session, holds, options.save_every)
        wait_within_steps(session, model, optimizer, holds)
    holds.wait("build", session.generation, session.rank)
    session.restore()

    def end_early() -> None:
        """At the end of the second epoch or a later one."""
        if holds.over and session.step_count > steps_per_epoch(options.global_batch):
            session.stop("the tester has seen enough")

    def evaluate() -> None:
        session.evaluate(dataset(), lambda batch: loss_of(model(batch[0]), batch[1]))

    seen, at_epoch_end = -1, end_early if options.holds else None
    for x, y in session.batches(
        dataset(),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        virtual_batch=options.virtual_batch,
        epochs=options.epochs,
        seed=3,
        on_epoch_end=evaluate if options.batch_norm else at_epoch_end,
    ):
        if session.step_count != seen:
            seen = session.step_count
            place = {"generation": session.generation, "step": seen + 1}
            trace = {**place, "samples": list(session.batch_indices)}
            # In one write, of which a kill leaves all or nothing.
            print(json.dumps({"trace": trace}) + "\n", end="", flush=True)
            pause(options.pause)
            holds.wait("step", session.generation, session.rank)
            if options.long_step == seen + 1 and session.generation == 1:
                time.sleep(options.long)
            if options.fail_at == seen + 1 and session.rank == 0:
                raise ValueError(f"told to fail at step {seen + 1}")
        if options.sample_s:
            share = {**place, "rank": session.rank, "samples": len(x)}
            print(json.dumps({"share": share}) + "\n", end="", flush=True)
            slow = options.slow_rank == str(session.rank)
            time.sleep(options.sample_s * len(x) * (1 + slow))
        loss = loss_of(model(x), y)
        session.backward(loss)
        if session.step(max_grad_norm=1.0):
            scheduler.step()
            ask_for_checkpoints(session, options.asks)
            tokens = {} if options.tokens is None else {"tokens": options.tokens}
            session.log(loss=loss.item(), **tokens)
            if options.slow_after is not None and session.step_count >= options.slow_after:
                time.sleep(1.5 if session.rank == 0 and session.generation == 1 else 0.0)


def wait_before_connecting(holds: Holds) -> None:
    """Of each generation, where a kept process connects again too."""
    connect = dist.init_process_group

    def wait_and_connect(*args: Any, **options: Any) -> None:
        generation = 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        holds.wait("connect", generation, int(os.environ.get("RANK", "0")))
        connect(*args, **options)

    dist.init_process_group = wait_and_connect


def refuse_shared_memory() -> None:
    """No file can be given room: what a /dev/shm that is too small does to a capture."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = refuse


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=10)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--virtual-batch", type=int)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, help="logged at each step")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--hidden", type=int, default=17)
    parser.add_argument("--batch-norm", action="store_true", help="a layer, and an evaluation")
    parser.add_argument("--slow-after", type=int)
    parser.add_argument("--long-step", type=int)
    parser.add_argument("--long", type=float, default=8.0)
    parser.add_argument("--slow-start", type=float, default=0.0)
    parser.add_argument("--slow-rank", help="starts slowly alone; samples take it twice as long")
    parser.add_argument("--sample-s", type=float, default=0.0, help="seconds that each takes")
    parser.add_argument("--linger", type=float, default=0.0)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--holds")
    parser.add_argument("--asks", help="a file of checkpoints that ranks ask for")
    parser.add_argument("--save-every", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.slow_rank is None or chosen.slow_rank == os.environ.get("RANK"):
        time.sleep(chosen.slow_start)
    if chosen.no_memory:
        refuse_shared_memory()
    if chosen.holds:
        wait_before_connecting(Holds(chosen.holds))
    ez.run(lambda session: train(session, chosen))
    time.sleep(chosen.linger if os.environ.get("RANK", "0") != "0" else 0.0)
