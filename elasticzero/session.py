"""Defines `Session`, the interface that a training script uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, Literal, Never, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from elasticzero.comm.barriers import Call
from elasticzero.consistency.configuration import Comparison
from elasticzero.data.loader import BatchReader
from elasticzero.data.loop_arguments import LoopArguments
from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.ipc.assignment import Assignment
from elasticzero.ipc.messages import Logged
from elasticzero.options.diloco import DiLoCo
from elasticzero.parallel.gradients import GradientFunction, GradientHook
from elasticzero.parallel.optimizers.groups import MadeOptimizers
from elasticzero.state.auxiliary import Stateful
from elasticzero.state.rng import Generator
from elasticzero.training import argument_checks
from elasticzero.training.batch_loops import Loops
from elasticzero.training.batch_work import BatchWork
from elasticzero.training.evaluation import Result, evaluate, evaluating
from elasticzero.training.islands.island_training import open_islands
from elasticzero.training.module_checks import batch_norms
from elasticzero.training.precision import Compute
from elasticzero.training.preparation import prepare_training
from elasticzero.training.training_state import TrainingState
from elasticzero.worker.generation import Generation
from elasticzero.worker.single_process import LocalLink

S = TypeVar("S", bound=Stateful | Generator)
Made = TypeVar("Made", bound=MadeOptimizers)


@argument_checks.checks_arguments
class Session:
    """Represents one generation of training to the script; `elasticzero.run` makes it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._link = generation.link
        self._comparison = Comparison(generation.groups, generation.link)
        self._work = BatchWork(
            generation.link,
            generation.groups,
            generation.tracker,
            on_gpu=generation.device.type == "cuda",
        )
        self._loops = Loops(generation.link, generation.groups, self._comparison, self._work)
        self.device = generation.device
        """The device of the batches and the model."""

    @property
    def _assignment(self) -> Assignment:
        return self._link.assignment

    @property
    def rank(self) -> int:
        """Returns this process's number among all ranks, from 0."""
        return self._assignment.rank

    @property
    def world_size(self) -> int:
        """Returns the number of ranks in this generation."""
        return self._assignment.world_size

    @property
    def local_rank(self) -> int:
        """Returns this process's number among those of its node, from 0."""
        return self._assignment.local_rank

    @property
    def generation(self) -> int:
        """Returns the number of the generation, from 1."""
        return self._assignment.generation

    @property
    def step_count(self) -> int:
        """Returns the number of optimizer steps applied so far; 1 after the first."""
        return 0 if (training := self._generation.training) is None else training.step_count

    @property
    def gradient_norm(self) -> float | None:
        """Returns the norm of the newest step's whole gradient, before clipping; None: no step."""
        return None if (training := self._generation.training) is None else training.gradient_norm

    @property
    def loss(self) -> float | None:
        """Returns the newest step's loss: the mean over the global batch, the same on all ranks;
        None: no step."""
        training = self._generation.training
        return None if training is None else training.loss

    @property
    def batch_indices(self) -> list[int]:
        """Returns the dataset indices of the whole current global batch, on all ranks together."""
        return self._work.indices()

    @property
    def micro_batch(self) -> MicroBatch:
        """Returns this rank's micro-batch: `weight` samples count, `last` ends the global batch."""
        return self._generation.tracker.now.current()

    @property
    def epoch(self) -> int:
        """Returns the epoch of the current global batch, from 0, over all loops over its dataset.

        In `on_epoch_end` it is the one that has ended, and after a loop that of the loop's last
        batch. After a loop that an earlier generation has done it is the epoch of the current
        position.
        """
        return self._loops.epoch

    @property
    def stopped(self) -> str | None:
        """Returns the reason given to `stop`, once all ranks have it; None: it was not called."""
        return None if (training := self._generation.training) is None else training.stopped

    def stop(self, reason: str) -> None:
        """Ends training for all ranks; any of them may call this, at any time.

        All ranks leave their loop at the same boundary, at most one step later, as if it had come
        to its end, and later loops yield nothing; the code after the loops runs. The state is
        saved, and the job ends as finished, with this reason. A run that is begun anew from its
        last checkpoint (`--restart`) continues training.

        Args:
            reason: the text that the job ends with.

        Raises:
            UserError: the reason is no text.
        """
        self._prepared("stop").ask_to_stop(argument_checks.stop_reason(reason))

    def checkpoint(self, tag: str | None = None) -> None:
        """Has the state of the next boundary between steps saved as a checkpoint.

        Any rank may call this, at any time; calls of several ranks are one save. After `step` has
        returned True, in `on_epoch_end` and after a loop it is the state at the call. Without
        `--checkpoint-dir` nothing is saved, which is said once.

        Args:
            tag: a name for the step, as "best", which `tags/best.json` in the checkpoint directory
                has from then on; None: the step has no name.

        Raises:
            UserError: the text is no tag.
        """
        if (training := self._prepared("checkpoint")).copy is None:
            raise UserError("call session.restore() before session.checkpoint(…)")
        training.requests.ask(argument_checks.checked_tag(tag))

    def prepare(  # noqa: PLR0913 - keywords of the public interface
        self,
        model: nn.Module,
        optimizer: Callable[[Any], Made],
        *,
        strategy: str | DiLoCo | None = None,
        precision: str = "fp32",
        compile: bool | str = False,
        cpu_offload: bool = False,
        load: str | PathLike[str] | None = None,
        load_optimizer: bool = False,
    ) -> tuple[nn.Module, Made]:
        """Divides the model and its optimizer among the ranks, and returns both.

        Use the model that this returns, not the one that was given.

        Args:
            model: an `nn.Module` on any device.
            optimizer: a function that takes the list of parameters and returns a torch optimizer,
                or a dict of several, each for parameters of its own.
            strategy: ddp, zero1, zero2, zero3 or auto; by default that of `--strategy`. Nodes that
                are islands (`--strategy diloco`) may have settings of their own: `DiLoCo(…)`.
            precision: fp32, or bf16 or fp16 for a forward in 16 bits, whose results have 32; fp16
                has its losses scaled.
            compile: whether `torch.compile` is applied to the model, or with which mode.
            cpu_offload: whether zero3 keeps parameters, gradients and optimizer state in host
                memory; auto takes zero3 then.
            load: a file, a directory or a URL of any format that `elasticzero checkpoint import`
                takes, from which rank 0 reads all parameters and persistent buffers where training
                begins.
            load_optimizer: whether `restore` gives the optimizer the state and the options that
                these files have. Where they number the parameters, the script's optimizer must have
                the groups that were saved, in their order.

        Returns:
            The model to call, and the optimizer, or the dict of them, as `optimizer` made it.

        Raises:
            UserError: the model or the optimizer is of another kind, files do not fit the model, or
                this was called before.
        """
        generation = self._generation
        if generation.training is not None:
            raise UserError("session.prepare was called twice; one session trains one model")
        place = generation.place(
            self._comparison,
            cpu_offload=bool(cpu_offload),
            load=load,
            load_optimizer=bool(load_optimizer),
        )
        name, islands = open_islands(self._link, generation.groups, strategy, generation.tracker)
        compute = Compute(precision=precision, compiled=compile)
        prepared = prepare_training(place, model, optimizer, name, compute)
        generation.begin_training(prepared)
        laid = prepared.training.strategy
        self._loops.islands = None if islands is None else islands(laid, prepared.outer)
        return laid.model, laid.optimizers.as_made

    def track(self, name: str, thing: S) -> S:
        """Makes an object part of the state that is saved and restored, and returns it.

        Call it before `restore`.

        Args:
            name: unique, without "/".
            thing: an object with `state_dict` and `load_state_dict`, such as a scheduler, or a
                random generator of torch, numpy or Python, which each rank keeps for itself.

        Raises:
            UserError: the name or the object is of another kind, or `restore` was called.
        """
        training = self._prepared("track")
        if training.copy is not None:
            raise UserError("session.track comes before session.restore")
        argument_checks.check_tracked(
            name, thing, training.strategy.optimizers, training.stager.strategy
        )
        training.auxiliary.track(name, thing)
        return thing

    def restore(self) -> None:
        """Loads the state that this generation starts from: a snapshot or a checkpoint.

        Without either, the fresh model stays as it is, and its optimizer has the state that
        `prepare` was told to load.

        Raises:
            UserError: this was called before.
            CheckpointMismatch: the state does not fit the model, optimizer or tracked objects.
        """
        training = self._prepared("restore")
        if training.copy is not None:
            raise UserError("session.restore was called twice")
        (link := self._link).check()
        began_s = time.monotonic()
        with link.exit_on_abort():
            restore = link.restore if isinstance(link, LocalLink) else TrainingState.restore
            bytes_read = restore(training)
        self._generation.report_restored(began_s, bytes_read)

    def batches(  # noqa: PLR0913 - keywords of the public interface
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        *,
        global_batch: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        micro_batch: int | Literal["auto"] | None = None,
        virtual_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        sampler: Collection[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        on_epoch_end: Callable[[], object] | None = None,
        **others: Never,
    ) -> Iterator[Any]:
        """Gives this rank's micro-batches, from where training stands to the end of the loop.

        Call `backward` and `step` for each. A loop goes on where the last one over the same dataset
        object has ended, so that `for epoch in range(3)` around one with `epochs=1` is the same as
        `epochs=3`.

        Args:
            dataset: has a length and is indexed by number, or is a stream: an `ez.Stream`, or an
                `IterableDataset` that gives the same samples each time; or is a `DataLoader`, whose
                arguments are taken over: its batch is the `micro_batch`, and `global_batch` as many
                as the first loop over a loader began with ranks.
            global_batch: samples in a step over all ranks.
            epochs: passes over the dataset, after which the loop ends.
            steps: global batches, after which it ends; give `epochs`, `steps` or both.
            micro_batch: samples at once on one rank, by default all of its share; auto: half as
                many each time that memory does not suffice.
            virtual_batch: cuts each global batch into slices of so many samples, which are the
                micro-batches, on whatever ranks; each has random states and buffers of its own, so
                that dropout and the like do not depend on the world; `global_batch` must be a
                multiple, and a stream's `readers` one of the number of slices.
            shuffle: whether each epoch has an order of its own.
            seed: with the epoch's number it chooses the order.
            sampler: gives the indices of an epoch in place of `shuffle`; it is iterated once an
                epoch, with seeded generators.
            collate_fn: makes a batch of a list of samples, as that of a `DataLoader`.
            num_workers: processes that load data.
            drop_last: leaves out the samples at an epoch's end that make no whole global batch.
            on_epoch_end: called on all ranks after the last step of each epoch, before the state is
                captured; its effect on what is tracked counts exactly once.

        Returns:
            An iterator over what `collate_fn` makes of each micro-batch's samples, on the session's
            device.

        Raises:
            UserError: an argument is not valid or not the same on all ranks, `restore` was not
                called, or a loop would go on with other data than training stopped in.
        """
        argument_checks.check_arguments(others, Session.batches)
        if (training := self._prepared("batches")).copy is None:
            raise UserError("call session.restore() before session.batches(…)")
        loop = LoopArguments(
            dataset=dataset,
            global_batch=global_batch,
            epochs=epochs,
            steps=steps,
            micro_batch=micro_batch,
            virtual_batch=virtual_batch,
            shuffle=shuffle,
            seed=seed,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=drop_last,
            # The release before deals samples without regard to such modules.
            never_one=self._link.assignment.one_release
            and any(True for _ in batch_norms(training.strategy.model)),
        ).resolved(training.first_world)
        limit, groups = self._loops.micro_batch_limit(training), self._generation.groups
        schedule = loop.schedule(self.rank, self.world_size, limit)
        reader = loop.reader(self.device, None if groups is None else groups.sum)
        return self._loops.run(training, schedule, reader, on_epoch_end)

    def steps_in(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        *,
        global_batch: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        sampler: Collection[int] | None = None,
        drop_last: bool = False,
    ) -> int:
        """Returns the number of global batches of a loop over `batches`, the same in every world.

        Build schedules of the learning rate with it, after `prepare`. What follows from the number
        of ranks, as `len(loader) // world_size`, changes the schedule whenever the world changes.

        Args:
            dataset: as for `batches`; of a stream the samples are not counted.
            global_batch: as for `batches`.
            epochs: as for `batches`; all of them, where several loops follow each other.
            steps: as for `batches`.
            sampler: as for `batches`.
            drop_last: as for `batches`.

        Returns:
            The steps from the beginning of the first loop; a batch that is skipped counts.

        Raises:
            UserError: an argument is not valid, or the dataset is a stream and `epochs` is given.
        """
        training = self._prepared("steps_in")
        loop = LoopArguments(
            dataset=dataset,
            global_batch=global_batch,
            epochs=epochs,
            steps=steps,
            sampler=sampler,
            drop_last=drop_last,
        )
        return loop.resolved(training.first_world).steps_in_all()

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the rows of all ranks' micro-batches, in the order of the global batch.

        For losses that compare the samples of a batch with each other: compute the loss of all rows
        on each rank, and give it to `backward`, which makes its gradient that of one process. All
        ranks call this, in each micro-batch alike; `tensor` carries gradients if it has them.

        Args:
            tensor: rows of this rank's micro-batch, in the first dimension; ranks may have
                different numbers of them. Those of a micro-batch of weight 0 are left out.

        Returns:
            The rows of all ranks; in a world of one rank its own.

        Raises:
            UserError: a rank's part of the global batch may be several micro-batches, by
                `micro_batch`, `virtual_batch` or a `DataLoader`, or ranks give different shapes.
        """
        self._prepared("gather")
        return self._work.gather(tensor)

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        only: str | Collection[str] | None = None,
    ) -> None:
        """Adds the gradient of a micro-batch's mean loss to that of the global batch.

        A micro-batch of weight 0 takes no part: its loss may be anything.

        Args:
            loss: a tensor with one element.
            weight: the divisor of the mean, if it is not the number of samples (tokens, say); give
                it for every micro-batch or for none.
            only: names of optimizers, of the dict of them; no other parameters get a gradient.

        Raises:
            UserError: the loss has another shape, or this is a second call for one micro-batch and
                `step(only=…)` was not called.
        """
        self._work.backward(self._prepared("backward"), loss, weight, only)

    def step(
        self, max_grad_norm: float | None = None, *, only: str | Collection[str] | None = None
    ) -> bool:
        """Ends a micro-batch, and applies the step of a global batch after its last one.

        Where a loss or a gradient is NaN or infinite the step is not applied: all ranks get False
        with `--on-nonfinite skip` or a loss scale, and `NotFinite` without.

        Args:
            max_grad_norm: limit of the norm of the whole gradient of the optimizer's parameters;
                None: no limit.
            only: as given to `backward`; these optimizers are stepped.

        Returns:
            True if the micro-batch was its global batch's last, and the step is applied.
        """
        return self._work.step(self._prepared("step"), max_grad_norm, only)

    def on_gradients(self, function: GradientFunction) -> GradientHook:
        """Calls `function(name, elements)` with each parameter's gradient, before it is stepped.

        The gradient is complete, and not clipped yet; what the function changes in place counts.

        Args:
            function: takes a parameter's name and, as a 1-D tensor, the elements of its gradient
                that this rank steps: all of them under ddp. It may return a number.

        Returns:
            The hook; its `sums` has the sum of the returned numbers over all ranks, by name.

        Raises:
            UserError: a function was given before.
        """
        return self._work.on_gradients(self._prepared("on_gradients"), function)

    def on_world_change(self, function: Callable[[], object]) -> None:
        """Calls `function()` on each rank after nodes have left, or come in, inside of a loop.

        `rank`, `world_size` and `generation` are the new ones then. It is called between two steps,
        on all ranks together; what it changes in the training state counts. Where a change enters
        the training function anew instead, that makes what follows from the world, and nothing is
        called.

        Args:
            function: sets what the script has computed from the number of ranks.
        """
        self._generation.on_world_change.append(function)

    def evaluate(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        fn: Callable[[Any], Any],
        *,
        batch_size: int = 32,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Result:
        """Returns the mean of `fn(batch)` over the dataset, the same on all ranks.

        The ranks divide the batches; the result does not depend on their number. Meanwhile the
        model is in eval mode and gradients are off, and training continues as if nothing happened.

        Args:
            dataset: as for `batches`; of a `DataLoader`, its batch size and `collate_fn` count.
            fn: a function that takes a batch and returns its mean, a number or a dict of numbers.
            batch_size: number of samples in a batch.
            collate_fn: as for `batches`.

        Raises:
            UserError: there is no sample, `batch_size` is below 1, or `fn` returned no number or
                other names than before.
        """
        training = self._prepared("evaluate")
        reader = BatchReader(dataset=dataset, device=self.device, collate_fn=collate_fn)
        groups = self._generation.groups
        self._generation.note_call("session.evaluate")
        if groups is not None:
            groups.barrier(Call.EVALUATE, where=f" after step {training.step}")
        model, auxiliary = training.strategy.model, training.auxiliary
        with self.busy("evaluating"), evaluating(model, auxiliary, training.share_buffers):
            return evaluate(reader, fn, batch_size, groups, self._link.check)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole model's state on rank 0, and an empty dict on the others.

        The tensors are copied to the CPU under the model's own names; what a module returns from
        `get_extra_state` is as it returns it. All ranks call this.

        Raises:
            UserError: inside a loop, a parameter was changed in a way that training cannot take.
        """
        training, groups = self._prepared("state_dict"), self._generation.groups
        if training.at.in_loop:  # after it, a model may be given another dtype
            training.take_changes()
        self._generation.note_call("session.state_dict")
        if groups is not None:
            groups.barrier(Call.STATE_DICT, where=f" after step {training.step}")
        return self._generation.whole_state()

    def log(self, **scalars: float | Tensor) -> None:
        """Writes numbers to the agent's event log and its metrics, for the current step.

        Each value is a number or a tensor with one element. `tokens`, those of this rank in the
        step, are added up.

        Raises:
            UserError: a value is neither.
        """
        values = {name: argument_checks.scalar(name, value) for name, value in scalars.items()}
        training = self._generation.training
        self._link.send(Logged(step=training.step if training else 0, scalars=values))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Marks a section of the script that makes no steps and is no hang; use it with `with`.

        `--hang-timeout` does not count in the section, on any rank, nor is it part of a step's
        time. Sections may be nested.

        Args:
            doing: a text such as "compiling", which appears in messages.
        """
        began_s = time.monotonic()
        try:
            with self._link.busy(doing):
                yield
        finally:
            if not self._link.is_busy:
                self._work.clock.exclude_since(began_s)

    def _prepared(self, call: str) -> TrainingState:
        if (training := self._generation.training) is None:
            raise UserError(f"call session.prepare(model, optimizer) before session.{call}(…)")
        return training
