"""When states are compared, what a difference leads to, and what counts after it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.comm.control import ControlWord, decode_word, encode_word
from elasticzero.consistency.differences import by_majority
from elasticzero.consistency.replicas import (
    LONGEST_EVERY,
    SHARE,
    ReplicaVerifier,
    SigningInterval,
    StateDigest,
)
from elasticzero.data.position import DataPosition
from elasticzero.errors import ReplicaMismatch, UserError
from elasticzero.ipc.agent_client import STANDALONE
from elasticzero.ipc.assignment import Resume
from elasticzero.launcher.protocol.documents import Failure, Holding, Member, Report, World
from elasticzero.launcher.protocol.failure_policy import QUARANTINE_STRIKES, outliers, strikes
from elasticzero.launcher.protocol.resume import choose_resume, describe_incomplete_snapshot
from elasticzero.launcher.protocol.termination import refuse_unverified_state
from elasticzero.parallel.mesh import Mesh
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.digests import combined, digests

NODES = ("a", "b", "c")
MEMBERS = tuple(Member(node, f"i{node}", node, 1, 2, 1) for node in NODES)
FRESH = Resume(tier="fresh")
START = Resume(tier="ram", step=20, generation=3)
DIFFERS = Failure(rank=1, blame="environment", message="differs", step=57, verified=50)


def world(resume: Resume = FRESH, strategy: str = "ddp") -> World:
    return World(
        generation=4,
        token="t",
        members=MEMBERS,
        strategy=strategy,
        resume=resume,
        reason="",
        trained=3,
    )


def report(node: str, *holdings: Holding, failure: Failure | None = None) -> Report:
    return Report(
        incarnation=f"i{node}", phase="stopped", holdings=holdings, failure=failure, final_step=57
    )


def whole(step: int, generation: int = 4) -> Holding:
    return Holding(generation=generation, step=step, world_size=1, ranks=(0,))


def parts(step: int, generation: int = 4) -> Holding:
    return Holding(generation=generation, step=step, world_size=3, ranks=(0, 1, 2))


@pytest.mark.parametrize(
    ("resume", "holdings", "storage", "verified", "expected"),
    [
        pytest.param(FRESH, [parts(40), parts(55)], None, 50, ("ram", 40), id="not the newest"),
        pytest.param(FRESH, [parts(40)], 48, 50, ("storage", 48), id="a newer checkpoint"),
        pytest.param(FRESH, [whole(57)], 48, 50, ("storage", 48), id="not the majority's own"),
        pytest.param(FRESH, [whole(57)], None, 50, ("ram", 57), id="the majority's, if nothing is"),
        pytest.param(FRESH, [parts(55)], None, 50, ("fresh", 0), id="unverified parts never"),
        pytest.param(FRESH, [whole(2)], None, 0, ("fresh", 0), id="at the beginning"),
        pytest.param(START, [whole(20, 3)], None, 50, ("ram", 20), id="what it started from"),
        pytest.param(
            START, [whole(20, 3), whole(57)], None, 50, ("ram", 57), id="the majority's before that"
        ),
        pytest.param(
            START, [whole(20, 3)], 10, 50, ("ram", 20), id="the start, newer than a checkpoint"
        ),
    ],
)
def test_what_counts_after_ranks_were_found_to_differ(
    resume: Resume,
    holdings: list[Holding],
    storage: int | None,
    verified: int,
    expected: tuple[str, int],
) -> None:
    reports = {
        "a": report("a", *holdings),
        "b": report("b", failure=replace(DIFFERS, verified=verified)),
        "c": report("c"),
    }
    chosen = choose_resume(world(resume), reports, storage)
    assert (chosen.tier, chosen.step) == expected
    lost = describe_incomplete_snapshot(world(resume), reports, chosen)
    assert lost == (
        ""
        if chosen.tier == "ram"
        else f"; the ranks were last found to be equal at step {verified}"
    )
    ended = refuse_unverified_state(reports, chosen, ("b", DIFFERS))
    assert (ended is not None) == (chosen.tier == "fresh" and verified > 0)


def test_without_a_difference_the_newest_state_counts() -> None:
    reports = {"a": report("a", parts(40), parts(55))}
    assert choose_resume(world(), reports, 48).step == 55


def test_an_odd_rank_s_node_is_set_aside_if_others_suffice() -> None:
    lost = Failure(rank=0, blame="peer", message="a rank differs")
    odd = replace(DIFFERS, odd=True)
    reports = {
        "a": report("a", failure=lost),
        "b": report("b", failure=odd),
        "c": report("c", failure=lost),
    }
    assert outliers(world(), reports, NODES, 2) == {"b": odd}
    assert outliers(world(), reports, NODES, 3) == {}
    (struck,) = strikes(world(), reports, 1.0, {"b": odd})
    assert (struck.node, struck.count) == ("b", QUARANTINE_STRIKES)
    both = {node: report(node, failure=DIFFERS) for node in NODES}
    assert outliers(world(), both, NODES, 1) == {}


def test_digests_differ_iff_their_maxima_are_no_complements() -> None:
    def heard(*digests: int | None) -> ControlWord:
        encoded = [
            encode_word(ControlWord(digest=digest), rank) for rank, digest in enumerate(digests)
        ]
        return decode_word([max(column) for column in zip(*encoded, strict=True)])

    top = (1 << 62) - 1
    for alike in ([None, None], [0, 0, 0], [5, 5], [top, top]):
        assert heard(*alike).digests_equal
    for unlike in ([0, 1], [5, 5, 6], [top, 0], [top, top - 1, top]):
        assert not heard(*unlike).digests_equal


def test_verifying_stays_below_its_share_of_the_time() -> None:
    interval, now_s = SigningInterval(), 100.0
    for step, step_s in enumerate([1.0, 0.010, 0.012, 5.0, 0.011, 0.011], 1):
        assert interval.proposed == 0 or step > 2
        now_s += 0.001
        interval.digested(10 * step, now_s - 0.001, now_s)
        now_s += 10 * step_s
    interval.digested(70, now_s, now_s + 0.001)
    every = interval.proposed
    assert 0.001 / (every * 0.0115) <= SHARE < 0.001 / ((every - 1) * 0.0115)
    assert SHARE < 0.001
    for step in range(71, 90):
        interval.digested(step, now_s, now_s + 0.001)
        now_s += 0.001
    assert interval.proposed == LONGEST_EVERY


class Row:
    """Stands for the ranks of one row, of which each knows its own number."""

    def __init__(self, shards: list[Tensor]) -> None:
        self.numbers = [combined(digests({"state": shard})) for shard in shards]

    def sum_of_row(self, tensor: Tensor) -> Tensor:
        assert [n for n in tensor.tolist() if n] in [[number] for number in self.numbers]
        return torch.tensor(self.numbers)


def test_a_shard_that_differs_makes_its_whole_node_differ() -> None:
    """Three nodes of two ranks each; one element of node 1's second shard is wrong."""
    tables = []
    copy = AuxiliaryState(torch.device("cpu")).capture(1, DataPosition())
    for rank in range(6):
        node, shard = divmod(rank, 2)
        shards = list(torch.arange(6.0).view(2, 3).clone())
        shards[1][0] += 1e-6 if node == 1 else 0.0
        row: Any = Row(shards)
        mesh = Mesh(shard=shard, shards=2, replica=node, replicas=3)
        held = (mesh, {"state": shards[shard]})
        assignment = replace(STANDALONE, world_size=6, rank=rank)
        verifier = ReplicaVerifier(row, assignment, dict, lambda held=held: held)  # type: ignore[misc]
        tables.append(verifier._take_digest(copy).table)
    assert by_majority(tables).odd == (2, 3)
    assert by_majority(tables).names == ("shard 1",)


def test_the_digest_is_that_of_a_rank_of_the_release_before() -> None:
    """Which keeps no `global_batch` in the position; another position still differs."""
    nothing: dict[str, Tensor] = {}
    verifier = ReplicaVerifier(None, STANDALONE, dict, lambda: (Mesh.of_world(0, 1), nothing))
    auxiliary, before = AuxiliaryState(torch.device("cpu")), DataPosition(offset=12, steps=3)
    tables = [
        verifier._take_digest(auxiliary.capture(3, position)).table
        for position in (before, replace(before, global_batch=4), replace(before, offset=13))
    ]
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.parametrize(
    ("names", "kind", "text"),
    [
        (["optimizer/options"], UserError, "options of the optimizers' groups, as lr, are not"),
        (["tracked/plateau", "optimizer/options"], UserError, "take session.loss"),
        (["tracked/plateau"], UserError, "a tracked object is not the same"),
        (["model/weight", "optimizer/options"], ReplicaMismatch, "A script does so that sets"),
    ],
)
def test_what_a_script_alone_sets_is_its_own_mistake(
    names: list[str], kind: type[Exception], text: str
) -> None:
    """A schedule that follows a rank's own loss was taken for processors of different kinds."""
    tables = [dict.fromkeys(names, rank) for rank in range(2)]
    reports = [
        {"node": "ab"[rank], "table": {n: f"digest {d:016x}" for n, d in table.items()}}
        for rank, table in enumerate(tables)
    ]
    groups: Any = SimpleNamespace(exchange=lambda _: [json.dumps(r).encode() for r in reports])
    assignment = replace(STANDALONE, world_size=2)
    verifier = ReplicaVerifier(groups, assignment, dict, lambda: (Mesh.of_world(0, 1), {}))
    verifier._compared = StateDigest(4, tables[0], 0)
    with pytest.raises(kind, match=text):
        verifier.raise_difference()
