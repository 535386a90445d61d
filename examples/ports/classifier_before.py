"""Trains an image classifier in one process, with AMP, BatchNorm and an average of the weights."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

SIZE, CLASSES = 16, 8
BATCH = 64


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


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    loader = DataLoader(Pictures(options.samples, seed=1), batch_size=BATCH, shuffle=True)
    held_out = DataLoader(Pictures(512, seed=2), batch_size=128)
    steps = options.epochs * len(loader)

    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
    schedule = CosineAnnealingLR(optimizer, steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    average.eval()

    def validate() -> None:
        right = 0
        with torch.no_grad(), torch.autocast(device.type, half):
            for x, y in held_out:
                right += int((average(x.to(device)).argmax(1) == y.to(device)).sum())
        print(f"accuracy {right / len(held_out.dataset):.3f}", flush=True)  # type: ignore[arg-type]

    for _ in range(options.epochs):
        for x, y in loader:
            with torch.autocast(device.type, half):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update_parameters(model)
        validate()
    torch.save({"model": model.state_dict(), "average": average.module.state_dict()}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("classifier.pt"))
    options = parser.parse_args()
    train(options)


if __name__ == "__main__":
    main()
