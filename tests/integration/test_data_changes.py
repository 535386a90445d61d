"""A run that goes on with another batch size or other data: it is refused in a sentence, or the
position is carried over, and through faults each sample is used once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticzero.data.sampling import SampleOrder
from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import DataChanged
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, SCRIPTS, Story, story, traces_in
from tests.integration.reference import order_of_samples, trained_on
from tests.integration.scripts import loops, regression
from tests.integration.test_elastic_training import check_weights
from tests.integration.test_loops import ask_at, in_order, lines, start, used
from tests.integration.test_operators import Operator
from tests.integration.training_harness import Pool
from tests.support.cases import slow

EPOCHS = 3
REFUSED = "training stopped in a loop with global_batch 10, and the script now has 14"


STREAM = """
import sys
import torch
import elasticzero as ez

size, last = map(int, sys.argv[1:])

def read(shard, start):
    yield from torch.arange(25.0 * shard + start, 25.0 * (shard + 1)).unsqueeze(1)

def train(session):
    model, _ = session.prepare(torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    session.restore()
    stream = ez.Stream(range(3), read, readers=3)
    ends = lambda: print("end", session.epoch)
    loop = {"epochs": 2, "drop_last": True, "on_epoch_end": ends}
    for x in session.batches(stream, global_batch=size, **loop):
        print("step", session.epoch, len(x))
        session.backward(model(x).mean())
        session.step()
        if session.step_count == last:
            session.stop("enough")

ez.run(train)
"""


def left_at(pool: Pool, folder: Path, told: dict[str, Any], step: int, **options: Any) -> Resume:
    """Trains until a step, and leaves the state in memory for the next world."""
    hold = {"hold": str(folder / f"hold-{step}"), "hold_at": step}
    running = start(pool, folder, options.pop("world"), told | hold, **options)
    ask_at(running, told | hold)
    resume = running.resume()
    assert resume.step == step
    changes = [worker.all(DataChanged) for worker in running.workers]
    assert [len(events) for events in changes] == [
        len(options.get("allow_data_change", ())),
        *[0] * (len(changes) - 1),
    ]
    return resume


@pytest.mark.parametrize("strategy", [slow("ddp"), "zero2"])
def test_the_batch_size_changes_twice_in_an_epoch(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    """And once more without permission, in a world that has it and in one that has not."""
    told = {"log": str(tmp_path / "log"), "strategy": strategy, "ends": True}
    told |= {"loops": [{"epochs": 2}], "batch": 4}
    resume = left_at(pool, tmp_path, told, 2, world=2)
    allowed: dict[str, Any] = {"allow_data_change": ("batch",)}
    options = {"generation": 2, "resume": resume, "world": 3}
    resume = left_at(pool, tmp_path, told | {"batch": 6}, 4, **options, **allowed)
    refused = start(pool, tmp_path, 2, told | {"batch": 5}, generation=3, resume=resume)
    refused.until(refused.ended)
    for worker in refused.workers:
        failed = worker.last(Failed)
        assert failed.blame == "user" and failed.final
        assert "with global_batch 6, and the script now has 5" in failed.message
        assert "start all nodes with --allow-data-change batch" in failed.message
    again = start(pool, tmp_path, 1, told | {"batch": 5}, generation=4, resume=resume, **allowed)
    assert again.finish() == 10
    text = "after step 4 the loop goes on with global_batch 5 in place of 6, as "
    text += "--allow-data-change batch allows: epoch 0 goes on after its first 20 samples"
    assert again.workers[0].last(DataChanged) == DataChanged(
        step=4, allowed=("batch",), message=text
    )
    assert used(told, {0: 0}) == {0: in_order(0, 2)}
    sizes = {line["step"]: len(line["samples"]) for line in lines(told) if "samples" in line}
    assert [sizes[step] for step in sorted(sizes)] == [4, 4, 6, 6, 3, 5, 5, 5, 5, 3]
    assert lines(told)[-1] == {"ended": [0, 1], "stopped": None}


def test_other_data_at_an_epochs_end_need_no_permission(pool: Pool, tmp_path: Path) -> None:
    """`on_epoch_end` of the epoch that was over had not run, and never did."""
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 2}], "ends": True, "batch": 4}
    resume = left_at(pool, tmp_path, told, 6, world=2)
    assert not [line for line in lines(told) if "end" in line]
    running = start(pool, tmp_path, 3, told | {"seed": 9}, generation=2, resume=resume)
    assert running.finish() == 12
    text = "after step 6 the loop goes on with seed 9 in place of 0: epoch 1 begins"
    assert running.workers[0].last(DataChanged) == DataChanged(step=6, allowed=(), message=text)
    ends = [(line["step"], line["end"]) for line in lines(told) if "end" in line]
    assert ends == [(6, 0)] * 3 + [(12, 1)] * 3
    order = SampleOrder(samples=loops.SAMPLES[0], seed=9).indices(1, 0, loops.SAMPLES[0])
    assert used(told, {0: 0}) == {0: in_order(0, 1) + order.tolist()}
    assert lines(told)[-1]["ended"] == [0, 1]


def test_a_rank_without_the_option_is_named(pool: Pool, tmp_path: Path) -> None:
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 2}], "batch": 4}
    resume = left_at(pool, tmp_path, told, 2, world=2)
    odd = {1: lambda assignment: replace(assignment, allow_data_change=())}
    running = start(
        pool,
        tmp_path,
        3,
        told | {"batch": 6},
        generation=2,
        resume=resume,
        allow_data_change=("batch",),
        odd=odd,
    )
    running.until(running.ended)
    failed = [worker.last(Failed) for worker in running.workers]
    assert [failure.blame for failure in failed] == ["peer", "user", "peer"]
    assert "has --allow-data-change nothing, the other ranks have batch" in failed[1].message


def test_a_node_that_comes_later_needs_no_option(pool: Pool, tmp_path: Path) -> None:
    """The state has the new size by then, on nodes that were given the option and on others."""
    told = {"log": str(tmp_path / "log"), "loops": [{"epochs": 1}], "batch": 4}
    resume = left_at(pool, tmp_path, told, 2, world=2)
    allowed = ("batch",)
    assignment = {"generation": 2, "resume": resume, "world": 1, "allow_data_change": allowed}
    resume = left_at(pool, tmp_path, told | {"batch": 6}, 3, **assignment)
    odd = {0: lambda assignment: replace(assignment, allow_data_change=allowed)}
    running = start(pool, tmp_path, 3, told | {"batch": 6}, generation=3, resume=resume, odd=odd)
    assert running.finish() == 5
    assert not any(worker.all(DataChanged) for worker in running.workers)
    assert used(told, {0: 0}) == {0: in_order(0, 1)}


def alone(folder: Path, *arguments: str, allow: str = "") -> subprocess.CompletedProcess[str]:
    """One process without an agent."""
    variables = {"ELASTICZERO_CHECKPOINT_DIR": str(folder), "ELASTICZERO_ALLOW_DATA_CHANGE": allow}
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_one_process_goes_on_with_another_batch_size_and_seed(tmp_path: Path) -> None:
    """`python train.py`: one line of error, and what the variable allows."""
    told: dict[str, Any] = {"log": str(tmp_path / "log"), "loops": [{"epochs": 2}], "ends": True}

    def run(changes: dict[str, Any], allow: str = "") -> subprocess.CompletedProcess[str]:
        return alone(tmp_path / "c", loops.__file__, json.dumps(told | changes), allow=allow)

    stopped = run({"stop": [0, 1]})
    assert stopped.returncode == 0, stopped.stderr
    for change, kinds in (({"batch": 6}, "batch"), ({"seed": 9}, "dataset")):
        refused = run(change)
        assert refused.returncode == ExitCode.USAGE, refused.stderr
        *_, last = refused.stderr.splitlines()
        assert last.startswith("error: training stopped in ")
        assert f"ELASTICZERO_ALLOW_DATA_CHANGE={kinds}: the epoch " in last
        assert "Traceback" not in refused.stderr
    before = used(told, {0: 0})[0]
    step = len(before) // 4
    larger = run({"batch": 6, "stop": [0, step + 1]}, "batch")
    assert larger.returncode == 0, larger.stderr
    assert f"epoch 0 goes on after its first {len(before)} samples" in larger.stderr
    before = used(told, {0: 0})[0]
    assert before == in_order(0, 1)[: len(before)]
    other = run({"batch": 6, "seed": 9}, "dataset,batch")
    assert other.returncode == 0, other.stderr
    assert other.stderr.count("the loop goes on with") == 1
    text = "with seed 9 in place of 0, as --allow-data-change dataset allows: epoch 0 begins anew"
    assert text in other.stderr
    count = loops.SAMPLES[0]
    orders = [SampleOrder(samples=count, seed=9).indices(epoch, 0, count) for epoch in range(2)]
    assert used(told, {0: 0}) == {0: before + [int(index) for order in orders for index in order]}
    assert [line["end"] for line in lines(told) if "end" in line] == [0, 1]
    assert lines(told)[-1]["ended"] == [0, 1]


def test_an_epoch_of_a_stream_that_is_too_short_for_the_new_batch_ends(tmp_path: Path) -> None:
    """`on_epoch_end` was passed over where the rest became known only as the stream was read."""
    first = alone(tmp_path / "c", "-c", STREAM, "4", "7")
    assert first.returncode == 0, first.stderr
    done = first.stdout.count("step 0 4\n")
    assert first.stdout == "step 0 4\n" * done and 25 < 4 * done < 40
    second = alone(tmp_path / "c", "-c", STREAM, "51", "0", allow="batch")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines() == ["end 0", "step 1 51", "end 1"]


def cut_anew(steps_before: int, *sizes: int) -> list[list[int]]:
    """The samples of each step where the batch size changes after the first ones."""
    steps = order_of_samples(sizes[0], EPOCHS)[:steps_before]
    every = [sample for step in order_of_samples(sizes[0], EPOCHS) for sample in step]
    done, size = sum(map(len, steps)), sizes[1]
    for epoch in range(EPOCHS):
        end = (epoch + 1) * regression.SAMPLES
        while done < end:
            steps.append(every[done : min(done + size, end)])
            done += len(steps[-1])
    return steps


def stopped_after(told: Story, operator: Operator, step: int) -> int:
    """Has an operator stop the job in the middle of an epoch; returns its last step."""
    told.wait_for_step(step)
    operator.asks("stop", "--wait")
    codes = told.wait_for_end()
    assert set(codes.values()) == {0}
    return told.step


def committed_samples(told: Story) -> dict[int, list[int]]:
    """The samples of each committed step, of all ranks that have written a part of it."""
    steps: dict[int, list[int]] = {}
    for generation, step, samples in traces_in(told.directory()):
        if told.lineage.is_committed(generation, step):
            steps.setdefault(step, []).extend(samples)
    return steps


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_job_goes_on_with_another_batch_size_through_faults(
    kind: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    operator, checkpoints = Operator(job, etcd), tmp_path / "c"
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    options = ["--nnodes", "1:3", "--strategy", "zero2", "--lease-ttl", "2"]
    options += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "8"]
    script: Sequence[str] = [str(REGRESSION)]
    if kind == "stream":
        script = [str(SCRIPTS / "streams.py"), "seeks", "--workers", "2"]
    script = [*script, "--epochs", str(EPOCHS), "--pause", "0.1", "--global-batch"]

    first_arguments = [*options, *script, "10"]
    with story(folders[0], etcd.endpoint, job, first_arguments, nodes=2) as told:
        last = stopped_after(told, operator, 5)
        before = committed_samples(told)
    assert last < 33

    again = [*options, "--restart"]
    with story(folders[1], etcd.endpoint, job, [*again, *script, "14"], nodes=2) as told:
        codes = told.wait_for_end()
        assert set(codes.values()) == {ExitCode.USAGE}, told.logs()
        logs = [path.read_text() for path in told.directory().glob("*/agent.log")]
        assert all(f"{REFUSED}. If that is meant, start all nodes with" in log for log in logs)
        assert not any("Traceback" in log for log in logs)
        assert not told.of("step")

    again += ["--allow-data-change", "batch"]
    with story(folders[2], etcd.endpoint, job, [*again, *script, "14"], nodes=3) as told:
        told.wait_for_step(last + 3)
        told.cluster.kill_worker(told.node(0))
        told.wait_for_first_step(2)
        told.wait_for_step(told.step + 3)
        told.cluster.kill_node(told.node(1))
        told.wait_for_first_step(3)
        codes = told.wait_for_end()
        after = committed_samples(told)
    assert codes == {"node-0": 0, "node-1": -9, "node-2": 0}
    text = f"after step {last} the loop goes on with global_batch 14 in place of 10, as "
    text += f"--allow-data-change batch allows: epoch 0 goes on after its first {10 * last} samples"
    changes = told.of("data_changed")
    assert changes and {(one["message"], tuple(one["allowed"])) for one in changes} == {
        (text, ("batch",))
    }
    assert any(text in path.read_text() for path in told.directory().glob("*/agent.log"))

    steps = {step: samples for step, samples in before.items() if step <= last} | after
    expected = cut_anew(last, 10, 14)
    assert sorted(steps) == list(range(1, len(expected) + 1))
    uses = [sample for step in sorted(steps) for sample in dict.fromkeys(steps[step])]
    for epoch in range(EPOCHS):
        samples = uses[epoch * regression.SAMPLES : (epoch + 1) * regression.SAMPLES]
        assert sorted(samples) == list(range(regression.SAMPLES))
    assert len(uses) == EPOCHS * regression.SAMPLES
    if kind == "indexed":
        trained = [sorted(set(steps[step])) for step in sorted(steps)]
        assert trained == [sorted(samples) for samples in expected]
        check_weights(checkpoints, trained_on(expected))
