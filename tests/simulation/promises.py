"""What is promised to nodes and operators: rules R10 to R18, and R25, of
`launcher/protocol/invariants.py`.

Each allows for how late an agent may hear of a thing: by a watch that lost it, by requests that
take their time, and by whatever kept the agent itself from running. Time is counted as long as etcd
serves, and begins anew when an agent comes back that could not be heard.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from elasticzero.launcher.agent.subscriptions import QUIET_STAGGER_S, STANDBY
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Failure,
    Member,
    Report,
    World,
)
from elasticzero.launcher.protocol.failure_policy import QUARANTINE_STRIKES, quarantine_s
from elasticzero.launcher.protocol.planned.proposal import PLAN_S
from elasticzero.launcher.store.watch_cache import CONTROL
from tests.simulation.schedule import CLEAN, HARMLESS, MACHINES

if TYPE_CHECKING:
    from tests.simulation.agents import Agent
    from tests.simulation.cluster import Cluster
    from tests.simulation.training import Group

READ_S = 0.1
TROUBLED_READ_S = 2.5
"""What stood for so long before a world was written, its writer has read: where all requests are
quick, and where some are slow."""
HEARD_S = 1.5
TROUBLED_HEARD_S = 5.0
"""What an agent has heard of for certain, if it happened so long ago; the latter where watches lose
what they were to tell."""
LISTENS_S = 2.75
"""So long after it came back an agent may wait for the end of a request, and not hear."""
STEP_SHARE = 1.5
"""A step takes no longer than so many times what the plan says."""
KNOWN_AWAY_S = 0.3
"""Who has found that etcd is away decides by it so soon."""
LAPSE_KNOWN_S = 1.5
"""Beyond a TTL: how late it may be noticed that a member is gone whose lease has lapsed."""
ANSWER_SHARE = 0.9
"""Clocks differ: of a time to answer so much must have passed by any."""
TERM_SHARE = 0.9
"""The same of the time for which a node is set aside."""
LOSS_KNOWN_S = 8.0
"""Beyond two TTLs: how late an agent that found etcd's data lost takes in nodes again."""
STOPPED_WITHIN_S = 12.0
"""No step is made for longer after a stop."""
PAID_WITHIN_STEPS = 10
"""A node that waits is taken within so many steps."""
SILENT = "its agent does not answer"
Registration = tuple[str, str]
"""Node and incarnation."""


def _aside(world: World) -> set[str]:
    """The nodes that may be set aside."""
    return {struck.node for struck in world.strikes if struck.count >= QUARANTINE_STRIKES}


def _is_newcomer(world: World, node: str) -> bool:
    """Whether a member has made no step with this job, where others have (B6 of `failure_policy`).

    A node that was alone counts as one that has made steps, if its script began so slowly that it
    was taken for a plain one.
    """
    return 0 < world.trained <= [member.node for member in world.members].index(node)


class Promises:
    """What was asked and said so far, and the checks."""

    def __init__(self, cluster: Cluster, require: Callable[[bool, str, str], None]) -> None:
        self._cluster = cluster
        self._require = require
        self._written_s = 0.0
        """When the last world was written."""
        self._last_event_s = 0.0
        """When something last happened that may keep an agent from hearing, or change a world."""
        policy = cluster.plan.policy
        self._sizes = [(0.0, (policy.min_nodes, policy.max_nodes))]
        """Fewest and most nodes, and since when they are asked for."""
        self._drained: dict[Registration, float] = {}
        self._stop_s: float | None = None
        self._since: dict[Registration, float] = {}
        """Registrations that stand, since when."""
        self._ended: dict[Registration, tuple[float, float]] = {}
        """Those that do not any more: when they ended, in true time, and since when they stood."""
        self._reports: dict[tuple[int, str], tuple[float, Report]] = {}
        """By generation and node: the last report, and when it was put."""
        self._answered: dict[tuple[int, str], float] = {}
        """By generation and node: when it first answered in the round, in true time."""
        self._alarms: dict[int, float] = {}
        """By generation: when its alarm was raised, in true time."""
        self._owing: dict[str, tuple[float, int]] = {}
        """What the world that trains owes: since when, and for how many steps."""
        self._steps = (0, 0.0, 0.0)
        """Of the last generation that made steps: its number, when the last one ended, and since
        when they go on without a pause, in time that etcd served."""
        self._struck: dict[tuple[str, int], float] = {}
        """By node and how many strikes it has: since when, in true time."""
        self._crashed: set[tuple[str, str]] = set()
        """By token of a world and node: a worker has died of itself."""
        self._only_machines = not cluster.plan.trouble and not cluster.plan.crash_at
        """Nothing has happened but what machines suffer."""

    @property
    def _now_s(self) -> float:
        return self._cluster.etcd.served_s

    def struck(self, kind: str) -> None:
        """A fault, of whatever kind."""
        self._only_machines &= kind.partition(":")[0] in MACHINES

    def disturbed(self) -> None:
        """Something happened, or an agent came back."""
        self._last_event_s = self._now_s

    @property
    def _lately_lost(self) -> bool:
        """Whether etcd has lost its data a moment ago: registrations may be remnants of nodes that
        are gone, and each agent counts the time from when it has found out."""
        etcd, ttl_s = self._cluster.etcd, self._cluster.plan.ttl_s
        since_s = self._cluster.timeline.now_s - max(etcd.lost_s, etcd.back_s)
        return etcd.losses > 0 and since_s < 2 * ttl_s + LOSS_KNOWN_S

    def _long_ago(self, since_s: float, limit_s: float) -> bool:
        return self._now_s - max(since_s, self._last_event_s) > limit_s

    @property
    def _ttl_s(self) -> float:
        return self._cluster.plan.ttl_s

    @property
    def _heard_s(self) -> float:
        return TROUBLED_HEARD_S if self._cluster.plan.trouble else HEARD_S

    @property
    def _read_s(self) -> float:
        usual_s = TROUBLED_READ_S if self._cluster.plan.trouble else READ_S
        return usual_s + self._cluster.etcd.frozen_s

    # -- what happens

    def asked(self, control: Control) -> None:
        """Operators ask for something more."""
        now_s = self._now_s
        if control.nnodes is not None and control.nnodes != self._sizes[-1][1]:
            self._sizes.append((now_s, control.nnodes))
        for drain in control.drain:
            self._drained.setdefault((drain.node, drain.incarnation), now_s)
        if control.stop and self._stop_s is None:
            self._stop_s = now_s

    def registered(self, member: Member) -> None:
        identity = (member.node, member.incarnation)
        self._since.setdefault(identity, self._now_s)

    def unregistered(self, member: Member) -> None:
        identity = (member.node, member.incarnation)
        since_s = self._since.pop(identity, None)
        if since_s is not None:
            self._ended[identity] = (self._cluster.timeline.now_s, since_s)

    def reported(self, generation: int, node: str, report: Report) -> None:
        self._reports[generation, node] = (self._now_s, report)
        if report.phase in ("alive", "stopped"):
            self._answered.setdefault((generation, node), self._cluster.timeline.now_s)
        if report.phase == "stopped" and (report.world, node) in self._crashed:
            named = report.failure is not None and report.failure.blame != "peer"
            text = f"{node} does not say that a worker of {generation} died: {report.failure}"
            self._require(named, "R18", text)

    def crashed(self, token: str, node: str) -> None:
        """A worker dies of itself, and was not asked to stop before. token: of its world, for where
        etcd has lost its data another one may have the same number."""
        self._crashed.add((token, node))

    def alarmed(self, generation: int, alarm: Alarm) -> None:
        """R10: a lapsed lease ends no generation whose steps go on; R16: it ends one soon where
        they do not."""
        true_s, now_s = self._cluster.timeline.now_s, self._now_s
        self._alarms.setdefault(generation, true_s)
        world = self._cluster.world
        assert world is not None
        if alarm.kind != "lapse" or generation != world.generation:
            return
        trained, stepped_s, since_s = self._steps
        is_current = trained == generation
        pause_s = STEP_SHARE * self._cluster.plan.step_s
        goes_on = is_current and now_s - stepped_s < pause_s and now_s - since_s > self._heard_s
        text = f"{alarm.reason}, though steps went on: {generation}"
        node = alarm.reason.removeprefix("the lease of ").partition(" lapsed")[0]
        silent = alarm.reason.endswith(SILENT)
        self._require(silent or not goes_on, "R10", text)
        if silent:
            self._check_silent(world, node, text)
            return
        plan, reached = self._cluster.plan, self._cluster.rules.reached.get(generation, 0)
        if not (plan.phased and reached >= plan.total_steps):  # its last save may take long
            stands = (at for (name, _), at in self._since.items() if name == alarm.node)
            since_s = max(*stands, stepped_s if is_current else 0.0, 0.0)
            place = world.nodes.index(alarm.node) if alarm.node in world.nodes else 0
            if place >= STANDBY:  # it looks at the others once they have made no step for long
                since_s += plan.ttl_s + QUIET_STAGGER_S * place
            leader = self._cluster.hosts[alarm.node].agent
            failed_s = leader.store.away_since_s if leader is not None else 0.0
            self._check_noticed(generation, node, since_s, failed_s)

    def _check_silent(self, world: World, node: str, text: str) -> None:
        """R25: an agent is given up no sooner, and none that answers."""
        cluster = self._cluster
        agent, true_s, ttl_s = cluster.hosts[node].agent, cluster.timeline.now_s, self._ttl_s
        group = cluster.group(world)
        lapsed_s = max(
            (at for (name, _), (at, _) in self._ended.items() if name == node), default=0
        )
        went_on_s = true_s - max(lapsed_s, group.held_s)
        least_s = ANSWER_SHARE * max(ttl_s, lapsed_s - group.held_s)
        self._require(went_on_s > least_s, "R25", f"{text}, for {went_on_s:.1f} s")
        still = agent is None or agent.dead or true_s < agent.deaf_until_s + self._heard_s
        self._require(still, "R25", f"{text}, and its agent runs")

    def _check_bounded(self, group: Group) -> None:
        """R25: no steps pile up behind an agent that stands still alone."""
        true_s, ttl_s = self._cluster.timeline.now_s, self._ttl_s
        agents = [self._cluster.hosts[member.node].agent for member in group.world.members]
        living = [agent for agent in agents if agent is not None and not agent.dead]
        still = [agent for agent in living if agent.stands_still]
        others = [agent for agent in living if agent not in still]
        if group.held_step is None or len(still) != 1 or len(living) < len(agents):
            return
        stalled_s, since_s = still[0].stalled_s, self._now_s - self._last_event_s
        if any(not agent.hears_for(ttl_s) for agent in others) or group.ledger.held is None:
            return
        whole = still[0].store.stopped_until_s > true_s  # else its lease is renewed for a TTL
        known_s = (1 if whole else 2) * ttl_s + LAPSE_KNOWN_S
        unheld_s = stalled_s + known_s - group.held_s
        most_s = known_s + max(ttl_s, unheld_s) + self._heard_s
        most_s *= 2 if self._cluster.plan.trouble else 1  # a request that fails begins it all anew
        lasts_s = min(true_s - stalled_s, since_s)
        text = f"{group.generation} trains on for {lasts_s:.1f} s without {still[0].host.name}"
        self._require(lasts_s < most_s, "R25", text)

    def _check_noticed(self, generation: int, node: str, since_s: float, failed_s: float) -> None:
        """R16. Others' leases are conclusive to the leader a TTL after each of these. since_s: the
        last step ended, or it was registered; failed_s: a request of it failed."""
        gone = [at for (name, _), (at, _) in self._ended.items() if name == node]
        begun_s = max(since_s, self._last_event_s, self._written_s)
        back_s = max(self._cluster.etcd.back_s, failed_s, *gone)
        lasted_s = min(self._now_s - begun_s, self._cluster.timeline.now_s - back_s)
        most_s = self._cluster.plan.ttl_s + LAPSE_KNOWN_S + self._heard_s
        text = f"{generation} stood still for {lasted_s:.1f} s, until the lease of {node} counted"
        self._require(lasted_s < most_s, "R16", text)

    def quiet_for(self, seconds: float) -> bool:
        """Whether nothing has happened for so long."""
        return self._now_s - self._last_event_s > seconds

    def round_s(self, world: World) -> float:
        """For how long the round of a world has been open, by its alarm or its first answer."""
        times = [self._alarms.get(world.generation, inf)]
        times += [self._answered.get((world.generation, node), inf) for node in world.nodes]
        return self._cluster.timeline.now_s - min(times)

    def asks(self, agent: Agent) -> None:
        """R10: nobody who knows that etcd is away has workers stop at a boundary."""
        away_s = self._cluster.timeline.now_s - agent.store.away_since_s
        is_away = not agent.store.reachable and away_s > KNOWN_AWAY_S
        text = f"{agent.host.name} asks for a boundary though etcd is away for {away_s:.1f} s"
        self._require(not is_away, "R10", text)

    # -- what must be so

    def sizes(self) -> list[tuple[int, int]]:
        """Fewest and most nodes that whoever writes a world now may go by."""
        ends, lost = [since_s for since_s, _ in self._sizes[1:]], self._wish_is_lost()
        old = [
            size
            for (_, size), end_s in zip(self._sizes[:-1], ends, strict=True)
            if lost or not self._long_ago(end_s, self._heard_s)
        ]
        return [*old, self._sizes[-1][1]]

    def world_written(self, before: World | None, after: World) -> None:
        sizes, count = self.sizes(), len(after.members)
        entered = after.resume.tier == "live"  # its size was decided before, and is only recorded
        fits = entered or any(least <= count <= most for least, most in sizes)
        self._require(fits, "R3", f"{count} members, where {sizes} are allowed")
        full = any(count >= most for _, most in sizes)
        if entered and before is not None:
            full |= self._cluster.rules.changes.parks(before)
        self._check_places(before, after, full=full)
        self._check_builds(after)
        self._check_drains(after)
        self._check_aside(before, after, max(least for least, _ in sizes))
        self._check_take_over(before, after)
        self._check_writer(before, after)
        if before is not None:
            self._check_odd(before, after)
            self._check_last_save(before, after)
        charged = self._only_machines and after.fruitless > 0
        self._require(not charged, "R15", f"a failure was charged: {after.reason}")
        self._written_s = self._now_s

    def _check_writer(self, before: World | None, after: World) -> None:
        """R3: who writes a world is registered."""
        etcd = self._cluster.etcd
        for agent in self._cluster.running():
            if agent.store is etcd.writer:
                me = agent.membership.me
                ended_s, _ = self._ended.get((me.node, me.incarnation), (-1.0, 0.0))
                stands = (me.node, me.incarnation) in self._since
                stands |= ended_s == self._cluster.timeline.now_s
                self._require(stands, "R3", f"{me.node} wrote {after.generation}, unregistered")
                self._check_basis(agent, before, after)
                told = agent.look.told or 0
                accounted_for = etcd.late or told in after.bad_steps or after.resume.step >= told
                start = f"{after.generation} starts from {after.resume.step}"
                self._require(accounted_for, "R5", f"{start}, its writer knew of {told} on storage")

    def _stood_before(self, member: Member) -> bool:
        """Whether a registration stood for so long that whoever wrote just now has read it; it may
        have ended by that very write. A process that has just been resumed has read nothing."""
        writer, true_s = self._cluster.etcd.writer, self._cluster.timeline.now_s
        stopped_s = getattr(writer, "stopped_until_s", 0.0)
        if true_s - stopped_s < self._read_s:
            return False
        identity = (member.node, member.incarnation)
        since_s = self._since.get(identity)
        if since_s is None:
            ended_s, since_s = self._ended.get(identity, (-1.0, 0.0))
            if ended_s != self._cluster.timeline.now_s:
                return False
        return self._now_s - since_s > self._read_s

    def _check_left_out(self, before: World, after: World) -> None:
        """R11: of the members of the world before."""
        aside, policy = _aside(after), self._cluster.plan.policy
        alarm_s = self._alarms.get(before.generation)
        true_s = self._cluster.timeline.now_s
        asked = alarm_s is not None and true_s - alarm_s > ANSWER_SHARE * policy.alive_s
        put = [self._reports.get((before.generation, m.node)) for m in before.members]
        rounds = [p[0] for p in put if p is not None and p[1].phase in ("alive", "stopped")]
        lasts_s = self._now_s - min(rounds, default=self._now_s)
        for member, (put_s, report) in zip(
            before.members, (p or (0.0, None) for p in put), strict=True
        ):
            out = not after.names(member) and member.node not in aside
            out &= self._fits(member.node, after)
            if after.resume.tier == "live" and report is not None and report.leaving:
                continue
            if (member.node, member.incarnation) in self._drained:
                continue  # also where its agent does not know of that yet
            if not out or not self._stood_before(member):
                continue
            text = f"{after.generation} is without {member.node}"
            agent = self._cluster.hosts[member.node].agent
            if agent is not None and not agent.leaving and not self._cluster.plan.trouble:
                same = agent.membership.me.incarnation == member.incarnation
                slow = report is not None and report.phase == "alive" and lasts_s > policy.stop_s
                hears = (
                    same and not slow and agent.hears_for(LISTENS_S + self._cluster.etcd.frozen_s)
                )
                self._require(not hears, "R11", f"{text}, which lives and hears")
            same_process = report is not None and report.incarnation == member.incarnation
            if report is None or not same_process or report.phase not in ("alive", "stopped"):
                lives = (
                    agent is not None
                    and not agent.dead
                    and agent.membership.me.incarnation == member.incarnation
                )
                self._require(asked or not lives, "R11", f"{text}, which had no time to answer")
            elif not report.leaving and self._now_s - put_s > self._read_s:
                late = report.phase == "alive" and lasts_s > policy.stop_s
                self._require(late, "R11", f"{text}, which was {report.phase}")

    def _check_places(self, before: World | None, after: World, *, full: bool) -> None:
        """R11."""
        if full or self._lately_lost:
            return
        if before is not None:
            self._check_left_out(before, after)
        if after.resume.tier == "live":
            return  # a node that came since has a place in the next world
        aside = _aside(after)
        for node, incarnation in [*self._since, *self._ended]:
            drained = (node, incarnation) in self._drained
            if drained or node in aside or after.find(node, incarnation) is not None:
                continue
            if not self._fits(node, after):
                continue
            agent = self._cluster.hosts[node].agent
            me = agent.membership.me if agent is not None else None
            if agent is None or me is None or me.incarnation != incarnation or agent.leaving:
                continue
            waited = before is None or not before.names(me)
            if waited and self._stood_before(me):
                self._require(False, "R11", f"{node} waited, and {after.generation} has room")

    def _fits(self, node: str, world: World) -> bool:
        """Returns whether a node has the build of a world, so that it may be in it (BD1)."""
        return self._cluster.hosts[node].versions in (("", ""), (world.release, world.torch))

    def _check_builds(self, after: World) -> None:
        """BD1."""
        odd = [node for node in after.nodes if not self._fits(node, after)]
        self._require(not odd, "BD1", f"{after.generation} has {odd}, and {after.release}")

    def _check_drains(self, after: World) -> None:
        """R12; a world that workers have entered already is only recorded."""
        if after.resume.tier == "live" or self._wish_is_lost():
            return
        for member in after.members:
            asked_s = self._drained.get((member.node, member.incarnation))
            late = asked_s is not None and self._long_ago(asked_s, self._heard_s)
            self._require(not late, "R12", f"{member.node} was drained: {after.generation}")

    def _check_basis(self, writer: Agent, before: World | None, after: World) -> None:
        """R3 and R12, by what the writer has seen; what workers have entered is only recorded."""
        view = writer.basis
        if self._cluster.etcd.late or view is None or after.resume.tier == "live":
            return
        text, registered = f"{writer.host.name} writes {after.generation} with", view.members or {}
        for member in after.members:
            incarnation = registered.get(member.node, member).incarnation
            same = incarnation == member.incarnation
            self._require(same, "R3", f"{text} {member.node}, which has registered anew")
            joins = before is None or not before.names(member)
            drained = joins and view.control.drains(member)
            self._require(not drained, "R12", f"{text} {member.node}, which it knows is drained")

    def _check_aside(self, before: World | None, after: World, least: int) -> None:
        """R13."""
        now_s = self._cluster.timeline.now_s
        rows = [(struck.node, struck.count) for struck in after.strikes]
        self._struck = {row: self._struck.get(row, now_s) for row in rows}
        named = {member.node for member in after.members}
        for (node, count), since_s in self._struck.items():
            waits = now_s - since_s < TERM_SHARE * quarantine_s(count)
            aside = count >= QUARANTINE_STRIKES and waits
            needed = len(after.members) <= least
            text = f"{node} has {count} strikes: {after.generation}"
            self._require(not aside or node not in named or needed, "R13", text)

    def _check_odd(self, before: World, after: World) -> None:
        """R17: of a generation that ended by nothing but nodes with bad input."""
        reports = [(m.node, self._reports.get((before.generation, m.node))) for m in before.members]
        stand = {node for node, _ in self._since}
        failed: dict[str, Failure] = {}
        for node, entry in reports:
            if entry is None or entry[1].phase != "stopped" or entry[1].leaving:
                return  # a node is lost, or leaves
            if entry[1].failure is not None and entry[1].failure.blame != "peer":
                failed[node] = entry[1].failure
            elif self._now_s - entry[0] < self._read_s or node not in stand:
                return
        bad = [node for node in failed if self._cluster.hosts[node].bad_input]
        judged = all(failed[node].final or _is_newcomer(before, node) for node in bad)
        least = max(least for least, _ in self.sizes())
        left = sum(node not in bad for node, _ in reports)
        if not bad or len(bad) < len(failed) or not judged:
            return
        if left < least:
            waiting = [node for node, _ in self._since if node not in before.nodes]
            fewest = min(least for least, _ in self.sizes())
            final = any(failed[node].final for node in bad) and left + len(waiting) < fewest
            text = f"{after.generation} is tried, though {', '.join(bad)} cannot train"
            self._require(not final or self._lately_lost, "R17", text)
            return
        text = f"{after.generation} follows failures of {', '.join(bad)} alone"
        self._require(after.fruitless <= before.fruitless, "R17", f"{text}, and they count")
        members = {member.node for member in before.members}
        held = all(source.node in members for source in before.resume.sources)
        back = held and after.resume.step < before.resume.step
        self._require(not back, "R17", f"{text}, and goes back")
        kept = [node for node in bad if any(m.node == node for m in after.members)]
        self._require(not kept, "R17", f"{text}, and has {', '.join(kept)}")

    def _check_last_save(self, before: World, after: World) -> None:
        """R19: where the last checkpoint was not written, no generation begins before it is.

        One may where the node is lost that says so: nothing is given up by that, for the generation
        starts from the newest state that is left, and its workers save at the end.
        """
        reports = [
            self._reports.get((before.generation, m.node))
            for m in before.members
            if (m.node, m.incarnation) in self._since
        ]
        failures = [p[1].failure for p in reports if p is not None and p[1].phase == "stopped"]
        blames = {failure.blame for failure in failures if failure is not None}
        if "storage" not in blames or blames - {"storage", "peer"}:
            return
        step = max(f.step for f in failures if f is not None and f.blame == "storage")
        written = max(self._cluster.storage.steps, default=0)
        text = f"{after.generation} begins, and step {step} is not written"
        self._require(written >= step, "R19", text)

    def few_are_good(self, done: Done) -> bool:
        """Whether a job may have ended by nodes with bad input; R17: not where MIN others train."""
        world = self._cluster.world
        assert world is not None
        bad = [m.node for m in world.members if self._cluster.hosts[m.node].bad_input]
        if done.failure is None or not done.failure.message.endswith("not as on the others"):
            return False
        stand = [m.node for m in world.members if (m.node, m.incarnation) in self._since]
        put = [(node, self._reports.get((world.generation, node))) for node in stand]
        final_reports = [
            (node, p[1]) for node, p in put if p is not None and p[1].phase == "stopped"
        ]
        good = [node for node, report in final_reports if node not in bad and not report.leaving]
        least = max(least for least, _ in self.sizes())
        judged = done.failure.final or any(_is_newcomer(world, node) for node in bad)
        ended = len(good) >= least and judged
        self._require(not ended, "R17", f"{', '.join(bad)} ended the job: {done.reason}")
        return True

    def _check_take_over(self, before: World | None, after: World) -> None:
        """R14."""
        if before is None or not after.reason.startswith("all nodes of generation"):
            return
        for member in before.members:
            identity = (member.node, member.incarnation)
            ended_s, since_s = self._ended.get(identity, (0.0, inf))
            lately = self._cluster.timeline.now_s - ended_s < self._cluster.plan.ttl_s / 2
            since_s = self._since.get(identity, since_s if lately else inf)
            read = self._now_s - since_s > self._read_s  # one that has just come back may be missed
            self._require(not read, "R14", f"{after.generation} was taken over from {member.node}")

    def check_lossless(self, after: World, reached: int, causes: list[str]) -> None:
        """R12: where nodes only come and go as they are asked to, no step is made twice."""
        clean = set(causes) <= CLEAN | HARMLESS and not self._cluster.plan.trouble
        clean &= self._cluster.storage.possible  # else who leaves too few takes state along
        kept = after.resume.step >= reached
        text = f"{after.generation} starts from {after.resume.step}, though {reached} was reached"
        self._require(kept or not clean, "R12", text)

    def stepped(self, group: Group) -> None:
        """R12."""
        trained, stepped_s, since_s = self._steps
        pause_s = STEP_SHARE * self._cluster.plan.step_s
        now_s, goes_on = self._now_s, trained == group.generation
        goes_on &= now_s - stepped_s < pause_s
        self._steps = (group.generation, now_s, since_s if goes_on else now_s)
        self._check_owed(group.world)
        self._check_bounded(group)
        if self._stop_s is not None and not self._wish_is_lost():
            late = self._long_ago(self._stop_s, STOPPED_WITHIN_S)
            text = f"generation {group.generation} trains on after a stop"
            self._require(not late, "R12", text)

    def _wish_is_lost(self) -> bool:
        """Whether etcd has lost what operators asked, and no agent was left that knew."""
        etcd = self._cluster.etcd
        return etcd.losses > 0 and not etcd.read(CONTROL).entries

    def _owed(self, world: World) -> list[str]:
        """What a world that trains owes: nodes that wait while there is room; fewer members."""
        most, count = self._sizes[-1][1][1], len(world.members)
        lapsed = any((m.node, m.incarnation) not in self._since for m in world.members)
        if self._lately_lost or (lapsed and self._cluster.namesakes):
            return []  # a node whose name another one has keeps its place, and the world its size
        if count > most:
            return [f"{count - most} members too many"]
        if count == most or len(self._since) <= count or world.strikes:
            return []
        pending = []
        coming = self._cluster.rules.changes.comes_into(world)
        for node, incarnation in self._since:
            agent = self._cluster.hosts[node].agent
            idle = agent is not None and not agent.dead and not agent.leaving
            idle &= (node, incarnation) not in self._drained and self._fits(node, world)
            if idle and not coming and world.find(node, incarnation) is None:
                pending.append(f"{node} {incarnation} waits")
        return pending

    def _check_owed(self, world: World) -> None:
        """R11, R12: it is paid within some steps, as long as all agents hear of it."""
        owed = self._owed(world)
        agents = [self._cluster.hosts[m.node].agent for m in world.members] if owed else []
        now_s = self._cluster.timeline.now_s
        if any(a is None or not a.store.well or a.deaf_until_s > now_s for a in agents):
            owed = []
        previous, limit_s = self._owing, PLAN_S + 2 * self._heard_s
        self._owing = {text: previous.get(text, (self._now_s, 0)) for text in owed}
        for text, (since_s, steps) in self._owing.items():
            self._owing[text] = (since_s, steps + 1)
            late = steps >= PAID_WITHIN_STEPS and self._long_ago(since_s, limit_s)
            self._require(not late, "R11", f"{text}: {world.generation} has room for {self._sizes}")
