"""Defines the trainers that train in an elastic session."""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import TrainOutput

from elasticzero.entry_point import run_framework
from elasticzero.errors import UserError
from elasticzero.integrations.launch_environment import hide
from elasticzero.integrations.resume_argument import resume_note
from elasticzero.integrations.session_log import log_numbers
from elasticzero.integrations.transformers import accelerator, refusals, saving
from elasticzero.integrations.transformers.evaluation import (
    averages_of_one_rank,
    with_fillers,
    without_fillers,
)
from elasticzero.integrations.transformers.loop import TrainingLoop
from elasticzero.session import Session
from elasticzero.state.rng import preserve_rng

log = logging.getLogger(__name__)


class Trainer(transformers.Trainer):
    """Trains on nodes that come and go; used as the `Trainer` of transformers is.

    The script runs from its top on each rank and in each generation, up to `train`, which goes on
    from the newest state. The lines after `train` are reached once training has finished, by each
    rank alone. A class that is derived from transformers' takes this one first among its bases:
    `class ElasticSFTTrainer(Trainer, SFTTrainer)`.
    """

    control: Any

    def __init__(self, *args: Any, global_batch: int | None = None, **others: Any) -> None:
        """Makes the trainer, which has a session while `train` runs.

        Args:
            *args: the arguments of the trainer that this one is derived from.
            global_batch: samples in a step over all ranks; by default as many as
                `per_device_train_batch_size` and `gradient_accumulation_steps` make of the ranks
                with which training begins.
            **others: likewise.
        """
        self.elastic_launch = hide()
        self.elastic_loop: TrainingLoop | None = None
        self.elastic_global_batch = global_batch
        self.elastic_output: TrainOutput | None = None
        super().__init__(*args, **others)
        accelerator.stand_alone(self, self.elastic_launch)

    @property
    def session(self) -> Session:
        """Returns the session of this generation; raises `UserError` outside of `train`."""
        if self.elastic_loop is None:
            raise UserError("trainer.session exists while train() runs: use it in a callback")
        return self.elastic_loop.session

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains from the newest state of the job to the end.

        Ends the process with `UserError` for an argument that has no effect here.

        Args:
            resume_from_checkpoint: has no effect where the job has a state, from which it goes on
                in any case; refused where training would begin.
            trial: must be None, as a job is no search for hyperparameters.
            ignore_keys_for_eval: outputs of the model that evaluations leave out.

        Returns:
            The steps, the mean loss and the metrics, as transformers returns them.
        """

        def generation(session: Session) -> None:
            refusals.check_training_arguments(self.args, trial)
            refusals.check_methods(self)
            if resume_from_checkpoint:  # get_last_checkpoint may have found nothing
                argument = f"train(resume_from_checkpoint={resume_from_checkpoint!r})"
                assignment = session._assignment  # noqa: SLF001 - the package's own
                note = resume_note(argument, assignment)
                if session.rank == 0:
                    log.info(note)
            if self.elastic_output is not None:
                raise UserError(
                    "train() was called twice, and a job trains once: make one dataset and one "
                    "schedule of both parts, or two jobs"
                )
            accelerator.join_generation(self, session.device)
            self.elastic_loop = TrainingLoop(
                self,
                session,
                global_batch=self.elastic_global_batch,
                ignore_keys=ignore_keys_for_eval,
            )
            self.elastic_output = self.elastic_loop.run()

        self.is_in_train = True
        with self.elastic_launch.shown():
            run_framework(generation, "transformers")
        self.is_in_train = False
        if self.elastic_loop is not None and self.elastic_loop.whole_model is not None:
            self.elastic_loop.whole_model.restore()
        self.elastic_loop, self.model_wrapped = None, self.model
        accelerator.stand_alone(self, self.elastic_launch)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            saving.load_best_model(self)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        assert self.elastic_output is not None
        return self.elastic_output

    def evaluate(self, *args: Any, **others: Any) -> Any:
        """Evaluates as transformers does: the ranks divide the batches while `train` runs, and
        after it each rank evaluates by itself."""
        if self.elastic_loop is None:
            return super().evaluate(*args, **others)
        with self.session.busy("evaluating"), preserve_rng(self.session.device):
            return super().evaluate(*args, **others)

    def evaluation_loop(self, *args: Any, **others: Any) -> Any:
        """Evaluates or predicts as transformers does, each batch by itself on one rank."""
        with averages_of_one_rank(self.args):
            return super().evaluation_loop(*args, **others)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **others: Any) -> Any:
        """Computes what transformers does of a batch, without the samples that only fill it."""
        kept, fillers = without_fillers(self, inputs)
        loss, logits, labels = super().prediction_step(model, kept, *args, **others)
        return loss, with_fillers(logits, fillers), with_fillers(labels, fillers)

    def log(self, logs: dict[str, float], *args: Any, **others: Any) -> None:
        """Logs as transformers does, and gives rank 0's numbers to `session.log` while `train`
        runs.

        Args:
            logs: numbers by name; what is no number is left out of `session.log`.
            *args: the further arguments of transformers' method.
            **others: likewise.
        """
        if self.elastic_loop is not None and self.session.rank == 0:
            log_numbers(self.session, logs)
        super().log(logs, *args, **others)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the whole model by rank 0; all ranks call this while `train` runs."""
        if self.elastic_loop is None:
            super().save_model(output_dir, _internal_call)
            return
        state = saving.state_dict(self.session, self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save")

    def is_world_process_zero(self) -> bool:
        """Returns whether this process is that of rank 0."""
        return self.elastic_launch.rank == 0

    def is_local_process_zero(self) -> bool:
        """Returns whether this process is the first of its node."""
        return self.elastic_launch.local_rank == 0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        saving.save_checkpoint(self, self.session)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Returns the model that the session has laid over the ranks.

        Args:
            model: the model that transformers would wrap; it is returned before `train`.
            training: has no effect.
            dataloader: has no effect.
        """
        return model if self.elastic_loop is None else self.model_wrapped

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        worker_device = accelerator.own_device(device, self.elastic_launch)
        super()._move_model_to_device(model, worker_device)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """Trains on nodes that come and go; used as the `Seq2SeqTrainer` of transformers is."""
