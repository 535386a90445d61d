"""`python train.py`: mistakes, progress and checkpoints without an agent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticzero.data.sampling import SampleOrder
from elasticzero.errors import UserError
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.options.settings import data_changes, spike_limit
from elasticzero.worker.single_process import read_settings

ROOT = Path(__file__).resolve().parents[2]
LOOPS = Path(__file__).parent / "scripts" / "loops.py"

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
    *progress, last = done.stderr.splitlines()
    assert last.startswith(f"error: {complaint}")
    assert all(re.match(r"\[\d\d:\d\d:\d\d\] (training on|step) ", line) for line in progress)


def test_who_calls_run_can_still_catch_it() -> None:
    call = """try:
        ez.run(train)
    except SystemExit as error:
        print(type(error.__cause__).__name__, error.code)"""
    assert run("pass", call).stdout == "UserError 64\n"


def test_other_errors_are_the_scripts_own() -> None:
    done = run("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_training_alone_shows_how_it_gets_on() -> None:
    """It printed nothing at all."""
    done = run("session.backward(loss); session.step()", "ez.run(train); print('after')")
    assert (done.returncode, done.stdout) == (0, "after\n")
    begins, first, ends = [line.partition("] ")[2] for line in done.stderr.splitlines()]
    assert begins.startswith("training on one process, from the beginning; nothing is saved: set ")
    assert re.fullmatch(r"step 1/2  loss -?[\d.]+", first), first
    assert re.fullmatch(r"finished after step 2 in [\d.]+ s  loss -?[\d.]+", ends), ends


PARTLY = """
import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
import elasticzero as ez

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(2, 1)

    def encode(self, x):
        return self.head(self.layers[0](x))

    def forward(self, x):
        return self.head(self.layers[1](self.layers[0](x)))

def late(model, x):
    model(x)
    return model.head(x) + model(x.clone().requires_grad_())

def train(session):
    model, _ = session.prepare({given}, torch.optim.SGD, strategy="zero3")
    session.restore()
    {before}
    for x in session.batches(torch.ones(8, 2), global_batch=4, epochs=2):
        session.backward({loss}.mean())
        assert session.step() and session.gradient_norm > 0

if __name__ == "__main__":
    ez.run(train)
"""


def call_part(loss: str, model: str = "Model()", before: str = "") -> tuple[int, str]:
    """The exit code and the last line of stderr."""
    script = PARTLY.format(given=model, before=before, loss=loss)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("loss", "model", "before"),
    [
        ("model.layers[0](x)", "Model()", ""),
        ("model['a'][0](x)", "nn.ModuleDict({'a': nn.ModuleList([Model()])})", ""),
        ("model.encode(x)", "Model()", "register_fsdp_forward_method(model, 'encode')"),
    ],
)
def test_zero3_gathers_what_is_called(loss: str, model: str, before: str) -> None:
    """A block before the model, a part of a container, and a method that FSDP2 is told."""
    code, output = call_part(loss, model, before)
    assert code == 0 and "finished after step 4" in output


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        ("model.encode(x)", "module 'head' was called outside of the forward of the model, "),
        ("model.layers[1][0](x)", "'layers.1.0' was called outside of the forward of 'layers.1'"),
        ("late(model, x)", "got a gradient after zero3 had summed those of its block"),
        (
            "torch.func.functional_call(model, {'head.bias': torch.ones(1)}, (x,))",
            "parameter 'head.bias' is replaced, as torch.func.functional_call does it",
        ),
    ],
)
def test_zero3_refuses_what_it_does_not_gather(loss: str, complaint: str) -> None:
    """`late` calls the head while the parameters of the model are gathered, and FSDP2 does not wait
    for its gradient."""
    code, output = call_part(loss)
    assert code == 64 and complaint in output, output


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


@contextmanager
def alone(told: dict[str, Any], **options: str) -> Iterator[subprocess.Popen[str]]:
    variables = {f"ELASTICZERO_{name}": value for name, value in options.items()}
    with subprocess.Popen(
        [sys.executable, str(LOOPS), json.dumps(told)],
        env=os.environ | variables,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        try:
            yield training
        finally:
            training.kill()


def ended(told: dict[str, Any], **options: str) -> tuple[int, str]:
    """The exit code, and what it said."""
    with alone(told, **options) as training:
        output = training.communicate(timeout=100)[1]
        return training.returncode, output


def interrupted(told: dict[str, Any], number: signal.Signals, **options: str) -> tuple[int, str]:
    """The same of a process that gets this signal after its first step."""
    with alone(told, **options) as training:
        assert training.stderr is not None
        while "step 1/" not in (line := training.stderr.readline()):
            assert line
        training.send_signal(number)
        output = training.communicate(timeout=60)[1]
        return training.returncode, output


def test_training_alone_saves_and_goes_on_as_an_agent_does(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    settings = {"CHECKPOINT_DIR": str(directory), "CHECKPOINT_EVERY": "4", "KEEP": "2"}
    settings["KEEP_EVERY"] = "8"
    told: dict[str, Any] = {"log": str(tmp_path / "log"), "loops": [{"steps": 14}]}
    code, output = ended(told, **settings)
    assert code == 0 and steps_in(directory) == [8, 12, 14], output
    assert f"checkpoints every 4 steps and at the end in {directory}" in output
    newest = next((directory / "step-000000000014").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    told["loops"] = [{"steps": 20}]
    code, output = ended(told, **settings, STRICT_CHECKPOINT="1")
    assert code == 70 and "error: the checkpoint of step 14 is damaged" in output
    code, output = ended(told, **settings)
    assert code == 0, output
    assert "the checkpoint of step 14 is damaged: " in output and "step 12 is used" in output
    steps = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    samples = {step["step"]: step["samples"] for step in steps if "samples" in step}
    order = SampleOrder(samples=23)
    places = [order.indices(epoch, 0, 23) for epoch in range(4)]
    expected = [int(i) for indices in places for i in indices]
    assert [i for step in sorted(samples) for i in samples[step]] == expected[: 3 * 23 + 8]
    assert [step["step"] for step in steps if "samples" in step][14:16] == [13, 14]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_an_interrupt_ends_at_a_boundary_and_saves(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    directory = tmp_path / "checkpoints"
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 10**6}]}
    exit_code, output = interrupted(told, number, CHECKPOINT_DIR=str(directory))
    assert exit_code == code, output
    (step,) = steps_in(directory)
    assert f"interrupted after step {step}; the same command goes on from the checkpoint" in output
    assert "Traceback" not in output


def test_an_interrupt_without_checkpoints_is_one_line(tmp_path: Path) -> None:
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 10**6}]}
    code, output = interrupted(told, signal.SIGINT)
    assert code == 130 and "nothing was saved: set ELASTICZERO_CHECKPOINT_DIR" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"ELASTICZERO_KEEP": "some"}, "1 or more, is expected (from ELASTICZERO_KEEP)"),
        ({"ELASTICZERO_STRATEGY": "zero9"}, "ELASTICZERO_STRATEGY=zero9: one of ddp, "),
        ({"ELASTICZERO_KEEP_EVERY": "2"}, "--keep-every needs --keep N"),
        ({"ELASTICZERO_CHECKPOINT_DIR": "/proc/none"}, "/proc/none cannot be written"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "start the script by `elasticzero run`"),
    ],
)
def test_bad_surroundings_are_one_line(variables: dict[str, str], complaint: str) -> None:
    script = SCRIPT.format(body="pass", call="ez.run(train)")
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 64, done.stderr
    assert done.stderr.startswith("error: ") and complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_variables_mean_what_they_mean_to_the_launcher() -> None:
    variables = {
        "ELASTICZERO_CHECKPOINT_DIR": "/x",
        "ELASTICZERO_CHECKPOINT_EVERY": "7",
        "ELASTICZERO_KEEP": "3",
        "ELASTICZERO_KEEP_EVERY": "10",
        "ELASTICZERO_STRATEGY": "zero2",
        "ELASTICZERO_STRICT_CHECKPOINT": "TRUE",
        "ELASTICZERO_ON_NONFINITE": "skip",
        "ELASTICZERO_ALLOW_DATA_CHANGE": "batch,dataset",
        "ELASTICZERO_ON_SPIKE": "stop:3:10",
    }
    options = {option.variable: option for option in RUN_OPTIONS}
    for environment in (variables, {}, dict.fromkeys(variables, "")):
        asked = [(options[name], options[name].given_in(environment)) for name in variables]
        expected = [option.default if got is None else got[1] for option, got in asked]
        expected[-2:] = data_changes("", expected[-2]), spike_limit("", expected[-1])
        settings = read_settings(environment)
        keep = [None if n is None else str(n) for n in (settings.keep.last, settings.keep.every)]
        assert expected == [
            settings.checkpoint_dir,
            settings.checkpoint_every,
            *keep,
            settings.strategy,
            settings.strict,
            settings.on_nonfinite,
            settings.allow_data_change,
            settings.on_spike,
        ]


@pytest.mark.parametrize("name", ["NONFINITE", "SPIKE"])
def test_a_rollback_needs_an_agent(name: str) -> None:
    value = "rollback" if name == "NONFINITE" else "rollback:3:10"
    with pytest.raises(UserError, match="for rollback start it by elasticzero run"):
        read_settings({f"ELASTICZERO_ON_{name}": value})
    sentences = {
        "NONFINITE": "ELASTICZERO_ON_NONFINITE=later: one of ",
        "SPIKE": "--on-spike later: off, .* .from ELASTICZERO_ON_SPIKE.",
    }
    with pytest.raises(UserError, match=sentences[name]):
        read_settings({f"ELASTICZERO_ON_{name}": "later"})
