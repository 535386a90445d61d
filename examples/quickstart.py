import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import elasticzero as ez


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Noisy pictures of ten random patterns, each with its number."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 64, generator=generator)
        self.y = torch.randint(10, (samples,), generator=generator)
        self.x = patterns[self.y] + torch.randn(samples, 64, generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def train(session: ez.Session) -> None:  # entered again for every generation
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = session.prepare(network, lambda params: torch.optim.AdamW(params, lr=3e-4))
    dataset = Digits(20_000)  # every sample reached by its index
    steps = session.steps_in(dataset, global_batch=64, epochs=3)  # the same in every world
    decay = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50, 1.1 - step / steps))
    scheduler = session.track("scheduler", decay)
    session.restore()  # from memory, from storage, or a fresh start
    for batch in session.batches(dataset, global_batch=64, epochs=3):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        session.backward(loss)
        if session.step(max_grad_norm=1.0):  # True: the global batch is complete and applied
            scheduler.step()
            session.log(loss=loss.item())
    weights = session.state_dict()  # the whole model, on rank 0
    if session.rank == 0:
        save_file(weights, "model.safetensors")


if __name__ == "__main__":
    ez.run(train)
