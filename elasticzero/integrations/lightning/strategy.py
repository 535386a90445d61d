"""Defines `Elastic`, the strategy by which a trainer of Lightning trains in an elastic session."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.data import DataLoader

from elasticzero.comm.broadcast_value import broadcast_value
from elasticzero.entry_point import run_framework
from elasticzero.errors import UserError
from elasticzero.integrations.launch_environment import hide
from elasticzero.integrations.lightning import data, refusals
from elasticzero.integrations.lightning.data import Limits, StepLoader
from elasticzero.integrations.lightning.logger import SessionLogger
from elasticzero.integrations.lightning.progress import NAME, FitProgress, stored_global_batch
from elasticzero.integrations.resume_argument import resume_note
from elasticzero.integrations.whole_model import WholeModel
from elasticzero.session import Session

log = logging.getLogger(__name__)

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
ENDLESS_EPOCHS = 1 << 40


class NothingLoaded(dict[str, Any]):
    """Stands for a file of Lightning of which nothing is loaded: Lightning passes over what is
    false."""

    def __bool__(self) -> bool:
        return False


class Launcher(_Launcher):
    """Runs a trainer's `fit` in the session of each generation."""

    def __init__(self, strategy: Elastic) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Returns False: a notebook is not started anew."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, **others: Any) -> Any:
        """Calls a function of the trainer: within a session if the trainer is to fit, or else
        alone.

        Args:
            function: the function.
            *args: its arguments.
            **others: likewise; `trainer` is taken out, and says what is to be done.

        Returns:
            What the function returns.
        """
        trainer = others.pop("trainer", None)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **others)
        results: list[Any] = []

        def generation(session: Session) -> None:
            with self._strategy.within(session):
                results.append(function(*args, **others))

        with self._strategy.launch_environment.shown():
            run_framework(generation, "Lightning")
        self._strategy.make_whole()
        return results[0]

    def kill(self, signum: int) -> None:
        """Does nothing: the agent ends the processes."""


class Elastic(Strategy):
    """Trains on nodes that come and go: `L.Trainer(strategy=Elastic("zero2"))`.

    The script runs from its top on each rank and in each generation, up to `trainer.fit`, which
    goes on from the newest state. The lines after it are reached once training has finished, by
    each rank alone.
    """

    def __init__(
        self,
        strategy: str | None = None,
        *,
        global_batch: int | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        """Makes the strategy of one trainer.

        Args:
            strategy: ddp, zero1, zero2, zero3 or auto; by default that of `--strategy`.
            global_batch: samples in a step over all ranks; by default as many as the loader's
                `batch_size` and `accumulate_grad_batches` make of the ranks with which training
                begins.
            seed: chooses the orders of samples; by default that of `seed_everything`, or 0.
            **others: the arguments of Lightning's `Strategy`.
        """
        super().__init__(**others)
        self.launch_environment = hide()
        self._strategy, self._global_batch, self._seed = strategy, global_batch, seed
        self._session: Session | None = None
        self._progress: FitProgress | None = None
        self._steps: StepLoader | None = None
        self._whole_model: WholeModel | None = None
        self._loggers: list[SessionLogger] = []
        self._shares_validation = False
        self._busy = ExitStack()
        self._limits = Limits(epochs=ENDLESS_EPOCHS, steps=None, seed=0)
        rank_zero_only.rank = self.launch_environment.rank

    @property
    def session(self) -> Session:
        """Returns the session of this generation; raises `UserError` outside of `fit`."""
        if self._session is None:
            raise UserError("trainer.strategy.session exists while trainer.fit runs")
        return self._session

    def within(self, session: Session) -> Any:
        """Returns the section in which the trainer works in a session."""
        stack = ExitStack()
        self._session = session
        stack.callback(self._leave)
        return stack

    def _leave(self) -> None:
        self._session = self._steps = self._progress = None
        for logger in self._loggers:
            logger.session = None

    def make_whole(self) -> None:
        """Gives the module all its values back, once training is over."""
        if self._whole_model is not None:
            self._whole_model.restore()
            self._whole_model = None

    # What a trainer asks of its place

    @property
    def root_device(self) -> torch.device:
        if self._session is not None:
            return self._session.device
        alone = self.accelerator is not None and "cuda" in type(self.accelerator).__name__.lower()
        return torch.device("cuda", self.launch_environment.local_rank) if alone else CPU

    @property
    def global_rank(self) -> int:
        return self.launch_environment.rank if self._session is None else self._session.rank

    @property
    def local_rank(self) -> int:
        return self.launch_environment.local_rank

    @property
    def world_size(self) -> int:
        return 1 if self._session is None else self._session.world_size

    @property
    def is_distributed(self) -> bool:
        """Returns whether metrics can be reduced over ranks."""
        return self.world_size > 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def _configure_launcher(self) -> None:
        self._launcher = Launcher(self)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks; any other value is returned as it is.

        Args:
            tensor: the value of this rank.
            group: has no effect; all ranks take part.
            reduce_op: mean, sum, max or min, as Lightning or torch names them; None: sum.

        Returns:
            The reduced tensor, the same on all ranks, or the other value.
        """
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        total = tensor.detach().clone().to(self.root_device)
        operation = str(reduce_op).lower().rpartition(".")[2] if reduce_op is not None else "sum"
        kinds = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if operation in ("mean", "avg") and not total.is_floating_point():
            total = total.float()
        dist.all_reduce(total, op=kinds.get(operation, dist.ReduceOp.SUM))
        return total / self.world_size if operation in ("mean", "avg") else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all ranks, or any of them, have decided so."""
        count = self.reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(count == self.world_size) if all else bool(count)

    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns one rank's value on all ranks: paths, and what `session.track` can keep too.

        Args:
            obj: the value of this rank.
            src: the rank whose value counts.

        Raises:
            UserError: the value is of another kind, for which it would have to be pickled.
        """
        if self.world_size == 1:
            return obj
        assert dist.group.WORLD is not None
        is_path = isinstance(obj, PurePath)
        value = is_path, str(obj) if is_path else obj
        try:
            is_path, value = broadcast_value(value, dist.group.WORLD, src)
        except UserError as error:
            raise UserError(
                f"the Elastic strategy broadcasts no {type(obj).__name__} of this kind, for it "
                f"sends no pickle to other ranks: {error}"
            ) from None
        return Path(value) if is_path else value

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, stacked; in a world of one, the tensor as it is.

        Args:
            tensor: that of this rank, of the same shape on all.
            group: has no effect; all ranks take part.
            sync_grads: must be False, as no gradients are gathered.

        Raises:
            UserError: `sync_grads` is True.
        """
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise UserError("the Elastic strategy gathers no gradients: all_gather(sync_grads=…)")
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    # Setup

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = self.global_rank
        assert self.lightning_module is not None
        connector = self.lightning_module.trainer._accelerator_connector  # noqa: SLF001 - no other way
        self._shares_validation |= connector.use_distributed_sampler
        connector.use_distributed_sampler = False  # loaders are divided here

    def model_to_device(self) -> None:
        assert self.model is not None
        if self._session is None:
            self.model.to(self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Lays the module over the ranks, and restores the newest state."""
        session, module = self.session, self.lightning_module
        assert module is not None
        refusals.check_trainer(trainer)
        refusals.check_module(module, trainer.callbacks)
        self._whole_model = WholeModel(session, module)
        self._loggers = [logger for logger in trainer.loggers if isinstance(logger, SessionLogger)]
        for logger in self._loggers:
            logger.session = session
        progress = self._begin_progress(trainer)
        _, optimizer = session.prepare(module, self._make_optimizer, strategy=self._strategy)
        if isinstance(module, FSDPModule):
            refusals.check_averages(trainer.callbacks)
            for name in STEPS:
                register_fsdp_forward_method(cast(nn.Module, module), name)
        self.optimizers = [optimizer]
        session.track(NAME, progress)
        session.restore()
        progress.recall()

    def _make_optimizer(self, _: Any) -> torch.optim.Optimizer:
        made, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        optimizer: torch.optim.Optimizer = made[0]
        return optimizer

    def _begin_progress(self, trainer: pl.Trainer) -> FitProgress:
        """Finds out the global batch and the length of training."""
        seed = self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        epochs = trainer.fit_loop.max_epochs or 0
        self._limits = Limits(
            epochs=epochs if epochs > 0 else ENDLESS_EPOCHS,
            steps=trainer.max_steps if trainer.max_steps > 0 else None,
            seed=seed,
        )
        self._accumulated = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = 1  # a batch of the trainer is a whole global batch
        stored = stored_global_batch(self.session)
        self._progress = FitProgress(trainer, self._global_batch, stored)
        return self._progress

    def process_dataloader(self, dataloader: object) -> object:
        """Returns what the trainer iterates over: the session's micro-batches for training, and
        this rank's part for validation."""
        if self._session is None or self._progress is None:
            return dataloader
        if self._stage == RunningStage.TRAINING:
            loader = data.only_loader(dataloader, others=self._steps is not None)
            if not self._progress.global_batch:
                ranks = self.session.world_size
                self._progress.global_batch = loader.batch_size * self._accumulated * ranks
            self._steps = StepLoader(loader, self.session, self._progress, self._limits)
            return self._steps
        if self._shares_validation and self.world_size > 1 and isinstance(dataloader, DataLoader):
            sampler = data.share_of_rank(dataloader, self.global_rank, self.world_size)
            return _update_dataloader(dataloader, sampler)
        return dataloader

    @property
    def _stage(self) -> RunningStage | None:
        assert self.lightning_module is not None
        stage: RunningStage | None = self.lightning_module.trainer.state.stage
        return stage

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the micro-batches of a step, and returns what the module gives for the last."""
        output = super().training_step(*args, **kwargs)
        while not self.session.micro_batch.last:
            loss = output["loss"] if isinstance(output, dict) else output
            self.session.backward(loss)
            self.session.step()
            assert self._steps is not None
            inputs = self._transferred(self._steps.more())
            output = super().training_step(inputs, *args[1:], **kwargs)
        return output

    def _transferred(self, batch: Any) -> Any:
        """Does with a micro-batch what the trainer has done with the first."""
        module = self.lightning_module
        assert module is not None
        batch = self.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
        batch = self.batch_to_device(batch, dataloader_idx=0)
        module.trainer._logger_connector.on_batch_start(batch)  # noqa: SLF001 - its size
        return batch

    def backward(self, closure_loss: Tensor, optimizer: Any, *_: Any, **__: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.session.backward(closure_loss)
        loss: Tensor = self.precision_plugin.post_backward(closure_loss, module)
        return loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **_: Any
    ) -> Any:
        """Computes a step's gradients, and applies them.

        Args:
            optimizer: has no effect; the session has the only one.
            closure: computes the loss and the gradients.
            model: has no effect; the session has the only one.

        Returns:
            The result of `closure`.
        """
        result = closure()
        assert self.lightning_module is not None
        self.session.step(max_grad_norm=self.lightning_module.trainer.gradient_clip_val or None)
        return result

    # The ends of stages

    def on_validation_start(self) -> None:
        if self._session is not None:
            self._busy.enter_context(self._session.busy("validating"))

    def on_validation_end(self) -> None:
        self._busy.close()
        if self._progress is not None:
            self._progress.callbacks_changed = True

    def on_train_end(self) -> None:
        assert self.lightning_module is not None
        if self._progress is not None and self._whole_model is not None:
            self._progress.share()
            self._whole_model.gather(self.session)
        if self.lightning_module.trainer.should_stop:
            self.session.stop("the Trainer was told to stop")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the whole model's state on rank 0; all ranks call this together."""
        if self._session is not None:
            return self._session.state_dict()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing: the optimizer's state is in the session's checkpoints."""
        no_state: dict[str, Any] = {}
        return no_state if self._session is not None else super().optimizer_state(optimizer)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **others: Any) -> Any:
        """Loads a file of Lightning to test with.

        Args:
            checkpoint_path: the file.
            *args: the further arguments of Lightning's method.
            **others: likewise.

        Returns:
            What is in the file; nothing in `fit`, which goes on by itself from the newest state.

        Raises:
            UserError: the file was given to `fit`, and there is no state to go on from.
        """
        if self._session is not None:
            argument = f"trainer.fit(ckpt_path={str(checkpoint_path)!r})"
            assignment = self._session._assignment  # noqa: SLF001 - the package's own
            note = resume_note(argument, assignment)
            if self.is_global_zero:
                log.info(note)
            return NothingLoaded({"pytorch-lightning_version": pl.__version__})
        return super().load_checkpoint(checkpoint_path, *args, **others)

    def save_checkpoint(self, *args: Any, **others: Any) -> None:
        """Saves a file as Lightning does, by which callbacks change.

        Args:
            *args: the arguments of Lightning's method.
            **others: likewise.
        """
        super().save_checkpoint(*args, **others)
        if self._progress is not None:
            self._progress.callbacks_changed = True

    def teardown(self) -> None:
        """Leaves the module where it is: its state is still to be saved."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


CPU = torch.device("cpu")
