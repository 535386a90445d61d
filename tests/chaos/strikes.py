"""Faults drawn from a seed, and the cluster that suffers them."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from elasticzero.launcher.local.cluster import Node
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.chaos.networks import Networks
from tests.integration.clusters import Story

FAULTS = (
    "worker",
    "two workers",
    "freeze",
    "node",
    "leader",
    "drain",
    "join",
    "etcd restart",
    "etcd pause",
    "cut",
)
MOST_CUT_S, MOST_DOWN_S, MOST_PAUSE_S = 8.0, 3.0, 4.0
LOOK_EVERY_S = 0.1


class Strikes:
    """Strikes at drawn times, and mends later what mends by itself in life: cables, and etcd.

    Nodes that die or leave are made up for by new ones, so that `nodes` run, and at times more.
    """

    def __init__(
        self,
        told: Story,
        etcd: EtcdServer,
        networks: Networks | None,
        dice: random.Random,
        nodes: int,
    ) -> None:
        self.done: list[tuple[float, str]] = []
        self._told = told
        self._etcd = etcd
        self._networks = networks
        self._dice = dice
        self._nodes = nodes
        self._leaving: set[str] = set()
        self._cut: set[str] = set()
        self._etcd_away = False
        self._mends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def play(self, faults: int, mean_gap_s: float) -> None:
        """So many faults, in time; some strike while the one before is not over."""
        for _ in range(faults):
            self._pass(self._dice.uniform(0.2, 1.8) * mean_gap_s)
            left = list(FAULTS)
            self._dice.shuffle(left)
            began_s = time.time()
            self.done.append((began_s, next(what for what in left if self._strike(what))))

    def finish(self) -> None:
        """Mend everything."""
        while self._mends:
            self._pass(max(0.0, self._mends[0][0] - time.monotonic()))

    def _pass(self, seconds: float) -> None:
        """Let time pass, and mend what is due."""
        until_s = time.monotonic() + seconds
        while True:
            while self._mends and self._mends[0][0] <= time.monotonic():
                heapq.heappop(self._mends)[2]()
            if time.monotonic() >= until_s:
                return
            self._told.look()
            time.sleep(min(LOOK_EVERY_S, max(0.0, until_s - time.monotonic())))

    def _later(self, most_s: float, mend: Callable[[], None]) -> None:
        at_s = time.monotonic() + self._dice.uniform(0.0, most_s)
        heapq.heappush(self._mends, (at_s, next(self._numbers), mend))

    def _strike(self, what: str) -> bool:
        """One fault; False if there is nobody to suffer it now."""
        cluster = self._told.cluster
        living = self._members()
        working = [node for node in living if cluster.workers_of(node)]
        match what:
            case "worker" if working:
                self._kill_worker(self._dice.choice(working))
            case "two workers" if len(working) > 1:
                for node in self._dice.sample(working, 2):
                    self._kill_worker(node)
            case "freeze" if working:
                self._freeze_worker(self._dice.choice(working))
            case "node" | "leader" if len(living) > 1:
                cluster.kill_node(living[0] if what == "leader" else self._dice.choice(living))
                self._fill_up()
            case "drain" if len(living) > 1:
                node = self._dice.choice(living)
                cluster.drain(node)
                self._leaving.add(node.name)
                self._fill_up()
            case "join" if len(self._staying()) <= self._nodes:
                cluster.start_node()
            case "etcd restart" if not self._etcd_away:
                self._etcd_away = True
                self._etcd.kill()
                self._later(MOST_DOWN_S, self._start_etcd)
            case "etcd pause" if not self._etcd_away:
                self._etcd_away = True
                self._etcd.pause()
                self._later(MOST_PAUSE_S, self._resume_etcd)
            case "cut" if self._networks is not None and len(living) > 1 and len(self._cut) < 2:
                node = self._dice.choice(living)
                self._networks.cut(node.name)
                self._cut.add(node.name)
                self._later(MOST_CUT_S, lambda: self._mend_cable(node.name))
            case _:
                return False
        return True

    def _members(self) -> list[Node]:
        """The nodes of the newest world that run, stay and are in reach, in its order."""
        nodes = self._told.cluster.nodes
        worlds = self._told.of("world")
        members = max(worlds, key=lambda event: event["generation"])["members"] if worlds else []
        left_out = self._leaving | self._cut
        return [nodes[name] for name in members if nodes[name].running and name not in left_out]

    def _staying(self) -> list[Node]:
        return [n for n in self._told.cluster.running() if n.name not in self._leaving]

    def _fill_up(self) -> None:
        if len(self._staying()) < self._nodes:
            self._told.cluster.start_node()

    def _kill_worker(self, node: Node) -> None:
        with suppress(IndexError, ProcessLookupError):  # it may have ended just now
            self._told.cluster.kill_worker(node)

    def _freeze_worker(self, node: Node) -> None:
        """Nobody thaws it: its agent is to see that it hangs."""
        with suppress(IndexError, ProcessLookupError):
            os.kill(self._told.cluster.workers_of(node)[-1], signal.SIGSTOP)

    def _start_etcd(self) -> None:
        self._etcd.start()
        self._etcd_away = False

    def _resume_etcd(self) -> None:
        self._etcd.resume()
        self._etcd_away = False

    def _mend_cable(self, node: str) -> None:
        assert self._networks is not None
        self._networks.mend(node)
        self._cut.discard(node)
