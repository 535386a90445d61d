"""`run` and `Session`: what a training script uses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from elasticzero import saving
from elasticzero.channel import (
    FLAG_GROW,
    FLAG_LEAVE,
    FLAG_STOP,
    Attached,
    Busy,
    CheckpointWritten,
    Finished,
    Held,
    Logged,
    Restored,
    Stepped,
)
from elasticzero.checkpoint.storage import local_path
from elasticzero.checkpoint.writer import write_checkpoint, write_snapshot
from elasticzero.collectives import ControlWord, Groups, Place, connect, device_of
from elasticzero.data import GlobalBatch, MicroBatch, Order, Plan, Position
from elasticzero.errors import UserError
from elasticzero.evaluation import Result, evaluate, evaluating, sync_buffers
from elasticzero.loader import Reading, Walk, length_of
from elasticzero.parallel import OptimizerFactory, Setting, Strategy, create
from elasticzero.state import BoundaryCopy, NamedModel, SmallState, Stateful
from elasticzero.worker import (
    AgentLink,
    GenerationEnded,
    Standing,
    limit_connecting,
    run_interruptibly,
    stop,
)

S = TypeVar("S", bound=Stateful)
FLAG_REASONS = {
    FLAG_LEAVE: "a node leaves",
    FLAG_GROW: "the world grows",
    FLAG_STOP: "the job is stopped",
}


def run(train: Callable[[Session], None]) -> None:
    """Train: call `train` with the session of this process's generation.

    Under an agent the process ends here when the generation does, and `train` is entered again in
    another process; the lines after `run` are reached once training has finished. Without an agent
    this trains on one process.
    """
    link = AgentLink.from_environment()
    session = Session(link)
    try:
        session._open()
        try:
            train(session)
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise
        session._end()
    except BaseException as error:
        if link.alone:
            raise
        stop(link, error, session._standing())
    session._close()


class Session:
    """One generation of training, as the script sees it."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._assignment = link.assignment
        self._place = _place_of(link)
        self._groups: Groups | None = None
        self._control = ControlWord(None)
        self._strategy: Strategy | None = None
        self._strategy_name = self._assignment.strategy
        self._small: SmallState | None = None
        self._copy: BoundaryCopy | None = None
        self._clean = False
        self._applied = False
        """A step was applied since the last boundary."""
        self._step = 0
        self._saved_step = -1
        self._position = Position()
        self._next_position = Position()
        self._loops = 0
        self._current = _Current()
        self._times_s = {"began": time.monotonic(), "connected": time.monotonic()}
        self.device = torch.device("cpu")
        """Where batches arrive and the model is."""

    @property
    def rank(self) -> int:
        return self._assignment.rank

    @property
    def world_size(self) -> int:
        return self._assignment.world_size

    @property
    def local_rank(self) -> int:
        return self._assignment.local_rank

    @property
    def generation(self) -> int:
        """Which world this is, from 1."""
        return self._assignment.generation

    @property
    def step_count(self) -> int:
        """Optimizer steps applied so far; 1 after the first."""
        return self._step

    @property
    def batch_indices(self) -> list[int]:
        """The dataset indices of the whole current global batch, on all ranks together."""
        current = self._current
        if current.batch is None or current.plan is None:
            raise UserError("session.batch_indices is there inside the loop over session.batches")
        batch = current.batch
        indices = current.plan.order.indices(batch.epoch, batch.start, batch.stop)
        return [int(index) for index in indices]

    def prepare(
        self, model: nn.Module, optimizer: OptimizerFactory, *, strategy: str | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Lay the model, and the optimizer that `optimizer(parameters)` makes, over the ranks.

        Use what this returns and no more the model that was given. strategy: ddp, zero1, zero2 or
        zero3; by default the launcher's.
        """
        if self._strategy is not None:
            raise UserError("session.prepare was called twice; one session trains one model")
        if not any(True for _ in model.parameters()):
            raise UserError("session.prepare was given a model without parameters")
        model.to(self.device)
        named = NamedModel(model)
        if self.world_size > 1 and self._assignment.resume.tier == "fresh":
            every = {**named.parameters, **dict(model.named_buffers())}
            sync_buffers({name: tensor.data for name, tensor in every.items()})
        self._strategy_name = strategy or self._strategy_name
        self._strategy = create(
            self._strategy_name,
            Setting(
                model=model,
                named=named,
                factory=optimizer,
                device=self.device,
                rank=self.rank,
                world_size=self.world_size,
            ),
        )
        small = SmallState(self.device)
        small.buffers, small.aliases = named.buffers, named.aliases
        small.groups = self._strategy.optimizer.param_groups
        small.group_names = self._strategy.group_names
        self._small = small
        return self._strategy.model, self._strategy.optimizer

    def track(self, name: str, thing: S) -> S:
        """Keep the state of anything with `state_dict` and `load_state_dict`; returns it."""
        _, small = self._prepared("track")
        if self._copy is not None:
            raise UserError("session.track comes before session.restore")
        small.track(name, thing)
        return thing

    def restore(self) -> None:
        """Put the state in place that this generation starts from: another node's or this one's
        memory, a checkpoint, or the fresh model as it is."""
        strategy, small = self._prepared("restore")
        if self._copy is not None:
            raise UserError("session.restore was called twice")
        self._link.check()
        resume, began_s = self._assignment.resume, time.monotonic()
        bytes_read = 0
        if resume.tier != "fresh":
            checkpoint = saving.open_source(self._assignment)
            self._position = saving.load(checkpoint, strategy, small, self.rank)
            self._step = checkpoint.manifest.step
            bytes_read = checkpoint.bytes_read
        if resume.tier == "storage":
            self._saved_step = self._step
        self._copy = small.capture(self._step, self._position)
        self._clean = True
        times_s = self._times_s
        self._link.send(
            Restored(
                step=self._step,
                tier=resume.tier,
                connect_s=times_s["connected"] - times_s["began"],
                build_s=began_s - times_s["connected"],
                restore_s=time.monotonic() - began_s,
                bytes_read=bytes_read,
            )
        )

    def batches(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """This rank's micro-batches, from where training stands to the end of the loop.

        global_batch: samples in a step over all ranks. micro_batch: samples at once on one rank,
        by default its whole part. Call `backward` and `step` for each. The order of samples
        depends on `seed` and the epoch only.
        """
        self._prepared("batches")
        if self._copy is None:
            raise UserError("call session.restore() before session.batches(…)")
        if micro_batch is not None and micro_batch < 1:
            raise UserError(f"micro_batch is {micro_batch}; it must be at least 1")
        order = Order(samples=length_of(dataset), seed=seed, shuffle=shuffle)
        plan = Plan(
            order=order,
            global_batch=global_batch,
            epochs=epochs,
            steps=steps,
            drop_last=drop_last,
        )
        if global_batch < self.world_size:
            raise UserError(
                f"global_batch is {global_batch}, smaller than the world of {self.world_size} "
                "ranks: raise it, or run on fewer"
            )
        reading = Reading(
            dataset=dataset, device=self.device, collate_fn=collate_fn, num_workers=num_workers
        )
        walk = Walk(plan=plan, rank=self.rank, world_size=self.world_size, micro_batch=micro_batch)
        self._loops += 1
        return self._walk(walk, reading, self._loops - 1)

    def _walk(self, walk: Walk, reading: Reading, loop: int) -> Iterator[Any]:
        self._settle()
        if loop < self._position.loop:
            return
        self._position = position = walk.plan.start(self._position, loop)
        current = self._current = _Current(plan=walk.plan)
        data = reading.batches(walk.indices(position))
        for batch, after in walk.steps(position):
            self._boundary()
            self._next_position = after
            current.begin(batch)
            for part in walk.parts(batch):
                began_s = time.monotonic()
                samples = next(data)
                current.data_wait_s += time.monotonic() - began_s
                current.part, current.backward, current.stepped = part, False, False
                self._prepared("batches")[0].expect(last=part.last)
                yield samples
                if not current.stepped:
                    raise UserError(
                        "session.step() was not called for this micro-batch; call "
                        "session.backward(loss) and session.step() for each, also for those "
                        "where step() returns False"
                    )
        self._boundary(last=True)
        self._current = _Current()

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Add the gradient of a micro-batch's mean loss to that of the global batch.

        weight: what the mean is over, in place of the number of samples (tokens, say); then give
        it for every micro-batch.
        """
        strategy, _ = self._prepared("backward")
        current = self._current
        if current.part is None or current.batch is None or current.stepped or current.backward:
            raise UserError("session.backward is called once for each micro-batch of the loop")
        if loss.numel() != 1:
            raise UserError(f"the loss has shape {tuple(loss.shape)}; it must be one number")
        self._link.check()
        counts = current.part.weight
        amount = float(counts if weight is None else weight)
        if counts == 0:
            loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0 * loss.detach())
            amount = 0.0
        if weight is not None:
            current.weights = (current.weights or 0.0) + amount
        strategy.backward(loss, amount / len(current.batch))
        current.backward = True

    def step(self, max_grad_norm: float | None = None) -> bool:
        """After each micro-batch; True when the global batch is complete and applied.

        max_grad_norm: limit of the norm of the whole gradient of the optimizer's parameters.
        """
        strategy, _ = self._prepared("step")
        current = self._current
        if current.part is None or current.batch is None or current.stepped:
            raise UserError("session.step is called once for each micro-batch of the loop")
        if not current.backward:
            raise UserError("session.backward(loss) was not called before session.step()")
        current.stepped = True
        if not current.part.last:
            return False
        self._link.check()
        strategy.finish(self._weight_factor(), max_grad_norm)
        self._clean = False
        strategy.apply()
        self._applied = True
        self._step += 1
        self._link.send(
            Stepped(
                step=self._step,
                step_s=time.monotonic() - current.began_s,
                data_wait_s=current.data_wait_s,
                samples=len(current.batch),
                total=current.total(self._step, self._next_position.steps),
            )
        )
        return True

    def _weight_factor(self) -> float:
        """What turns a mean over samples into one over the weights that the script gave."""
        current = self._current
        if current.weights is None or current.batch is None:
            return 1.0
        total = current.weights
        if self.world_size > 1:
            summed = torch.tensor([total], dtype=torch.float64, device=self.device)
            dist.all_reduce(summed)
            total = float(summed)
        if total <= 0:
            raise UserError(f"the weights of a global batch sum to {total:g}; it must be positive")
        return len(current.batch) / total

    def evaluate(
        self,
        dataset: Dataset[Any],
        fn: Callable[[Any], Any],
        *,
        batch_size: int = 32,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Result:
        """The mean over the dataset of what `fn(batch)` gives as a batch's mean: a number or a
        dict of numbers.

        In eval mode, without gradients; training goes on as if it had not been. The result does
        not depend on the world.
        """
        strategy, small = self._prepared("evaluate")
        reading = Reading(dataset=dataset, device=self.device, collate_fn=collate_fn)
        place = (self.rank, self.world_size)
        with (
            self.busy("evaluating"),
            evaluating(strategy.model, small.buffers, self.world_size),
        ):
            return evaluate(reading, fn, batch_size, place, self._link.check)

    def log(self, **scalars: float | Tensor) -> None:
        """Hand numbers to the agent's metrics and log, for the current step."""
        if not self._link.alone:
            values = {name: float(value) for name, value in scalars.items()}
            self._link.send(Logged(step=self._step, scalars=values))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """A section that makes no steps and is no stall: "evaluating", "compiling"."""
        self._link.send(Busy(doing=doing))
        try:
            yield
        finally:
            self._link.send(Busy(doing=None))

    def _prepared(self, call: str) -> tuple[Strategy, SmallState]:
        if self._strategy is None or self._small is None:
            raise UserError(f"call session.prepare(model, optimizer) before session.{call}(…)")
        return self._strategy, self._small

    def _boundary(self, *, last: bool = False) -> None:
        """Between two steps: the state is whole and copied, flags are exchanged, a due checkpoint
        is written. Raises `GenerationEnded` when a flag was raised."""
        _, small = self._prepared("batches")
        self._link.check()
        if self._applied:
            if self.world_size > 1 and small.buffers:
                sync_buffers(small.buffers)
            self._position = self._next_position
        self._copy = small.capture(self._step, self._position)
        self._clean, stepped, self._applied = True, self._applied, False
        flags = self._control.exchange(self._link.flags, last=last)
        if flags:
            raise GenerationEnded(" and ".join(r for f, r in FLAG_REASONS.items() if flags & f))
        every = self._assignment.checkpoint_every
        due = stepped and every > 0 and self._step % every == 0
        if due or last:
            self._write_checkpoint()

    def _settle(self) -> None:
        """Take the boundary of a loop that the script left by `break`."""
        if self._applied:
            self._boundary(last=True)
        self._current = _Current()

    def _author(self, *, complete: bool) -> saving.Author:
        return saving.Author(
            rank=0 if complete else self.rank,
            world_size=1 if complete else self.world_size,
            generation=self.generation,
            token=self._assignment.token,
            strategy=self._strategy_name,
        )

    def _write_checkpoint(self) -> None:
        directory = self._assignment.checkpoint_dir
        if directory is None or self._step <= max(self._saved_step, 0) or self._copy is None:
            return
        strategy, _ = self._prepared("batches")
        author = self._author(complete=False)
        draft, pieces = saving.draft(strategy.share(), self._copy, author)
        path = local_path(directory)
        with self.busy("writing a checkpoint"):
            written = run_interruptibly(
                lambda: write_checkpoint(path, draft, self.rank, pieces),
                self._link.check,
                "checkpoint",
            )
        self._saved_step = self._step
        self._link.send(
            CheckpointWritten(
                step=self._step,
                seconds=written.seconds,
                bytes=written.bytes,
                committed=written.committed,
            )
        )

    def _write_snapshot(self) -> Held:
        strategy, _ = self._prepared("batches")
        assert self._copy is not None
        author = self._author(complete=strategy.replicated)
        draft, pieces = saving.draft(strategy.share(), self._copy, author)
        write_snapshot(Path(self._assignment.snapshot_root), draft, author.rank, pieces)
        return Held(
            step=self._copy.step,
            generation=author.generation,
            rank=author.rank,
            world_size=author.world_size,
        )

    def _standing(self) -> Standing:
        resume = self._assignment.resume
        return Standing(
            step=self._copy.step if self._clean and self._copy is not None else self._step,
            clean=self._clean,
            complete=self._strategy is not None and self._strategy.replicated,
            bad_step=resume.step if resume.tier == "storage" and self._copy is None else None,
            save=self._write_snapshot if self._clean else None,
            shut=self._groups.shut if self._groups is not None else lambda: None,
        )

    def _open(self) -> None:
        """Meet the other ranks."""
        if "OMP_NUM_THREADS" not in os.environ and not self._link.alone:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // self._assignment.local_world_size))
        self._link.send(Attached(pid=os.getpid()))
        self.device = device_of(self._place)
        if not self._link.alone:
            watchdog = limit_connecting(self._link)
            self._groups = connect(self._place, self.device)
            watchdog.cancel()
            self._link.on_abort(self._groups.shut)
            self._control = ControlWord(self._groups)
        self._times_s["connected"] = time.monotonic()

    def _end(self) -> None:
        """After the training function: save what is not saved, and wait until all ranks have."""
        if self._strategy is not None and self._copy is not None:
            self._settle()
            self._write_checkpoint()
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))
        self._link.check()
        self._link.send(Finished(step=self._step))

    def _close(self) -> None:
        if self._groups is not None:
            self._groups.close()


class _Current:
    """The global batch and micro-batch that the script works on."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan
        self.batch: GlobalBatch | None = None
        self.part: MicroBatch | None = None
        self.backward = False
        self.stepped = False
        self.weights: float | None = None
        self.began_s = 0.0
        self.data_wait_s = 0.0

    def begin(self, batch: GlobalBatch) -> None:
        self.batch, self.weights = batch, None
        self.began_s, self.data_wait_s = time.monotonic(), 0.0

    def total(self, step: int, steps_of_loop: int) -> int:
        """Steps of the whole run, if this loop is its last."""
        return step - steps_of_loop + self.plan.total_steps if self.plan is not None else 0


def _place_of(link: AgentLink) -> Place:
    a = link.assignment
    return Place(
        rank=a.rank,
        world_size=a.world_size,
        local_rank=a.local_rank,
        master_address=a.master_address,
        master_port=a.master_port,
        store_fd=a.store_fd,
        token=a.token,
        connect_timeout_s=a.connect_timeout_s,
        collective_timeout_s=a.collective_timeout_s,
    )
