"""The training of `regression.py` in which ranks hang on request, each time in another way.

`--hang GENERATION:KIND@STEP,…`, on the last rank, before that step: `gil` a call into C that keeps
Python's lock, `loop` a loop without end, `collective` a collective that the others do not call,
`busy` a section that makes no steps for long.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import time

import regression
import torch
import torch.distributed as dist

import elasticzero as ez


def hang(kind: str, session: ez.Session, group: dist.ProcessGroup, busy_s: float) -> None:
    if session.rank != session.world_size - 1:
        return
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
    data = regression.dataset()
    for x, y in session.batches(data, global_batch=10, epochs=3, seed=3):
        place = {"generation": session.generation, "step": session.step_count + 1}
        trace = {**place, "samples": list(session.batch_indices)}
        print(json.dumps({"trace": trace}), flush=True)
        time.sleep(options.pause)
        for match in hangs:
            assert match is not None, options.hang
            if (int(match[1]), int(match[3])) == (session.generation, session.step_count + 1):
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
