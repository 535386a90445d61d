"""Trains the regression by a loop of accelerate in float64, and writes down which samples each
global batch holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from elasticzero.integrations.accelerate import Accelerator
from tests.integration.scripts import adapted, regression


def main() -> None:
    options = adapted.parser().parse_args()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, global_batch=options.global_batch
    )
    data, net = regression.dataset(), regression.network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.7)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    held_out = DataLoader(Subset(data, range(31)), batch_size=5)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(
        net, optimizer, loader, held_out, schedule
    )
    session = accelerator.session
    for _ in range(options.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                if accelerator.sync_gradients:
                    adapted.trace(session, options.pause)
                loss = regression.loss_of(model(x), y)
                ended = accelerator.sync_gradients
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if ended:
                accelerator.log({"loss": loss.item(), "of": "training"})
        model.eval()
        losses = []
        for x, y in held_out:
            with torch.no_grad():
                error = ((model(x) - y) ** 2).mean(1)
            losses.append(accelerator.gather_for_metrics(error))
        mean = torch.cat(losses).mean().item()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, options.output)
    steps, rate = session.step_count, optimizer.param_groups[0]["lr"]
    accelerator.end_training()
    if accelerator.is_main_process:
        with torch.no_grad():
            after = regression.loss_of(net(data.tensors[0]), data.tensors[1]).item()
        told = {"steps": steps, "after": after, "samples": len(torch.cat(losses)), "mean": mean}
        told |= {"lr": rate, "in_epoch": len(loader)}
        print(json.dumps({"ended": told}), flush=True)
        assert Path(options.output, "model.safetensors").exists()


if __name__ == "__main__":
    main()
