"""Computes what a world assigns to one of its nodes: to its workers, and to what saves their state.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticzero.ipc.assignment import Assignment, KnownError, Source
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.protocol.documents import FIRST_RUN, World
from elasticzero.launcher.protocol.placement import mirroring_ranks, replica_sources
from elasticzero.launcher.protocol.planned.proposal import possible
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.snapshots.roles import ReplicaSource, SnapshotRole
from elasticzero.launcher.tls.contexts import TlsContexts
from elasticzero.launcher.workers.error_file import error_file
from elasticzero.security.proofs import run_secret
from elasticzero.serialization import field_values

CONNECT_S, CONNECT_MAX_S = 10.0, 300.0
START_S, START_MAX_S = 300.0, 1200.0
"""The maximum ends before a first step is due: H2 of `hang_rules`."""


def assignments(options: AgentOptions, world: World, index: int, token: Secret) -> list[Assignment]:
    """Returns the assignments of the workers of the node at `index` in the world's order.

    Args:
        options: Options of the node.
        world: World of the generation.
        index: Index of the node in its order of members.
        token: The job's token, from which the secret of the run is derived that workers get.
    """
    member, shard, spent = world.members[index], world.shard, world.time_spent
    assert shard != "other", "agents follow no such world"
    first = world.first_rank(index)
    connect_s, start_s = timeouts_s(world.fruitless)
    keepers = mirroring_ranks(world)
    script_errors = tuple(
        KnownError(message=s.message, node=s.node, generation=s.generation)
        for s in world.setbacks
        if s.blame == "user"
    )
    return [
        Assignment(
            job=options.job,
            node=options.node,
            generation=world.generation,
            token=world.token,
            password=run_secret(token.reveal, world.run),
            proofs=world.proofs,
            tls=None if options.tls is None else options.tls.credentials,
            rank=first + local_rank,
            local_rank=local_rank,
            world_size=world.world_size,
            local_world_size=member.nproc,
            group_rank=index,
            master_address=world.members[0].host,
            master_port=world.members[0].store_port,
            host=member.host,
            store_fd=None,
            strategy=world.strategy,
            shard=shard,
            resume=world.resume,
            trained=index < world.trained,
            returns=spent.returns if spent is not None else 0,
            running_since=spent.running_since if spent is not None else 0.0,
            snapshot_root=str(options.snapshot_dir),
            overflow_root=str(options.overflow_dir) if options.overflow_dir is not None else "",
            micro_batch=world.micro_batch,
            left_out=world.left_out,
            bad_steps=world.bad_steps,
            connect_timeout_s=connect_s,
            start_timeout_s=start_s,
            save_timeout_s=options.policy.save_timeout_s,
            keep=options.keep_workers,
            known_errors=script_errors,
            nodes=len(world.members),
            error_file=str(error_file(options.log_dir, local_rank)),
            settings=options.workers,
            mirrors=tuple(r for r, keeper in keepers.items() if keeper == first + local_rank),
            mirrored_by=keepers.get(first + local_rank),
            run=max(world.run, FIRST_RUN),
            changes_inside=possible(world, options.policy),
            changes_with_nccl=options.policy.changes_inside == "on",
            **field_values(options.training),
        )
        for local_rank in range(member.nproc)
    ]


def begin_inside(
    assigned: Sequence[Assignment], world: World, following: World
) -> list[Assignment]:
    """Returns the assignments of workers that begin in a generation which others enter inside of
    their loops: they read the state of the boundary from these.

    Args:
        assigned: The assignments of the generation.
        world: World that the others leave.
        following: World of the generation.
    """
    holders = world.members if world.strategy != "ddp" else following.members[:1]
    sources = [
        Source(rank=rank, node=member.node, address=member.address)
        for place, member in enumerate(holders)
        for rank in (world.ranks(place) if world.strategy != "ddp" else (0,))
    ]
    resume = replace(following.resume, generation=world.generation, sources=tuple(sources))
    return [replace(assignment, resume=resume) for assignment in assigned]


def timeouts_s(fruitless: int) -> tuple[float, float]:
    """Returns the seconds that a worker waits for a host or a process group, and for the others'
    scripts.

    Both double after each generation without progress.
    """
    return min(CONNECT_S * 2**fruitless, CONNECT_MAX_S), min(START_S * 2**fruitless, START_MAX_S)


def snapshot_role(
    world: World, index: int, token: Secret, tls: TlsContexts | None = None
) -> SnapshotRole:
    """Returns this node's part in holding and saving the state of a generation.

    Args:
        world: World of the generation.
        index: Index of this node in its order of members.
        token: The job's token, from which the secret of the run is derived.
        tls: Contexts of the connections to other nodes; None: the job is without TLS.
    """
    sources = replica_sources(world.zones)
    other = sources[index] if sources else None
    return SnapshotRole(
        generation=world.generation,
        token=world.token,
        password=run_secret(token.reveal, world.run),
        proofs=world.proofs,
        tls=tls,
        world_size=world.world_size,
        ranks=world.ranks(index),
        replica_source=None
        if other is None
        else ReplicaSource(address=world.members[other].address, ranks=world.ranks(other)),
        bad_steps=frozenset(world.bad_steps),
        run=max(world.run, FIRST_RUN),
    )
