"""One cluster that suffers cells of the matrix, one after another, and is whole again in between.

Ranks stay where a strike shall meet them, because the script waits while a file tells it to
(`Holds` in `scripts/regression.py`). A node joins at the very moment that is wanted, because its
agent registers once it is told to, like those of `elasticzero local`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.protocol.documents import world_from_bytes
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.watch_cache import WORLD
from elasticzero.processes import descendants
from tests.chaos.matrix import (
    COMES_BACK,
    COSTS_NOTHING,
    LEADS,
    LOSES_A_NODE,
    PROVOKED,
    SHAPES,
    STRIKES,
    Cell,
)
from tests.chaos.networks import Networks
from tests.chaos.seen import Seen
from tests.integration.clusters import Story
from tests.integration.reference import steps_in
from tests.integration.scripts.regression import OVER

LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0
CELL_S = 20.0
"""Training is slowed down so that it would last so long for each cell: the fewer steps are left,
the slower, for nodes may take long to start."""
HOLDS_POLL_S = 0.2
"""A rank that is no longer held has gone on by then."""
BEHIND_S = 12.0
"""Training that is done again because an agent was suspended alone lasts for less: two TTLs of 2 s,
and what a busy machine adds."""
NPROC = "ELASTICZERO_NPROC_PER_NODE"


class Stage:
    """Plays cells; `form` is the first call, `finish` the last."""

    def __init__(
        self,
        told: Story,
        etcd: EtcdServer,
        networks: Networks | None,
        *,
        strategy: str,
        shape: str,
        holds: Path,
        steps: int,
        cells: int,
        dice: random.Random,
    ) -> None:
        """told: runs all nodes of the shape but the last. holds: where the script looks. steps: of
        the whole training. cells: that will be played."""
        self.done: list[str] = []
        self._told, self._etcd, self._networks = told, etcd, networks
        self._seen = Seen(told, divided=strategy != "ddp")
        self._strategy, self._holds, self._steps, self._dice = strategy, holds, steps, dice
        self._nproc = {f"node-{i}": n for i, n in enumerate(SHAPES[shape])}
        self._shape = SHAPES[shape]
        self._environment = dict(told.cluster.environment)
        self._cell: Cell | None = None
        self._left = cells
        self._pause_s = 0.0
        self._struck: list[str] = []
        """Whose worker was killed or frozen, in order: a node whose workers fail in a row is set
        aside."""
        self._ready: set[str] = set()
        """Nodes that have said that they wait to be told to register."""
        self._codes: dict[str, int] = {}
        """Of nodes that do not stay to the end."""

    def form(self, cell: Cell | None) -> None:
        """Bring the job to its first world; cell: with its fault before that."""
        self._cell = cell
        free = self._told.cluster.running()
        if cell is None:
            self._start(self._shape[-1])
            self._whole(0)
            return
        further_sizes = self._shape[:1] if cell.fault in ("leader", "drain") else ()
        spares = self._spares(self._shape[-1], *further_sizes)
        self._wait("registrations", lambda: self._seen.all_reported("registered", free))
        leads = lambda: [node for node in free if self._seen.all_reported("leads", [node])]  # noqa: E731
        leader = self._wait("a leader", leads)[0]
        others = [node for node in free if node is not leader]
        choices = [leader] if cell.fault in LEADS else free if cell.fault == "drain" else others
        victim = self._dice.choice(choices)
        assert not self._seen.worlds, f"{cell}: the first world was written before the strike"
        began_s = time.monotonic()
        if cell.fault != "join":
            self._strike(cell, victim)
        if cell.fault == "drain":
            self._wait("the leaver's end", lambda: not victim.running)
        self._release(*spares)
        self._recover(cell, victim, 0, began_s)
        self._check(cell, 0, 0)
        self._mend(cell, victim)

    def play(self, cell: Cell, left: int) -> None:
        """One fault, at one step; then the job has all its nodes again. left: cells after it."""
        self._cell = cell
        self._left = left
        joiner = self._joiner() if cell.fault == "join" else None
        self._wait("progress", lambda: self._seen.trains(set(self._seen.members), 0))
        nodes, members, before = self._told.cluster.nodes, self._seen.members, self._seen.generation
        choices = members[1:] if cell.fault == "node" else members
        if cell.fault in LEADS:
            choices = members[:1]
        if cell.fault in STRIKES:
            longest = min(map(self._last_struck, members))
            choices = [name for name in members if self._last_struck(name) == longest]
        victim = joiner or nodes[self._dice.choice(choices)]
        others = [name for name in members if name != victim.name]
        other = nodes[min(others, key=self._last_struck)]
        lost = [self._nproc[victim.name]] if cell.fault in LOSES_A_NODE else []
        spares = self._outside(*lost)
        fruitless = self._fruitless()
        self._reach(cell, before, victim, other)
        struck, began_s = self._seen.generation, time.monotonic()
        if joiner is not None:
            self._release(joiner)
            self._wait("the registration", lambda: self._seen.all_reported("registered", [joiner]))
        else:
            self._strike(cell, victim)
        for hold in self._holds.glob("*-*"):
            hold.unlink()
        self._recover(cell, victim, struck, began_s, spares)
        self._check(cell, before, fruitless)
        self._mend(cell, victim, spares)

    def finish(self) -> int:
        """Train to the end of an epoch at full speed, and see that each node ends as it should;
        returns how many epochs were trained."""
        self._put(OVER, "")
        exit_codes = self._told.wait_for_end()
        expected = {name: self._codes.get(name, 0) for name in exit_codes}
        assert exit_codes == expected, f"{self.done}: {exit_codes}\n{self._told.logs()}"
        steps = max(self._told.committed())
        epochs, rest = divmod(steps, steps_in(10, 1))
        assert rest == 0, f"{self.done}: {steps} steps\n{self._told.logs()}"
        return epochs

    # Nodes, and those that wait until they are told to register.

    def _start(self, nproc: int) -> Node:
        self._told.cluster.environment = {**self._environment, NPROC: str(nproc)}
        node = self._told.cluster.start_node()
        self._nproc[node.name] = nproc
        return node

    def _outside(self, *nproc: int) -> list[Node]:
        """Nodes that do not register before they are released."""
        self._told.cluster.connected = True
        nodes = [self._start(workers) for workers in nproc]
        self._told.cluster.connected = False
        return nodes

    def _spares(self, *nproc: int) -> list[Node]:
        """The same; those released register at once."""
        nodes = self._outside(*nproc)
        self._wait("spare nodes", lambda: all(map(self._is_ready, nodes)))
        return nodes

    def _is_ready(self, node: Node) -> bool:
        """Returns whether a node that waits outside has imported what its workers need."""
        messages = self._told.cluster.messages()
        self._ready |= {sender.name for sender, message in messages if "ready" in message}
        return node.name in self._ready

    def _release(self, *nodes: Node) -> None:
        self._told.cluster.send(nodes, begin=True)

    def _joiner(self) -> Node:
        """A node that is to join, and room for it."""
        leaver = self._told.cluster.nodes[self._seen.members[-1]]
        self._told.cluster.drain(leaver)
        self._codes[leaver.name] = 75
        before, stay = self._seen.generation, set(self._seen.members[:-1])
        self._wait("room for a node", lambda: self._seen.trains(stay, before))
        return self._spares(self._nproc[leaver.name])[0]

    def _whole(self, after: int) -> None:
        """Wait for a world of all nodes that trains."""

        def trains() -> bool:
            names = {node.name for node in self._told.cluster.running()}
            return self._seen.trains(names, after - 1)

        self._wait("a world of all", trains)
        assert len(self._seen.members) == len(self._shape), f"{self._cell}: {self._seen.members}"

    # Steps of the protocol.

    def _reach(self, cell: Cell, generation: int, victim: Node, other: Node) -> None:
        """Come to the step of the protocol, and stay there."""
        ranks = self._ranks()
        everybody = [rank for node_ranks in ranks.values() for rank in node_ranks]
        late = ranks[other.name][-1]
        rest = [rank for rank in everybody if rank != late]
        match cell.step:
            case "regrouping":
                stay = [name for name in ranks if name != other.name]
                struck = cell.fault in STRIKES
                keeps = victim.name if struck else min(stay, key=victim.name.__eq__)
                busy = ranks[keeps][-1:]
                self._hold("step", generation, busy)
                self._at("step", generation, busy)
                self._provoke(other)
                seen = set(self._seen.members)
                rounds = self._seen.rounds
                self._wait("a round", lambda: rounds.get(generation, set()) >= seen)
            case "written":
                self._provoke(other)
                self._wait("a world", lambda: self._seen.generation > generation)
                if cell.fault in STRIKES:
                    word = f"start {generation + 1}"
                    self._wait("a start", lambda: self._seen.all_reported(word, [victim]))
                    workers = lambda: self._told.cluster.workers_of(victim)  # noqa: E731
                    self._wait("a new worker", workers)
            case "connecting":
                self._hold("connect", generation + 1, [late])
                self._provoke(other)
                self._at("connect", generation + 1, everybody)
            case "restoring":
                self._hold("build", generation + 1, [late])
                self._hold("restore", generation + 1, rest)
                self._provoke(other)
                self._at("build", generation + 1, [late])
                self._at("restore", generation + 1, rest)
            case "saving":
                self._in_a_save(generation, late, set(rest))
            case "reducing" | "between" | "gathering":
                self._hold(cell.step, generation, [late])
                self._at(cell.step, generation, [late])

    def _in_a_save(self, generation: int, late: int, rest: set[int]) -> None:
        """Come into a save in which all ranks but one have captured their part.

        No capture is taken where the save before it is not over; then the next one is waited for.
        """
        captured = lambda: any(  # noqa: E731
            g == generation and rest <= ranks and late not in ranks
            for (g, _), ranks in self._seen.captured.items()
        )
        for _ in range(10):
            self._hold("save", generation, [late])
            self._at("save", generation, [late])
            with suppress(AssertionError):
                self._wait("a capture", captured, 3.0)
                return
            (self._holds / f"save-{generation}").unlink()
            time.sleep(HOLDS_POLL_S)
            (self._holds / f"save-{generation}-at-{late}").unlink()
        met = {at: sorted(ranks) for at, ranks in self._seen.captured.items()}
        tale = f"{self._cell}: no save was met; rank {late} was held, and of each save there were"
        raise AssertionError(f"{tale} {met}\n{self._told.logs()}")

    def _ranks(self) -> dict[str, list[int]]:
        """By node of the newest world, in its order."""
        ranks: dict[str, list[int]] = {}
        for name in self._seen.members:
            first = sum(map(len, ranks.values()))
            ranks[name] = list(range(first, first + self._nproc[name]))
        return ranks

    def _pace(self) -> None:
        """Slow the training down so much that it lasts for this cell and those after it."""
        steps = max(1, self._steps - self._told.step)
        wanted_s = (self._left + 1) * CELL_S / steps
        pause_s = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, wanted_s))
        if abs(pause_s - self._pause_s) > 0.1 * self._pause_s:
            self._pause_s = pause_s
            self._told.pause(pause_s)

    def _hold(self, place: str, generation: int, ranks: list[int]) -> None:
        self._put(f"{place}-{generation}", " ".join(map(str, ranks)))

    def _put(self, name: str, text: str) -> None:
        written = self._holds / ".new"
        written.write_text(text)
        written.rename(self._holds / name)

    def _at(self, place: str, generation: int, ranks: list[int]) -> None:
        marks = [self._holds / f"{place}-{generation}-at-{rank}" for rank in ranks]
        self._wait(f"all at {place}", lambda: all(mark.exists() for mark in marks))

    def _wait(self, what: str, so: Callable[[], Any], patience_s: float = 90.0) -> Any:
        def seen() -> Any:
            self._pace()
            return so()

        return self._seen.wait(f"{self._strategy}, {self._cell}: {what}", seen, patience_s)

    # Faults, and what comes of them.

    def _provoke(self, node: Node) -> None:
        """End a generation by the least that does: one worker, whose state others have."""
        self._struck.append(node.name)
        self._told.cluster.kill_worker(node)

    def _last_struck(self, name: str) -> int:
        return max((i for i, node in enumerate(self._struck) if node == name), default=-1)

    def _strike(self, cell: Cell, victim: Node) -> None:
        cluster = self._told.cluster
        if cell.fault in STRIKES:
            self._struck.append(victim.name)
        match cell.fault:
            case "worker":
                cluster.kill_worker(victim)
            case "freeze":
                os.kill(cluster.workers_of(victim)[-1], signal.SIGSTOP)
            case "node" | "leader":
                cluster.kill_node(victim)
                self._codes[victim.name] = -signal.SIGKILL
            case "silent" | "silent leader":
                _signal_all(victim, signal.SIGSTOP)
            case "agent":
                victim.process.send_signal(signal.SIGSTOP)
            case "cut":
                assert self._networks is not None
                self._networks.cut(victim.name)
            case "drain":
                cluster.drain(victim)
                self._codes[victim.name] = 75
            case "etcd":
                self._etcd.kill()

    def _recover(
        self, cell: Cell, victim: Node, struck: int, began_s: float, spares: Sequence[Node] = ()
    ) -> None:
        """See the job train again with those that are left. struck: its newest generation then;
        spares: nodes that wait outside."""
        seen = self._seen
        step = seen.reached(struck)
        named = {node.name for node in self._told.cluster.running()}
        running = named - {spare.name for spare in spares}
        if cell.fault == "etcd":
            self._etcd.start()
        if cell.fault == "etcd" and cell.step != "regrouping":
            back = lambda: seen.trains(running, struck - 1, step)  # noqa: E731
        else:
            gone = {victim.name} if cell.fault in (*LOSES_A_NODE, *COMES_BACK) else set()
            back = lambda: seen.trains(running - gone, struck)  # noqa: E731
        self._wait("recovery", back)
        self.done.append(f"{cell}: {time.monotonic() - began_s:.1f} s")

    def _check(self, cell: Cell, before: int, fruitless: int) -> None:
        """What is promised of every generation after `before`, in which the cell began. fruitless:
        how many failures in a row its world knew of."""
        provoked = cell.step in PROVOKED
        seen = self._seen
        new = [generation for generation in sorted(seen.worlds) if generation > before]
        for generation in new:
            cost = seen.cost(generation)
            tale = f"{self._strategy}, {cell}: generation {generation} did {cost} steps again"
            tale += f"\n{self._told.logs()}"
            if cell.fault in COSTS_NOTHING and not (provoked and generation == before + 1):
                assert cost == 0, tale
            if self._strategy == "ddp":
                assert cost <= 1, tale
            elif generation - 1 in seen.worlds:
                resumed = seen.worlds[generation]["resume_step"]
                assert resumed >= seen.held(generation - 1), tale
                if cell.fault == "agent" and cell.step not in ("forming", *PROVOKED):
                    assert cost * self._pause_s < BEHIND_S, tale
        self.done[-1] += f", {sum(map(seen.cost, new))} recomputed"
        if cell.fault == "etcd" and cell.step not in ("forming", *PROVOKED):
            assert not new, f"{cell}: generation {new} without need\n{self._told.logs()}"
        if cell.fault in COSTS_NOTHING:
            assert self._fruitless() <= fruitless, f"{cell}: counted against --max-restarts"

    def _fruitless(self) -> int:
        """Failures in a row without progress, as the newest world counts them."""
        with EtcdStore([self._etcd.endpoint], job_prefix(self._told.cluster.job)) as store:
            return world_from_bytes(store.read(WORLD).entries[WORLD].value).fruitless

    def _mend(self, cell: Cell, victim: Node, spares: Sequence[Node] = ()) -> None:
        """Give the job back what it has lost; spares: nodes that make up for one."""
        if cell.fault == "drain":
            self._wait("the leaver's end", lambda: not victim.running)
        if cell.fault in COMES_BACK and cell.step == "saving":
            newest = max(step for _, step in self._seen.captured)
            self._wait("a later checkpoint", lambda: self._seen.checkpoint > newest)
        if cell.fault in ("silent", "silent leader", "agent"):
            _signal_all(victim, signal.SIGCONT)
        if cell.fault == "cut":
            assert self._networks is not None
            self._networks.mend(victim.name)
        self._release(*spares)
        if cell.fault in LOSES_A_NODE and len(self._told.cluster.running()) < len(self._shape):
            self._start(self._nproc[victim.name])
        self._whole(self._seen.generation)


def _signal_all(node: Node, number: signal.Signals) -> None:
    """To every process of a node."""
    for pid in [node.process.pid, *descendants(node.process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
