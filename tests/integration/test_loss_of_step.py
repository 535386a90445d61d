"""`session.loss` is the mean over a global batch on every rank, in every format of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticzero.spans import STRATEGIES
from elasticzero.training.batch_work import SUM_OF_SAMPLES
from tests.integration.training_harness import Pool
from tests.support.cases import slow

SCRIPT = """
import sys
import torch
import elasticzero as ez

SAMPLES = torch.arange(1, 22, dtype=torch.float64).div(7).sqrt()  # no format of 16 bits holds them

def train(session):
    strategy, dtype, precision = sys.argv[1:4]
    model = torch.nn.Linear(3, 2).to(getattr(torch, dtype))
    model, _ = session.prepare(
        model, lambda p: torch.optim.SGD(p, lr=1e-3), strategy=strategy, precision=precision
    )
    session.restore()
    assert session.loss is None
    given = {"weighted": True} if precision == "fp32" else {}
    for x in session.batches(SAMPLES, global_batch=7, micro_batch=2, steps=5, shuffle=False):
        ones = torch.ones(len(x), 3, dtype=getattr(torch, dtype))
        value = x.square().mean() + 0 * model(ones).double().sum()
        weight = x.sum() if given else None  # stands for a number of tokens
        session.backward(value, weight=weight)
        if session.step():
            batch = SAMPLES[session.batch_indices]
            parts = micro_batches(batch, session.world_size)
            weights = [part.sum() if given else len(part) for part in parts]
            losses = [part.square().mean() for part in parts]
            expected = sum(w * v for w, v in zip(weights, losses)) / sum(weights)
            assert abs(session.loss - expected) < 1e-6 * expected, (session.loss, expected)
    assert session.step_count == 5

def micro_batches(batch, world):
    shares = [len(batch) * rank // world for rank in range(world + 1)]
    shares = [batch[a:b] for a, b in zip(shares, shares[1:])]
    return [micro for share in shares for micro in share.split(2) if len(micro)]

ez.run(train)
"""


@pytest.mark.parametrize("world", [slow(1), 2])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "fp32"), ("bfloat16", "fp32"), ("float16", "fp32"), ("float32", "fp16")],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_is_the_mean_over_the_global_batch(
    pool: Pool, tmp_path: Path, strategy: str, dtype: str, precision: str, world: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    running = pool.start(script, [strategy, dtype, precision], world)
    running.until(running.ended)
    assert [worker.exit_code for worker in running.workers] == [0] * world, running.logs()


SUM = """
import sys
import torch
import elasticzero as ez

def train(session):
    model, _ = session.prepare(torch.nn.Linear(3, 1), lambda p: torch.optim.SGD(p, lr=1e-3))
    session.restore()
    for x in session.batches(torch.ones(8, 3), global_batch=4, epochs=2):
        losses = model(x).square()
        total, mean = losses.sum(), losses.mean()
        given = {"sum": (total,), "mean": (mean,), "weighed": (total, 1.0)}
        session.backward(*given[sys.argv[1]])
        session.step()

ez.run(train)
"""


@pytest.mark.parametrize(("loss", "count"), [("sum", 1), ("mean", 0), ("weighed", 0)])
def test_a_sum_over_samples_is_said_once(pool: Pool, tmp_path: Path, loss: str, count: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SUM)
    running = pool.start(script, [loss], 1)
    running.until(running.ended)
    assert running.logs().count(SUM_OF_SAMPLES) == count, running.logs()


TURNS = """
import torch
import elasticzero as ez

def train(session):
    nets = torch.nn.ModuleDict({
        "wide": torch.nn.Linear(3, 1), "narrow": torch.nn.Linear(3, 1, dtype=torch.bfloat16)
    })
    def factory(parameters):
        return {n: torch.optim.SGD(net.parameters(), lr=1e-3) for n, net in nets.items()}
    model, _ = session.prepare(nets, factory, strategy="ddp")
    session.restore()
    data = torch.arange(1.0, 9.0)
    for x in session.batches(data, global_batch=8, epochs=2, shuffle=False):
        for name in ("wide", "narrow"):
            net = model[name]
            out = net(torch.ones(len(x), 3, dtype=net.weight.dtype)).float().sum()
            is_bad = name == "narrow" and session.epoch == 1
            loss = x.div(7).mean() * (float("nan") if is_bad and session.rank == 1 else 1)
            session.backward(loss + 0 * out, only=name)
            assert session.step(only=name) != is_bad
            if not is_bad:
                assert abs(session.loss - 4.5 / 7) < 1e-6, (name, session.loss)

ez.run(train)
"""


def test_networks_of_two_formats_that_take_turns_have_each_its_loss(
    pool: Pool, tmp_path: Path
) -> None:
    """One whose format holds no loss is stepped by itself: a loss that is not finite leaves it
    out."""
    script = tmp_path / "train.py"
    script.write_text(TURNS)
    running = pool.start(script, [], 2, on_nonfinite="skip")
    running.until(running.ended)
    assert [worker.exit_code for worker in running.workers] == [0, 0], running.logs()
