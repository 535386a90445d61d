"""Chooses the state that the next generation starts from.

Pure. Rules (`choose_resume`):
1. A snapshot counts only if this generation wrote it, or if it is the state that this generation
   itself started from. Any other may be off the job's lineage. Where training came into this
   generation without a stop, the snapshots of the generations before it count too, and those of
   the generation after it where a report says that its workers have entered that one.
2. A snapshot is whole when the reports name a holder for every rank of its world. Shards of two
   generations or of two steps are never mixed.
3. The highest step wins, in memory or on storage. At equal steps memory wins, for it is faster to
   read.
4. If no state exists anywhere, the job starts fresh.
5. Where ranks were found to differ, no snapshot counts that is newer than the last step at which
   they were equal. A checkpoint counts whatever its step: it is always of a step at which the ranks
   were equal, and a newer one was completed late by an older generation. If there is neither, the
   whole state counts that a rank of a majority (or a node, where state is divided within nodes) has
   handed over, else the state that this generation itself started from.
6. Where no member of the last world is there, the state counts that a node has brought along from
   another island: the node has seen that it is newer than what the island has saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elasticzero.ipc.assignment import Resume, Source
from elasticzero.launcher.protocol.documents import Holding, Member, Report, World
from elasticzero.text import named_text


def choose_resume(
    world: World | None,
    reports: Mapping[str, Report],
    storage_step: int | None,
    newcomers: Sequence[Member] = (),
) -> Resume:
    """Returns the state that the next generation starts from, by the rules of this module.

    Args:
        world: World of the generation that ends; None: there was none.
        reports: Reports by node, of the generation of `world`.
        storage_step: Step of the newest good checkpoint; None: there is none.
        newcomers: The next world's members, where none of them is of `world`.
    """
    brought = [_brought_by(member) for member in newcomers if member.brought_step]
    if brought:
        return max(brought, key=lambda resume: resume.step)
    candidates = [Resume(tier="fresh")]
    if storage_step is not None:
        candidates.append(Resume(tier="storage", step=storage_step))
    if world is not None:
        candidates += _whole_snapshots(world, reports)
    verified = verified_step(reports)
    if world is not None and verified is not None:
        candidates = _not_after(world, candidates, verified)
    nearness = {"fresh": 0, "storage": 1, "ram": 2}
    return max(candidates, key=lambda r: (r.step, nearness[r.tier], r.generation))


def _brought_by(member: Member) -> Resume:
    """Returns the state that a node has brought along."""
    ranks = range(member.brought_shards)
    return Resume(
        tier="ram",
        step=member.brought_step,
        sources=tuple(Source(rank=r, node=member.node, address=member.address) for r in ranks),
    )


def verified_step(reports: Mapping[str, Report]) -> int | None:
    """Returns the newest step at which ranks that were found to differ were equal; None: none
    differed."""
    failures = [report.failure for report in reports.values() if report.failure is not None]
    return min((f.verified for f in failures if f.verified is not None), default=None)


def _not_after(world: World, candidates: Sequence[Resume], verified: int) -> list[Resume]:
    """Returns what rule 5 leaves of the candidates.

    Args:
        world: World of the generation that ends.
        candidates: All states that could be started from.
        verified: Last step at which the ranks were equal.
    """
    fresh = [resume for resume in candidates if resume.tier == "fresh"]
    stored = [resume for resume in candidates if resume.tier == "storage"]
    snapshots = [resume for resume in candidates if resume.tier == "ram"]
    equal = [*stored, *(resume for resume in snapshots if resume.step <= verified)]
    newer = [resume for resume in equal if resume != _as_held(world.resume, resume)]
    whole = [
        resume for resume in snapshots if resume.step > verified and _of_one_node(world, resume)
    ]
    if verified == 0:
        return stored or fresh
    return equal if newer else (whole or equal or fresh)


def _of_one_node(world: World, resume: Resume) -> bool:
    """Returns whether a snapshot is of one rank or node that held the whole state."""
    size = len({source.rank for source in resume.sources})
    return size == 1 or size < world.world_size


def _as_held(origin: Resume, held: Resume) -> Resume:
    """Returns `origin`, which memory still holds, with the sources that were found of it."""
    return replace(origin, sources=held.sources) if origin.tier == "ram" else origin


def _whole_snapshots(world: World, reports: Mapping[str, Report]) -> list[Resume]:
    """Returns the snapshots that rules 1 and 2 admit."""
    return [
        Resume(
            tier="ram",
            step=step,
            generation=generation,
            sources=tuple(source for rank in sorted(by_rank) for source in by_rank[rank]),
        )
        for (generation, step, world_size), by_rank in _held(world, reports).items()
        if len(by_rank) == world_size
    ]


def _held(
    world: World, reports: Mapping[str, Report]
) -> dict[tuple[int, int, int], dict[int, list[Source]]]:
    """Returns which node holds which rank's shard of each (generation, step, world size) that rule
    1 admits."""
    addresses = {member.node: member.address for member in world.members}
    held: dict[tuple[int, int, int], dict[int, list[Source]]] = {}
    for node, report in reports.items():
        for holding in report.holdings:
            if not _is_on_lineage(world, report, holding):
                continue
            state = (holding.generation, holding.step, holding.world_size)
            by_rank = held.setdefault(state, {})
            for rank in holding.ranks:
                source = Source(rank=rank, node=node, address=addresses[node])
                by_rank.setdefault(rank, []).append(source)
    return held


def _is_on_lineage(world: World, report: Report, holding: Holding) -> bool:
    """Returns whether rule 1 admits a snapshot.

    Args:
        world: World of the generation that ends.
        report: Report of a node, of that generation.
        holding: A snapshot in that node's memory.
    """
    generation, step, resume = holding.generation, holding.step, world.resume
    if generation == world.generation:
        return True
    if resume.tier == "ram" and (generation, step) == (resume.generation, resume.step):
        return True
    if report.switched and generation == world.generation + 1:
        return True
    return any(
        generation == ancestor.generation and ancestor.first <= step <= ancestor.last
        for ancestor in world.ancestors
    )


def describe_incomplete_snapshot(
    world: World, reports: Mapping[str, Report], resume: Resume
) -> str:
    """Returns why no snapshot is used though nodes hold parts of some; empty where one is, or none
    was taken.

    Args:
        world: World of the generation that ends.
        reports: Reports by node, of that generation.
        resume: State that was chosen to start from.
    """
    if resume.tier == "ram":
        return ""
    if (verified := verified_step(reports)) is not None:
        return f"; the ranks were last found to be equal at step {verified}"
    parts = {state: by_rank for state, by_rank in _held(world, reports).items() if by_rank}
    newer = [state for state in parts if state[1] > resume.step]
    if not newer:
        return ""
    _, step, size = most = max(newer, key=lambda state: (len(parts[state]), state[1]))
    missing = [rank for rank in range(size) if rank not in parts[most]]
    return (
        f"; no node is left that holds the part of {named_text('rank', missing, 4)} of the "
        f"snapshot of step {step}"
    )
