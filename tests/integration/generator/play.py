"""Trains the script of a draw by plain torch and by us, and judges what came out.

The plain process and the ranks are forks of one process that has torch loaded. Agents are played
by `Pool`: ranks get assignments, captures are sealed in a directory as an agent does it, and the
next world goes on from the newest whole snapshot or checkpoint by the product's own code.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.checkpoint.steps.catalog import newest_good
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.ipc.assignment import Assignment, Resume, Source
from elasticzero.ipc.channel import ChannelClosed
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import FLAG_LEAVE, Finished, Request, Stepped
from tests.integration.generator.draws import STEPS, Draw, World
from tests.integration.generator.elements import Kind
from tests.integration.generator.render import render
from tests.integration.training_harness import Pool, Running

PAUSE_S = 0.02
"""Seconds that each step takes beside its own in a world that does not end by itself, so that a
snapshot is whole before its end."""
PATIENCE_S = 30.0
MOST_RANKS = 3
SNAPSHOTS = "snapshots"
"""Name of the directory that stands for the memory of the nodes."""
CLASS_OF_ERROR = re.compile(r"^\w+(Error|Exception|Interrupt): ")
"""Begins the message of an error that no sentence of ours explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a draw."""

    kind: Kind
    text: str
    """The sentence of a refusal, or what is wrong."""
    script: Path
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Returns whether the product keeps its promise."""
        return self.kind in ("exact", "refused")


class Unexpected(Exception):
    """A world ended in a way that no promise covers."""


class Refused(Exception):
    """A world ended with a sentence to the user."""


def play(pool: Pool, draw: Draw, folder: Path) -> Verdict:
    """Returns what came of a draw; a right one leaves only its script in `folder`."""
    began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"script_{draw.seed}.py"
    script.write_text(render(draw))
    kind, text = _judge(pool, draw, script, folder / "files")
    verdict = Verdict(kind=kind, text=text, script=script, seconds=time.monotonic() - began_s)
    if verdict.is_right:
        shutil.rmtree(folder / "files")
    return verdict


def _judge(pool: Pool, draw: Draw, script: Path, folder: Path) -> tuple[Kind, str]:
    folder.mkdir(exist_ok=True)
    alone = pool.start(script, [json.dumps({"plain": True, "out": str(folder / "plain")})], 1)
    try:
        _train(pool, draw, script, folder)
        alone.until(alone.ended, PATIENCE_S)
        if not (folder / "plain").exists():
            return "invalid", alone.logs()
        difference = _difference(folder, draw.tolerance)
        return ("wrong", difference) if difference else ("exact", "")
    except Refused as refusal:
        return "refused", str(refusal)
    except Unexpected as error:
        alone.until(alone.ended, PATIENCE_S)
        runs = (folder / "plain").exists()
        return ("failed", str(error)) if runs else ("invalid", alone.logs())
    except AssertionError as error:  # a world that does not end
        return "hung", str(error)
    finally:
        pool.end_worlds()


def _difference(folder: Path, tolerance: float) -> str:
    ours, plain = (torch.load(folder / name, weights_only=False) for name in ("out", "plain"))
    return difference(ours, plain, tolerance)


# Worlds.


def _train(pool: Pool, draw: Draw, script: Path, folder: Path) -> None:
    """Trains through the worlds of a draw; the last one writes `out`."""
    resume, done = Resume(tier="fresh"), 0
    for generation, world in enumerate(draw.worlds, 1):
        running = _start(pool, draw, world, generation, resume, script, folder)
        _end(running, world)
        steps = [s.step for worker in running.workers for s in worker.all(Stepped)]
        done = max([done, *steps])
        _check(running, draw, world, done)
        if all(w.all(Finished) and w.last(Finished).step == STEPS for w in running.workers):
            return
        running.settle()
        if draw.mirrored:
            _gather_nodes(folder, world.ranks)
        resume = newest_state(folder, on_storage=draw.on_storage)
    raise Unexpected(f"training ended at step {done} of {STEPS}\n{running.logs()}")


def _start(
    pool: Pool,
    draw: Draw,
    world: World,
    generation: int,
    resume: Resume,
    script: Path,
    folder: Path,
) -> Running:
    told: dict[str, Any] = {"out": str(folder / "out"), "restored": resume.tier != "fresh"}
    if world.end == "finish":
        told["steps"] = world.step
    else:
        told["pause"] = PAUSE_S
    if world.end == "kill":
        told["die"] = [world.rank, world.step, world.place]
    return pool.start(
        script,
        [json.dumps(told)],
        world.ranks,
        node="node",
        snapshot_root=str(folder / SNAPSHOTS),
        generation=generation,
        resume=resume,
        checkpoint_dir=str(folder / "checkpoints"),
        checkpoint_every=2 if draw.on_storage else 0,
        snapshot_every=0 if draw.on_storage else 1000 if draw.mirrored else 1,
        verify_every=draw.verify_every,
        bucket_bytes=draw.bucket_bytes,
        odd=dict.fromkeys(range(world.ranks), _with_mirror) if draw.mirrored else {},
    )


def _with_mirror(assignment: Assignment) -> Assignment:
    """Has each rank keep a mirror of the next one's part, and be a node of its own, which writes
    what it keeps where the owner does not write."""
    rank, size = assignment.rank, assignment.world_size
    if size == 1:
        return assignment
    root = f"{assignment.snapshot_root}-{rank}"
    return replace(
        assignment,
        node=f"node{rank}",
        snapshot_root=root,
        mirrors=((rank + 1) % size,),
        mirrored_by=(rank - 1) % size,
    )


def _gather_nodes(folder: Path, ranks: int) -> None:
    """Copies the shards of all nodes to each node of the next world, those of owners first."""
    gathered = SnapshotStore(folder / SNAPSHOTS)
    shards = [
        (rank != node, node, held, rank)
        for node in range(ranks)
        for held in SnapshotStore(folder / f"{SNAPSHOTS}-{node}").held()
        for rank in held.ranks
    ]
    for _, node, held, rank in sorted(shards, key=lambda shard: shard[0]):
        name = ShardName(held.generation, held.step, rank, held.world_size)
        if gathered.sealed(name):
            continue
        target = gathered.path(held.generation, held.step)
        target.mkdir(parents=True, exist_ok=True)
        source = SnapshotStore(folder / f"{SNAPSHOTS}-{node}").path(held.generation, held.step)
        for path in source.glob(f"*rank-{rank:05d}-of-{held.world_size:05d}*"):
            shutil.copyfile(path, target / path.name)
    for held in gathered.held():
        part = gathered.path(held.generation, held.step)
        for node in range(MOST_RANKS):
            store = SnapshotStore(folder / f"{SNAPSHOTS}-{node}")
            target = store.path(held.generation, held.step)
            target.mkdir(parents=True, exist_ok=True)
            for path in part.iterdir():
                if not (target / path.name).exists():
                    shutil.copyfile(path, target / path.name)


def _end(running: Running, world: World) -> None:
    """Waits for the end of a world, which is told to leave if that is how it ends."""
    if world.end == "drain":
        reached = running.reached(world.step)
        running.until(reached, PATIENCE_S)
        with suppress(ChannelClosed, OSError):
            running.workers[world.rank].channel.send(Request(flags=FLAG_LEAVE))
    running.until(running.ended, PATIENCE_S)


def _check(running: Running, draw: Draw, world: World, done: int) -> None:
    """Raises if a world did not end as it should.

    Args:
        running: The world, which has ended.
        draw: The draw.
        world: How the world was to end.
        done: The last step that any rank has made in any world so far.
    """
    failures = [failed for worker in running.workers for failed in worker.all(Failed)]
    refusals = [f.message for f in failures if f.final and f.blame == "user"]
    raw = [message for message in refusals if CLASS_OF_ERROR.match(message)]
    if refusals and not raw:
        most = 1 + draw.since + max(piece.since for piece in draw.pieces)
        if any(piece.takes_ranks for piece in draw.pieces):
            most += _alone(draw)
        if done <= most:
            raise Refused(refusals[0])
        raise Unexpected(f"refused only after step {done}: {refusals[0]}\n{running.logs()}")
    for failed in failures:
        if failed.blame != "peer":
            raise Unexpected(f"{failed.blame}: {failed.message}\n{running.logs()}")
    for worker in running.workers:
        is_killed = world.end == "kill" and worker.rank == world.rank
        if worker.exit_code not in ((-9, 0) if is_killed else (0, 75)):
            raise Unexpected(f"rank {worker.rank} exits {worker.exit_code}\n{running.logs()}")


def _alone(draw: Draw) -> int:
    """Returns the last step that may be made before a world has several ranks."""
    alone = takewhile(lambda world: world.ranks == 1, draw.worlds)
    return max((world.step for world in alone), default=0)


def newest_state(folder: Path, *, on_storage: bool) -> Resume:
    """Returns the newest state that is whole, in memory or on storage.

    Args:
        folder: Where the files of a draw lie.
        on_storage: Which of two states of one step is taken.
    """
    memory = [
        held
        for held in SnapshotStore(folder / SNAPSHOTS).held()
        if len(held.ranks) == held.world_size
    ]
    newest = max(memory, key=lambda held: (held.step, held.generation), default=None)
    stored = newest_good(open_directory(str(folder / "checkpoints")))
    if stored is not None and (newest is None or (stored, on_storage) > (newest.step, False)):
        return Resume(tier="storage", step=stored)
    if newest is None:
        return Resume(tier="fresh")
    nodes = ("node", *(f"node{rank}" for rank in range(MOST_RANKS)))
    sources = tuple(
        Source(rank=rank, node=node, address="127.0.0.1:1")
        for rank in newest.ranks
        for node in nodes
    )
    return Resume(tier="ram", step=newest.step, generation=newest.generation, sources=sources)


# Comparison.


def difference(ours: Any, plain: Any, tolerance: float, path: str = "") -> str:
    """Returns the first difference between two results in words; empty: there is none.

    Args:
        ours: What came out of the worlds.
        plain: What came out of plain torch.
        tolerance: Difference that two numbers about 1 may have.
        path: Where the two stand.
    """
    if isinstance(plain, Tensor) and isinstance(ours, Tensor):
        return _tensor_difference(ours, plain, tolerance, path)
    if isinstance(plain, float) and isinstance(ours, float):
        off = abs(ours - plain)
        return "" if off <= tolerance * max(1.0, abs(plain)) else f"{path} is off by {off:.2g}"
    if type(ours) is not type(plain):
        return f"{path} is {ours!r}, and {plain!r} by plain torch"
    if isinstance(plain, dict):
        if list(ours) != list(plain):
            return f"{path} has {list(ours)}, and {list(plain)} by plain torch"
        pairs = [(str(key), ours[key], plain[key]) for key in plain]
    elif isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return f"{path} has {len(ours)} items, and {len(plain)} by plain torch"
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(ours, plain, strict=True))]
    else:
        return "" if ours == plain else f"{path} is {ours!r}, and {plain!r} by plain torch"
    every = (difference(a, b, tolerance, f"{path}/{key}") for key, a, b in pairs)
    return next((text for text in every if text), "")


def _tensor_difference(ours: Tensor, plain: Tensor, tolerance: float, path: str) -> str:
    kinds = [f"{tensor.dtype} of shape {list(tensor.shape)}" for tensor in (ours, plain)]
    if kinds[0] != kinds[1]:
        return f"{path} is {kinds[0]}, and {kinds[1]} by plain torch"
    if not plain.numel():
        return ""
    left, right = ours.to(torch.complex128), plain.to(torch.complex128)
    off = float(((left - right).abs() / right.abs().clamp(min=1.0)).max())
    return "" if off <= tolerance else f"{path} is off by {off:.2g}"
