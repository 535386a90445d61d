"""Loops over datasets, as a test asks for: writes down what each step used and each epoch's end.

Argument: JSON with log (a file) and loops, each a dict with dataset (0 or 1), epochs or steps, and
at will breaks (steps after which the script leaves it). At will: hold (file) and hold_at (step),
stop, leave, exit and evaluate (rank, step, perhaps place), stop_after_epoch, ends, strategy, batch,
micro, seed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticzero as ez

SAMPLES = (23, 17)


class Ended:
    """A tracked object: the epochs whose end has counted."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": list(self.epochs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = list(state["epochs"])


class Numbers(Dataset[Tensor]):
    """A dataset of one-hot samples: the model learns which were used."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return nn.functional.one_hot(torch.tensor(index), max(SAMPLES)).double()


def train(session: ez.Session, told: dict[str, Any]) -> None:
    model, _ = session.prepare(
        nn.Linear(max(SAMPLES), 1).double(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        strategy=told.get("strategy", "ddp"),
    )
    ended = session.track("ended", Ended())
    session.restore()
    datasets = [Numbers(samples) for samples in SAMPLES]

    def on_epoch_end() -> None:
        ended.epochs.append(session.epoch)
        _log(told, {"end": session.epoch, "rank": session.rank, "step": session.step_count})
        mean = session.evaluate(datasets[0], lambda x: model(x).mean())
        assert isinstance(mean, float)
        if told.get("stop_after_epoch") == [session.rank, session.epoch]:
            session.stop("the validation loss rises")

    for number, loop in enumerate(told["loops"]):
        _loop(session, model, told, number, datasets[loop.get("dataset", 0)], on_epoch_end)
    if session.rank == 0:
        _log(told, {"ended": ended.epochs, "stopped": session.stopped})


def _loop(
    session: ez.Session,
    model: nn.Module,
    told: dict[str, Any],
    number: int,
    dataset: Any,
    on_epoch_end: Any,
) -> None:
    loop, done = told["loops"][number], 0
    for x in session.batches(
        dataset,
        global_batch=told.get("batch", 4),
        epochs=loop.get("epochs"),
        steps=loop.get("steps"),
        micro_batch=told.get("micro"),
        seed=told.get("seed", 0),
        on_epoch_end=on_epoch_end if told.get("ends") else None,
    ):
        if done == loop.get("breaks"):
            break
        if session.step_count + 1 == told.get("hold_at"):
            _hold(told, session.rank)
        _leave(session, told, "before")
        session.backward(model(x).mean())
        _leave(session, told, "middle")
        if session.step():
            done += 1
            _log(
                told,
                {
                    "generation": session.generation,
                    "rank": session.rank,
                    "loop": number,
                    "epoch": session.epoch,
                    "step": session.step_count,
                    "samples": session.batch_indices,
                },
            )
            if told.get("stop") == [session.rank, session.step_count]:
                session.stop("good enough")
            _leave(session, told, "after")
            if [session.rank, session.step_count, "break"] == told.get("leave"):
                break


def _leave(session: ez.Session, told: dict[str, Any], place: str) -> None:
    """One rank leaves its loop alone."""
    leave = [session.rank, session.step_count, place]
    if leave == told.get("exit"):
        sys.exit(0)
    if leave == told.get("evaluate"):
        session.evaluate(Numbers(5), lambda x: x.mean())


def _hold(told: dict[str, Any], rank: int) -> None:
    Path(f"{told['hold']}-at-{rank}").touch()
    while not Path(told["hold"]).exists():
        time.sleep(0.01)


def _log(told: dict[str, Any], line: Any) -> None:
    with open(told["log"], "a") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    ez.run(lambda session: train(session, options))
