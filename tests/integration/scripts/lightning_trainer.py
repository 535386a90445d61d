"""Trains the regression by Lightning in float64, and writes down which samples each global batch
holds."""

from __future__ import annotations

import json
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from elasticzero.integrations.lightning import Elastic, SessionLogger
from tests.integration.scripts import adapted, regression


class Regression(L.LightningModule):
    """The regression's network, with a schedule and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = regression.network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = regression.loss_of(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", regression.loss_of(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-2, weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Trace(Callback):
    """Writes down the samples of each step, and slows it."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        adapted.trace(trainer.strategy.session, self._pause_s)


def main() -> None:
    parser = adapted.parser()
    parser.add_argument("--average", action="store_true")
    options = parser.parse_args()
    data = regression.dataset()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    held_out = DataLoader(Subset(data, range(30)), batch_size=5)
    keep = ModelCheckpoint(options.output, monitor="val_loss", save_top_k=1, save_last=True)
    averages = [EMAWeightAveraging(decay=0.9)] if options.average else []
    stop = EarlyStopping("val_loss", patience=options.epochs)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=Elastic(global_batch=options.global_batch),
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[Trace(options.pause), keep, stop, *averages],
        default_root_dir=options.output,
        logger=SessionLogger(),
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    module = Regression()
    trainer.fit(module, loader, held_out)
    if trainer.is_global_zero:
        told = {
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            "val_loss": trainer.callback_metrics["val_loss"].item(),
            "best": keep.best_model_score.item(),
            "path": keep.best_model_path,
            "waited": stop.wait_count,
            "after": trainer.validate(module, held_out, verbose=False)[0]["val_loss"],
        }
        print(json.dumps({"ended": told}), flush=True)


if __name__ == "__main__":
    main()
