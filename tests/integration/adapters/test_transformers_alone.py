"""The Trainer of transformers on one process: the results of transformers' own, and what is
refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset, SequentialSampler, Subset
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from elasticzero.integrations.transformers import Seq2SeqTrainer, Trainer
from elasticzero.integrations.transformers.progress import TrainerProgress
from elasticzero.integrations.transformers.refusals import ARGUMENTS
from tests.integration.scripts.transformers_trainer import Texts, gpt2, loss_of, right


class InOrder(transformers.Trainer):
    """Takes the samples in their order, which both trainers then have."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Theirs(InOrder):
    """That of transformers."""


class Ours(InOrder, Trainer):
    """That of this package."""


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 3,
        "save_strategy": "no",
        "warmup_steps": 4,
    }
    fixed = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(**{**fixed, **values, **options})


def model() -> Any:
    torch.manual_seed(0)
    return gpt2().double()


def made(kind: type, folder: Path, args: dict[str, Any], **options: Any) -> Any:
    values = {"train_dataset": Texts(), "compute_loss_func": loss_of, **options}
    values.setdefault("model", model())
    chosen = arguments(folder, **args)
    if issubclass(kind, transformers.Seq2SeqTrainer):
        chosen = Seq2SeqTrainingArguments(**chosen.to_dict())
    return kind(args=chosen, **values)


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_equal(ours: Any, theirs: Any) -> None:
    assert ours.state.global_step == theirs.state.global_step
    for (name, parameter), other in zip(
        ours.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        assert (parameter - other).abs().max() < 1e-10, name
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss", "epoch"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-4), name
    assert ours.state.total_flos == pytest.approx(theirs.state.total_flos, rel=1e-9)
    assert ours.state.total_flos > 0


@pytest.mark.parametrize(
    "args",
    [
        {},
        pytest.param(
            {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine"}, marks=pytest.mark.slow
        ),
        pytest.param({"max_steps": 17, "eval_strategy": "epoch"}, marks=pytest.mark.slow),
        pytest.param(
            {"num_train_epochs": 1.5, "optim": "sgd", "lr_scheduler_type": "constant"},
            marks=pytest.mark.slow,
        ),
        {"dataloader_drop_last": True, "dataloader_num_workers": 1},
    ],
    ids=lambda args: ",".join(args) or "plain",
)
def test_the_steps_are_those_of_transformers(args: dict[str, Any], tmp_path: Path) -> None:
    outcomes = []
    samples = 97 if "dataloader_drop_last" in args else len(Texts())  # of which one is dropped
    data = {"train_dataset": Subset(Texts(), range(samples))}
    data["eval_dataset"] = Subset(Texts(), range(9))
    for kind in (Ours, Theirs):
        trainer = made(kind, tmp_path / kind.__name__, args, **data)
        output = trainer.train()
        assert output.global_step == trainer.state.global_step > 0
        outcomes.append((trainer, output.training_loss))
    (ours, loss), (theirs, expected) = outcomes
    check_equal(ours, theirs)
    assert loss == pytest.approx(expected, rel=1e-4)


def test_an_optimizer_and_a_scheduler_that_are_given(tmp_path: Path) -> None:
    trainers = []
    for kind in (Ours, Theirs):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.8, 0.9))
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            milestones=[5],
        )
        trainer = made(
            kind, tmp_path / kind.__name__, {}, model=net, optimizers=(optimizer, scheduler)
        )
        trainer.train()
        trainers.append(trainer)
    check_equal(*trainers)


def test_training_stops_early_and_ends_with_the_best_model(tmp_path: Path) -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    options = {"eval_dataset": Subset(Texts(), range(9)), "callbacks": [stop]}
    trainer = made(Ours, tmp_path, args, compute_metrics=right, **options)
    output = trainer.train()
    losses = logged(trainer, "eval_loss")
    best = losses.index(max(losses)) * 2 + 2
    assert output.global_step in (best + 4, best + 5) and len(losses) == best // 2 + 2
    assert trainer.state.best_global_step == best
    assert (tmp_path / f"checkpoint-{best}" / "model.safetensors").exists()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-6)


class Row(IterableDataset):  # type: ignore[type-arg]
    """The texts, without an index."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Texts()[index] for index in range(len(Texts())))


def test_a_stream_is_trained_on(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, {"max_steps": 20}, train_dataset=Row())
    assert trainer.train().global_step == 20


@pytest.mark.filterwarnings("ignore")  # of peft about itself
def test_lora_saves_the_adapter_alone(tmp_path: Path) -> None:
    net = peft.get_peft_model(
        model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    trainer = made(Trainer, tmp_path, {"save_strategy": "epoch"}, model=net)
    trainer.train()
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)
    for folder in (tmp_path / "checkpoint-26", tmp_path):
        if folder == tmp_path:
            trainer.save_model()
        assert (folder / "adapter_model.safetensors").exists()
        again = peft.PeftModel.from_pretrained(model(), folder)
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, net.get_parameter(name)), name


REFUSED = {
    "deepspeed": {},
    "ignore_data_skip": True,
    "neftune_noise_alpha": 5.0,
    "include_num_input_tokens_seen": "all",
    "average_tokens_across_devices": False,
}


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "deepspeed"])
def test_an_argument_without_effect_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = made(Trainer, tmp_path, {name: REFUSED[name]})
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    stderr = capsys.readouterr().err
    assert stop.value.code == 64
    assert (
        f"takes no {name}=" in stderr and ARGUMENTS[name][1] in stderr and "Traceback" not in stderr
    )


class OwnStep(Trainer):
    def training_step(self, *_: Any, **__: Any) -> Any:
        return torch.zeros(())


class Looks(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        raise AssertionError


class EndsEpochs(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (OwnStep, {}, "has called self.accelerator.backward 0 times for a micro-batch"),
        (Trainer, {"callbacks": [Looks()]}, "Looks has on_pre_optimizer_step"),
        (Trainer, {"callbacks": [EndsEpochs()]}, "should_epoch_stop"),
        (Trainer, {"train_dataset": None}, "needs a train_dataset"),
    ],
)
def test_what_is_not_called_is_refused(
    kind: type,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        made(kind, tmp_path, {}, **options).train()
    assert stop.value.code == 64
    assert message in capsys.readouterr().err


def test_a_second_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = made(Trainer, tmp_path, {"max_steps": 2})
    trainer.train()
    with pytest.raises(SystemExit):
        trainer.train()
    assert "train() was called twice" in capsys.readouterr().err


def test_a_folder_to_resume_from_is_left_alone_where_a_state_is(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The idiom of most scripts ended the job at its first recovery."""
    saving: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    for folder in ("checkpoint-2", True):
        with pytest.raises(SystemExit) as stop:
            made(Trainer, tmp_path / "no", saving).train(resume_from_checkpoint=folder)
        assert stop.value.code == 64
        assert "training would begin at step 0" in capsys.readouterr().err
    monkeypatch.setenv("ELASTICZERO_CHECKPOINT_DIR", str(tmp_path / "state"))
    for steps, told in ((4, False), (6, True)):
        trainer = made(Trainer, tmp_path / "out", saving | {"max_steps": steps})
        newest = get_last_checkpoint(str(trainer.args.output_dir))
        caplog.clear()
        with caplog.at_level("INFO", logger="elasticzero"):
            trainer.train(resume_from_checkpoint=newest)
        assert trainer.state.global_step == steps
        assert ("has no effect: training goes on from step 4" in caplog.text) == told


class Steps(transformers.Trainer):
    """Wraps `training_step`, as trainers that are derived from transformers' do."""

    def training_step(self, *args: Any, **others: Any) -> Any:
        self.model.config.steps_seen = getattr(self.model.config, "steps_seen", 0) + 1
        return super().training_step(*args, **others)


class StepsInOrder(Steps, InOrder):
    """That of transformers."""


class OurStepsInOrder(InOrder, Trainer, Steps):
    """That of this package, as a mixin."""


def test_an_overridden_training_step_is_called(tmp_path: Path) -> None:
    theirs, ours = made(StepsInOrder, tmp_path, {}), made(OurStepsInOrder, tmp_path, {})
    theirs.train()
    ours.train()
    check_equal(ours, theirs)
    assert ours.model.config.steps_seen == theirs.model.config.steps_seen > 0


class Seq2SeqInOrder(InOrder, Seq2SeqTrainer):
    """That of this package."""


@pytest.mark.filterwarnings("ignore")  # of older transformers about an argument that has a default
def test_a_derived_trainer_trains_as_that_of_transformers(tmp_path: Path) -> None:
    theirs, ours = made(Theirs, tmp_path, {}), made(Seq2SeqInOrder, tmp_path, {})
    theirs.train()
    ours.train()
    check_equal(ours, theirs)
    assert isinstance(ours, transformers.Seq2SeqTrainer)


def test_the_stored_progress_has_its_keys() -> None:
    """Checkpoints of other releases hold it."""
    progress = TrainerProgress()
    stored = (
        '{"global_batch": null, "loss": [0.0, 0], "unlogged": [0.0, 0], "gradient_norm": null, '
        '"operations": 0.0, "trainer": "", "scheduler": null}'
    )
    assert json.dumps(progress.state_dict()) == stored
    changed = json.loads(stored) | {"global_batch": 8, "loss": [1.5, 3], "unlogged": [0.5, 1]}
    changed |= {"operations": 6e9}
    progress.load_state_dict(changed)
    assert progress.state_dict() == changed
    older = '{"global_batch": 8, "loss": [1.5, 3], "trainer": "", "scheduler": null}'
    progress.load_state_dict(json.loads(older))
    assert progress.state_dict() == changed | {"unlogged": [0.0, 0], "operations": 0.0}
