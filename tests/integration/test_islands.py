"""Islands that average what they have learnt: real agents and workers, through real faults."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero.data.sampling import SampleOrder
from elasticzero.errors import ExitCode
from elasticzero.launcher.islands.documents import STATE
from elasticzero.launcher.protocol.rounds.documents import Rounds
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from tests.integration.clusters import SCRIPTS, Story, story
from tests.integration.island_phases import RoundsWatch, cells, send_all, strike
from tests.integration.scripts import islands
from tests.support.cases import slow

SCRIPT = SCRIPTS / "islands.py"
NONE_LAPSES = ("--lease-ttl", "60")
"""For runs that are compared with an undisturbed one: an island that a busy machine holds up for
longer than its lease is left out of a round."""


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@contextmanager
def job(
    tmp_path: Path,
    etcd: EtcdServer,
    name: str,
    diloco: str,
    *arguments: str,
    nodes: int = 3,
    workers: int = 1,
    options: Sequence[str] = (),
) -> Iterator[Story]:
    line = ["--strategy", "diloco", "--diloco", diloco, "--lease-ttl", "2"]
    line += ["--nproc-per-node", str(workers), *options]
    line += ["--nnodes", f"{nodes}:{nodes + 1}", str(SCRIPT), *arguments]
    with story(tmp_path, etcd.endpoint, name, line, nodes=nodes) as told:
        yield told


def lines_of(told: Story, node: str) -> list[dict[str, Any]]:
    path = told.directory() / node / "0.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def used_by(told: Story, node: str) -> list[list[int]]:
    return [line["used"] for line in lines_of(told, node) if "used" in line]


def weights_of(told: Story) -> dict[str, list[float]]:
    """What each island ended with that has come to the end."""
    ends = {node: lines_of(told, node)[-1:] for node in told.cluster.nodes}
    return {node: end[0]["weights"] for node, end in ends.items() if end and "weights" in end[0]}


def rounds_of(told: Story, etcd: EtcdServer) -> Rounds:
    """What the islands have agreed on last."""
    store = EtcdStore([etcd.endpoint], job_prefix(told.cluster.job))
    try:
        rounds: Rounds = document(Rounds, store.read(STATE).entries[STATE].value)
        return rounds
    finally:
        store.close()


def check_each_sample_counts_once(
    told: Story, etcd: EtcdServer, samples: int, survivors: Sequence[str]
) -> None:
    """All samples have a weight, so each counts at least once; and no more were counted."""
    weights = weights_of(told)
    assert {*weights} >= {*survivors}, told.logs()
    assert len({tuple(flat) for flat in weights.values()}) == 1, "islands end with other weights"
    (flat,) = {tuple(flat) for flat in weights.values()}
    assert len(flat) == samples
    assert min(flat) > 0, "a sample counts nowhere"
    rounds = rounds_of(told, etcd)
    assert rounds.done
    assert rounds.samples == samples


@pytest.mark.parametrize(
    "diloco",
    [
        "every=5,outer-lr=1,outer-momentum=0",
        slow("every=6,outer-lr=1,outer-momentum=0,overlap=2,alpha=0.5"),
        slow("every=6,outer-lr=1,outer-momentum=0,fragments=2"),
        slow("every=1,outer-lr=1,outer-momentum=0,quorum=0.5"),
        "every=4,wire=int8,inner=zero2",
        slow("every=4,fragments=2,wire=bf16"),
        slow("every=4,wire=topk:0.2"),
        slow("every=4,wire=powersgd:2"),
    ],
)
def test_islands_divide_the_samples_and_end_alike(
    diloco: str, tmp_path: Path, etcd: EtcdServer
) -> None:
    # The second has several parameters, and what is rounded counts no samples.
    model = "count" if "fragments" not in diloco and "wire" not in diloco else "regress"
    name = f"plain-{abs(hash(diloco))}"
    arguments = ("--model", model, "--lr", "0.01")
    workers = 2 if "zero2" in diloco else 1
    with job(tmp_path, etcd, name, diloco, *arguments, workers=workers) as told:
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        used = Counter(i for n in told.cluster.nodes for batch in used_by(told, n) for i in batch)
        assert used == Counter(range(960))
        assert rounds_of(told, etcd).samples == 960
        if model == "count":
            check_each_sample_counts_once(told, etcd, 960, [*told.cluster.nodes])
        assert len({tuple(flat) for flat in weights_of(told).values()}) == 1


@pytest.mark.parametrize(
    ("inner", "workers", "virtual"),
    [
        ("ddp", 1, ()),
        slow("ddp", 2, ()),
        ("zero2", 2, ()),
        slow("zero1", 3, ()),
        ("zero3", 2, ()),
        slow("ddp", 2, ("--virtual", "2")),
        slow("zero1", 2, ("--virtual", "4")),
    ],
)
def test_two_islands_that_average_each_step_are_one_process(
    inner: str, workers: int, virtual: Sequence[str], tmp_path: Path, etcd: EtcdServer
) -> None:
    diloco = f"every=1,outer-lr=1,outer-momentum=0,wait=60,inner={inner}"
    arguments = ("--model", "regress", "--samples", "240", "--lr", "0.05", "--pause", "0", *virtual)
    name = f"alike-{inner}-{workers}-{len(virtual)}"
    with job(
        tmp_path, etcd, name, diloco, *arguments, nodes=2, workers=workers, options=NONE_LAPSES
    ) as told:
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        check_as_of_one_process(weights_of(told), 2)


def check_as_of_one_process(ends: Mapping[str, list[float]], nodes: int) -> None:
    """Islands that average each step of 12 of 240 samples have computed what one process does."""
    model = islands.Regression(240)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    index_N, x_NF, y_N1 = islands.dataset(240).tensors
    order = SampleOrder(samples=240)
    for start in range(0, 240, 12):
        batch = torch.from_numpy(order.indices(0, start, start + 12))
        optimizer.zero_grad()
        model.loss(index_N[batch], x_NF[batch], y_N1[batch]).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert len(ends) == nodes
    for flat in ends.values():
        end = torch.tensor(flat, dtype=torch.float64)
        assert torch.allclose(end, expected, rtol=0, atol=1e-9), (end - expected).abs().max()


def test_islands_that_start_again_go_on_from_a_committed_round(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """With its outer momentum, whatever the nodes' names are: they end as if nothing had been."""
    diloco = "every=2,outer-lr=0.7,outer-momentum=0.9,wait=60"
    arguments = ("--model", "regress", "--samples", "480", "--lr", "0.05", "--pause", "0.05")
    ends = []
    for case in ("undisturbed", "killed"):
        saves = ["--checkpoint-dir", str(tmp_path / case), "--checkpoint-every", "4", *NONE_LAPSES]
        with job(tmp_path, etcd, case, diloco, *arguments, nodes=2, options=saves) as told:
            if case == "killed":
                told.wait(
                    "steps", lambda: all(len(used_by(told, n)) > 17 for n in told.cluster.nodes)
                )
                for node in told.cluster.nodes.values():
                    told.cluster.kill_node(node)
                folder = tmp_path / case / "islands"
                for name in told.cluster.nodes:
                    (folder / name).rename(folder / f"of-{name}")
            else:
                assert set(told.wait_for_end().values()) == {0}, told.logs()
                ends.append(weights_of(told))
    with job(tmp_path, etcd, "again", diloco, *arguments, nodes=2, options=saves) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        ends.append(weights_of(told))
        assert all(len(used_by(told, n)) < 35 for n in told.cluster.nodes)  # of 40
    undisturbed, again = (torch.tensor(end["node-0"], dtype=torch.float64) for end in ends)
    assert torch.allclose(again, undisturbed, rtol=0, atol=1e-9), (again - undisturbed).abs().max()


def test_islands_go_on_where_a_job_without_them_was(tmp_path: Path, etcd: EtcdServer) -> None:
    saves = ["--checkpoint-dir", str(tmp_path / "saves"), "--checkpoint-every", "4"]
    script = [str(SCRIPT), "--model", "regress", "--samples", "480", "--lr", "0.05"]
    options = [*saves, "--strategy", "zero1", "--nnodes", "2", *script, "--pause", "0.1"]
    with story(tmp_path, etcd.endpoint, "before", options, nodes=2) as told:
        told.wait("steps", lambda: len(used_by(told, "node-0")) > 13)
        for node in told.cluster.nodes.values():
            told.cluster.kill_node(node)
    arguments = ("--model", "regress", "--samples", "480", "--lr", "0.05")
    with job(tmp_path, etcd, "after", "every=3", *arguments, nodes=2, options=saves) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        used = sorted(i for n in told.cluster.nodes for batch in used_by(told, n) for i in batch)
        assert rounds_of(told, etcd).samples == 480
    order = SampleOrder(samples=480).indices(0, 0, 480).tolist()
    assert used == sorted(order[480 - len(used) :])
    assert 300 <= len(used) <= 480 - 12 * 12


def test_a_job_without_islands_goes_on_where_an_island_was(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """With all samples behind the first that is in no committed round, and some others again."""
    saves = ["--checkpoint-dir", str(tmp_path / "saves"), "--checkpoint-every", "4"]
    arguments = ("--model", "regress", "--samples", "480", "--lr", "0.05")
    slowly = (*arguments, "--pause", "0.1")
    with job(tmp_path, etcd, "islands", "every=3", *slowly, nodes=2, options=saves) as told:
        told.wait("steps", lambda: len(used_by(told, "node-0")) > 20)
        for node in told.cluster.nodes.values():
            told.cluster.kill_node(node)
    saves[1] = str(tmp_path / "saves" / "islands" / "node-0")
    options = [*saves, "--strategy", "zero2", "--nnodes", "2", str(SCRIPT), *arguments]
    with story(tmp_path, etcd.endpoint, "without", options, nodes=2) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        used = sorted(i for batch in used_by(told, "node-0") for i in batch)
        logs = [told.directory() / node / "0.log" for node in told.cluster.nodes]
        lines = re.findall("without islands, from sample .*", "".join(p.read_text() for p in logs))
        assert len(lines) == 1 and f"from sample {480 - len(used)} of epoch 0" in lines[0]
    order = SampleOrder(samples=480).indices(0, 0, 480).tolist()
    assert used == sorted(order[480 - len(used) :])
    assert 48 <= len(used) <= 480 - 8 * 12


@pytest.mark.parametrize(
    "fault",
    ["kill the lead", "kill a worker", slow("kill another"), slow("freeze"), slow("leave")],
)
def test_the_others_go_on_whatever_becomes_of_an_island(
    fault: str, tmp_path: Path, etcd: EtcdServer
) -> None:
    diloco = "every=5,outer-lr=1,outer-momentum=0"
    arguments = ("--samples", "3600")
    with job(tmp_path, etcd, fault.replace(" ", "-"), diloco, *arguments) as told:
        nodes = [*told.cluster.nodes]
        told.wait("steps of all", lambda: all(len(used_by(told, n)) > 20 for n in nodes))
        lead = next(
            n for n in nodes if "round 1: " in (told.directory() / n / "agent.log").read_text()
        )
        victim = lead if fault != "kill another" else next(n for n in nodes if n != lead)
        node = told.cluster.nodes[victim]
        survivors = [n for n in nodes if n != victim]
        if fault.startswith("kill a "):
            told.cluster.kill_worker(node)
            survivors = nodes
        elif fault.startswith("kill"):
            told.cluster.kill_node(node)
        elif fault == "leave":
            told.cluster.drain(node)
        else:
            send_all(node, signal.SIGSTOP)
        before = {n: len(used_by(told, n)) for n in survivors}
        told.wait("steps", lambda: all(len(used_by(told, n)) > before[n] + 5 for n in survivors))
        if fault == "freeze":
            send_all(node, signal.SIGCONT)
        codes = told.wait_for_end()
        assert all(codes[n] == 0 for n in survivors), told.logs()
        check_each_sample_counts_once(told, etcd, 3600, survivors)


STREAM = ("--shards", "16", "--readers", "16")


def used_in(told: Story) -> Counter[int]:
    """The samples of a stream that all ranks of all islands have used."""
    logs = [p for n in told.cluster.nodes for p in (told.directory() / n).glob("[0-9].log")]
    lines = [line for path in logs for line in path.read_text().splitlines()]
    whole = (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}"))
    return Counter(i for line in whole for i in line.get("used", ()))


@pytest.mark.parametrize(
    ("diloco", "workers"),
    [
        slow("every=5,outer-lr=1,outer-momentum=0", 1),
        ("every=4,inner=zero2,outer-lr=1,outer-momentum=0", 2),
        slow("every=6,outer-lr=1,outer-momentum=0,overlap=2", 1),
    ],
)
def test_islands_divide_a_stream_and_end_alike(
    diloco: str, workers: int, tmp_path: Path, etcd: EtcdServer
) -> None:
    name, arguments = f"stream-{abs(hash(diloco))}", (*STREAM, "--epochs", "2")
    with job(tmp_path, etcd, name, diloco, *arguments, workers=workers) as told:
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        used = used_in(told)
        if workers == 1:  # else a rank without a sample in some step is given any
            assert used == Counter([*range(960)] * 2)
        assert {*used} == {*range(960)}
        assert rounds_of(told, etcd).samples == 1920
        (flat,) = {tuple(flat) for flat in weights_of(told).values()}
        assert min(flat) > 0, "a sample counts nowhere"


@pytest.mark.parametrize("fault", ["kill the lead", slow("kill a worker")])
def test_the_readers_of_a_lost_island_go_on_on_others(
    fault: str, tmp_path: Path, etcd: EtcdServer
) -> None:
    diloco = "every=5,outer-lr=1,outer-momentum=0"
    with job(
        tmp_path, etcd, f"stream-{fault.replace(' ', '-')}", diloco, "--samples", "2400", *STREAM
    ) as told:
        nodes = [*told.cluster.nodes]
        told.wait("steps of all", lambda: all(len(used_by(told, n)) > 20 for n in nodes))
        lead = next(
            n for n in nodes if "round 1: " in (told.directory() / n / "agent.log").read_text()
        )
        if fault == "kill a worker":
            told.cluster.kill_worker(told.cluster.nodes[lead])
        else:
            told.cluster.kill_node(told.cluster.nodes[lead])
            nodes.remove(lead)
        codes = told.wait_for_end()
        assert all(codes[n] == 0 for n in nodes), told.logs()
        check_each_sample_counts_once(told, etcd, 2400, nodes)


@pytest.mark.slow
def test_a_job_on_a_stream_goes_on_with_islands_and_again_without(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """Islands go on where all readers were; without them the epoch begins anew."""
    saves = ["--checkpoint-dir", str(tmp_path / "saves"), "--checkpoint-every", "4"]
    arguments = ("--model", "regress", "--samples", "960", "--lr", "0.05", *STREAM)
    slowly = (*arguments, "--pause", "0.1")
    options = [*saves, "--strategy", "zero1", "--nnodes", "2", str(SCRIPT), *slowly]

    def kill(told: Story, steps: int) -> Counter[int]:
        told.wait("steps", lambda: len(used_by(told, "node-0")) > steps)
        for node in told.cluster.nodes.values():
            told.cluster.kill_node(node)
        return used_in(told)

    with story(tmp_path, etcd.endpoint, "stream-before", options, nodes=2) as told:
        kill(told, 13)
    with job(tmp_path, etcd, "on-islands", "every=3", *slowly, nodes=2, options=saves) as told:
        on_islands = kill(told, 20)
    with job(
        tmp_path, etcd, "islands-again", "every=3", *arguments, nodes=2, options=saves
    ) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        again = used_in(told)
        assert rounds_of(told, etcd).samples == 960
    assert max(again.values()) == 1 and max(on_islands.values()) == 1
    assert len(on_islands | again) <= 960 - 12 * 12
    assert len(again) <= 960 - 12 * 12 - 8 * 12
    saves[1] = str(tmp_path / "saves" / "islands" / "node-0")
    options = [*saves, "--strategy", "zero2", "--nnodes", "2", str(SCRIPT), *arguments]
    with story(
        tmp_path, etcd.endpoint, "stream-without", [*options, "--epochs", "2"], nodes=2
    ) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        used = used_in(told)  # in the second epoch; the first was committed
        assert {*used} == {*range(960)}
        # A rank without a sample in some step is given any.
        assert sum(count == 1 for count in used.values()) > 950


@pytest.mark.parametrize("workers", [slow(1), 2])
def test_an_island_that_waits_leaves_when_it_is_told_to(
    workers: int, tmp_path: Path, etcd: EtcdServer
) -> None:
    """Its ranks look for that together."""
    diloco = "every=2,outer-lr=1,outer-momentum=0,wait=600"
    arguments = ("--model", "regress", "--samples", "2400", "--lr", "0.01")
    ttl = ("--lease-ttl", "120")  # so that the other island is not taken for gone
    with job(
        tmp_path,
        etcd,
        f"waits-{workers}",
        diloco,
        *arguments,
        nodes=2,
        workers=workers,
        options=ttl,
    ) as told:
        nodes = told.cluster.nodes
        told.wait("steps", lambda: all(len(used_by(told, n)) > 4 for n in nodes))
        send_all(nodes["node-1"], signal.SIGSTOP)
        steps = [0, 1]
        while steps[-1] != steps[-2]:  # until it waits
            time.sleep(0.5)
            steps.append(len(used_by(told, "node-0")))
        told.cluster.drain(nodes["node-0"])
        told.wait("the end of the island that waits", lambda: not nodes["node-0"].running)
        assert nodes["node-0"].process.returncode == ExitCode.LEFT, told.logs()
        reasons = [e["reason"] for n, e in told.told if (n, e["event"]) == ("node-0", "round")]
        assert reasons[-1] == "all stopped at a boundary", "it waits for as long as it can"
        send_all(nodes["node-1"], signal.SIGKILL)


def test_an_island_that_comes_takes_the_state_of_the_others(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    diloco = "every=5,outer-lr=1,outer-momentum=0"
    with job(tmp_path, etcd, "comes", diloco, "--samples", "6000", nodes=2) as told:
        told.wait("steps", lambda: all(len(used_by(told, n)) > 20 for n in told.cluster.nodes))
        with told.slowed(0.5):
            told.cluster.start_node()
            told.wait("its steps", lambda: len(used_by(told, "node-2")) > 2)
        told.wait("further steps", lambda: len(used_by(told, "node-2")) > 20)
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        first = next(line["step"] for line in lines_of(told, "node-2") if "used" in line)
        assert first > 10, "a newcomer's step count goes on where those of the others are"
        check_each_sample_counts_once(told, etcd, 6000, [*told.cluster.nodes])


@pytest.mark.parametrize(
    ("inner", "workers"), [("ddp", 1), slow("ddp", 2), slow("zero2", 2), slow("zero3", 2)]
)
def test_an_island_that_comes_has_the_inner_optimizer_of_another(
    inner: str, workers: int, tmp_path: Path, etcd: EtcdServer
) -> None:
    """From the other's memory, whether it is new, or was lost and has nothing left."""
    diloco = f"every=5,inner={inner}"
    arguments = ["--model", "regress", "--adam", "--lr", "0.01", "--samples", "2400"]
    arguments += ["--tells-adam"] * (inner == "ddp")
    name = f"brings-{inner}-{workers}"
    every = ("--snapshot-every", "5")
    with job(
        tmp_path, etcd, name, diloco, *arguments, nodes=2, workers=workers, options=every
    ) as told:
        told.wait("snapshots", lambda: len({node for node, e in told.told if is_held(e)}) == 2)
        with told.slowed(0.5):
            told.cluster.start_node()
            told.wait("its steps", lambda: len(used_by(told, "node-2")) > 2)
            told.cluster.kill_node(told.cluster.nodes["node-1"])
            told.cluster.start_node("node-1")
            told.wait("its state", lambda: ("node-1", "ram") in begun_from(told))
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        began = {*product(["node-0", "node-1"], ["fresh"]), *product(["node-1", "node-2"], ["ram"])}
        assert begun_from(told) == began
        if inner == "ddp":
            assert begun(told, "node-0") == [0]
            assert begun(told, "node-2")[0] > 5, told.logs()
            assert begun(told, "node-1")[1] > 5, told.logs()
        assert rounds_of(told, etcd).samples == 2400


@pytest.mark.parametrize("workers", [slow(1), 2])
def test_each_epoch_ends_once_on_each_island(
    workers: int, tmp_path: Path, etcd: EtcdServer
) -> None:
    """Once all of its samples are in rounds. On an island that comes those end that have not ended
    in the state that it begins with."""
    arguments = ("--model", "regress", "--lr", "0.01", "--samples", "240", "--epochs", "9")
    name = f"epochs-{workers}"
    with job(
        tmp_path, etcd, name, "every=4", *arguments, "--tells-epochs", nodes=2, workers=workers
    ) as told:
        told.wait("epochs", lambda: all(ended_on(told, n) for n in told.cluster.nodes))
        with told.slowed(0.2):
            told.cluster.start_node()
            told.wait("its steps", lambda: len(used_by(told, "node-2")) > 2)
        codes = told.wait_for_end()
        assert set(codes.values()) == {0}, told.logs()
        for node in ("node-0", "node-1"):
            assert ended_on(told, node) == list(range(9)), told.logs()
        late = ended_on(told, "node-2")
        assert late and late == list(range(9))[-len(late) :], told.logs()
        assert rounds_of(told, etcd).samples == 9 * 240


@pytest.mark.timeout(180)
@pytest.mark.parametrize("trainer", [slow("transformers"), slow("lightning")])
def test_trainers_train_on_islands(trainer: str, tmp_path: Path, etcd: EtcdServer) -> None:
    line = ["--strategy", "diloco", "--diloco", "every=4", "--nnodes", "2:2"]
    script = SCRIPTS / f"{trainer}_trainer.py"
    line += [str(script), str(tmp_path / "output"), "--global-batch", "16", "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, f"trainer-{trainer}", line, nodes=2) as told:
        assert set(told.wait_for_end().values()) == {0}, told.logs()
        rounds = rounds_of(told, etcd)
        assert rounds.done and rounds.samples == rounds.order.total > 300


def ended_on(told: Story, node: str) -> list[int]:
    """The epochs for whose end a node's first worker has called the script's function."""
    return [line["ended"] for line in lines_of(told, node) if "ended" in line]


def is_held(event: Mapping[str, Any]) -> bool:
    return event["event"] == "kept" and event["error"] is None and event["step"] > 5


def begun_from(told: Story) -> set[tuple[str, str]]:
    """From where the workers of each node had their first state."""
    return {(node, e["tier"]) for node, e in told.told if e["event"] == "restored"}


def begun(told: Story, node: str) -> list[int]:
    """With how many steps of its optimizer each of a node's first workers began."""
    return [line["adam_steps"] for line in lines_of(told, node) if "adam_steps" in line]


DRAWN = {("kill", "one island has the result", "lead")}
"""The cells that `make test` plays; `make slow` plays all."""


@pytest.mark.parametrize(
    ("fault", "phase", "role"), [cell if cell in DRAWN else slow(*cell) for cell in cells()]
)
def test_a_fault_in_each_phase_of_a_round(
    fault: str, phase: str, role: str, tmp_path: Path, etcd: EtcdServer
) -> None:
    diloco = "every=5,outer-lr=1,outer-momentum=0"
    name = re.sub(r"\W+", "-", f"{fault}-{phase}-{role}")
    arguments = ("--samples", "4800", "--ballast", str(1 << 21))  # a round takes some 0.1 s
    hold, newcomer = tmp_path / "hold", "node-3"
    with job(tmp_path, etcd, name, diloco, *arguments) as told:
        if fault == "join":
            hold.touch()
            told.cluster.environment = {**told.cluster.environment, "TESTER_HOLD": str(hold)}
            with told.slowed(0.5):
                told.cluster.start_node()
                told.wait(
                    "the newcomer", lambda: any("holds" in x for x in lines_of(told, newcomer))
                )
        watch = RoundsWatch(etcd.endpoint, told.cluster.job)
        try:
            victim = watch.wait_for_victim(phase, role, 1, newcomer)
        finally:
            watch.close()
        ends_too = strike(told.cluster, victim, fault, hold)
        survivors = [n for n in told.cluster.nodes if ends_too or n != victim]
        before = {n: len(used_by(told, n)) for n in survivors}
        told.wait("steps", lambda: all(len(used_by(told, n)) > before[n] + 5 for n in survivors))
        if fault == "freeze":
            send_all(told.cluster.nodes[victim], signal.SIGCONT)
        codes = told.wait_for_end()
        assert all(codes[n] == 0 for n in survivors), told.logs()
        check_each_sample_counts_once(told, etcd, 4800, survivors)
