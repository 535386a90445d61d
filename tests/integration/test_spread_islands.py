"""Islands of several nodes: one node keeps each in the rounds, and the others follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from elasticzero.launcher.islands.places import PREFIX
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.integration.clusters import Story
from tests.integration.test_islands import (
    NONE_LAPSES,
    STREAM,
    begun_from,
    check_as_of_one_process,
    check_each_sample_counts_once,
    is_held,
    job,
    rounds_of,
    used_by,
    weights_of,
)
from tests.support.cases import slow

TWO_NODES = ("--island-nodes", "2")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def islands_in(told: Story) -> dict[tuple[str, ...], int]:
    """The nodes of each island's newest world, in the order of their ranks, and its generation."""
    newest: dict[frozenset[str], tuple[int, tuple[str, ...]]] = {}
    for node, event in told.told:
        if event["event"] == "world" and node in event["members"]:
            members = tuple(event["members"])
            for key in [*newest]:
                if key & {*members} and newest[key][0] < event["generation"]:
                    del newest[key]
            if not any(key & {*members} for key in newest):
                newest[frozenset(members)] = event["generation"], members
    return {members: generation for generation, members in newest.values()}


def places_of(told: Story, etcd: EtcdServer) -> set[str]:
    """The nodes that have a place on an island."""
    with EtcdStore([etcd.endpoint], job_prefix(told.cluster.job)) as store:
        return {entry.value.decode() for entry in store.read(PREFIX).entries.values()}


@pytest.mark.parametrize(
    ("inner", "workers"), [("ddp", 1), slow("zero2", 2), slow("zero1", 1), slow("ddp", 2)]
)
def test_two_islands_of_two_nodes_are_one_process(
    inner: str, workers: int, tmp_path: Path, etcd: EtcdServer
) -> None:
    diloco = f"every=1,outer-lr=1,outer-momentum=0,wait=60,inner={inner}"
    arguments = ("--model", "regress", "--samples", "240", "--lr", "0.05", "--pause", "0")
    name = f"spread-{inner}-{workers}"
    options = (*TWO_NODES, *NONE_LAPSES)
    with job(
        tmp_path, etcd, name, diloco, *arguments, nodes=4, workers=workers, options=options
    ) as told:
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        assert sorted(map(sorted, islands_in(told))) in (
            [["node-0", "node-1"], ["node-2", "node-3"]],
            [["node-0", "node-2"], ["node-1", "node-3"]],
            [["node-0", "node-3"], ["node-1", "node-2"]],
        )
        check_as_of_one_process(weights_of(told), 4)


@pytest.mark.parametrize(
    "diloco",
    [
        slow("every=4,wire=int8"),
        slow("every=6,fragments=2,overlap=2"),
        slow("every=4,wire=bf16"),
        slow("every=4,wire=topk:0.3"),
        slow("every=4,wire=powersgd:2"),
    ],
)
def test_nodes_of_an_island_have_the_same_bits(
    diloco: str, tmp_path: Path, etcd: EtcdServer
) -> None:
    """`--verify-replicas` ends the job where they have not."""
    options = (*TWO_NODES, "--verify-replicas", "1")
    arguments = ("--model", "regress", "--lr", "0.01", "--ballast", "20000")
    name = f"bits-{abs(hash(diloco))}"
    with job(tmp_path, etcd, name, diloco, *arguments, nodes=4, options=options) as told:
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        heads = [members[0] for members in islands_in(told)]
        used = Counter(i for n in heads for batch in used_by(told, n) for i in batch)
        assert used == Counter(range(960))
        assert rounds_of(told, etcd).samples == 960
        assert len({tuple(flat) for flat in weights_of(told).values()}) == 1


@pytest.mark.parametrize(
    ("fault", "role", "data"),
    [
        ("kill", "head", ()),
        slow("kill", "follower", ()),
        slow("kill a worker", "head", ()),
        slow("kill a worker", "follower", ()),
        slow("leave", "head", ()),
        slow("leave", "follower", ()),
        slow("kill", "head", STREAM),
        slow("leave", "follower", STREAM),
    ],
)
def test_an_island_goes_on_when_it_loses_a_node(
    fault: str, role: str, data: Sequence[str], tmp_path: Path, etcd: EtcdServer
) -> None:
    """A node that comes then takes the free place."""
    diloco = "every=5,outer-lr=1,outer-momentum=0"
    name = f"spread-{fault}-{role}-{len(data)}".replace(" ", "-")
    arguments = ("--samples", "4800", *data)
    with job(tmp_path, etcd, name, diloco, *arguments, nodes=4, options=TWO_NODES) as told:
        nodes = [*told.cluster.nodes]
        told.wait("steps of all", lambda: all(len(used_by(told, n)) > 20 for n in nodes))
        island = next(members for members in islands_in(told) if "node-1" in members)
        victim = island[0 if role == "head" else 1]
        node = told.cluster.nodes[victim]
        survivors = [n for n in nodes if n != victim]
        if fault == "kill":
            told.cluster.kill_node(node)
        elif fault == "leave":
            told.cluster.drain(node)
        else:
            told.cluster.kill_worker(node)
            survivors = nodes
        before = {n: len(used_by(told, n)) for n in survivors}
        told.wait("steps", lambda: all(len(used_by(told, n)) > before[n] + 5 for n in survivors))
        if fault != "kill a worker":
            told.wait("the free place", lambda: victim not in places_of(told, etcd))
            with told.slowed(0.5):
                told.cluster.start_node()
                told.wait("its steps", lambda: len(used_by(told, "node-4")) > 2)
            partners = [members for members in islands_in(told) if "node-4" in members]
            assert {*partners[0]} == {"node-4", *island} - {victim}
        codes = told.wait_for_end()
        assert all(code == 0 for n, code in codes.items() if n != victim), told.logs()
        check_each_sample_counts_once(told, etcd, 4800, survivors)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["ddp", "zero1"])
def test_an_island_that_was_lost_has_the_inner_optimizer_of_another(
    inner: str, tmp_path: Path, etcd: EtcdServer
) -> None:
    """One of its nodes reads it from the other's memory, and the rest from that one."""
    options = (*TWO_NODES, "--snapshot-every", "5")
    arguments = ("--model", "regress", "--adam", "--lr", "0.01", "--samples", "6000")
    name = f"spread-brings-{inner}"
    diloco = f"every=5,inner={inner}"
    with job(tmp_path, etcd, name, diloco, *arguments, nodes=4, options=options) as told:
        nodes = [*told.cluster.nodes]
        told.wait("snapshots", lambda: {*nodes} <= {n for n, e in told.told if is_held(e)})
        lost = next(members for members in islands_in(told) if "node-0" not in members)
        with told.slowed(0.5):
            for node in lost:
                told.cluster.kill_node(told.cluster.nodes[node])
            for node in lost:
                told.cluster.start_node(node)
            told.wait("its state", lambda: {(node, "ram") for node in lost} <= begun_from(told))
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        logs = [(told.directory() / node / "agent.log").read_text() for node in lost]
        assert sum("begins with what island-" in text for text in logs) == 1
        assert rounds_of(told, etcd).samples == 6000


@pytest.mark.slow
def test_islands_that_start_again_go_on_from_a_committed_round(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """One node of each copies another island's checkpoint, where its own has another name, and they
    end as islands of one node do that nothing has disturbed."""
    diloco = "every=2,outer-lr=0.7,outer-momentum=0.9,wait=60"
    arguments = ("--model", "regress", "--samples", "480", "--lr", "0.05", "--pause", "0.05")
    with job(
        tmp_path, etcd, "spread-undisturbed", diloco, *arguments, nodes=2, options=NONE_LAPSES
    ) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        undisturbed = torch.tensor(weights_of(told)["node-0"], dtype=torch.float64)
    saves = tmp_path / "saves"
    options = ("--checkpoint-dir", str(saves), "--checkpoint-every", "4", *TWO_NODES, *NONE_LAPSES)
    with job(tmp_path, etcd, "spread-killed", diloco, *arguments, nodes=4, options=options) as told:
        nodes = [*told.cluster.nodes.values()]
        told.wait("steps", lambda: all(len(used_by(told, n.name)) > 17 for n in nodes))
        for node in nodes:
            told.cluster.kill_node(node)
    for name in ("island-0", "island-1"):
        (saves / "islands" / name).rename(saves / "islands" / f"of-{name}")
    with job(tmp_path, etcd, "spread-again", diloco, *arguments, nodes=4, options=options) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        assert all(len(used_by(told, n)) < 35 for n in told.cluster.nodes)  # of 40
        for flat in weights_of(told).values():
            end = torch.tensor(flat, dtype=torch.float64)
            assert torch.allclose(end, undisturbed, rtol=0, atol=1e-9)
