"""Has an island's agent begin with the state of another island, before it registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol, TypeVar

from elasticzero.checkpoint.ram.store import SnapshotStore
from elasticzero.launcher.agent.config import AgentOptions
from elasticzero.launcher.agent.console import log_for_node
from elasticzero.launcher.agent.extensions.island import IslandInEtcd
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import is_answering, open_files, query_agent
from elasticzero.launcher.islands.newcomers.beginning import (
    Newcomer,
    Places,
    begin_as_others,
    one_node_at_a_time,
)
from elasticzero.launcher.islands.newcomers.from_memory import Reach
from elasticzero.launcher.protocol.view import PreemptionNotice
from elasticzero.launcher.store.membership import Membership
from elasticzero.options.diloco import FOLDER

T = TypeVar("T")


class Retry(Protocol):
    """Repeats a call while the store does not answer."""

    def __call__(self, call: Callable[[], T]) -> T: ...


class PreparedAgent(Protocol):
    """Is an agent that has not registered yet."""

    options: AgentOptions
    snapshots: SnapshotStore

    @property
    def access(self) -> AgentAccess:
        """Returns how the job's agents are reached."""

    @property
    def notice(self) -> PreemptionNotice | None:
        """Returns why this node is to leave; None: it is not to leave."""


@contextmanager
def begun_as_others(
    in_etcd: IslandInEtcd, membership: Membership, agent: PreparedAgent, retry: Retry
) -> Iterator[None]:
    """Gives an island of which no node is there the state of another one, and has its other nodes
    wait until the context ends, when this one is registered.

    Args:
        in_etcd: What the agent has of etcd.
        membership: Registers the node.
        agent: The agent.
        retry: Repeats a call while the store does not answer.
    """
    options, island = agent.options, str(agent.options.island)
    saves = options.training.checkpoint_dir
    newcomer = Newcomer(
        node=options.node,
        island=island,
        workers=options.nproc,
        job_saves=None if saves is None else saves.removesuffix(f"/{FOLDER}/{island}"),
        saves=saves,
    )
    reach = Reach(
        ask=lambda member, path, timeout_s: query_agent(member, agent.access, path, timeout_s),
        open=lambda address, run, folder: open_files(address, run, folder, agent.access),
        answers=lambda member: is_answering(member, agent.access),
        cancelled=lambda: agent.notice is not None,
    )
    places = Places(
        job=lambda key: retry(lambda: in_etcd.job.read(key)).entries,
        island=lambda key: retry(lambda: in_etcd.island.read(key)).entries,
        reach=reach,
        snapshots=agent.snapshots,
    )
    ttl_s = int(options.policy.lease_ttl_s)
    alone = partial(
        one_node_at_a_time, in_etcd.island, options.node, ttl_s, lambda: agent.notice is not None
    )
    with ExitStack() as stack:
        retry(lambda: stack.enter_context(alone()))
        brought = begin_as_others(newcomer, places, partial(log_for_node, options.node))
        if brought is not None:
            membership.brings(brought.step, brought.shards)
        yield
