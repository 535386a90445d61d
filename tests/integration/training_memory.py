"""Trains a model of 24 layers and writes the greatest number of bytes that its tensors took.

Argument: JSON with strategy, dtype, micro and out (a file); at will steps, ram (the
bytes of RAM that seem to be free), meta (the model is built on the meta device), load (the
files that have its first values), and load_optimizer. The count is that of the storages of all
living tensors after each operation, from the second step on; the model is built while they are
counted.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

import elasticzero as ez
from elasticzero.processes import Ram
from elasticzero.training import preparation, strategy_choice

LAYERS, WIDTH, STEPS = 24, 256, 3


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages of all tensors that operations have returned and that still
    exist; a storage may be resized meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, self._reference(storage))
        self.peak = max(self.peak, self.count())
        return result

    def _reference(self, storage: Any) -> weakref.ref[Any]:
        key = storage._cdata
        return weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def count(self) -> int:
        storages = [reference() for reference in list(self._storages.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)


class Inputs(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index / 64)


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*layers).to(dtype)


def train(session: ez.Session) -> None:
    dtype, live = getattr(torch, told["dtype"]), LiveBytes()
    with live:
        with torch.device("meta" if told.get("meta") else "cpu"):
            built = build(dtype)
        model, _ = session.prepare(
            built,
            lambda params: torch.optim.AdamW(params, lr=0.001, fused=True),
            strategy=told["strategy"],
            load=told.get("load"),
            load_optimizer=told.get("load_optimizer", False),
        )
        del built
        Path(f"{told['out']}-built-{session.rank}").write_text(json.dumps(live.peak))
        session.restore()
        steps = told.get("steps", STEPS)
        batches = session.batches(
            Inputs(),
            global_batch=4,
            micro_batch=told["micro"],
            steps=steps,
            shuffle=False,
        )
        for batch in batches:
            if session.step_count == 1:
                live.peak = 0
            output = model(batch.to(dtype))
            wide = output if dtype == torch.float64 else output.float()
            session.backward(wide.square().mean())
            session.step(max_grad_norm=1.0)
    weights = {name: tensor.double().sum().item() for name, tensor in session.state_dict().items()}
    Path(f"{told['out']}-weights-{session.rank}").write_text(json.dumps(weights))
    Path(f"{told['out']}-{session.rank}").write_text(json.dumps(live.peak))


def seeming_ram(memory: Path = Path(), cgroup: Path = Path()) -> Ram:
    return Ram(int(told["ram"]), int(told["ram"]))


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    # Of a whole part the thread of the collective may keep a copy for a moment after its end.
    preparation.PART_BYTES = 1 << 19
    if "ram" in told:
        strategy_choice.__dict__["ram"] = seeming_ram
    ez.run(train)
