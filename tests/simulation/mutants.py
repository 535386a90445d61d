"""Deliberately broken rules: does the simulator notice?

Each mutant is one edit of a file, mostly a pure one of the launcher; a rule that several files keep
takes several edits. They are applied to a copy of the packages, in which schedules are run until
one breaks a rule: those of seeds, all orders of two agents' events (`tests/simulation/orders`), or
those of islands (`tests/simulation/islands`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.conftest import ROOT

COPIED = ("elasticzero", "launcher", "checkpoint", "tests/simulation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One broken rule."""

    name: str
    file: str
    """Its path from `launcher/`."""
    right: str
    wrong: str
    unfound: str = ""
    """Why no schedule finds it, though a rule is broken; empty: one of the first 3,000 finds it."""
    further: tuple[tuple[str, str, str], ...] = ()
    """Further edits: file, right and wrong."""
    search: Literal["seeds", "orders", "islands"] = "seeds"
    """The schedules that are run."""


MUTANTS = (
    Mutant(
        name="a snapshot of which ranks are missing is gone on from",
        file="protocol/resume.py",
        right="if len(by_rank) == world_size",
        wrong="if by_rank",
    ),
    Mutant(
        name="a snapshot off the lineage is gone on from",
        file="protocol/resume.py",
        right="if not _is_on_lineage(world, report, holding):",
        wrong="if False:",
        further=(
            (
                "agent/core.py",
                "        self._memory.keep_only({(world.resume.generation, world.resume.step)})\n",
                "",
            ),
        ),
    ),
    Mutant(
        name="the nearest state wins, not the newest",
        file="protocol/resume.py",
        right="key=lambda r: (r.step, nearness[r.tier], r.generation)",
        wrong="key=lambda r: (nearness[r.tier], r.step, r.generation)",
    ),
    Mutant(
        name="members that stay are put in the order of their names",
        file="protocol/placement.py",
        right="kept.sort(key=lambda member: position[member.node])",
        wrong="kept.sort(key=lambda member: member.node)",
    ),
    Mutant(
        name="MAX is not kept to",
        file="protocol/placement.py",
        right="return tuple([*kept, *joiners][:most])",
        wrong="return tuple([*kept, *joiners])",
    ),
    Mutant(
        name="a lapsed lease counts at once when the store is back",
        file="protocol/leader.py",
        right="store.reachable and now_s - store.outage_end_s >= ttl_s",
        wrong="store.reachable",
    ),
    Mutant(
        name="a step is no proof of life",
        file="protocol/leader.py",
        right="    if not _makes_steps(view, after_s, now_s, policy):\n",
        wrong="    if True:\n",
    ),
    Mutant(
        name="a step just before its lease lapsed is no proof of life",
        file="protocol/leader.py",
        right="after_s = view.missing_since_s[node] - policy.lease_ttl_s / 2",
        wrong="after_s = view.missing_since_s[node]",
    ),
    Mutant(
        name="steps prove for half a minute that a member lives",
        file="protocol/leader.py",
        right="goes_on = waited_s < most_s and",
        wrong="goes_on =",
    ),
    Mutant(
        name="steps pile up behind an agent that is suspended alone",
        file="protocol/leader.py",
        right="    if _agent_is_lost(view, node, now_s, policy):\n",
        wrong="    if False:\n",
    ),
    Mutant(
        name="an agent that is cut off from etcd alone is taken for a suspended one",
        file="protocol/leader.py",
        right="silent_s = view.workers, view.unanswered_since_s.get(node)",
        wrong="silent_s = view.workers, view.missing_since_s[node]",
    ),
    Mutant(
        name="a suspended agent is given up as soon where it costs more",
        file="protocol/leader.py",
        right="waited = now_s - since_s >= max(policy.lease_ttl_s, unheld_s)",
        wrong="waited = now_s - since_s >= policy.lease_ttl_s",
    ),
    Mutant(
        name="growth is asked for while etcd is away",
        file="protocol/leader.py",
        right="if view.workers.finished or not view.store.reachable:",
        wrong="if view.workers.finished:",
    ),
    Mutant(
        name="nobody is waited for that has not answered",
        file="protocol/regroup.py",
        right="now_s - asked_s < policy.alive_s",
        wrong="False",
    ),
    Mutant(
        name="one that refuses connections speaks for all that are silent",
        file="protocol/regroup.py",
        right="not view.refusing.issuperset(silent) and waits",
        wrong="not view.refusing and waits",
    ),
    Mutant(
        name="nobody is waited for whose workers still stop",
        file="protocol/regroup.py",
        right="if late and now_s - opened_s < policy.stop_s + policy.save_s:",
        wrong="if False:",
    ),
    Mutant(
        name="an answer counts, whichever incarnation gave it",
        file="protocol/leader.py",
        right="return world.find(node, report.incarnation) is not None",
        wrong="return True",
        unfound="Reports name their world by its token, and a world has one incarnation of a "
        "node: an answer of another one is of another world of the same number, by a node of the "
        "release before, whose reports name none. A unit test holds the rule.",
    ),
    Mutant(
        name="a node that has come anew is taken for what it was",
        file="protocol/regroup.py",
        right="return registration.incarnation == member.incarnation\n    ttl_s",
        wrong="return True\n    ttl_s",
    ),
    Mutant(
        name="a member that answered lives for ever",
        file="protocol/regroup.py",
        right="return young or (now_s - well_s < ttl_s and well_s - missing_s < ttl_s)",
        wrong="return young or missing_s > 0.0",
    ),
    Mutant(
        name="a node that leaves keeps its place",
        file="protocol/regroup.py",
        right="if m.node in reports and not reports[m.node].leaving",
        wrong="if m.node in reports",
    ),
    Mutant(
        name="the first world does not wait for MIN",
        file="protocol/leader.py",
        right="if ready < policy.min_nodes:",
        wrong="if ready < 1:",
    ),
    Mutant(
        name="the next world does not wait for MIN",
        file="protocol/regroup.py",
        right="    if len(members) < policy.min_nodes:\n",
        wrong="    if not members:\n",
    ),
    Mutant(
        name="nobody follows a leader that is gone",
        file="protocol/leader.py",
        right="present = view.members is None or node not in view.missing_since_s",
        wrong="present = True",
    ),
    Mutant(
        name="a spare takes over at once",
        file="protocol/leader.py",
        right="if now_s - max(view.missing_since_s.values()) < policy.lease_ttl_s:",
        wrong="if False:",
    ),
    Mutant(
        name="nobody who waits is taken",
        file="protocol/leader.py",
        right="if room <= 0 or not settled",
        wrong="if room <= 99 or not settled",
    ),
    Mutant(
        name="who is drained is taken until it has heard of it",
        file="protocol/leader.py",
        right="    if view.control.drain:\n",
        wrong="    if False:\n",
    ),
    Mutant(
        name="a lowered MAX shrinks nothing",
        file="protocol/leader.py",
        right="if len(world.members) > policy.max_nodes and view.control.nnodes is not None:",
        wrong="if room < -99:",
    ),
    Mutant(
        name="a job that is to stop goes on after a round",
        file="protocol/regroup.py",
        right="    if view.control.stop:\n        return stop_job(view,",
        wrong="    if view.control.stop and False:\n        return stop_job(view,",
    ),
    Mutant(
        name="a failure is charged though steps were made",
        file="protocol/failure_policy.py",
        right="    if _comes_on(world, resume_step, cause):\n        return 0\n",
        wrong="",
    ),
    Mutant(
        name="what was done before may be done again and again",
        file="protocol/failure_policy.py",
        right="return resume_step > max(world.resume.step, world.furthest)",
        wrong="return resume_step > world.resume.step",
        unfound="It decides how many failures count, and not which state is gone on from. A "
        "schedule has few failures, so that its job ends either way; that one which fails "
        "for ever is given up, unit tests of `failure_policy` hold.",
    ),
    Mutant(
        name="who cannot read what a lost node held is charged",
        file="protocol/failure_policy.py",
        right="    counts &= not _in_want(world, cause[1], reports)\n",
        wrong="",
    ),
    Mutant(
        name="a lost node is charged to the job",
        file="protocol/failure_policy.py",
        right='counts = cause[1].blame != "peer" or (all_stay and not lost)',
        wrong="counts = True",
    ),
    Mutant(
        name="a node is set aside one strike later",
        file="protocol/failure_policy.py",
        right="if struck.count >= QUARANTINE_STRIKES:",
        wrong="if struck.count > QUARANTINE_STRIKES:",
    ),
    Mutant(
        name="all that are set aside are taken back where one is needed",
        file="protocol/failure_policy.py",
        right="set(struck[:wanting])",
        wrong="set(struck if wanting else ())",
    ),
    Mutant(
        name="a newcomer that cannot train ends the job",
        file="protocol/failure_policy.py",
        right="return apart if len(good) >= max(1, least) else {}",
        wrong="return {}",
    ),
    Mutant(
        name="newcomers are judged like members that have trained",
        file="protocol/failure_policy.py",
        right="young = dict.fromkeys(() if _has_trained(reports) else newcomers)",
        wrong="young: dict[str, None] = {}",
    ),
    Mutant(
        name="nodes with bad input are set aside though too few are left",
        file="protocol/failure_policy.py",
        right="good = [node for node in present if node not in apart]",
        wrong="good = list(present)",
    ),
    Mutant(
        name="a death that was learnt of late is no failure",
        file="protocol/failure_policy.py",
        right="if stop_requested and not exiting:",
        wrong="if stop_requested:",
    ),
    Mutant(
        name="each snapshot forgives a crash that recurs",
        file="protocol/failure_policy.py",
        right="return resume_step <= last.step and any(_same(earlier, last) for earlier in row)",
        wrong="return False",
        unfound="It forgives one failure for each newer snapshot below the crash, of which there "
        "are a few: the job is given up a few failures later. Unit tests of "
        "`failure_policy` hold how many count.",
    ),
    Mutant(
        name="a job is given up one failure earlier",
        file="protocol/termination.py",
        right="following.fruitless > policy.max_restarts",
        wrong="following.fruitless >= policy.max_restarts",
    ),
    Mutant(
        name="a stop does not wait for the state to be saved",
        file="protocol/termination.py",
        right="    if not only_in_memory(view, resume):\n        return stop_from",
        wrong="    if True:\n        return stop_from",
    ),
    Mutant(
        name="nobody answers an alarm",
        file="protocol/decide.py",
        right='actions = list(_report(view, "alive", "").actions)',
        wrong="actions = []",
    ),
    Mutant(
        name="a node that leaves does not wait until its state is read",
        file="protocol/decide.py",
        right="if needed and unread and",
        wrong="if False and",
    ),
    Mutant(
        name="a node that leaves while etcd is away asks for a boundary",
        file="protocol/drain.py",
        right="if not view.store.reachable:",
        wrong="if False:",
    ),
    Mutant(
        name="one node that waits is taken for a deadlock",
        file="protocol/hang_rules.py",
        right='if "stalled" not in phases or phases - {"stalled", "finished"}:',
        wrong='if "stalled" not in phases:',
    ),
    Mutant(
        name="a worker that waits for a peer is to blame",
        file="protocol/hang_rules.py",
        right='        guilty = False\n        state = f"it seems',
        wrong='        state = f"it seems',
    ),
    Mutant(
        name="nobody looks at workers that make no step",
        file="protocol/hang_rules.py",
        right="if workers.silent_s >= limit_s:",
        wrong="if False:",
    ),
    Mutant(
        name="a leader writes though its registration is gone",
        file="agent/store_writer.py",
        right="            self._membership.still_registered(),\n",
        wrong="",
    ),
    Mutant(
        name="a leader that was frozen before its write overwrites the next world",
        file="agent/store_writer.py",
        right="            unchanged(WORLD, entry),\n",
        wrong="",
        further=(
            ("agent/store_writer.py", "            self._membership.still_registered(),\n", ""),
        ),
        search="orders",
    ),
    Mutant(
        name="a leader that was frozen before its write overwrites the next of several nodes",
        file="agent/store_writer.py",
        right="            unchanged(WORLD, entry),\n",
        wrong="",
        further=(
            ("agent/store_writer.py", "            self._membership.still_registered(),\n", ""),
        ),
    ),
    Mutant(
        name="a world is written though the job is over",
        file="agent/store_writer.py",
        right="            unchanged(DONE, self._observer.unreadable(Done)),\n",
        wrong="",
    ),
    Mutant(
        name="an earlier registration of a node, from a backup, stays",
        file="store/membership.py",
        right="member_at(entry).incarnation == self.me.incarnation\n",
        wrong="True\n",
        unfound="A backup must hold an earlier registration of an agent that lives, and that "
        "agent must not find that etcd has lost its data: revisions must be those that it "
        "has seen. A unit test holds the rule.",
    ),
    Mutant(
        name="a node that waits does not look whether it is registered",
        file="agent/store_writer.py",
        right="        if due:\n",
        wrong="        if False:\n",
    ),
    Mutant(
        name="where the token's record was written anew is forgotten",
        file="store/recovery.py",
        right="            self._agreed = self._agreed.at(record.mod_revision)\n",
        wrong="            pass\n",
    ),
    Mutant(
        name="what etcd has lost is not written anew",
        file="store/recovery.py",
        right="                if self._restore():\n",
        wrong="                if True:\n",
    ),
    Mutant(
        name="an earlier run writes on",
        file="store/job_run.py",
        right="fenced = [*conditions, self._stored.unchanged()]",
        wrong="fenced = [*conditions]",
    ),
    Mutant(
        name="a node that was away overwrites the run that --restart began",
        file="store/job_run.py",
        right="fenced = [*conditions, self._stored.unchanged()]",
        wrong="fenced = [*conditions]",
        further=(
            ("protocol/documents.py", "if UNSTATED in (run, other):", "if True:"),
            (
                "store/recovery.py",
                "lapsed |= not self._observer.is_retained_since(self._membership.revision)",
                "lapsed |= False",
            ),
        ),
        search="orders",
    ),
    Mutant(
        name="an earlier run writes on, in some order of two agents",
        file="store/job_run.py",
        right="fenced = [*conditions, self._stored.unchanged()]",
        wrong="fenced = [*conditions]",
        search="orders",
    ),
    Mutant(
        name="a world is written while the number of the run cannot be read",
        file="store/job_run.py",
        right="if ends and self.unreadable and self._is_still_unreadable():",
        wrong="if False:",
    ),
    Mutant(
        name="a node stays that cannot read the number of the run",
        file="agent/core.py",
        right="if not self._notices and store.run is not None and store.run.unreadable:",
        wrong="if False:",
    ),
    Mutant(
        name="an agent registers over another one of its name",
        file="store/membership.py",
        right="        return not self._name_taken and self._put(",
        wrong="        return self._put(",
    ),
    Mutant(
        name="a committer does not list its files again",
        file="../checkpoint/steps/commit.py",
        right="    _check_listed(storage, files, data, replaced)\n    if",
        wrong="    if",
    ),
    Mutant(
        name="files of a save are removed without a look for its manifest",
        file="../checkpoint/steps/loose_files.py",
        right="    committed = repeated(lambda: _may_be_committed(storage, token))\n",
        wrong="    committed = False\n",
    ),
    Mutant(
        name="files of a save are removed though it was tried again meanwhile",
        file="../checkpoint/steps/loose_files.py",
        right="            storage.remove(name, version=versions[name])\n            removed",
        wrong="            storage.remove(name)\n            removed",
        unfound="The files of one save are written twice only by agents that save from memory in "
        "a round, and removed by another's retention between its look and its removal, of "
        "two requests. In 80 schedules that save in phases none meets it; a test of "
        "frozen savers (`test_fence.py`) plays that order.",
    ),
    Mutant(
        name="retention keeps one step too few",
        file="../checkpoint/steps/retention.py",
        right="if good < keep.last or (",
        wrong="if good < keep.last - 1 or (",
    ),
    Mutant(
        name="a document without a run is one of an earlier run",
        file="protocol/documents.py",
        right="    if UNSTATED in (run, other):\n",
        wrong="    if False:\n",
    ),
    Mutant(
        name="a document with an unknown field cannot be read",
        file="../elasticzero/serialization.py",
        right="    fields: dict[str, Any] = {}\n",
        wrong="    fields: dict[str, Any] = {}\n"
        "    if value.keys() - {name for name, _, _ in _fields(kind)}:\n"
        "        raise RecordError(where)\n",
    ),
    Mutant(
        name="a node stays whose agent's loop has failed",
        file="agent/core.py",
        right="        if self._errors == 1:\n",
        wrong="        if False:\n",
    ),
    Mutant(
        name="an agent ends by the second error of its loop",
        file="agent/core.py",
        right="        if self._errors >= MAX_ERRORS:\n",
        wrong="        if self._errors > 1:\n",
    ),
    Mutant(
        name="an agent that fails leaves its workers running",
        file="agent/core.py",
        right="        self._node.stop_workers(stopping)\n",
        wrong="",
    ),
    Mutant(
        name="of two histories the lower generation goes on",
        file="protocol/documents.py",
        right="return order > other_order if order != other_order else",
        wrong="return order < other_order if order != other_order else",
    ),
    Mutant(
        name="what was reported is not put again where a look finds it lost",
        file="agent/observer.py",
        right="if entry is None or (reports.history, entry.mod_revision) != self._put_at:\n",
        wrong="if False:\n",
        unfound="Nearly every loss of data is found by its revisions, and then all reports are put "
        "again. It matters where a restored backup has reached the very revision of the report. A "
        "unit test holds the rule.",
    ),
    Mutant(
        name="the remnants of a backup are taken into the world",
        file="protocol/leader.py",
        right="or view.missing_since_s or view.remnants:",
        wrong="or view.missing_since_s:",
        unfound="The leader takes remnants for nodes that wait only where each member of its "
        "world is registered, and those are remnants too for as long. Unit tests hold the "
        "rule.",
    ),
)


def edited(mutant: Mutant) -> dict[str, str]:
    """The files with their edits, by name."""
    texts: dict[str, str] = {}
    for file, right, wrong in ((mutant.file, mutant.right, mutant.wrong), *mutant.further):
        text = texts.get(file) or (ROOT / "launcher" / file).read_text()
        assert text.count(right) == 1, f"{file} has no longer one: {right}"
        texts[file] = text.replace(right, wrong)
    return texts


def hunt(mutant: Mutant, folder: Path, *, first: int, count: int, timeout_s: float) -> str:
    """Run schedules in a copy with these edits, in a process of its own; what it said in the
    end."""
    for name in COPIED:
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (folder / "tests" / "__init__.py").touch()
    for file, text in edited(mutant).items():
        (folder / "launcher" / file).write_text(text)
    command = [sys.executable, "-m", "tests.simulation", str(first)]
    command += ["--count", str(count), "--first"]
    if mutant.search == "orders":
        command = [sys.executable, "-m", "tests.simulation.orders", "--first"]
    elif mutant.search == "islands":
        command[2] += ".islands"
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    lines = ran.stdout.strip().splitlines()
    return lines[-1] if lines else ran.stderr.strip()[-500:]
