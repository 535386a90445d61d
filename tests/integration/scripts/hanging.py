"""The training of `regression.py` in which ranks hang on request, each time in another way.

`--hang GENERATION:KIND@STEP,…`, on the last rank, before that step: `gil` a call into C that keeps
Python's lock, `loop` a loop without end, `collective` a collective that the others do not call,
`busy` a section that makes no steps for long. For as long, and without a word to the session:
`sleep`, `child` a wait for another process, `thread` for another thread, `compute`, `data` for the
next batch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import threading
import time
from typing import Any

import regression
import torch
import torch.distributed as dist

import elasticzero as ez


class SlowDataset(torch.utils.data.Dataset[Any]):
    """The dataset of `regression.py`, whose next sample may take long."""

    def __init__(self) -> None:
        self._samples = regression.dataset()
        self.next_takes_s = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.next_takes_s)
        self.next_takes_s = 0.0
        return self._samples[index]


def wait(kind: str, busy_s: float, data: SlowDataset) -> None:
    """Makes no step for `busy_s`, as a script may that has much to do."""
    until_s = time.monotonic() + busy_s
    if kind == "sleep":
        time.sleep(busy_s)
    elif kind == "child":
        subprocess.run(["sleep", str(busy_s)], check=True)
    elif kind == "thread":
        threading.Event().wait(busy_s)
    elif kind == "data":
        data.next_takes_s = busy_s
    while kind == "compute" and time.monotonic() < until_s:
        pass


def hang(kind: str, session: ez.Session, group: dist.ProcessGroup, busy_s: float) -> None:
    if kind == "busy":
        with session.busy("looking around"):
            with session.busy("resting"):
                pass
            time.sleep(busy_s)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(600)
    elif kind == "loop":
        while True:
            pass
    elif kind == "collective":
        dist.barrier(group)


def train(session: ez.Session, options: argparse.Namespace) -> None:
    hangs = [re.fullmatch(r"(\d+):(\w+)@(\d+)", word) for word in options.hang.split(",")]
    group = dist.new_group(backend="gloo")
    model, optimizer = session.prepare(
        regression.network(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05),
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    scheduler = session.track("scheduler", schedule)
    session.restore()
    data = SlowDataset()
    for x, y in session.batches(data, global_batch=10, epochs=3, seed=3):
        place = {"generation": session.generation, "step": session.step_count + 1}
        trace = {**place, "samples": list(session.batch_indices)}
        print(json.dumps({"trace": trace}), flush=True)
        regression.pause(options.pause)
        for match in hangs:
            assert match is not None, options.hang
            is_now = (int(match[1]), int(match[3])) == (session.generation, session.step_count + 1)
            if is_now and session.rank == session.world_size - 1:
                wait(match[2], options.busy_s, data)
                hang(match[2], session, group, options.busy_s)
        session.backward(regression.loss_of(model(x), y))
        if session.step(max_grad_norm=1.0):
            scheduler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hang", required=True)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--busy-s", type=float, default=0.0)
    chosen = parser.parse_args()
    ez.run(lambda session: train(session, chosen))
