"""Faults drawn at random, one upon the other, on real processes; the result is the undisturbed one.

make chaos                               # many seeds, and 60 faults in ten minutes
CHAOS_SEED=7 python -m pytest -m chaos tests/chaos -k one_seed

Each node has a network of its own, where the machine allows namespaces. Where it does not, all
share loopback and no cable is cut: the tests say so by skipping when all else has passed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import on_loopback
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.chaos.networks import Networks, NoNetworks
from tests.chaos.strikes import Strikes
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.reference import steps_in, undisturbed
from tests.integration.test_elastic_training import check_samples, check_weights

NODES = 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEP_S = 0.2


@pytest.fixture
def networks() -> Iterator[Networks | None]:
    try:
        made = Networks()
    except NoNetworks as error:
        yield None
        pytest.skip(f"passed, but no network was cut: {error}")
    yield made
    made.close()


def goodput(told: Story, until_s: float) -> float:
    """The share of the time until then that went into steps that count, at the speed of an
    undisturbed one."""
    events = [e for e in told.of("step") if e["time"] <= until_s]
    steps = sorted({(e["generation"], e["step"]): e["time"] for e in events}.items())
    gaps = [
        at_s - before_s
        for ((g, s), before_s), ((h, t), at_s) in pairwise(steps)
        if (h, t) == (g, s + 1)
    ]
    times = [at_s for _, at_s in steps]
    count = max(step for (_, step), _ in steps)
    share: float = count * statistics.median(gaps) / (max(times) - min(times))
    return share


def play(
    seed: int,
    tmp_path: Path,
    job: str,
    networks: Networks | None,
    *,
    faults: int,
    mean_gap_s: float,
    strategy: str | None = None,
) -> None:
    """Train for longer than the faults last, through all of them, and compare."""
    dice = random.Random(seed)
    strategy = strategy or dice.choice(STRATEGIES)
    epochs = round(1.15 * faults * mean_gap_s / STEP_S / steps_in(10, 1)) + 1
    checkpoints = tmp_path / "checkpoints"
    words = ["--nnodes", f"1:{NODES}", "--lease-ttl", "2", "--strategy", strategy]
    words += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "10"]
    words += [
        "--hang-timeout",
        "5",
        "--max-restarts",
        "20",
        str(REGRESSION),
        "--epochs",
        str(epochs),
    ]
    words += ["--pause", str(STEP_S)]
    place = networks.place if networks is not None else on_loopback
    address = networks.address if networks is not None else "127.0.0.1"
    with (
        EtcdServer(address=address) as etcd,
        story(tmp_path, etcd.endpoint, job, words, nodes=NODES, place=place) as told,
    ):
        told.wait("training", lambda: told.step >= 2)
        strikes = Strikes(told, etcd, networks, dice, NODES)
        strikes.play(faults, mean_gap_s)
        strikes.finish()
        struck_s = time.time()  # what is left is trained without pauses
        codes = told.wait_for_end(240.0 + 2 * steps_in(10, epochs) * STEP_S)
        told.look()
        tale = f"seed {seed}, {strategy}, {strikes.done}, codes {codes}"
        assert 0 in codes.values(), f"{tale}\n{told.logs()}"
        assert set(codes.values()) <= {0, -9, 75}, f"{tale}\n{told.logs()}"
    check_samples(told.lineage, told.directory(), epochs=epochs)
    check_weights(checkpoints, undisturbed(global_batch=10, epochs=epochs))
    counts = ", ".join(f"{count} {what}" for what, count in Counter(strikes.done).most_common())
    print(
        f"\nseed {seed}, {strategy}: {len(strikes.done)} faults ({counts}); {told.generation} "
        f"generations, {told.step} steps, {told.lineage.recomputed} recomputed, "
        f"goodput {goodput(told, struck_s):.1%}"
    )


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(20))
def test_many_seeds(seed: int, tmp_path: Path, job: str, networks: Networks | None) -> None:
    play(seed, tmp_path, job, networks, faults=8, mean_gap_s=2.5)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_one_seed(tmp_path: Path, job: str, networks: Networks | None) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0"))
    play(seed, tmp_path, job, networks, faults=8, mean_gap_s=2.5)


@pytest.mark.chaos
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_60_faults_in_10_minutes(
    strategy: str, tmp_path: Path, job: str, networks: Networks | None
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    play(seed, tmp_path, job, networks, faults=60, mean_gap_s=10.0, strategy=strategy)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_faults(tmp_path: Path, job: str, networks: Networks | None) -> None:
    play(3942, tmp_path, job, networks, faults=7, mean_gap_s=4.0)
