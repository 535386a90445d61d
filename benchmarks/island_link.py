"""Measures how fast two islands train over a slow network, beside ddp.

    python benchmarks/island_link.py [--link 100mbit] [--width 800] [--every 50] [--steps 200]
        [--cases "ddp;diloco;diloco:fragments=4,overlap=5;torchft"] [--record]

Two nodes of one worker have network namespaces of their own, whose cable takes so much (`tc`): that
needs root. The time from step to step says how fast both train together; what is beyond that of a
step without a wait went into waits, for the wire or for anything else. Cases of `torchft` are
torchft's DiLoCo with the same settings, where `pip install torchft` was done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from performance_page import publish_table
from recovery_trial import HERE, wait_for
from slow_network import SlowNetworks

from elasticzero.launcher.local.cluster import Cluster, cluster_environment
from elasticzero.launcher.store.etcd.server import EtcdServer, free_ports
from elasticzero.text import table_text
from tests.chaos.networks import NoNetworks

LIMIT_S = 600.0
HEAD = ["case", "samples a second", "median step", "waits", "times as fast as ddp"]
SHORT = 10
"""Steps of a case that waits for the wire in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Holds how fast two nodes have trained together."""

    case: str
    samples_s: float
    step_s: float
    """Median time from step to step."""
    waits: float
    """Share of the time that is beyond the median step."""


def measure(case: str, options: argparse.Namespace) -> Speed:
    """Returns how fast a case trains.

    Args:
        case: `ddp`, or `diloco` or `torchft`, with settings after a colon.
        options: The options of this command.

    Raises:
        NoNetworks: This machine makes no slow network.
        SystemExit: The job failed; its logs are left, and the message has their place.
    """
    strategy, _, settings = case.partition(":")
    runs = Path(tempfile.mkdtemp(prefix="elasticzero-link-"))
    steps = SHORT if strategy == "ddp" else options.steps
    networks = SlowNetworks(options.link)
    try:
        if strategy == "torchft":
            _train_with_torchft(networks, runs, settings, options)
            return speed_of(case, _times(case, runs))
        with EtcdServer(address=networks.address) as etcd:
            command = ["--etcd", etcd.endpoint, "--nnodes", "2", "--http-port", "0"]
            command += ["--strategy", strategy, "--snapshot-every", "0"]
            if strategy == "diloco":
                text = ",".join(filter(None, [f"every={options.every}", settings]))
                command += ["--diloco", text]
            command += [str(HERE / "island_steps.py"), str(runs / "times")]
            command += ["--width", str(options.width), "--steps", str(steps)]
            command += ["--pause", str(options.pause)]
            cluster = Cluster(command, "link", runs, cluster_environment(2), place=networks.place)
            try:
                for _ in range(2):
                    cluster.start_node()
                wait_for("the end", lambda: not cluster.running() or None, LIMIT_S)
            finally:
                cluster.stop()
    finally:
        networks.close()
    return speed_of(case, _times(case, runs))


def _times(case: str, runs: Path) -> list[list[tuple[float, int]]]:
    """Returns what the nodes have written of their steps; raises `SystemExit` where one has not."""
    times = [json.loads(path.read_text()) for path in runs.glob("times-*")]
    if len(times) < 2:
        raise SystemExit(f"error: {runs} says why {case} failed")
    shutil.rmtree(runs)
    return times


def _train_with_torchft(
    networks: SlowNetworks, runs: Path, settings: str, options: argparse.Namespace
) -> None:
    """Trains on two nodes with torchft.

    Args:
        networks: The nodes' network.
        runs: Where logs and times go.
        settings: `fragments` and `overlap`, as of diloco.
        options: The options of this command.
    """
    server = shutil.which("torchft_lighthouse")
    if server is None:
        raise SystemExit("error: there is no torchft here: pip install torchft")
    (port,) = free_ports(1)
    url = f"http://{networks.address}:{port}"
    pairs = [f"--{part.replace('=', ' ')}".split() for part in filter(None, settings.split(","))]
    with ExitStack() as stack:
        log = stack.enter_context(open(runs / "torchft.log", "w"))
        lighthouse = [server, "--min_replicas", "2", "--bind", f"[::]:{port}"]
        stack.callback(subprocess.Popen(lighthouse, stdout=log, stderr=log).kill)
        nodes = []
        for node in range(2):
            place = networks.place(f"node-{node}")
            command = [*place.command_prefix, sys.executable, str(HERE / "island_torchft.py")]
            command += [str(runs / f"times-{node}"), "--node", str(node), "--lighthouse", url]
            command += ["--address", str(place.address), "--width", str(options.width)]
            command += ["--steps", str(options.steps), "--pause", str(options.pause)]
            command += ["--every", str(options.every), *(word for pair in pairs for word in pair)]
            environment = {**os.environ, **cluster_environment(2), "GLOO_SOCKET_IFNAME": "eth0"}
            nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            stack.callback(nodes[-1].kill)
        for process in nodes:
            with suppress(subprocess.TimeoutExpired):  # which leaves no times
                process.wait(LIMIT_S)


def speed_of(case: str, nodes: Sequence[Sequence[tuple[float, int]]]) -> Speed:
    """Returns how fast nodes have trained that have written the end and the samples of each step.

    Args:
        case: The case.
        nodes: Steps of each node, in seconds of one clock.
    """
    began_s = max(steps[0][0] for steps in nodes)
    ended_s = min(steps[-1][0] for steps in nodes)
    samples = sum(n for steps in nodes for at_s, n in steps if began_s < at_s <= ended_s)
    gaps = [after[0] - before[0] for steps in nodes for before, after in pairwise(steps)]
    median_s = statistics.median(gaps)
    beyond_s = sum(gap - median_s for gap in gaps if gap > 1.1 * median_s)
    return Speed(
        case=case,
        samples_s=samples / (ended_s - began_s),
        step_s=median_s,
        waits=beyond_s / sum(gaps),
    )


def rows(speeds: Sequence[Speed]) -> list[list[str]]:
    """Returns a row for each case; the first one is what others are compared with."""
    return [
        [
            speed.case,
            f"{speed.samples_s:.1f}",
            f"{speed.step_s:.3f} s",
            f"{speed.waits:.1%}",
            f"{speed.samples_s / speeds[0].samples_s:.1f}",
        ]
        for speed in speeds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--link", default="100mbit", help="what a node can send in a second")
    parser.add_argument("--width", type=int, default=800, help="16 width² parameters")
    parser.add_argument("--every", type=int, default=50, help="inner steps of a round")
    parser.add_argument("--steps", type=int, default=250, help="of islands")
    parser.add_argument("--pause", type=float, default=0.12, help="seconds of rest in a step")
    parser.add_argument("--cases", default="ddp;diloco;diloco:fragments=4,overlap=5")
    parser.add_argument("--record", action="store_true", help="write the table and the figures")
    options = parser.parse_args()
    speeds = []
    for case in options.cases.split(";"):
        try:
            speeds.append(measure(case, options))
        except NoNetworks as error:
            raise SystemExit(f"error: no slow network can be made here: {error}") from None
        print(*rows(speeds)[-1], sep="  ", flush=True)
    print(f"two nodes, {options.link}, {16 * options.width**2 / 1e6:.1f} million parameters")
    print(table_text(HEAD, rows(speeds)), end="")
    if options.record:
        publish_table("island-link", "islands link", HEAD, rows(speeds), speeds)


if __name__ == "__main__":
    main()
