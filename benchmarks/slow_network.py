"""Measures a step over a slow network with each `--wire`, beside torch's own compression of DDP.

    python benchmarks/slow_network.py [--link 100mbit] [--width 800] [--steps 3] [--pairs 3]
        [--strategies ddp,zero1] [--wires fp32,int8] [--snapshot-every 0]

Two nodes of one worker have network namespaces of their own, whose cable takes so much (`tc`): that
needs root. Each job takes steps by turns with torch's DDP in the same processes; beside a wire of
16 bits or fewer that has torch's `fp16_compress_hook`, since its bf16 one needs a GPU, and it has
none of fewer. Medians, and their ratios to a job with `--wire fp32`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from recovery_trial import HERE, wait_for

from elasticzero.launcher.local.cluster import Cluster, Placement, cluster_environment
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.options.wire import Wire, wire_of
from elasticzero.text import table_text

sys.path.insert(0, str(HERE.parent))
from tests.chaos.networks import Networks, NoNetworks

LIMIT_S = 900.0
STRATEGIES = ("ddp", "zero1", "zero2")
WIRES = "fp32,bf16,fp8,int8,int4,topk:0.01,powersgd:4"
BURST = "64kb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the medians of a step of one job, in seconds."""

    strategy: str
    wire: Wire
    session_s: float
    torch_s: float


class SlowNetworks(Networks):
    """Limits what each node sends."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        super().__init__()

    def place(self, node: str) -> Placement:
        placement = super().place(node)
        limit = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self._rate]
        limit += ["burst", BURST, "latency", "400ms"]
        done = subprocess.run([*placement.command_prefix, *limit], capture_output=True, text=True)
        if done.returncode:
            raise NoNetworks(f"{' '.join(limit)}: {done.stderr.strip()}")
        return placement


def measure(strategy: str, wire: Wire, order: argparse.Namespace) -> Measured:
    """Returns the time of a step in a job of two nodes.

    Args:
        strategy: Its name.
        wire: The format of gradients between ranks.
        order: The options of this command.

    Raises:
        NoNetworks: This machine makes no slow network.
        SystemExit: The job failed; its logs are left, and the message has their place.
    """
    runs = Path(tempfile.mkdtemp(prefix="elasticzero-slow-"))
    out, reference = runs / "seconds.json", "DDP in fp16" if wire.is_lossy else "DDP"
    job, networks = f"slow-{strategy}-{wire.format}", SlowNetworks(order.link)
    try:
        with EtcdServer(address=networks.address) as etcd:
            command = ["--etcd", etcd.endpoint, "--nnodes", "2", "--http-port", "0"]
            command += ["--strategy", strategy, "--wire", str(wire)]
            command += ["--snapshot-every", order.snapshot_every]
            command += [str(HERE / "training_session.py"), str(out)]
            command += ["--width", str(order.width), "--reference", reference]
            command += ["--pairs", str(order.pairs), "--steps", str(order.steps)]
            cluster = Cluster(command, job, runs, cluster_environment(2), place=networks.place)
            try:
                for _ in range(2):
                    cluster.start_node()
                wait_for("the end", lambda: not cluster.running() or None, LIMIT_S)
            finally:
                cluster.stop()
    finally:
        networks.close()
    if not out.exists():
        raise SystemExit(f"error: {runs / job} says why {strategy} with {wire} failed")
    turns = json.loads(out.read_text())
    shutil.rmtree(runs)
    return Measured(
        strategy=strategy,
        wire=wire,
        session_s=statistics.median(turns["session"]),
        torch_s=statistics.median(turns["reference"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", default="100mbit", help="what a node can send in a second")
    parser.add_argument(
        "--width", type=int, default=800, help="of the blocks: 16 width² parameters"
    )
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--pairs", type=int, default=3, help="turns of each")
    parser.add_argument("--snapshot-every", default="auto", help="steps; 0: none is replicated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="by commas")
    parser.add_argument("--wires", default=WIRES, help="by commas, fp32 first")
    order = parser.parse_args()
    wires = [wire_of("--wires", text) for text in order.wires.split(",")]
    rows: list[tuple[str, ...]] = []
    plain_s: dict[str, float] = {}
    for strategy in order.strategies.split(","):
        for wire in wires:
            if wire.refusal(strategy):
                continue
            try:
                steps = measure(strategy, wire, order)
            except NoNetworks as error:
                raise SystemExit(f"error: no slow network can be made here: {error}") from None
            plain_s.setdefault(strategy, steps.session_s)
            rows.append(
                (
                    *(strategy, str(wire), f"{steps.session_s:.2f} s", f"{steps.torch_s:.2f} s"),
                    f"{steps.session_s / steps.torch_s:.2f}",
                    f"{plain_s[strategy] / steps.session_s:.2f}",
                )
            )
    head = ("strategy", "wire", "a step", "torch's DDP", "ratio", "times as fast as fp32")
    print(f"two nodes, {order.link}, {16 * order.width**2 / 1e6:.1f} million parameters")
    print(table_text(head, rows), end="")


if __name__ == "__main__":
    main()
