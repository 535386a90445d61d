"""How long many agents need to agree on a world, against one real etcd.

    python benchmarks/rendezvous.py [--agents 10,100,1000] [--rounds 3] [--rest 15] [--record]

Real membership clients, many to a process (see rendezvous_crowd.py); workers are pretended. In each
round they register all at once and form generation 1, rest, and regroup after one in a hundred was
killed with its process while every other worker noticed. etcd is one member, without fsync, and its
own counters say what was asked of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rendezvous_crowd import CrowdOptions
from rendezvous_report import Phase, Report, Round, Size

from elasticzero.launcher.protocol.documents import World
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.watch_cache import WORLD

HERE = Path(__file__).resolve().parent
CROWD = HERE / "rendezvous_crowd.py"
TTL_S = 5
FEW = 10
"""Clients in the first process of several: the first ones lead, and must not wait for the many."""
LEAST_SHARE = 0.5
"""Share of the agents that stay with which the next world may begin. Whoever answers too slowly for
it comes into a later one, and the round of the benchmark lasts until all have a place."""
SETTLE_S = 2.0
"""Between generation 1 and the measured rest."""
RECEIVED = "grpc_server_msg_received_total"
SENT_BYTES = "etcd_network_client_grpc_sent_bytes_total"


class Crowd:
    """One process of clients, and what it said."""

    def __init__(self, options: CrowdOptions, ask: Callable[[int], None]) -> None:
        """ask: called when its leader asks all workers of a generation for a boundary."""
        self.clients = options.clients
        self._ask = ask
        self._sending = threading.Lock()
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(CROWD), json.dumps(asdict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard = json.loads(line)
            if heard["event"] == "boundary":
                self._ask(heard["generation"])
            else:
                self._heard.put(heard)
        self._heard.put({"event": "ended"})

    def order(self, word: str) -> None:
        assert self._process.stdin is not None
        with self._sending:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def wait(self, event: str, patience_s: float, **fields: Any) -> dict[str, Any]:
        """The event of that name with these fields; each is given once."""
        deadline_s = time.monotonic() + patience_s
        while True:
            for heard in self._events:
                if heard["event"] == event and fields.items() <= heard.items():
                    self._events.remove(heard)
                    return heard
            try:
                heard = self._heard.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                seen = [e["event"] for e in self._events]
                raise SystemExit(
                    f"error: {self.clients} clients: no {event!r} {fields} in {patience_s:g} s, "
                    f"only {seen}; give them more by --patience"
                ) from None
            if heard["event"] == "ended":
                raise SystemExit(f"error: a process of clients ended before {event!r}; see above")
            if heard["event"] == "trouble":
                print(f"  trouble: {heard['client']}: {heard['error']}", file=sys.stderr)
            self._events.append(heard)

    def kill(self) -> float:
        """End it as a power cut would; when (monotonic)."""
        self._process.kill()
        at_s = time.monotonic()
        self._process.wait()
        return at_s


class Measured:
    """What etcd and the clients' processes have used so far."""

    def __init__(self, etcd: EtcdServer, crowds: list[Crowd]) -> None:
        for crowd in crowds:
            crowd.order("mark")
        marks = [crowd.wait("cpu", 60.0) for crowd in crowds]
        self.agents_cpu_s = sum(mark["cpu_s"] for mark in marks)
        self.rss_bytes = sum(mark["rss_bytes"] for mark in marks)
        self.etcd_cpu_s = _cpu_of(etcd.pid)
        self.at_s = time.monotonic()
        self.requests, self.watch_messages, self.sent_bytes = _counters(etcd.endpoint)

    def since(self, before: Measured, agents: int) -> Phase:
        requests = self.requests - before.requests
        return Phase(
            agents=agents,
            seconds=self.at_s - before.at_s,
            requests=dict(sorted(requests.items())),
            watch_messages=self.watch_messages - before.watch_messages,
            sent_bytes=self.sent_bytes - before.sent_bytes,
            agents_cpu_s=self.agents_cpu_s - before.agents_cpu_s,
            etcd_cpu_s=self.etcd_cpu_s - before.etcd_cpu_s,
        )


def _cpu_of(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _counters(endpoint: str) -> tuple[Counter[str], int, int]:
    """Requests by kind, messages told to watches, and bytes sent, since etcd began."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{endpoint}/metrics", timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    requests: Counter[str] = Counter()
    watch_messages = sent_bytes = 0
    for line in lines:
        name, _, value = line.rpartition(" ")
        kind = name.partition('grpc_method="')[2].partition('"')[0]
        if name.startswith(RECEIVED) and float(value):
            requests[kind] += int(float(value))
        elif name.startswith("grpc_server_msg_sent_total") and kind == "Watch":
            watch_messages += int(float(value))
        elif name == SENT_BYTES:
            sent_bytes += int(float(value))
    return requests, watch_messages, sent_bytes


@contextmanager
def crowds_of(
    endpoint: str, job: str, agents: int, victims: int, options: argparse.Namespace
) -> Iterator[tuple[list[Crowd], Crowd]]:
    """The processes of those that stay, and the one of those that will vanish."""
    stay = agents - victims
    processes = max(1, min(options.processes, stay // 25))
    few = FEW if processes > 1 else 0
    cuts = [few + (stay - few) * n // processes for n in range(processes + 1)] + [agents]
    cuts = [0, *cuts] if few else cuts
    crowds: list[Crowd] = []

    def ask_for_boundary(generation: int) -> None:
        for crowd in crowds:
            with suppress(OSError):  # the process of those that vanish is gone
                crowd.order(f"boundary {generation}")

    for first, end in itertools.pairwise(cuts):
        one = CrowdOptions(
            endpoint=endpoint,
            job=job,
            first=first,
            clients=end - first,
            nodes=agents,
            least=max(1, int(LEAST_SHARE * stay)),
            ttl_s=TTL_S,
            share=options.connections == "shared",
        )
        crowds.append(Crowd(one, ask_for_boundary))
    try:
        yield crowds[:-1], crowds[-1]
    finally:
        for crowd in crowds:
            crowd.kill()


def play(agents: int, number: int, options: argparse.Namespace) -> Round:
    """One round: form, rest, regroup."""
    job, patience_s = f"rendezvous-{number}", options.patience
    victims = max(1, agents // 100)
    with (
        EtcdServer() as etcd,
        crowds_of(etcd.endpoint, job, agents, victims, options) as (stay, vanish),
    ):
        everyone = [*stay, vanish]

        def last(crowds: list[Crowd], event: str, generation: int) -> float:
            events = [crowd.wait(event, patience_s, generation=generation) for crowd in crowds]
            return max(float(event["at_s"]) for event in events)

        for crowd in everyone:
            crowd.wait("ready", patience_s)
        before = Measured(etcd, everyone)
        stay[0].order("go")
        began_s = stay[0].wait("first", patience_s)["at_s"]
        stay[0].wait("joined", patience_s)  # the oldest registration, which leads, will not vanish
        for crowd in everyone[1:]:
            crowd.order("go")
        registered_s = last(everyone, "registered", 0) - began_s
        formed_s = last(everyone, "knows", 1) - began_s
        last(everyone, "reported", 1)
        print(f"{agents} agents: formed {formed_s:.2f} s", flush=True)
        formed = Measured(etcd, everyone)
        time.sleep(SETTLE_S)
        rest_began = Measured(etcd, everyone)
        time.sleep(options.rest)
        rested = Measured(etcd, everyone)
        world_bytes, _ = _world(etcd.endpoint, job)
        calm = Measured(etcd, stay)
        killed_s = vanish.kill()
        for crowd in stay:
            crowd.order("fail")
        regrouped_s = last(stay, "knows", 2) - killed_s
        last(stay, "reported", 2)
        regrouped = Measured(etcd, stay)
        next_world_bytes, generation = _world(etcd.endpoint, job)
        return Round(
            registered_s=registered_s,
            formed_s=formed_s,
            regrouped_s=regrouped_s,
            world_bytes=world_bytes,
            next_world_bytes=next_world_bytes,
            worlds=generation - 1,
            rss_bytes=rested.rss_bytes,
            forming=formed.since(before, agents),
            resting=rested.since(rest_began, agents),
            regrouping=regrouped.since(calm, agents - victims),
        )


def _world(endpoint: str, job: str) -> tuple[int, int]:
    """The size of the present world's document, and its generation."""
    with EtcdStore([endpoint], job_prefix(job)) as store:
        value = store.read(WORLD).entries[WORLD].value
    return len(value), document(World, value).generation


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", default="10,100,1000", help="how many, for each row")
    parser.add_argument("--rounds", type=int, default=3, help="how often each figure is taken")
    parser.add_argument("--rest", type=float, default=15.0, help="seconds at rest")
    parser.add_argument("--processes", type=int, default=4, help="that share the clients, at most")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for any")
    parser.add_argument(
        "--connections",
        choices=("own", "shared"),
        default="own",
        help="to etcd: one for each agent, or for each process",
    )
    parser.add_argument(
        "--record", action="store_true", help="write a result and its page in benchmarks/results"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    sizes = []
    for agents in map(int, options.agents.split(",")):
        rounds = []
        for number in range(options.rounds):
            rounds.append(play(agents, number, options))
            one = rounds[-1]
            print(
                f"{agents} agents: registered {one.registered_s:.2f} s, "
                f"formed {one.formed_s:.2f} s, regrouped {one.regrouped_s:.2f} s",
                flush=True,
            )
        sizes.append(Size(agents=agents, rounds=tuple(rounds)))
    command = ["python", "benchmarks/rendezvous.py", *sys.argv[1:]]
    report = Report(command=" ".join(command), sizes=sizes)
    print(f"\n{report}")
    if options.record:
        report.record()


if __name__ == "__main__":
    main()
