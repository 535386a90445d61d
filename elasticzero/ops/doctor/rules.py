"""Judges all facts about a machine.

Pure.
"""

from __future__ import annotations

from elasticzero.ops.doctor.facts import MachineFacts
from elasticzero.ops.doctor.finding import Finding
from elasticzero.ops.doctor.machine_rules import (
    judge_clock,
    judge_gpu,
    judge_limits,
    judge_shared_memory,
    judge_versions,
)
from elasticzero.ops.doctor.path_rules import judge_path, judge_private_network
from elasticzero.ops.doctor.service_rules import (
    judge_cloud,
    judge_etcd,
    judge_peer,
    judge_port,
    judge_storage,
)


def findings(facts: MachineFacts) -> list[Finding]:
    """Returns all findings, in the order in which they are printed."""
    return [
        *judge_versions(facts.versions),
        *judge_etcd(facts.etcd),
        judge_port(facts.port),
        *(judge_peer(peer) for peer in facts.peers),
        *([] if facts.network is None else [judge_private_network(facts.network)]),
        *(judge_path(path) for path in facts.paths),
        judge_shared_memory(facts.memory),
        *judge_storage(facts.storage),
        judge_gpu(facts.gpu),
        *judge_limits(facts.limits, facts.memory),
        judge_clock(facts.clock_synchronized),
        judge_cloud(facts.cloud),
    ]
