"""What decisions ask of the store, done: the registration, alarms, reports, worlds, the end.

Each may be lost or done twice without harm: reports and alarms are overwritten by equal ones; a
world, and the end, are written in one transaction that is conditioned on the revision of `world`
that was seen, on `done` not being there, and on this node's own registration. Every method raises
`StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticzero.launcher.agent.observer import ClusterObserver
from elasticzero.launcher.protocol.actions import (
    Decision,
    PutReport,
    RaiseAlarm,
    WriteDone,
    WriteWorld,
)
from elasticzero.launcher.protocol.documents import Alarm, Done, Report, to_bytes
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.protocol.view import View
from elasticzero.launcher.store.api import Condition, PrefixState, Store
from elasticzero.launcher.store.membership import Membership
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    DONE,
    MEMBERS,
    WORLD,
    WatchCache,
    reports_of,
)

StoreAction = RaiseAlarm | PutReport | WriteWorld | WriteDone


class StoreWriter:
    """Performs one agent's actions on the store."""

    def __init__(
        self,
        store: Store,
        observer: WatchCache,
        membership: Membership,
        cluster: ClusterObserver,
        again: Callable[[float], Decision],
        clock: Callable[[], float],
    ) -> None:
        """again: look at everything afresh, at a given time, and decide once more."""
        self._store = store
        self._observer = observer
        self._membership = membership
        self._cluster = cluster
        self._again = again
        self._clock = clock
        self.token_digest = ""
        """Of the job's token; it stands in each world that is written."""

    def keep_registered(self, now_s: float, *, leaving: bool) -> None:
        """Renew the registration where it has lapsed; a node that leaves does not come back."""
        world, revision = self._observer.world()
        named = world is None or world.names(self._membership.me)
        if named or not leaving:
            self._membership.check(now_s, named=named, world_revision=revision)

    def do(self, action: StoreAction, view: View, now_s: float, limits: JobPolicy) -> None:
        """Perform an action that was decided at `now_s` from `view`."""
        generation = view.world.generation if view.world is not None else 0
        match action:
            case RaiseAlarm(alarm):
                self._raise_alarm(generation, alarm)
            case PutReport(report):
                self._put_report(generation, view.me.node, report)
            case WriteWorld() | WriteDone():
                self._reread_and_write(now_s, limits)

    def _raise_alarm(self, generation: int, alarm: Alarm) -> None:
        if alarm.kind == "lapse" and not self._still_lapsed():
            return
        key = f"{ALARM}{generation}"
        self._store.write({key: to_bytes(alarm)}, conditions=[Condition(key=key, mod_revision=0)])
        if self._observer.alarm(generation) is None:  # mostly the watch has told it by now
            self._observer.put(ALARM, self._store.read(ALARM))

    def _still_lapsed(self) -> bool:
        """Whether a fresh look finds a lease lapsed too: a watch may tell late that it is back."""
        self._observer.put(MEMBERS, self._store.read(MEMBERS))
        actions = self._again(self._clock()).actions
        return any(isinstance(action, RaiseAlarm) for action in actions)

    def _put_report(self, generation: int, node: str, report: Report) -> None:
        world, _ = self._observer.world()
        told = replace(report, world=world.token if world is not None else "")
        revision = self._store.write({f"{reports_of(generation)}{node}": to_bytes(told)})
        self._cluster.reported(generation, report, revision or 0)

    def _reread_and_write(self, now_s: float, limits: JobPolicy) -> None:
        """Write the next world, or the end, if it is still what a fresh look at the store leads to.

        A slow answer means that the store was away, and that others could not be heard either:
        their time to answer begins anew.
        """
        world, _ = self._observer.world()
        generation = world.generation if world is not None else 0
        for prefix in (reports_of(generation), MEMBERS):
            self._observer.put(prefix, self._store.read(prefix))
        asked_s = self._clock()
        if asked_s - now_s > limits.alive_s / 2:
            self._membership.well_since_s = asked_s
        stands = self._observer.get(WORLD)
        for action in self._again(asked_s).actions:
            if isinstance(action, WriteDone):
                self._write_done(action.done, stands)
            elif isinstance(action, WriteWorld):
                check_invariants(world, action.world)
                old = [f"{ALARM}{generation - 1}", reports_of(generation - 1)]
                conditions = self._conditions(stands)
                following = replace(action.world, token_digest=self.token_digest)
                key_value = {WORLD: to_bytes(following)}
                deletes = [f"{MEMBERS}{node}" for node in action.gone]
                deletes += old if generation > 1 else []
                written = self._store.write(key_value, deletes=deletes, conditions=conditions)
                if written is not None:
                    self._observer.put(WORLD, self._store.read(WORLD))

    def _conditions(self, stands: PrefixState | None) -> list[Condition]:
        """Of what ends a generation: nobody has ended it, or the job; this node has its place."""
        entry = stands.entries.get(WORLD) if stands is not None else None
        revision, value = (entry.mod_revision, entry.value) if entry is not None else (0, None)
        return [
            Condition(key=WORLD, mod_revision=revision, value=value),
            Condition(key=DONE, mod_revision=0),
            self._membership.still_registered(),
        ]

    def _write_done(self, done: Done, stands: PrefixState | None) -> None:
        self._store.write({DONE: to_bytes(done)}, conditions=self._conditions(stands))
        self._observer.put(DONE, self._store.read(DONE))
