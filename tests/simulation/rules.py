"""The rules of `launcher/protocol/invariants.py`, checked against the truth, which no agent knows.

Each is checked at the events that could break it: a world is written (R1 to R5, R10), a worker
connects or its node starts another generation's (R6), a step ends, `done` is written (R8, R9), an
agent exits (R8, R21), and no agent gets anywhere any more (R7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.agent.core import MAX_ERRORS
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Member,
    Proposal,
    Report,
    World,
    outranks,
)
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.termination import exit_code_of
from elasticzero.launcher.store.api import Entry
from elasticzero.launcher.store.watch_cache import DONE, MEMBERS, NEXT, WORLD
from tests.simulation.name_rules import NameRules
from tests.simulation.planned_rules import ChangeRules
from tests.simulation.promises import Promises
from tests.simulation.saved_rules import SavedRules
from tests.simulation.schedule import HARMLESS
from tests.simulation.storage import SnapshotName, State
from tests.simulation.training import Group, Worker

if TYPE_CHECKING:
    from tests.simulation.agents import Agent
    from tests.simulation.cluster import Cluster

HEARD_OF_WITHIN_TTLS = 2.0
TOLD_LATE_S = 4.5
"""Where watches lose what they were to tell, or requests are slow, it takes so much longer."""
COUNTED_NEVER = frozenset(
    {"join", "drain", "scale", "stop", "kill-agent", "lose-node", "slow-agent", "stop-agent"}
    | {"freeze-agent", "freeze-writer", "freeze-committer", "loop-error", "drain-newcomer"}
    | {"odd-run", "join-backed-up", "kill-source", "kill-saver", "freeze-holder"}
    | {"sigterm", "sigterm-leader", "sigterm-two", "sigterm-again", "storage-away"}
)
"""Faults of machines and of storage: a job that meets no others is never given up."""
STORAGE_SEEN_WITHIN_S = 6.0
Chain = tuple[tuple[int, int, int], ...]
"""Which generation did which steps of a state: (generation, first step, last step), in order."""


class Violation(AssertionError):
    """A rule is broken."""


def extended(chain: Chain, generation: int, step: int) -> Chain:
    """The chain of a state that `generation` reached from the state of `chain`."""
    start = chain[-1][2] if chain else 0
    return chain if step == start else (*chain, (generation, start + 1, step))


class Rules:
    """What has been true so far, and the checks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.worlds: dict[int, World] = {}
        self._tokens: set[str] = set()
        """Of all worlds that were ever written."""
        self.reached: dict[int, int] = {}
        """By generation: the last step that any of its ranks finished."""
        self._origins: dict[int, Chain] = {}
        """By generation: the chain of the state it started from."""
        self.registrations: set[tuple[str, str]] = set()
        """Registrations that stand, by node and incarnation."""
        self._disturbed_s = 0.0
        """When an agent last came back that had been cut off or had not run, in the same time."""
        self._last_sign: dict[tuple[str, str], float] = {}
        """By node and incarnation: when its registration went, or it last reported, in time that
        etcd served."""
        self._held: dict[tuple[str, str], dict[SnapshotName, set[int]]] = {}
        """By token of a world and node: what the node said that it held when it had stopped."""
        self._unregistered: dict[str, float] = {}
        """By node: since when a living one was found without its registration."""
        self._ends = 0
        self._trained: set[int] = set()
        """The generations of which all ranks began to train."""
        self._causes: list[str] = []
        """What has happened so far that may change a generation."""
        self.started: dict[int, int] = {}
        """By generation: how many of its nodes have started it."""
        self.promises = Promises(cluster, self.require)
        self.changes = ChangeRules(cluster, self.require)
        self.names = NameRules(cluster, self.require)
        self.saved = SavedRules(cluster, self)

    def fail(self, rule: str, text: str) -> NoReturn:
        raise Violation(f"{rule}: {text}")

    def require(self, so: bool, rule: str, text: str) -> None:
        if not so:
            self.fail(rule, text)

    # -- what happens

    def cause(self, kind: str) -> None:
        """A fault that may change a generation."""
        self._causes.append(kind)
        self.promises.disturbed()

    def asked(self, control: Control) -> None:
        """Operators ask for something more."""
        self.promises.asked(control)

    def came_back(self) -> None:
        """An agent can be heard, and hears, again: it may count as well whom it heard before."""
        self._disturbed_s = self._cluster.etcd.served_s
        self.promises.disturbed()

    def wrote(self, writer: object, key: str) -> None:
        """R20: nothing is written by an agent of an earlier run. R24: no world and no end is
        written while the number of the run cannot be read."""
        for agent in self._cluster.running():
            if agent.store is writer:
                text = f"{agent.host.name} of run {agent.run} writes {key}"
                self.require(agent.run == self._cluster.run_number, "R20", text)
                if key in (WORLD, DONE) and agent.host.release != "before":
                    self.require(self._cluster.has_readable_run, "R24", text)

    def put(self, key: str, entry: Entry) -> None:
        if key.startswith("members/"):
            member: Member = self._cluster.read_document(Member, entry.value)
            self.names.registers(member, self.registrations)
            self._replace(member)
            self.registrations.add((member.node, member.incarnation))
            self.promises.registered(member)
            self._note_waiting(self._cluster.world)
        elif key.startswith("alarm/"):
            alarm = self._cluster.read_document(Alarm, entry.value)
            self.promises.alarmed(int(key.removeprefix("alarm/")), alarm)
            self.changes.alarmed(alarm, self._causes)
        elif key == NEXT:
            self.changes.proposed(self._cluster.read_document(Proposal, entry.value))
        elif key.startswith("reports/"):
            self._reported(key, self._cluster.read_document(Report, entry.value))

    def _replace(self, member: Member) -> None:
        """An agent puts its registration over an earlier one of its own, which a backup brought
        back."""
        if not self._cluster.etcd.losses:
            return
        for node, incarnation in list(self.registrations):
            if node == member.node and incarnation != member.incarnation:
                self.registrations.discard((node, incarnation))
                self._last_sign[node, incarnation] = self._cluster.etcd.served_s
                self.promises.unregistered(replace(member, incarnation=incarnation))

    def _reported(self, key: str, report: Report) -> None:
        """R4: nobody says that it holds what it does not."""
        _, generation, node = key.split("/")
        self._last_sign[node, report.incarnation] = self._cluster.etcd.served_s
        self.promises.reported(int(generation), node, report)
        if report.phase != "stopped":
            return
        world = self._cluster.world
        shards = self._cluster.hosts[node].memory.shards
        agent = self._cluster.hosts[node].agent
        speaks = (  # and not a write that etcd has kept from one that is dead
            agent is not None
            and not agent.dead
            and agent.membership.me.incarnation == report.incarnation
        )
        holdings = {(h.generation, h.step, h.world_size): set(h.ranks) for h in report.holdings}
        self._held.setdefault((report.world, node), holdings)
        for held in report.holdings:
            ranks = shards.get((held.generation, held.step, held.world_size), set())
            late = not speaks or world is None or world.generation > int(generation)
            stands = late or set(held.ranks) <= ranks
            self.require(stands, "R4", f"{node} says that it holds {held}")

    def removed(self, key: str, entry: Entry) -> None:
        if key.startswith("members/"):
            member: Member = self._cluster.read_document(Member, entry.value)
            identity = (member.node, member.incarnation)
            self.registrations.discard(identity)
            self.promises.unregistered(member)
            self._last_sign[identity] = self._cluster.etcd.served_s

    def writes(self, before: World | None, after: World) -> None:
        """A world is written over what stands in etcd: a new one, or, where etcd has lost its data,
        one that stood there before."""
        generation, lost = after.generation, self._cluster.etcd.losses > 0
        if lost and before is not None:
            text = f"generation {generation} was written over {before.generation}"
            self.require(outranks(after, before), "R1", text)
        if after.token in self._tokens:
            self.require(lost, "R1", f"generation {generation} was written twice")
            self.worlds[generation] = after
            return
        former = (after.entered or generation) - 1
        if lost and (before is None or before.generation != former):
            before = self.worlds.get(former)
        self.world_written(before, after)
        self._tokens.add(after.token)

    def goes_on(self) -> None:
        """The end that was written is no end."""
        self._ends = 0

    def world_written(self, before: World | None, after: World) -> None:
        generation = after.generation
        once = generation not in self.worlds or self._cluster.etcd.losses > 0
        self.require(once, "R1", f"generation {generation} was written twice")
        self.require(self._cluster.done is None, "R8", "a world was written after `done`")
        expected = before.generation + 1 if before is not None else 1
        self.changes.written(after)
        entered = self.changes.entered_after(before) if before is not None else None
        self.changes.numbers(entered, after)
        if after.entered:
            expected = after.entered + 1
        self.require(
            generation == expected, "R2", f"generation {generation} follows {expected - 1}"
        )
        try:
            check_invariants(before, after)
        except AssertionError as error:
            self.fail("R2", str(error))
        self._check_members(after)
        self._check_state(before, after)
        self.worlds[generation] = after
        if entered is None or entered.token != after.token:
            self.reached[generation] = max(self.reached.get(generation, 0), after.resume.step)
        if before is not None:
            joined = {m.node for m in after.members} - {m.node for m in before.members}
            explained = bool(self._causes or joined) or before.generation not in self._trained
            self.require(explained, "R10", f"generation {generation} has no cause")
            reached = self.reached[before.generation]
            if entered is not None and entered.token != after.token:  # else its steps go on
                reached = max(reached, self.reached[entered.generation])
            self.promises.check_lossless(after, reached, self._causes)
        self._note_waiting(after)
        self.promises.world_written(before, after)

    def _note_waiting(self, world: World | None) -> None:
        """A node that waits for a place may change the generation."""
        if world is not None and not self._causes:
            named = {member.node for member in world.members}
            if any(node not in named for node, _ in self.registrations):
                self._causes.append("join")

    def _check_members(self, world: World) -> None:
        """R3."""
        served_s, ttl_s = self._cluster.etcd.served_s, self._cluster.plan.ttl_s
        for member in world.members:
            identity = (member.node, member.incarnation)
            text = f"generation {world.generation}: {member.node} {member.incarnation}"
            if identity in self.registrations:
                continue
            last_s = self._last_sign.get(identity)
            self.require(last_s is not None, "R3", f"{text} was never registered")
            silent_s = served_s - max(last_s or 0.0, self._disturbed_s)
            late_s = TOLD_LATE_S if self._cluster.plan.trouble else 0.0
            lately = silent_s <= HEARD_OF_WITHIN_TTLS * ttl_s + late_s
            self.require(lately, "R3", f"nothing was heard of {text} for {silent_s:.2f} s")

    def _check_state(self, before: World | None, after: World) -> None:
        """R4 and R5."""
        resume = after.resume
        self._check_held(before, resume)
        self._origins[after.generation] = self._chain_of(before, resume)
        best = self.best_in_memory(before, after)
        is_past = resume.tier == "live"  # its own workers have gone on since, or have stopped
        self.require(
            resume.step >= best or is_past,
            "R5",
            f"{after.generation} starts from step {resume.step}, though its members hold {best}",
        )
        seen = self._cluster.storage.newest_good(
            before_s=self._cluster.timeline.now_s - STORAGE_SEEN_WITHIN_S
        )
        is_bad = seen in after.bad_steps
        self.require(
            resume.step >= (seen or 0) or is_bad or is_past,
            "R5",
            f"{after.generation} starts from step {resume.step}, though storage has {seen}",
        )

    def _check_held(self, before: World | None, resume: Resume) -> None:
        """R4: the sources hold what they are said to hold, unless they have died since."""
        if resume.tier == "storage":
            stored_step = self._cluster.storage.recorded(resume.step)
            now_s = self._cluster.timeline.now_s
            seen_good = stored_step is not None and (
                stored_step.hidden
                or (not stored_step.damaged and resume.step in self._cluster.storage.steps)
                or now_s - stored_step.damaged_s < STORAGE_SEEN_WITHIN_S
            )
            self.require(seen_good, "R4", f"storage has no good step {resume.step}")
            return
        if resume.tier != "ram":
            return
        assert before is not None
        admitted = [before.generation, *(ancestor.generation for ancestor in before.ancestors)]
        if (entered := self.changes.entered_after(before)) is not None:
            admitted.append(entered.generation)
        if before.resume.tier == "ram" and before.resume.step == resume.step:
            admitted.append(before.resume.generation)
        self.require(
            resume.generation in admitted, "R5", f"a snapshot of generation {resume.generation}"
        )
        ranks = {source.rank for source in resume.sources}
        self.require(ranks == set(range(len(ranks))) and bool(ranks), "R4", "a rank is missing")
        name = (resume.generation, resume.step, len(ranks))
        for source in resume.sources:
            host = self._cluster.hosts[source.node]
            if host.serves and self._same_agent(before, source.node):
                has = host.memory.has(name, source.rank)
                self.require(has, "R4", f"{source.node} has no rank {source.rank} of {name}")

    def _same_agent(self, before: World, node: str) -> bool:
        """Whether the node's agent is still the one that reported."""
        agent = self._cluster.hosts[node].agent
        return agent is not None and before.names(agent.membership.me)

    def _chain_of(self, before: World | None, resume: Resume) -> Chain:
        """The lineage of the state that a world starts from; R5 where there never was such one."""
        if resume.tier == "fresh":
            return ()
        if resume.tier == "live":
            assert before is not None
            return self.chain((before.generation, resume.step))
        if resume.tier == "storage":
            stored_step = self._cluster.storage.recorded(resume.step)
            assert stored_step is not None  # R4
            state = (stored_step.generation, resume.step)
        else:
            state = (resume.generation, resume.step)
        return self.chain(state)

    def chain(self, state: State) -> Chain:
        generation, step = state
        world = self.worlds.get(generation) or self.changes.numbered(generation)
        if world is None:
            self.fail("R5", f"no generation {generation} was written")
        start = world.resume.step
        reached = self.reached[generation]
        self.require(
            start <= step <= reached,
            "R5",
            f"generation {generation} went from {start} to {reached}, never to {step}",
        )
        return extended(self._origins[generation], generation, step)

    def best_in_memory(self, before: World | None, after: World) -> int:
        """The newest step that is whole among the members that stay, of those that count."""
        if before is None:
            return 0
        held = [
            self._held.get((before.token, member.node), {})
            for member in after.members
            if before.names(member) and self._same_agent(before, member.node)
        ]
        return self.newest_whole(before, held)

    def newest_whole(self, world: World, held: Iterable[Mapping[SnapshotName, set[int]]]) -> int:
        """The newest step that is whole, of those that count for the world after this one. held:
        ranks of each snapshot, on several nodes."""
        ranks_by_snapshot: dict[SnapshotName, set[int]] = {}
        for shards in held:
            for name, ranks in shards.items():
                ranks_by_snapshot.setdefault(name, set()).update(ranks)
        resume = world.resume
        origin = (resume.generation, resume.step) if resume.tier == "ram" else None
        entered = self.changes.entered_after(world)
        numbers = {world.generation, *([entered.generation] if entered is not None else ())}
        numbers |= {ancestor.generation for ancestor in world.ancestors}
        counts = [n for n in ranks_by_snapshot if n[0] in numbers or n[:2] == origin]
        return max((n[1] for n in counts if len(ranks_by_snapshot[n]) == n[2]), default=0)

    def committed(self, generation: int, step: int) -> None:
        """A checkpoint stands: its state was reached."""
        self.chain((generation, step))

    def stepped(self, group: Group) -> None:
        generation = group.generation
        self.promises.stepped(group)
        self.reached[generation] = max(self.reached[generation], group.step)
        self.changes.stepped(group)
        for worker in group.workers.values():
            current = worker.worker_group.agent.worker_group is worker.worker_group
            text = f"{worker.worker_group.host.name} trains in generation {generation}"
            self.require(current and worker.alive, "R6", text + ", which is not its own")

    def switches(self, before: World, after: World) -> None:
        """All workers of a generation go over to another one, inside their loops."""
        self.changes.switches(before, after)
        generation, step = after.generation, after.resume.step
        chain = extended(self._origins[before.generation], before.generation, step)
        self._origins[generation], self.reached[generation] = chain, step

    def stepped_alone(self, group: Group, worker: Worker) -> None:
        """A survivor had all it needed for one more step."""
        self.reached[group.generation] = max(self.reached[group.generation], worker.step)

    def connects(self, group: Group, worker: Worker) -> None:
        text = (
            f"{worker.worker_group.host.name} connects as rank {worker.rank} of {group.generation}"
        )
        self.require(worker.worker_group.generation == group.generation, "R6", text)
        self.require(worker.rank not in group.workers, "R6", f"{text}, which is there already")

    def trains(self, group: Group) -> None:
        """All ranks have their state."""
        self._trained.add(group.generation)

    def starts(self, agent: Agent, world: World, index: int) -> None:
        if agent.run < self._cluster.run_number and world.run < self._cluster.run_number:
            return  # it is about to learn that its run is over
        written = self.worlds.get(world.generation)
        text = f"{agent.host.name} starts generation {world.generation}"
        same = written is not None and written.token == world.token
        same |= self._cluster.etcd.losses > 0 and world.token in self._tokens
        self.require(same, "R1", text)
        member = world.members[index]
        same_process = (member.node, member.incarnation) == (
            agent.host.name,
            agent.membership.me.incarnation,
        )
        self.require(same_process, "R6", f"{text} in the place of {member.node}")
        self.started[world.generation] = self.started.get(world.generation, 0) + 1

    def done_written(self, done: Done) -> None:
        plan = self._cluster.plan
        self._ends += 1
        self.require(self._ends == 1, "R8", "`done` was written twice")
        if done.outcome == "stopped":
            self.require(self._cluster.asked.stop, "R7", f"stopped: {done.reason}")
            reached = max(self.reached.values(), default=0)
            self.saved.stopped(done, reached, self._causes)
            return
        if done.outcome != "finished":
            self._check_given_up(done)
            return
        self.require(done.step == plan.total_steps, "R9", f"done after step {done.step}")
        world = self._cluster.world
        assert world is not None
        chain = self.chain((world.generation, done.step))
        steps = [step for _, first, last in chain for step in range(first, last + 1)]
        self.require(steps == list(range(1, done.step + 1)), "R9", f"the lineage is {chain}")
        generations = [generation for generation, _, _ in chain]
        ordered = generations == sorted(generations) or self._cluster.etcd.losses > 0
        self.require(ordered, "R9", f"the lineage is {chain}")

    def _check_given_up(self, done: Done) -> None:
        """R7: only after --max-restarts failures in a row that came no further."""
        plan = self._cluster.plan
        often = len(self._causes) > plan.policy.max_restarts
        often |= self._causes.count("crash-worker") > 1  # B3 of `failure_policy`
        unsaved = "could not be saved" in done.reason or "is not saved" in done.reason  # E5
        often |= "storage-fails" in self._causes and unsaved
        often |= self.promises.few_are_good(done)
        explained = often or bool(plan.crash_at) or "damage" in self._causes
        explained &= bool(set(self._causes) - COUNTED_NEVER - HARMLESS)
        self.require(explained, "R7", f"failed: {done.reason}")
        self.saved.failed(done)
        if "without progress" not in done.reason:
            return
        count = plan.policy.max_restarts + 1
        began = [self.worlds[generation].resume.step for generation in sorted(self.worlds)]
        row = [*began[-count:], done.step]
        first = self.worlds[max(1, max(self.worlds) - count + 1)]
        furthest = max(first.resume.step, first.furthest)
        failed_at = [setback.step for setback in done.setbacks]
        recurs_at = max((s for s in failed_at if failed_at.count(s) > 1), default=0)
        stood = len(row) > count and max(row) <= max(furthest, recurs_at)
        self.require(stood, "R7", f"given up, and the last generations began at {row}")

    def turned(self, agent: Agent, *, unreadable: bool) -> None:
        """R21: a node leaves whose agent has met an unexpected error; R24: so does one whose agent
        has met a number of the run that it cannot read, as `unreadable` tells. R29."""
        text = f"{agent.host.name} stays, though its loop has failed"
        self.require(agent.leaving or not agent.failures, "R21", text)
        text = f"{agent.host.name} stays, though it cannot read the number of the run"
        self.require(agent.leaving or not unreadable, "R24", text)
        history, losses = agent.store.history, self._cluster.etcd.losses
        text = f"{agent.host.name} has found {history.number} of {losses} losses of etcd's data"
        self.require(history.number <= losses, "R29", f"{text}; {history.reason}")

    def _check_failed(self, agent: Agent) -> None:
        """R21: of an agent that ends by errors of its loop."""
        ended = self._cluster.done is not None or self._cluster.first_end is not None
        text = f"{agent.host.name} ends as failed"
        if agent.exit_code is ExitCode.FAILED:
            self.require(ended, "R21", f"{text} with its job, and that has not ended")
        if agent.exit_code is not ExitCode.DEFECT:
            return
        self.require(agent.failures >= MAX_ERRORS, "R21", f"{text}, and its loop has not")
        group = agent.worker_group
        live = group is not None and any(worker.alive for worker in group.workers)
        self.require(not live, "R21", f"{text}, and its workers run")

    def exits(self, agent: Agent) -> None:
        self._check_failed(agent)
        done = self._cluster.done
        text = f"{agent.host.name} of run {agent.run} exits with {agent.exit_code}"
        gives_way = agent.exit_code is ExitCode.SUPERSEDED
        if agent.run == self._cluster.run_number:
            self.require(not gives_way, "R20", text)
        elif self._cluster.first_end is not None:
            done = self._cluster.first_end
            as_usual = (ExitCode.LEFT, ExitCode.USAGE, exit_code_of(done))
            so = gives_way or agent.exit_code in as_usual or agent.failures >= MAX_ERRORS
            self.require(so, "R20", text)
        if agent.exit_code is ExitCode.DONE:
            so = done is not None and done.outcome in ("finished", "stopped")
            self.require(so, "R8", f"{agent.host.name} exits with 0 before `done`")

    def registered(self, agents: list[Agent]) -> None:
        """R7: a node that lives and does not leave is registered, or soon again."""
        members = self._cluster.etcd.read(MEMBERS).entries
        for agent in agents:
            me = agent.membership.me
            entry = members.get(f"{MEMBERS}{me.node}")
            stored_member = entry is not None and self._cluster.read_document(Member, entry.value)
            away = not agent.store.well or agent.deaf_until_s > self._cluster.timeline.now_s
            if (
                agent.leaving
                or away
                or self.names.has_namesake(agent)
                or (stored_member and stored_member.incarnation == me.incarnation)
            ):
                self._unregistered.pop(me.node, None)
                continue
            since_s = self._unregistered.setdefault(me.node, self._cluster.timeline.now_s)
            lasts_s = self._cluster.timeline.now_s - since_s
            self.require(lasts_s < 10.0, "R7", f"{me.node} is not registered for {lasts_s:.0f} s")

    def stuck(self) -> None:
        """R7: there were no faults for long, and the job is not over."""
        cluster = self._cluster
        reasons = "; ".join(f"{a.host.name}: {a.reason}" for a in cluster.running())
        done = "not done" if cluster.done is None else "done, but not all have left"
        self.fail(
            "R7", f"no end {cluster.timeline.now_s:.0f} s after the start ({done}): {reasons}"
        )

    def at_the_end(self) -> None:
        cluster = self._cluster
        last = dict(cluster.exits)
        wrong = [n for n, code in last.items() if code is ExitCode.UNAVAILABLE]
        self.require(not wrong, "R7", f"{', '.join(wrong)} gave up")
