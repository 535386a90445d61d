"""Runs a trainer's training in one generation: its data, its callbacks, and what it logs."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_utils import TrainOutput, speed_metrics

from elasticzero.errors import UserError
from elasticzero.integrations.global_batch import agreed_global_batch
from elasticzero.integrations.transformers.evaluation import averages_of_one_rank
from elasticzero.integrations.transformers.optimizer import OptimizerFactory
from elasticzero.integrations.transformers.progress import TrainerProgress
from elasticzero.integrations.whole_model import WholeModel
from elasticzero.session import Session


class TrainingLoop:
    """Trains a trainer's model in the session of one generation."""

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        *,
        global_batch: int | None,
        ignore_keys: list[str] | None,
    ) -> None:
        """Takes the trainer, of which nothing is changed until `run`.

        Args:
            trainer: One of this package's own, which has `_save_checkpoint` and `log` of its own.
            session: The session of the generation.
            global_batch: Number of samples of a step, as the script gave it; None: it gave none.
            ignore_keys: Outputs that an evaluation leaves out, as of `Trainer.train`.
        """
        self.session = session
        self._trainer, self._args = trainer, trainer.args
        self._global_batch = global_batch
        self._ignore_keys = ignore_keys
        self._progress = TrainerProgress()
        self._operations = 0.0
        """Floating-point operations of this rank in the step under way, as transformers counts
        them."""
        self._steps_in_epoch: int | None = None
        """Steps of an epoch; None: the dataset has no length."""
        self._in_epoch = self._in_step = False
        self._began = 0
        self._began_s = time.time()
        self.whole_model: WholeModel | None = None

    def run(self) -> TrainOutput:
        """Trains from the newest state to the end of training."""
        trainer, session, args = self._trainer, self.session, self._args
        if trainer.model_init is not None:
            trainer.model = trainer.call_model_init()
        _checkpoint_activations(trainer)
        factory = OptimizerFactory(trainer)
        self.whole_model = whole_model = WholeModel(session, trainer.model)
        trainer.lr_scheduler = None
        model, trainer.optimizer = session.prepare(
            trainer.model,
            factory,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            compile=(args.torch_compile_mode or True) if args.torch_compile else False,
        )
        trainer.model_wrapped = model
        session.track("trainer", self._progress)
        session.restore()
        batches, steps = self._batches()
        trainer.lr_scheduler = factory.scheduler_of(trainer.optimizer, steps)
        self._progress.adopt_scheduler(trainer.lr_scheduler)
        self._begin(steps)
        for inputs in batches:
            self._micro_batch(model, inputs)
        if self._in_epoch:
            self._end_epoch()
        output = self._finish()
        whole_model.gather(session)
        return output

    def _batches(self) -> tuple[Any, int]:
        """Returns the micro-batches of all epochs, and the number of steps in them."""
        trainer, args, progress = self._trainer, self._args, self._progress
        dataset = trainer.train_dataset
        if dataset is None:
            raise UserError("train() needs a train_dataset, which the Trainer was not given")
        accumulated = args.per_device_train_batch_size * args.gradient_accumulation_steps
        progress.global_batch = global_batch = agreed_global_batch(
            self._global_batch,
            progress.global_batch,
            accumulated * self.session.world_size,
        )
        collate = trainer._get_collator_with_removed_columns(  # noqa: SLF001 - as its own loader
            trainer.data_collator, description="training"
        )
        steps = args.max_steps
        order: dict[str, Any] = {}
        if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
            whole = math.floor if args.dataloader_drop_last else math.ceil
            self._steps_in_epoch = max(1, whole(len(dataset) / global_batch))
            if steps <= 0:
                steps = math.ceil(args.num_train_epochs * self._steps_in_epoch)
            sampler = trainer._get_train_sampler()  # noqa: SLF001 - as its own loader
            order = {"shuffle": isinstance(sampler, RandomSampler)}
            if sampler is not None and not isinstance(sampler, (RandomSampler, SequentialSampler)):
                order = {"sampler": sampler}
        micro_batch: Any = "auto" if args.auto_find_batch_size else args.per_device_train_batch_size
        batches = self.session.batches(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            steps=steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            drop_last=args.dataloader_drop_last,
            on_epoch_end=self._end_epoch,
            **order,
        )
        return batches, steps

    def _begin(self, steps: int) -> None:
        trainer, args = self._trainer, self._args
        handler = trainer.callback_handler
        handler.model, handler.optimizer = trainer.model, trainer.optimizer
        handler.lr_scheduler = trainer.lr_scheduler
        state = self._progress.recall(trainer)
        if state is not None:
            trainer.state = state
        state = trainer.state
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.global_step = self._began = self.session.step_count
        state.max_steps, state.train_batch_size = steps, args.per_device_train_batch_size
        state.num_train_epochs = math.ceil(steps / (self._steps_in_epoch or steps))
        state.compute_steps(args, steps)
        self._set_epoch()
        trainer.control = handler.on_train_begin(args, state, trainer.control)
        if args.eval_on_start and state.global_step == 0:
            trainer._evaluate(None, self._ignore_keys, skip_scheduler=True)  # noqa: SLF001

    def _micro_batch(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Computes one micro-batch, and what follows the global batch's last one."""
        trainer, args, handler = self._trainer, self._args, self._trainer.callback_handler
        if not self._in_epoch:
            self._in_epoch = True
            trainer.control = handler.on_epoch_begin(args, trainer.state, trainer.control)
        if not self._in_step:
            self._in_step = True
            trainer.control = handler.on_step_begin(args, trainer.state, trainer.control)
        if type(trainer).training_step is Trainer.training_step:
            self._compute(model, inputs)
        else:
            self._compute_by_override(model, inputs)
        rate = trainer._get_learning_rate()  # noqa: SLF001 - that of this step
        last = self.session.micro_batch.last
        if last:
            operations, self._operations = self._sum_over_ranks(self._operations), 0.0
        if self.session.step(max_grad_norm=args.max_grad_norm or None):
            self._progress.add_step(self.session, operations.item())
            self._end_step(rate)
        elif not last:
            trainer.control = handler.on_substep_end(args, trainer.state, trainer.control)
        if last:
            self._in_step = False

    def _compute(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Computes a micro-batch's loss and gradient as transformers' `training_step` does."""
        trainer = self._trainer
        model.train()
        inputs = trainer._prepare_inputs(inputs)  # noqa: SLF001 - a hook of subclasses
        items = self._items(inputs)
        with trainer.compute_loss_context_manager(), averages_of_one_rank(self._args):
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        self._count_operations(inputs)
        self.session.backward(loss, weight=items)

    def _compute_by_override(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Computes a micro-batch's loss and gradient by a subclass's own `training_step`, which
        calls that of transformers, or `accelerator.backward` itself."""
        trainer, items = self._trainer, self._items(inputs)
        backward_calls: list[int] = []

        def backward(loss: Tensor, **_: Any) -> None:
            backward_calls.append(1)
            self.session.backward(loss, weight=items)

        trainer.current_gradient_accumulation_steps = 1  # the session takes the mean
        trainer.accelerator.backward = backward
        with averages_of_one_rank(self._args):
            trainer.training_step(model, inputs, items)
        self._count_operations(inputs)
        if len(backward_calls) != 1:
            raise UserError(
                f"{type(trainer).__name__}.training_step has called self.accelerator.backward "
                f"{len(backward_calls)} times for a micro-batch: call it once, or call "
                "super().training_step"
            )

    def _count_operations(self, inputs: dict[str, Any]) -> None:
        """Counts what a micro-batch takes of this rank, unless it is only there to fill a share."""
        if self.session.micro_batch.weight:
            self._operations += float(self._trainer.floating_point_ops(inputs))

    def _sum_over_ranks(self, value: float) -> Tensor:
        """Returns a sum that is there once the session's step is: nothing waits for it here."""
        total = torch.tensor(value, dtype=torch.float64, device=self.session.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    def _items(self, inputs: dict[str, Any]) -> Tensor | None:
        """Returns the number of labels in a micro-batch, over which its loss is a mean; None: it is
        a mean over samples."""
        count = self._trainer._get_num_items_in_batch  # noqa: SLF001 - as its own loop
        with averages_of_one_rank(self._args):
            items = count([inputs], self.session.device)
        return items if items is None or isinstance(items, Tensor) else torch.tensor(items)

    def _end_step(self, rate: float) -> None:
        """Does what follows a step of the optimizer."""
        trainer, args, handler = self._trainer, self._args, self._trainer.callback_handler
        scheduler = trainer.lr_scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step()
        trainer.state.global_step = self.session.step_count
        self._set_epoch()
        if (
            args.torch_empty_cache_steps
            and trainer.state.global_step % args.torch_empty_cache_steps == 0
        ):
            torch.cuda.empty_cache()
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
        self._act(rate)

    def _end_epoch(self) -> None:
        """Does what follows an epoch's last step."""
        trainer, args = self._trainer, self._args
        self._in_epoch = False
        trainer.control = trainer.callback_handler.on_epoch_end(
            args, trainer.state, trainer.control
        )
        self._act(trainer._get_learning_rate())  # noqa: SLF001 - no public name

    def _act(self, rate: float) -> None:
        """Logs, evaluates, saves and ends, as the callbacks have decided on all ranks alike."""
        trainer, control = self._trainer, self._trainer.control
        asked = control.should_log or control.should_evaluate or control.should_save
        if control.should_log and (loss := self._progress.take_unlogged()) is not None:
            self._log(loss, rate)
        if control.should_evaluate:
            metrics = trainer._evaluate(None, self._ignore_keys)  # noqa: SLF001 - steps the rate
            best = trainer._determine_best_metric(metrics, None)  # noqa: SLF001 - no public name
            if self._args.save_strategy == "best":
                control.should_save = best
        if control.should_save:
            trainer._save_checkpoint(trainer.model, None)  # noqa: SLF001 - a hook of subclasses
            trainer.control = trainer.callback_handler.on_save(
                self._args, trainer.state, trainer.control
            )
        if asked:
            self._progress.share(trainer)
        if control.should_epoch_stop and not control.should_training_stop:
            raise UserError(
                "a callback has set should_epoch_stop, and an epoch ends with its last sample: "
                "set should_training_stop"
            )
        last = trainer.state.global_step >= trainer.state.max_steps
        if control.should_training_stop and not last:
            self.session.stop("a callback of the Trainer has set should_training_stop")

    def _log(self, loss: float, rate: float) -> None:
        """Logs the steps since the last log.

        Args:
            loss: Their mean loss, over all ranks.
            rate: The learning rate of the newest.
        """
        trainer = self._trainer
        logs = {"loss": loss}
        if self._progress.gradient_norm is not None:
            logs["grad_norm"] = self._progress.gradient_norm
        logs["learning_rate"] = rate
        trainer.state.total_flos = self._progress.operations
        trainer.log(logs, self._began_s)

    def _set_epoch(self) -> None:
        state = self._trainer.state
        state.epoch = state.global_step / (self._steps_in_epoch or state.max_steps)

    def _finish(self) -> TrainOutput:
        """Logs the whole training's figures."""
        trainer, progress = self._trainer, self._progress
        steps = trainer.state.global_step
        done = steps - self._began
        samples = done * (progress.global_batch or 0)
        metrics = speed_metrics("train", self._began_s, num_samples=samples, num_steps=done)
        trainer.state.total_flos = self._progress.operations
        mean = progress.mean_loss()
        metrics["total_flos"], metrics["train_loss"] = trainer.state.total_flos, mean
        trainer.log(metrics)
        return TrainOutput(steps, mean, metrics)


def _checkpoint_activations(trainer: Trainer) -> None:
    """Makes the model compute activations again in its backward, if its arguments say so."""
    args, model = trainer.args, trainer.model
    if getattr(args, "activation_checkpointing", False):
        options = dict(getattr(args, "activation_checkpointing_kwargs", None) or {})
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None)
    elif args.gradient_checkpointing:
        options = args.gradient_checkpointing_kwargs or {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
