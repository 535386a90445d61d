"""Lightning on one process: the results of its own strategy, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from elasticzero.integrations.lightning import Elastic
from elasticzero.integrations.lightning.progress import NAME, FitProgress
from tests.integration.scripts import regression
from tests.integration.scripts.lightning_trainer import Regression
from tests.support.cases import slow

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning about data workers and loggers


def trained(strategy: Any, folder: Path, module: Any = None, **options: Any) -> tuple[Any, Any]:
    data = regression.dataset()
    module = module if module is not None else Regression()
    callbacks = options.pop("callbacks", [])
    # Lightning's last step of an epoch would be smaller where these do not divide
    loader = options.pop("loader", DataLoader(Subset(data, range(328)), batch_size=4))
    values = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    trainer = L.Trainer(strategy=strategy, callbacks=callbacks, **{**values, **options})
    trainer.fit(module, loader, DataLoader(Subset(data, range(30)), batch_size=5))
    return trainer, module


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"gradient_clip_val": 0.05, "max_epochs": 3}, marks=pytest.mark.slow),
        {"max_steps": 17, "max_epochs": -1, "check_val_every_n_epoch": 1},
        pytest.param(
            {"accumulate_grad_batches": 1, "val_check_interval": 0.5}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_the_steps_are_those_of_lightning(options: dict[str, Any], tmp_path: Path) -> None:
    outcomes = [trained(strategy, tmp_path, **options) for strategy in (Elastic(), "auto")]
    (ours, ours_module), (theirs, other) = outcomes
    assert ours.global_step == theirs.global_step > 0
    assert ours.current_epoch == theirs.current_epoch
    for (name, p), q in zip(ours_module.named_parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-10, name
    metrics = {name: value.item() for name, value in theirs.callback_metrics.items()}
    assert "train_loss_epoch" in metrics
    for name in metrics.keys() & {"val_loss"}:
        assert ours.callback_metrics[name].item() == pytest.approx(metrics[name], rel=1e-6)


class Worse(Regression):
    """Its metric rises from the start."""

    def on_validation_epoch_end(self) -> None:
        self.log("rises", float(self.trainer.global_step))


@pytest.mark.slow
def test_training_stops_early(tmp_path: Path) -> None:
    stop = EarlyStopping("rises", patience=2)
    trainer, _ = trained(Elastic(), tmp_path, Worse(), callbacks=[stop], max_epochs=9)
    assert trainer.current_epoch == 3


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnStep(Regression):
    def optimizer_step(self, *_: Any, **__: Any) -> None:
        raise AssertionError


class Looks(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        raise AssertionError


class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        data = regression.dataset()
        return (data[index] for index in range(len(data)))


def test_a_stream_is_trained_on(tmp_path: Path) -> None:
    loader = DataLoader(Rows(), batch_size=4)
    trainer, _ = trained(Elastic(), tmp_path, SteppedTo(30), loader=loader, max_steps=30)
    assert trainer.global_step == 30


class SteppedTo(Regression):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ByHand, {"accumulate_grad_batches": 1}, "optimizes by hand"),
        (OwnStep, {}, "overrides optimizer_step"),
        (Regression, {"callbacks": [Looks()]}, "on_before_optimizer_step"),
        (Regression, {"limit_train_batches": 5}, "limit_train_batches"),
        (
            Regression,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "clip by norm",
        ),
        (Regression, {"loader": [DataLoader(regression.dataset())] * 2}, "one DataLoader"),
        (SteppedTo, {"loader": DataLoader(Rows(), 4), "max_epochs": 1}, "max_steps"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_cannot_be_done_is_refused(
    module: Any,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        trained(Elastic(), tmp_path, module(3) if module is SteppedTo else module(), **options)
    told = capsys.readouterr().err
    assert stop.value.code == 64
    assert message in told and "Traceback" not in told


class Unscheduled(Regression):
    """Can be trained for more steps than at first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=1e-3)


def test_a_file_to_resume_from_is_left_alone_where_a_state_is(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A script that gives its newest file ended the job at the first recovery."""

    def fit(steps: int, file: Path | None) -> Any:
        trainer = L.Trainer(
            strategy=Elastic(),
            accelerator="cpu",
            devices=1,
            logger=False,
            max_steps=steps,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        loader = DataLoader(regression.dataset(), 4)
        trainer.fit(Unscheduled(), loader, ckpt_path=file, weights_only=False)
        return trainer

    file = tmp_path / "a.ckpt"
    fit(2, None).save_checkpoint(file)
    with pytest.raises(SystemExit):
        fit(4, file)
    assert "training would begin at step 0" in capsys.readouterr().err
    monkeypatch.setenv("ELASTICZERO_CHECKPOINT_DIR", str(tmp_path / "state"))
    fit(3, None)
    with caplog.at_level("INFO", logger="elasticzero"):
        trainer = fit(5, file)
    assert trainer.global_step == 5
    assert "has no effect: training goes on from step 3" in caplog.text


def test_a_trained_module_is_validated_and_saved_by_lightning(tmp_path: Path) -> None:
    trainer, module = trained(Elastic(), tmp_path)
    held_out = DataLoader(Subset(regression.dataset(), range(30)), batch_size=5)
    (metrics,) = trainer.validate(module, held_out, verbose=False)
    x, y = (tensor[:30] for tensor in regression.dataset().tensors)
    with torch.no_grad():
        expected: Tensor = regression.loss_of(module.net(x), y)
    assert metrics["val_loss"] == pytest.approx(expected.item(), rel=1e-6)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Regression.load_from_checkpoint(tmp_path / "a.ckpt")
    for p, q in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_stored_progress_has_its_keys(tmp_path: Path) -> None:
    """Checkpoints of other releases hold it, under this name."""
    trainer, _ = trained(Elastic(), tmp_path, max_steps=1)
    stored = FitProgress(trainer, 8, None).state_dict()
    assert NAME == "lightning"
    assert list(stored) == ["global_batch", "loops", "schedulers", "callbacks"]
    assert stored["global_batch"] == 8
    assert stored["loops"] == trainer.fit_loop.state_dict()


class Counts(Callback):
    """Counts steps, by its state and by the hooks of checkpoints."""

    def __init__(self) -> None:
        self.by_state = self.by_hook = 0
        self.norm = torch.zeros(2000)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.by_state += 1
        self.by_hook += 1
        self.norm += trainer.global_step

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.by_state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.by_state = state["steps"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = {"steps": (self.by_hook,), "norm": self.norm}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        (self.by_hook,) = checkpoint["counted"]["steps"]
        self.norm = checkpoint["counted"]["norm"]


class Fails(Callback):
    """Ends training once, in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise RuntimeError("the fault")


class CountsToo(Regression):
    """Counts steps by a module's own hooks."""

    steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_module"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["of_module"]


@pytest.mark.parametrize("strategy", [slow("ddp"), "zero2"])
def test_what_hooks_of_checkpoints_keep_goes_through_a_fault(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average of weights began anew, in silence."""

    def run(folder: str, *others: Callback) -> tuple[Any, Counts, Any]:
        monkeypatch.setenv("ELASTICZERO_CHECKPOINT_DIR", str(tmp_path / folder))
        monkeypatch.setenv("ELASTICZERO_CHECKPOINT_EVERY", "4")
        average, counts = EMAWeightAveraging(decay=0.9), Counts()
        callbacks = [average, counts, *others]
        torch.manual_seed(3)
        _, module = trained(Elastic(strategy), tmp_path, CountsToo(), callbacks=callbacks)
        return module, counts, average

    with pytest.raises(RuntimeError, match="the fault"):
        run("disturbed", Fails(50))
    module, counts, _ = run("disturbed")
    expected, others, _ = run("calm")
    assert counts.by_state == others.by_state == counts.by_hook == others.by_hook == 82
    assert module.steps == expected.steps == 82
    assert torch.equal(counts.norm, others.norm)
    for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-12, name  # the averages, which take the weights' place


def test_an_average_of_a_divided_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        trained(Elastic("zero3"), tmp_path, callbacks=[EMAWeightAveraging()])
    assert stop.value.code == 64
    assert "EMAWeightAveraging averages the whole module" in capsys.readouterr().err
