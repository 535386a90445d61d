"""Holds what `plan --link` says of messages against messages that are sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticzero.cli.main import main
from elasticzero.ops.cli.link_costs import WIRES, Cluster, bits_per_s, costs, formats, sent_bytes
from elasticzero.options.wire import EXACT, parse_wire
from elasticzero.parallel.wire.codecs import LowRank, encoding_of
from elasticzero.parallel.wire.sums import ChunkSum, CompressedSum, Peers
from tests.support.fake_groups import fake_group
from tests.support.threaded_ranks import FakeGroup, Message, patched

ELEMENTS = 1 << 14


def cluster(nodes: int, ranks_per_node: int) -> Cluster:
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        elements=ELEMENTS,
        element_bytes=4,
        gathered_bytes=2,
        layer=ELEMENTS,
    )


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (2, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("text", ["bf16", "int8", "int4", "topk:0.25"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_node_sends_what_its_ranks_send_to_those_of_others(
    strategy: str, text: str, nodes: int, ranks_per_node: int
) -> None:
    wire, ranks = parse_wire(text), nodes * ranks_per_node
    codec = encoding_of(wire, torch.ones(32, 32))
    assert codec is not None and not isinstance(codec, LowRank)
    sent = [0] * nodes

    class Counted(Message):
        def begin(self, group: FakeGroup) -> None:
            super().begin(group)
            source, target = (r // ranks_per_node for r in (group.local.rank, self.peer))
            if self.is_sent and source != target:
                with group.changed:
                    sent[source] += self.tensor.nbytes

    def body(rank: int) -> None:
        flat_E = torch.ones(ELEMENTS)
        peers = Peers(index=rank, group=fake_group(ranks), wire=wire)
        chunks: list[Tensor] = list(flat_E.split(ELEMENTS // ranks))
        if strategy == "ddp":
            sums: Any = CompressedSum(flat_E, codec, peers, torch.zeros(ELEMENTS))
        else:
            sums = ChunkSum(chunks, codec, peers, [torch.zeros_like(c) for c in chunks])
        sums.add_up()
        sums.finish()

    with pytest.MonkeyPatch.context() as patch:
        made = patched(FakeGroup(ranks), patch)
        patch.setattr(torch.distributed, "P2POp", Counted)
        made.run(body)
    told = sent_bytes(strategy, cluster(nodes, ranks_per_node), wire, by_node=False)
    parameters = 0 if strategy == "ddp" else 4 * ELEMENTS * (ranks - 1) // ranks
    assert sent == pytest.approx([told - parameters] * nodes, rel=0.01)


def test_what_is_not_encoded_goes_round_in_a_ring() -> None:
    """Each rank sends its neighbour all but one part of the whole, twice for a sum of all."""
    for ranks_per_node in (1, 8):
        ring = 4 * ELEMENTS * (4 * ranks_per_node - 1) / (4 * ranks_per_node)
        sizes = {
            name: sent_bytes(name, cluster(4, ranks_per_node), EXACT, by_node=False)
            for name in ("ddp", "zero1", "zero2", "zero3")
        }
        halved = {"zero3": ring + 2 * ring / 2}  # gathered in 16 bits, twice
        assert sizes == pytest.approx(dict.fromkeys(sizes, 2 * ring) | halved, rel=1e-3)
    assert sent_bytes("ddp", cluster(1, 8), EXACT, by_node=False) == 0


@pytest.mark.parametrize("text", WIRES)
def test_nodes_that_hold_all_send_as_much_however_many_ranks_they_have(text: str) -> None:
    wire = parse_wire(text)
    sizes = {sent_bytes("zero2", cluster(4, ranks), wire, by_node=True) for ranks in (1, 2, 8)}
    assert len(sizes) == 1


def test_the_format_that_loses_least_is_recommended_if_it_is_fast_enough() -> None:
    model = cluster(2, 1)
    cases = [
        (strategy, shard, wire)
        for strategy, shard in (("ddp", None), ("zero1", "world"))
        for wire in formats(EXACT, model)
    ]
    link = 8 * sent_bytes("ddp", cluster(2, 1), EXACT, by_node=False)  # one second in fp32
    for step_s, expected in ((4.1, "fp32"), (3.9, "bf16"), (1.9, "int8"), (0.9, "int4")):
        best = costs(cases, model, link, step_s)["recommended"]
        assert (best["strategy"], best["wire"]) == ("ddp", expected)
        assert best["step_s"] == step_s + best["link_s"]
    best = costs(cases, model, link, 1e-6)["recommended"]
    assert best["wire"] == "topk:0.01"
    assert costs(cases, model, link, None)["recommended"] is None


def test_what_would_be_sent_as_it_is_is_not_compared() -> None:
    large = replace(cluster(2, 1), layer=12 << 20)
    assert [str(wire) for wire in formats(EXACT, large)] == list(WIRES)
    small = replace(large, layer=1200)
    assert "powersgd:4" not in [str(wire) for wire in formats(EXACT, small)]
    halves = replace(large, element_bytes=2)
    assert formats(EXACT, halves) == [EXACT]
    asked = parse_wire("powersgd:512")
    assert formats(asked, large)[-1] == asked
    for name in ("ddp", "zero1"):
        sizes = {sent_bytes(name, large, wire, by_node=False) for wire in (EXACT, asked)}
        assert len(sizes) == 1


def test_only_what_fits_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    """A residual takes memory, and ddp keeps no masters of 16-bit parameters."""
    sizes = ["plan", "--nodes", "4", "--link", "1gbit", "--step-time", "10", "--json"]
    assert main([*sizes, "--params", "3e9", "--layer-params", "1e8"]) == 0
    rows = json.loads(capsys.readouterr().out)["link"]["rows"]
    assert {row["wire"] for row in rows if row["strategy"] == "ddp"} == {"fp32"}
    assert main([*sizes, "--params", "1e9", "--dtype", "bf16"]) == 0
    link = json.loads(capsys.readouterr().out)["link"]
    assert {row["wire"] for row in link["rows"]} == {"fp32"}
    assert link["recommended"]["strategy"] != "ddp"
    assert main([*sizes[:-1], "--params", "1e15"]) == 0
    assert "No strategy fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "speed"), [("100mbit", 1e8), ("25Gbit", 2.5e10), ("1.5 gbit/s", 1.5e9), ("9bit", 9)]
)
def test_speeds_are_written_as_tc_writes_them(text: str, speed: float) -> None:
    assert bits_per_s(text) == speed


@pytest.mark.parametrize("text", ["", "100", "0mbit", "-1mbit", "100mb", "mbit", "nanbit"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a speed such as 100mbit or 25gbit"):
        bits_per_s(text)


def test_the_plan_shows_each_format_and_recommends_one(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["plan", "--params", "10.24e6", "--layer-params", "2.56e6", "--nodes", "2"]
    assert main([*sizes, "--link", "100mbit", "--step-time", "0.4", "--wire", "topk:0.1"]) == 0
    out = capsys.readouterr().out.split("at 100mbit, by --wire:")[1]
    lines = [line.split() for line in out.splitlines()]
    assert lines[2] == ["strategy", "shard", *WIRES, "topk:0.1"]
    assert lines[3][:6] == ["ddp", "-", "3.28", "s", "1.64", "s"]
    assert "Recommended: --strategy ddp --wire powersgd:4." in out
    assert main([*sizes, "--link", "100mbit", "--json"]) == 0
    link = json.loads(capsys.readouterr().out)["link"]
    assert link["bits_per_s"] == 1e8 and link["recommended"] is None
    powersgd = {(r["strategy"], r["shard"]) for r in link["rows"] if r["wire"] == "powersgd:4"}
    assert powersgd == {("ddp", None), ("zero1", "world")}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--nodes", "2", "--step-time", "1"], "--step-time counts with --link alone"),
        (["--link", "1gbit"], "--link: one node sends nothing to others"),
        (["--nodes", "2", "--link", "fast"], "'fast' is not a speed such as 100mbit"),
        (["--nodes", "2", "--link", "1gbit", "--step-time", "0"], "'0' is not a number of seconds"),
    ],
)
def test_options_that_say_nothing_are_refused(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", "--params", "7e9", *options])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 64 and error in capsys.readouterr().err
