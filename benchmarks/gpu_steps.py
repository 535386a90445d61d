"""Steps of training by turns: each contender is a process, and one of them trains at a time."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu_report import CAPTURE_EVERY, TURN_STEPS, turn

from elasticzero.launcher.local.cluster import Cluster
from elasticzero.spans import STRATEGIES

SCRIPT = Path(__file__).with_name("gpu_contender.py")
WARM_UP_STEPS = 4
TURN_S = 60.0
"""Maximum seconds of one contender's turn; beyond them it takes no further part."""
END_S = 4.0
"""Seconds that contenders get to end by themselves."""


@dataclass(slots=True)
class Contender:
    """A contender's processes: its own alone, or a cluster of one agent."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    cluster: Cluster | None = None
    stream: IO[str] | None = None
    """Where turns go out and seconds come in, once it is connected."""

    @property
    def runs(self) -> bool:
        if self.cluster:
            return bool(self.cluster.running())
        return self.process is not None and self.process.poll() is None

    def send(self, steps: int) -> None:
        """Gives it a turn of so many steps; 0 ends it."""
        assert self.stream
        self.stream.write(f"{steps}\n")
        self.stream.flush()

    def receive(self) -> dict[str, Any]:
        """Returns what it says of its turn; raises OSError where it is gone or takes too long."""
        assert self.stream
        line = self.stream.readline()
        if not line:
            raise ConnectionError(f"it ended; {self.log} says why")
        document: dict[str, Any] = json.loads(line)
        return document

    def stop(self) -> None:
        if self.stream:
            self.stream.close()
        if self.cluster:
            self.cluster.stop()
        if self.process:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class Field:
    """All contenders, and what their turns gave."""

    device: str
    endpoint: str
    runs: Path
    environment: Mapping[str, str]
    contenders: dict[str, Contender] = field(default_factory=dict)
    turns: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """It says by name why a contender took no part, or no further part."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Versions, and the GPU's name, as a contender has them."""

    def start(self, name: str, path: str) -> None:
        """Starts a contender, which connects to the socket at `path` when its model is built."""
        strategy, _, addition = name.partition("+")
        arguments = [str(SCRIPT), name, self.device, path]
        log = self.runs / f"{name}.log"
        if strategy not in STRATEGIES:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, *arguments], env=self.environment, stdout=file, stderr=file
                )
            self.contenders[name] = Contender(name, log, process=process)
            return
        options = ["--etcd", self.endpoint, "--nnodes", "1", "--nproc-per-node", "1"]
        options += ["--http-port", "0", "--strategy", strategy, "--hang-timeout", "600"]
        options += ["--snapshot-every", str(CAPTURE_EVERY)] if addition == "capture" else []
        job = f"gpu-{name.replace('+', '-')}-{time.time_ns()}"
        cluster = Cluster([*options, *arguments], job, self.runs, self.environment)
        self.contenders[name] = Contender(name, cluster.start_node().log, cluster=cluster)

    def drop(self, name: str, error: object) -> None:
        """Ends a contender's part, and keeps the reason."""
        self.missing[name] = str(error) or type(error).__name__
        self.contenders.pop(name).stop()

    def connect(self, listener: socket.socket, deadline_s: float) -> None:
        """Waits until all contenders are connected, have ended, or are too late."""
        while waiting := [one for one in self.contenders.values() if not one.stream]:
            for one in waiting:
                if not one.runs:
                    self.drop(one.name, f"it ended; {one.log} says why")
                elif time.monotonic() > deadline_s:
                    self.drop(one.name, "it did not start in time")
            if not select.select([listener], [], [], 0.2)[0]:
                continue
            connection, _ = listener.accept()
            connection.settimeout(TURN_S)
            stream: Any = connection.makefile("rw")
            connection.close()  # the stream keeps it open
            try:
                about = json.loads(stream.readline())
            except (OSError, ValueError):  # it ended as it connected, which the next turn shows
                stream.close()
                continue
            name = about.pop("name")
            self.facts |= about
            if name in self.contenders:
                self.contenders[name].stream = stream
            else:
                stream.close()

    def warm_up(self) -> None:
        """Has each take its first steps. Those that compile do so beside the others."""
        compiling = [name for name in self.contenders if name.endswith("+compile")]
        for name in compiling:
            self.contenders[name].send(WARM_UP_STEPS)
        for name in [name for name in self.contenders if name not in compiling]:
            self.ask(name, WARM_UP_STEPS)
        for name in compiling:
            self.ask(name, None)

    def ask(self, name: str, steps: int | None) -> list[float]:
        """Returns the seconds of a turn's steps, or nothing where the contender fails.

        Args:
            name: the contender's.
            steps: of the turn; None: it was given before.
        """
        contender = self.contenders[name]
        try:
            if steps is not None:
                contender.send(steps)
            answer = contender.receive()
        except OSError as error:
            self.drop(name, error)
            return []
        self.peak_bytes[name] = answer["peak_bytes"]
        seconds: list[float] = answer["seconds"]
        return seconds

    def rounds(self, deadline_s: float, most: int) -> None:
        """Gives every contender a turn in each round, forwards and backwards, while there is
        time for a round; there is one in any case."""
        longest_s = 0.0
        for number in range(most):
            began_s = time.monotonic()
            if number and began_s + longest_s > deadline_s:
                return
            names = list(self.contenders)
            for name in names if number % 2 == 0 else reversed(names):
                if name in self.contenders and (seconds := self.ask(name, TURN_STEPS)):
                    self.turns.setdefault(name, []).append(turn(seconds))
            longest_s = max(longest_s, time.monotonic() - began_s)

    def stop(self) -> None:
        """Ends all contenders; those that do not end by themselves are killed."""
        for name, contender in list(self.contenders.items()):
            try:
                if contender.stream:
                    contender.send(0)
            except OSError as error:
                self.drop(name, error)
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s and any(c.runs for c in self.contenders.values()):
            time.sleep(0.1)
        for contender in self.contenders.values():
            contender.stop()


@contextmanager
def listening(runs: Path) -> Iterator[tuple[socket.socket, str]]:
    """Listens on a socket in the directory of the run; gives it and its path."""
    path = str(runs / "turns")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        yield listener, path


def measure(the_field: Field, names: Sequence[str], deadline_s: float, rounds: int) -> None:
    """Has all contenders train by turns.

    Args:
        the_field: which gets the figures.
        names: of the contenders.
        deadline_s: by `time.monotonic`; the last turn is over about then.
        rounds: turns of each, at most.
    """
    with listening(the_field.runs) as (listener, path):
        try:
            for name in names:
                the_field.start(name, path)
            the_field.connect(listener, deadline_s)
            the_field.warm_up()
            the_field.rounds(deadline_s, rounds)
        finally:
            the_field.stop()
    order = {name: the_field.turns[name] for name in names if name in the_field.turns}
    the_field.turns = order
