"""Defines the `Accelerator` that trains in an elastic session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from elasticzero.entry_point import OpenRun
from elasticzero.errors import UserError
from elasticzero.integrations.accelerate.prepared import (
    ElasticLoader,
    ElasticOptimizer,
    ElasticScheduler,
    GradientNorm,
    LoopSize,
    Registered,
)
from elasticzero.integrations.launch_environment import hide
from elasticzero.integrations.optimizers import GivenOptimizer, move_scheduler
from elasticzero.integrations.session_log import log_numbers
from elasticzero.integrations.whole_model import WholeModel
from elasticzero.session import Session
from elasticzero.training.training_state import TrainingState

REFUSED = {
    "deepspeed_plugin": "--strategy zero2 divides the state",
    "deepspeed_plugins": "--strategy zero2 divides the state",
    "fsdp_plugin": "--strategy zero3 divides the model",
    "megatron_lm_plugin": "models are not divided within a layer here",
    "parallelism_config": "models are not divided within a layer here",
    "split_batches": "a loader's batch is what a rank computes at once",
}
"""Arguments without effect, and why."""
REGISTERED = "registered "
"""Beginning of the names under which registered objects are in the state, before their numbers."""
ONE_CALL = "give the model, its optimizer, the training DataLoader and schedulers in one call"


class Accelerator(accelerate.Accelerator):
    """Trains on nodes that come and go; used as the `Accelerator` of accelerate is.

    The script runs from its top on each rank and in each generation. Loops over the prepared
    training loader that training has passed give nothing, and the one that it was in goes on.
    """

    def __init__(
        self,
        *args: Any,
        global_batch: int | None = None,
        strategy: str | None = None,
        **others: Any,
    ) -> None:
        """Opens the session of this generation.

        Args:
            *args: the arguments of accelerate's `Accelerator`.
            global_batch: samples in a step over all ranks; by default as many as the loader's
                `batch_size` and `gradient_accumulation_steps` make of the ranks with which training
                begins.
            strategy: ddp, zero1, zero2, zero3 or auto; by default that of `--strategy`.
            **others: likewise those of accelerate.

        Raises:
            UserError: an argument of accelerate has no effect here.
        """
        for name, advice in REFUSED.items():
            if others.get(name):
                raise UserError(f"elasticzero's Accelerator takes no {name}: {advice}")
        os.environ.update(hide().variables)
        self.elastic = OpenRun()  # whose group accelerate then finds, and opens no other
        self.elastic_global_batch, self.elastic_strategy = global_batch, strategy
        self.elastic_registered: list[Registered] = []
        self.elastic_optimizer: ElasticOptimizer | None = None
        self.elastic_models: dict[int, nn.Module] = {}
        self.elastic_whole: WholeModel | None = None
        super().__init__(*args, **others)

    @property
    def session(self) -> Session:
        """Returns the session of this generation."""
        return self.elastic.session

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares what is trained, in one call; loaders of other calls are for evaluation.

        Args:
            *args: the model, its optimizer, schedulers and loaders. The first `DataLoader` beside
                an optimizer is the one that is trained on.
            device_placement: has no effect; the session places all.

        Returns:
            What takes the place of the arguments, in their order.

        Raises:
            UserError: this is a second call with an optimizer, there are several models or
                optimizers, or a model comes without its optimizer.
        """
        optimizers = [argument for argument in args if isinstance(argument, Optimizer)]
        models = [argument for argument in args if isinstance(argument, nn.Module)]
        if not optimizers and not models:
            prepared = tuple(self.prepare_data_loader(argument) for argument in args)
            return prepared if len(prepared) > 1 else prepared[0]
        if self.elastic_optimizer is not None or len(optimizers) != 1 or len(models) != 1:
            raise UserError(
                f"accelerator.prepare was given {len(models)} models and {len(optimizers)} "
                f"optimizers{' in a second call' if self.elastic_optimizer is not None else ''}, "
                f"and one session trains one model by one optimizer: {ONE_CALL}"
            )
        loader = next((argument for argument in args if isinstance(argument, DataLoader)), None)
        if loader is None or loader.batch_size is None:
            raise UserError(f"accelerator.prepare needs a DataLoader with a batch_size: {ONE_CALL}")
        replacements = self._prepared(models[0], optimizers[0], loader, args)
        return tuple(
            replacements[id(argument)]
            if id(argument) in replacements
            else self.prepare_data_loader(argument)
            if isinstance(argument, DataLoader)
            else argument
            for argument in args
        )

    def _prepared(
        self,
        model: nn.Module,
        script_optimizer: Optimizer,
        loader: DataLoader[Any],
        args: tuple[Any, ...],
    ) -> dict[int, Any]:
        """Lays all over the ranks and restores the newest state.

        Args:
            model: the script's model.
            script_optimizer: the script's optimizer, of which one of the same kind is made.
            loader: the loader that is trained on; it has a batch size.
            args: all arguments of `prepare`, of which the schedulers are taken.

        Returns:
            What takes the place of each of the script's objects, by its `id`.
        """
        session, accumulated = self.session, self.gradient_accumulation_steps
        batch = (loader.batch_size or 1) * accumulated
        precision = "fp32" if self.mixed_precision == "no" else str(self.mixed_precision)
        factory = GivenOptimizer(script_optimizer, model)
        self.elastic_whole = WholeModel(session, model)
        laid, made = session.prepare(
            model, factory, strategy=self.elastic_strategy, precision=precision
        )
        self.elastic_models[id(laid)] = model
        size = LoopSize(self.elastic_global_batch, batch * session.world_size)
        session.track("accelerate", size)
        optimizer = self.elastic_optimizer = ElasticOptimizer(made, session)
        replacements: dict[int, Any] = {id(model): laid, id(script_optimizer): optimizer}
        replacements[id(loader)] = ElasticLoader(
            loader, session, size, accumulated, self.elastic_registered
        )
        kinds = (LRScheduler, ReduceLROnPlateau)
        schedulers = [argument for argument in args if isinstance(argument, kinds)]
        for number, original in enumerate(schedulers):
            scheduler = session.track(f"scheduler {number}", move_scheduler(original, made))
            replacements[id(original)] = ElasticScheduler(scheduler, optimizer, size, batch)
        tracked = self._training().start.json().get("tracked", {})
        stored = sum(name.startswith(REGISTERED) for name in tracked)
        while len(self.elastic_registered) < stored:
            self.elastic_registered.append(Registered())  # the script registers it after this
        for number, registered in enumerate(self.elastic_registered):
            session.track(f"{REGISTERED}{number}", registered)
        session.restore()
        return replacements

    def _training(self) -> TrainingState:
        training = self.session._generation.training  # noqa: SLF001 - the package's own
        assert training is not None
        return training

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **others: Any) -> None:
        """Adds the gradient of a micro-batch's mean loss to that of the global batch.

        Args:
            loss: a tensor with one element.
            weight: as of `session.backward`.
            **others: must be empty.

        Raises:
            UserError: another argument is given.
        """
        if others:
            raise UserError(f"accelerator.backward takes no {', '.join(sorted(others))}")
        self.session.backward(loss, weight)

    @property
    def sync_gradients(self) -> bool:
        """Returns whether the micro-batch is its global batch's last on this rank."""
        return self.session.micro_batch.last

    @sync_gradients.setter
    def sync_gradients(self, _: bool) -> None:
        """Does nothing: the session decides."""

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Marks a micro-batch."""
        yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Marks a micro-batch."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> GradientNorm:
        """Limits the norm of the whole gradient in the coming step.

        Args:
            parameters: has no effect; the gradient of all parameters is clipped.
            max_norm: the limit.
            norm_type: must be 2.

        Returns:
            The norm before clipping, which is known after that step.

        Raises:
            UserError: another norm is asked for, or `prepare` was not called.
        """
        if norm_type != 2 or self.elastic_optimizer is None:
            raise UserError("accelerator.clip_grad_norm_ clips by the 2-norm, after prepare")
        self.elastic_optimizer.clip_coming_step(max_norm)
        return GradientNorm(self.session)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refuses to clip by value, for which `session.on_gradients` is there.

        Args:
            parameters: has no effect.
            clip_value: has no effect.

        Raises:
            UserError: always.
        """
        raise UserError("accelerator.clip_grad_value_: use accelerator.session.on_gradients")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Returns whether the last global batch was left out."""
        return self.elastic_optimizer is not None and self.elastic_optimizer.step_was_skipped

    def unwrap_model(self, model: nn.Module, *args: Any, **others: Any) -> Any:
        """Returns the script's own model.

        Args:
            model: the model that `prepare` has returned; any other is unwrapped as accelerate does.
            *args: the further arguments of accelerate's method.
            **others: likewise.
        """
        original = self.elastic_models.get(id(model), model)
        return super().unwrap_model(original, *args, **others)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the whole model's state on rank 0; all ranks call this together."""
        if id(model) not in self.elastic_models and model not in self.elastic_models.values():
            return super().get_state_dict(model, unwrap)
        return self.session.state_dict()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Makes objects part of the state, in the order of the calls; call it before the loop.

        Args:
            *objects: have `state_dict` and `load_state_dict`.

        Raises:
            UserError: one has not, or the state that training goes on from has none in its place.
        """
        for thing in objects:
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UserError(
                    f"accelerator.register_for_checkpointing was given a {type(thing).__name__}, "
                    "which has no state_dict and load_state_dict"
                )
            self._registered_place().adopt(thing)

    def _registered_place(self) -> Registered:
        """Returns the place of the next object that the script registers."""
        for registered in self.elastic_registered:
            if registered.is_open:
                return registered
        registered, number = Registered(), len(self.elastic_registered)
        if self.elastic_optimizer is not None:
            if (step := self._training().step) > 0:
                raise UserError(
                    f"accelerator.register_for_checkpointing: the state of step {step} has no "
                    f"object of place {number}, and training would go on without what it had: "
                    "register the same objects in every generation, before the loop"
                )
            self._training().auxiliary.track(f"{REGISTERED}{number}", registered)
        self.elastic_registered.append(registered)
        return registered

    def save_state(self, output_dir: str | None = None, *args: Any, **others: Any) -> str:
        """Saves the whole model by rank 0; the rest of the state is in `--checkpoint-dir`.

        Args:
            output_dir: the directory for the weights, which must be given.
            *args: the further arguments of accelerate's method, which have no effect.
            **others: likewise.

        Returns:
            The directory.

        Raises:
            UserError: no directory is given.
        """
        if output_dir is None:
            raise UserError("accelerator.save_state needs output_dir, for the model's weights")
        for model in self.elastic_models.values():
            self.save_model(model, output_dir)
        return output_dir

    def load_state(self, input_dir: str | None = None, *args: Any, **others: Any) -> None:
        """Refuses to load, since training goes on by itself from the newest state.

        Args:
            input_dir: has no effect.
            *args: the further arguments of accelerate's method, which have no effect.
            **others: likewise.

        Raises:
            UserError: always.
        """
        raise UserError(
            "accelerator.load_state: training goes on by itself from the newest state of "
            "--checkpoint-dir; leave it out, and skip_first_batches too"
        )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns the loader if no batch is to be skipped; raises `UserError` otherwise."""
        if num_batches:
            raise UserError("accelerator.skip_first_batches: the loader goes on by itself")
        return dataloader

    def log(self, values: Any, step: int | None = None, *args: Any, **others: Any) -> None:
        """Logs as accelerate does, and gives rank 0's numbers to `session.log`, for the step in
        which training stands.

        Args:
            values: numbers by name; what is no number is left out of `session.log`.
            step: the step under which accelerate's trackers log; None: as they choose.
            *args: the further arguments of accelerate's method.
            **others: likewise.
        """
        trains = self.elastic_whole is not None
        if trains and self.is_main_process:
            log_numbers(self.session, values)
        super().log(values, step, *args, **others)

    def end_training(self) -> None:
        """Saves what is not saved yet, and waits for the other ranks; the script goes on alone."""
        for tracker in self.trackers:
            tracker.finish()
        if self.elastic_whole is not None:
            self.elastic_whole.gather(self.session)
        self.elastic.finish()
        if self.elastic_whole is not None:
            self.elastic_whole.restore()
            self.elastic_whole = None
        alone = {"distributed_type": DistributedType.NO, "num_processes": 1}
        PartialState._shared_state.update(alone)  # noqa: SLF001 - its group is gone
