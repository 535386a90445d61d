"""Faults drawn at random, one upon the other, on real processes; the result is the undisturbed one.

make chaos                               # many seeds, and 60 faults in ten minutes
CHAOS_SEED=7 python -m pytest -m chaos tests/chaos -k one_seed

The agents use TLS between each other. Each node has a network of its own, where the machine allows
namespaces. Where it does not, all share loopback and no cable is cut: the tests say so by skipping
when all else has passed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import on_loopback
from elasticzero.launcher.secrets import TOKEN
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.chaos.networks import Networks, NoNetworks
from tests.chaos.strikes import Strikes
from tests.integration.clusters import REGRESSION, Story, story
from tests.integration.reference import steps_in, undisturbed
from tests.integration.test_elastic_training import check_samples, check_weights

NODES = 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MIRROR = ("--redundancy", "mirror")
NODE = ("--shard", "node", "--nproc-per-node", "2")
LONG = [(strategy,) for strategy in STRATEGIES] + [(name, *MIRROR) for name in STRATEGIES[1:]]
STEP_S = 0.2
WITH_TLS = {TOKEN: "a-token-from-which-certificates-are-made"}


@pytest.fixture
def networks() -> Iterator[Networks | None]:
    try:
        made = Networks()
    except NoNetworks as error:
        yield None
        pytest.skip(f"passed, but no network was cut: {error}")
    yield made
    made.close()


def undisturbed_step_s(told: Story, until_s: float) -> float:
    """The median time of a step after one of the same generation, up to a time: later steps make
    no pause."""
    times: dict[tuple[int, int], float]
    times = {(e["generation"], e["step"]): e["time"] for e in told.of("step")}
    return statistics.median(
        at_s - times[generation, step - 1]
        for (generation, step), at_s in times.items()
        if (generation, step - 1) in times and at_s <= until_s
    )


def seconds_lost(told: Story, struck: Sequence[tuple[float, str]]) -> list[tuple[str, float]]:
    """The time from each fault to the next that went into no step that counts, at the speed of an
    undisturbed one; the faults have their times, and the last one only ends the last but one."""
    normal_s = undisturbed_step_s(told, struck[-1][0])
    counted: dict[int, float] = {}
    for event in told.of("step"):  # of a step done twice, the time that counts is the last
        counted[event["step"]] = max(counted.get(event["step"], 0.0), event["time"])
    return [
        (what, end_s - began_s - normal_s * sum(began_s <= t < end_s for t in counted.values()))
        for (began_s, what), (end_s, _) in pairwise(struck)
    ]


def goodput(told: Story, struck: Sequence[tuple[float, str]]) -> str:
    """The share of the time from the first step to the end of the last fault that went into steps
    that count, and what a fault of each kind has cost on average."""
    began_s = min(event["time"] for event in told.of("step"))
    lost = seconds_lost(told, [(began_s, "the start"), *struck])
    share = 1 - sum(seconds for _, seconds in lost) / (struck[-1][0] - began_s)
    kinds = sorted({what for what, _ in lost})
    mean_s = {kind: statistics.mean(s for what, s in lost if what == kind) for kind in kinds}
    return f"{share:.1%}; lost by a fault: " + ", ".join(
        f"{k} {s:.1f} s" for k, s in mean_s.items()
    )


def play(
    seed: int,
    tmp_path: Path,
    job: str,
    networks: Networks | None,
    *,
    faults: int,
    mean_gap_s: float,
    options: Sequence[str] = (),
    begin_s: float = 0.0,
) -> None:
    """Train for longer than the faults last, through all of them, and compare."""
    dice = random.Random(seed)
    options = options or (dice.choice(STRATEGIES),)
    epochs = round(1.15 * faults * mean_gap_s / STEP_S / steps_in(10, 1)) + 1
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", f"1:{NODES}", "--lease-ttl", "2", "--strategy", *options]
    arguments += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "10"]
    arguments += ["--max-restarts", "20", str(REGRESSION), "--epochs", str(epochs)]
    arguments += ["--pause", str(STEP_S), "--slow-start", str(begin_s)]
    place = networks.place if networks is not None else on_loopback
    address = networks.address if networks is not None else "127.0.0.1"
    with (
        EtcdServer(address=address) as etcd,
        story(
            tmp_path,
            etcd.endpoint,
            job,
            arguments,
            nodes=NODES,
            environments=[WITH_TLS] * NODES,
            place=place,
        ) as told,
    ):
        told.wait("training", lambda: told.step >= 2)
        strikes = Strikes(told, etcd, networks, dice, NODES)
        strikes.play(faults, mean_gap_s)
        strikes.finish()
        struck_s = time.time()  # what is left is trained without pauses
        codes = told.wait_for_end(240.0 + 2 * steps_in(10, epochs) * STEP_S)
        told.look()
        tale = f"seed {seed}, {' '.join(options)}, {strikes.done}, codes {codes}"
        assert 0 in codes.values(), f"{tale}\n{told.logs()}"
        assert set(codes.values()) <= {0, -9, 75}, f"{tale}\n{told.logs()}"
        assert {event["scheme"] for event in told.of("serving")} == {"https"}
    check_samples(told.lineage, told.directory(), epochs=epochs)
    check_weights(checkpoints, undisturbed(global_batch=10, epochs=epochs))
    kinds = Counter(what for _, what in strikes.done)
    counts = ", ".join(f"{count} {what}" for what, count in kinds.most_common())
    print(
        f"\nseed {seed}, {' '.join(options)}: {len(strikes.done)} faults ({counts}); "
        f"{told.generation} generations, {told.step} steps, {told.lineage.recomputed} recomputed, "
        f"goodput {goodput(told, [*strikes.done, (struck_s, 'the end')])}"
    )


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(20))
def test_many_seeds(seed: int, tmp_path: Path, job: str, networks: Networks | None) -> None:
    play(seed, tmp_path, job, networks, faults=8, mean_gap_s=2.5)


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("seed", range(20, 23))
def test_seeds_with_state_within_nodes(
    seed: int, strategy: str, tmp_path: Path, job: str, networks: Networks | None
) -> None:
    options = (strategy, *NODE)
    play(seed, tmp_path, job, networks, faults=8, mean_gap_s=2.5, options=options)


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(23, 29))
def test_seeds_of_a_script_for_which_processes_stand_by(
    seed: int, tmp_path: Path, job: str, networks: Networks | None
) -> None:
    play(seed, tmp_path, job, networks, faults=8, mean_gap_s=4.0, begin_s=0.8)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_one_seed(tmp_path: Path, job: str, networks: Networks | None) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0"))
    play(seed, tmp_path, job, networks, faults=8, mean_gap_s=2.5)


@pytest.mark.chaos
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("options", LONG, ids=" ".join)
def test_60_faults_in_10_minutes(
    options: tuple[str, ...], tmp_path: Path, job: str, networks: Networks | None
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    play(seed, tmp_path, job, networks, faults=60, mean_gap_s=10.0, options=options)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_faults(tmp_path: Path, job: str, networks: Networks | None) -> None:
    play(3942, tmp_path, job, networks, faults=7, mean_gap_s=4.0)
