"""Mistakes of a first script: each is one sentence that says what to write instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOLD = {
    "optimizer object": "lambda params: torch.optim.AdamW(params, …)",
    "no factory": "a function that makes the optimizer",
    "made nothing": "let it return the optimizer",
    "forgotten restore": "call session.restore() before session.batches(…)",
    "loader of batches": "makes its batches by batch_sampler=",
    "generator": "give a dataset whose samples are reached by index, an IterableDataset",
    "dict": "with the keys 'train': give one dataset of it",
    "batch_size": "session.batches takes no batch_size=: give global_batch=",
    "typo": "session.batches takes no shufle=: is shuffle= meant?",
    "typo of a method": "session.track takes no nmae=: is name= meant?",
    "typo of prepare": "session.prepare takes no stratgy=: is strategy= meant?",
    "missing": "session.prepare(…) does not fit its arguments: missing a required argument",
    "own step": "the script calls optimizer.step() itself: leave it out",
    "scheduler": "this LambdaLR was built on another optimizer",
    "nested scheduler": "this SequentialLR was built on another optimizer",
    "half a batch": "leave it where session.step() has returned True",
    "nested loops": "inside the loop over session.batches",
    "early epoch": "session.epoch is there once a loop over session.batches has begun",
    "average zero3": "under zero3 no rank has the whole model",
    "plain average zero3": "under zero3 no rank has the whole model",
    "saved zero3": "call session.state_dict() on all ranks",
}
TOLD["norm in parts"] = TOLD["value in parts"] = "where they are not complete"
for strategy in ("zero1", "zero2", "zero3"):
    TOLD[f"norm {strategy}"] = TOLD[f"value {strategy}"] = "session.step(max_grad_norm=…)"
for strategy in ("ddp", "zero1", "zero2", "zero3"):
    TOLD[f"closure {strategy}"] = "LBFGS computes the loss anew"
WORKS = {
    *("evaluated loader", "norm ddp", "value ddp"),
    *(
        f"{what} {which}"
        for what in ("average", "plain average")
        for which in ("ddp", "zero1", "zero2")
    ),
    *(f"saved {which}" for which in ("ddp", "zero1", "zero2")),
    *(f"zero_grad {which}" for which in ("ddp", "zero1", "zero2", "zero3")),
}


def test_each_mistake_is_a_sentence_or_works() -> None:
    """They ended in tracebacks of torch's, or had no effect at all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.scripts.mistakes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == TOLD.keys() | WORKS
    for name, (code, text) in outcomes.items():
        if name in WORKS:
            assert (code, text) == (0, ""), (name, text)
        else:
            assert code == 64 and TOLD[name] in text, (name, code, text)


TRAINS = """import torch, elasticzero as ez

def train(session):
    session.prepare(torch.nn.Linear(2, 1), torch.optim.SGD, stratgy="ddp")

ez.run({arguments})
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train", "session.prepare takes no stratgy=: is strategy= meant? (train.py:4 in train)"),
        (
            "train, keep_proces=True",
            "elasticzero.run takes no keep_proces=: is keep_process= meant? (train.py:6)",
        ),
    ],
)
def test_a_mistake_has_its_line_in_the_script(arguments: str, told: str, tmp_path: Path) -> None:
    """It was a TypeError, which a job took for a fault and tried again."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS.format(arguments=arguments))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (64, f"error: {told}\n")
