"""`python train.py`: mistakes without an agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch
import elasticzero as ez

def train(session):
    model, _ = session.prepare(torch.nn.Linear(2, 1), torch.optim.SGD)
    session.restore()
    first = True
    for batch in session.batches(torch.ones(8, 2), global_batch=4, micro_batch=2, epochs=1):
        loss = model(batch).mean()
        session.log(loss=loss)
        {body}

if __name__ == "__main__":
    {call}
"""


def run(body: str, call: str = "ez.run(train)") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(body=body, call=call)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("pass", "session.step() was not called for this micro-batch"),
        ("session.backward(loss)", "session.step() was not called for this micro-batch"),
        ("session.step()", "session.backward(loss) was not called before session.step()"),
        (
            "session.backward(loss, weight=1.0 if first else None); first = False; session.step()",
            "session.backward was given weight=… for some micro-batches",
        ),
        ("session.log(all=batch)", "session.log: 'all' is not one number"),
    ],
)
def test_a_mistake_is_one_line(body: str, complaint: str) -> None:
    done = run(body)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith(f"error: {complaint}") and done.stderr.count("\n") == 1


def test_who_calls_run_can_still_catch_it() -> None:
    call = """try:
        ez.run(train)
    except SystemExit as error:
        print(type(error.__cause__).__name__, error.code)"""
    assert run("pass", call).stdout == "UserError 64\n"


def test_other_errors_are_the_scripts_own_and_a_right_one_says_nothing() -> None:
    done = run("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    done = run("session.backward(loss); session.step()", "ez.run(train); print('after')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "after\n", "")
