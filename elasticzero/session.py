"""`run` and `Session`: what a training script uses."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from elasticzero.boundary import Boundary
from elasticzero.captures import Captures, check_shared
from elasticzero.collectives import ControlWord, Groups
from elasticzero.data import Order, Plan, Position
from elasticzero.errors import ElasticZeroError, UserError
from elasticzero.evaluation import Result, evaluate, evaluating, sync_buffers
from elasticzero.loader import Progress, Reading, Walk, length_of
from elasticzero.messages import Finished, Logged, Looped, Restored, Stepped
from elasticzero.parallel import OptimizerFactory, Setting, create
from elasticzero.rescue import rescue_if_stuck
from elasticzero.state import NamedModel, SmallState, Stateful
from elasticzero.survival import Origin, Over, survive
from elasticzero.worker import AgentLink, Standing, end, enter_world

S = TypeVar("S", bound=Stateful)


def run(train: Callable[[Session], None]) -> None:
    """Train: call `train` with the session of this process's generation.

    Under an agent the process ends here when the generation does, and `train` is entered again in
    another process, or with --keep-workers in the same one; the lines after `run` are reached once
    training has finished. Without an agent
    this trains on one process, and an error of this project's is printed in one line and raised as
    `SystemExit` with its exit code.
    """
    link = AgentLink.from_environment()
    origin = Origin()
    while (over := _generation(link, train)) is not None:
        survive(link, over, origin)


def _generation(link: AgentLink, train: Callable[[Session], None]) -> Over | None:
    """One generation; None: training has finished."""
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
            if isinstance(error, ElasticZeroError):
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(int(error.exit_code)) from error
            raise
        code = end(link, error, session._standing)
        traceback.clear_frames(error.__traceback__)  # what the script held in them
        return session._over(code)
    session._close()
    return None


class Session:
    """One generation of training, as the script sees it."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._assignment = link.assignment
        self._groups: Groups | None = None
        self._control = ControlWord(None)
        self._at: Boundary | None = None
        self._saving = True
        self._clean = False
        self._applied = False
        """A step was applied since the last boundary."""
        self._step = 0
        self._position = Position()
        self._next_position = Position()
        self._loops = 0
        self._progress = Progress()
        self._began_s = self._connected_s = time.monotonic()
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
        return self._progress.indices()

    def prepare(
        self, model: nn.Module, optimizer: OptimizerFactory, *, strategy: str | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Lay the model, and the optimizer that `optimizer(parameters)` makes, over the ranks.

        Use what this returns and no more the model that was given. strategy: ddp, zero1, zero2 or
        zero3; by default the launcher's.
        """
        if self._at is not None:
            raise UserError("session.prepare was called twice; one session trains one model")
        if not any(True for _ in model.parameters()):
            raise UserError("session.prepare was given a model without parameters")
        model.to(self.device)
        named = NamedModel(model)
        if self.world_size > 1 and self._assignment.resume.tier == "fresh":
            every = {**named.parameters, **dict(model.named_buffers())}
            sync_buffers({name: tensor.data for name, tensor in every.items()})
        name = strategy or self._assignment.strategy
        setting = Setting(
            model=model,
            named=named,
            factory=optimizer,
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
        )
        laid = create(name, setting)
        small = SmallState(self.device)
        small.buffers, small.aliases = named.buffers, named.aliases
        small.groups, small.group_names = laid.optimizer.param_groups, laid.group_names
        captures = Captures(
            self._link, name, laid.share, replicated=laid.replicated, saving=self._saving
        )
        self._at = Boundary(self._link, self._control, laid, small, captures)
        return laid.model, laid.optimizer

    def track(self, name: str, thing: S) -> S:
        """Keep the state of anything with `state_dict` and `load_state_dict`; returns it."""
        at = self._prepared("track")
        if at.copy is not None:
            raise UserError("session.track comes before session.restore")
        at.small.track(name, thing)
        return thing

    def restore(self) -> None:
        """Put the state in place that this generation starts from: another node's or this one's
        memory, a checkpoint, or the fresh model as it is."""
        at = self._prepared("restore")
        if at.copy is not None:
            raise UserError("session.restore was called twice")
        self._link.check()
        began_s, connected_s = time.monotonic(), self._connected_s
        with self._link.leaving_at_once():
            copy, bytes_read = at.restore()
        self._step, self._position, self._clean = copy.step, copy.position, True
        self._link.send(
            Restored(
                step=self._step,
                tier=self._assignment.resume.tier,
                connect_s=connected_s - self._began_s,
                build_s=began_s - connected_s,
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
        if self._prepared("batches").copy is None:
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
        strategy = self._prepared("batches").strategy
        progress = self._progress = Progress(walk.plan)
        data = reading.batches(walk.indices(position))
        try:
            for batch, after in walk.steps(position):
                self._boundary()
                self._next_position = after
                progress.begin(batch)
                for part in walk.parts(batch):
                    began_s = time.monotonic()
                    samples = next(data)
                    progress.present(part, time.monotonic() - began_s)
                    strategy.expect(last=part.last)
                    yield samples
                    if not progress.stepped:
                        raise UserError(
                            "session.step() was not called for this micro-batch; call "
                            "session.backward(loss) and session.step() for each, also for those "
                            "where step() returns False"
                        )
            self._boundary(last=True)
        finally:
            self._link.send(Looped())
        self._progress = Progress()

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Add the gradient of a micro-batch's mean loss to that of the global batch.

        weight: what the mean is over, in place of the number of samples (tokens, say); then give
        it for every micro-batch.
        """
        at, progress = self._prepared("backward"), self._progress
        batch, part = progress.current("backward")
        if progress.backward:
            raise UserError("session.backward was called twice for one micro-batch")
        if loss.numel() != 1:
            raise UserError(f"the loss has shape {tuple(loss.shape)}; it must be one number")
        self._link.check()
        amount = float(part.weight if weight is None else weight)
        if part.weight == 0:
            loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0 * loss.detach())
            amount = 0.0
        if weight is not None:
            progress.weights = (progress.weights or 0.0) + amount
        at.strategy.backward(loss, amount / len(batch))
        progress.backward = True

    def step(self, max_grad_norm: float | None = None) -> bool:
        """After each micro-batch; True when the global batch is complete and applied.

        max_grad_norm: limit of the norm of the whole gradient of the optimizer's parameters.
        """
        strategy, progress = self._prepared("step").strategy, self._progress
        batch, part = progress.current("step")
        if not progress.backward:
            raise UserError("session.backward(loss) was not called before session.step()")
        progress.stepped = True
        if not part.last:
            return False
        self._link.check()
        strategy.finish(self._weight_factor(len(batch)), max_grad_norm)
        self._link.change(self._tear)
        strategy.apply()
        self._applied = True
        self._step += 1
        step_s = time.monotonic() - progress.began_s
        self._prepared("step").captures.stepped(step_s)
        self._link.send(
            Stepped(
                step=self._step,
                step_s=step_s,
                data_wait_s=progress.data_wait_s,
                samples=len(batch),
                total=progress.total(self._step, self._next_position.steps),
            )
        )
        return True

    def _tear(self) -> None:
        """The state is about to change, and of no use until it has."""
        self._clean = False

    def _weight_factor(self, samples: int) -> float:
        """What turns a mean over samples into one over the weights that the script gave."""
        if self._progress.weights is None:
            return 1.0
        total = self._progress.weights
        if self.world_size > 1:
            summed = torch.tensor([total], dtype=torch.float64, device=self.device)
            dist.all_reduce(summed)
            total = float(summed)
        if total <= 0:
            raise UserError(f"the weights of a global batch sum to {total:g}; it must be positive")
        return samples / total

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
        at = self._prepared("evaluate")
        reading = Reading(dataset=dataset, device=self.device, collate_fn=collate_fn)
        place = (self.rank, self.world_size)
        with (
            self.busy("evaluating"),
            evaluating(at.strategy.model, at.small.buffers, self.world_size),
        ):
            return evaluate(reading, fn, batch_size, place, self._link.check)

    def log(self, **scalars: float | Tensor) -> None:
        """Hand numbers to the agent's metrics and log, for the current step; without an agent
        nobody hears them."""
        values = {name: _scalar(name, value) for name, value in scalars.items()}
        self._link.send(Logged(step=self._step, scalars=values))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """A section that makes no steps and is no hang: "evaluating", "compiling".

        `--hang-timeout` does not count in it, on no rank. Sections may lie in each other.
        """
        with self._link.busy(doing):
            yield

    def _prepared(self, call: str) -> Boundary:
        if self._at is None:
            raise UserError(f"call session.prepare(model, optimizer) before session.{call}(…)")
        return self._at

    def _boundary(self, *, last: bool = False) -> None:
        """Between two steps. Raises `GenerationEnded` when a flag was raised, or the generation is
        over; the state is clean then too."""
        boundary = self._prepared("batches")
        stepped, self._applied = self._applied, False
        if stepped:
            self._position = self._next_position
        lost = boundary.reach(self._step, self._position, stepped=stepped)
        self._clean = True
        self._link.check()
        if lost is not None:
            raise lost
        every = self._assignment.checkpoint_every
        due = last or (stepped and every > 0 and self._step % every == 0)
        boundary.meet(due=due, last=last)

    def _settle(self) -> None:
        """Take the boundary of a loop that the script left by `break`."""
        if self._applied:
            self._boundary(last=True)
        self._progress = Progress()

    def _standing(self) -> Standing:
        """What the stop protocol is to say and save."""
        resume, boundary = self._assignment.resume, self._at
        copy = boundary.copy if boundary is not None else None
        clean = self._clean and boundary is not None and copy is not None
        kept = clean and boundary is not None and boundary.captures.can_stop_with_state()
        return Standing(
            step=copy.step if clean and copy is not None else self._step,
            clean=kept,
            complete=boundary is not None and boundary.strategy.replicated,
            bad_step=resume.step if resume.tier == "storage" and copy is None else None,
            save=boundary.snapshot if boundary is not None and kept else None,
            shut=self._groups.shut if self._groups is not None else lambda: None,
        )

    def _open(self) -> None:
        """Meet the other ranks."""
        self.device, self._groups = enter_world(self._link)
        self._control = ControlWord(self._groups)
        if (groups := self._groups) is not None:
            self._link.on_abort(lambda: self._give_up(groups))
        if self._groups is not None:
            self._agree_on_checkpoints(self._groups)
        self._connected_s = time.monotonic()

    def _give_up(self, groups: Groups) -> None:
        """The agent has ended the generation."""
        groups.shut()
        rescue_if_stuck(self._link, self._standing)

    def _agree_on_checkpoints(self, groups: Groups) -> None:
        """All ranks save at the same steps or none does, whatever each node was told."""
        given = self._assignment
        every = groups.greatest(given.checkpoint_every if given.rank == 0 else 0)
        wished = -1 if given.snapshot_every is None else given.snapshot_every
        snapshots = groups.greatest(wished if given.rank == 0 else -1)
        self._assignment = replace(
            given, checkpoint_every=every, snapshot_every=None if snapshots < 0 else snapshots
        )
        self._link.assignment = self._assignment
        self._saving = not groups.greatest(int(given.checkpoint_dir is None))
        if self._saving:
            check_shared(given, groups.greatest)
        elif given.checkpoint_dir is not None:
            print("no checkpoints: some nodes have no --checkpoint-dir", file=sys.stderr)

    def _end(self) -> None:
        """After the training function: save what is not saved, and wait until all ranks have."""
        if self._at is not None and self._at.copy is not None:
            self._settle()
            with self.busy("writing the last checkpoint"):
                self._at.captures.finish(self._at.copy)
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))
        self._link.check()
        self._link.send(Finished(step=self._step))

    def _over(self, code: int) -> Over:
        """The generation is over, the process may not be."""
        if self._at is not None:
            self._at.captures.close()
        return Over(code, self._groups)

    def _close(self) -> None:
        if self._groups is not None:
            self._groups.close()


def _scalar(name: str, value: float | Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"session.log: {name!r} is not one number ({error})") from None
