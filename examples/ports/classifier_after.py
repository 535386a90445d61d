"""Trains an image classifier on nodes that come and go, with AMP, BatchNorm and an average of the
weights."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import elasticzero as ez

SIZE, CLASSES = 16, 8
BATCH, SLICE = 64, 16  # BatchNorm takes its statistics over a slice, on however many ranks


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures of a few random patterns, each with its number."""

    def __init__(self, samples: int, seed: int) -> None:
        patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(CLASSES, (samples,), generator=generator)
        noise = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
        self.x = patterns[self.y] + 4 * noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 2) ** 2, CLASSES),
    )


def train(session: ez.Session, options: argparse.Namespace) -> None:
    cuda = session.device.type == "cuda"
    loader = DataLoader(Pictures(options.samples, seed=1), batch_size=BATCH, shuffle=True)
    held_out = DataLoader(Pictures(512, seed=2), batch_size=128)

    torch.manual_seed(0)
    model, optimizer = session.prepare(
        network(),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4),
        precision="fp16" if cuda else "bf16",
    )
    steps = session.steps_in(loader, global_batch=BATCH, epochs=options.epochs)
    schedule = session.track("schedule", CosineAnnealingLR(optimizer, steps))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    average = session.track("average", average)
    average.eval()
    session.restore()

    def right(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        share: Tensor = (average(x).argmax(1) == y).double().mean()
        return share

    def validate() -> None:
        accuracy = session.evaluate(held_out, right)
        if session.rank == 0:
            print(f"accuracy {accuracy:.3f}", flush=True)

    loop = session.batches(
        loader,
        global_batch=BATCH,
        virtual_batch=SLICE,
        epochs=options.epochs,
        on_epoch_end=validate,
    )
    for x, y in loop:
        loss = F.cross_entropy(model(x), y)
        session.backward(loss)
        if session.step(max_grad_norm=5.0):
            schedule.step()
            average.update_parameters(model)
    weights = session.state_dict()
    if session.rank == 0:
        torch.save({"model": weights, "average": average.module.state_dict()}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("classifier.pt"))
    options = parser.parse_args()
    ez.run(lambda session: train(session, options))


if __name__ == "__main__":
    main()
