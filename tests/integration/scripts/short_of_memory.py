"""Trains with micro-batches of automatic size; rank 1 has memory for two samples only, from step 2
on.

Arguments: a file, into which rank 0 writes the generation, the largest micro-batch of its last
generation, and the weights; the samples of a global batch; the steps.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elasticzero as ez

OUT, GLOBAL_BATCH, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def data() -> Any:
    return torch.randn(80, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(session: ez.Session) -> None:
    net, _ = session.prepare(model(), lambda params: torch.optim.SGD(params, lr=0.1))
    session.restore()
    most = 0
    for batch in session.batches(
        data(), global_batch=GLOBAL_BATCH, steps=STEPS, micro_batch="auto"
    ):
        if session.rank == 1 and session.step_count >= 2 and len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        most = max(most, len(batch))
        session.backward(net(batch).square().mean())
        session.step()
    state = session.state_dict()
    if session.rank == 0:
        weights = {name: tensor.flatten().tolist() for name, tensor in state.items()}
        outcome = {"generation": session.generation, "most": most, "weights": weights}
        OUT.write_text(json.dumps(outcome))


if __name__ == "__main__":
    ez.run(train)
