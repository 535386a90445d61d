"""Workers that hang are found, their stacks dumped, and replaced; training goes on with the right
weights."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elasticzero.launcher.protocol.hang_rules import FLOOR_S, SUSPENDED_S
from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.processes import process_state
from tests.integration.clusters import REGRESSION, SCRIPTS, Story, story
from tests.integration.test_elastic_training import check_samples, check_weights

HANGING = SCRIPTS / "hanging.py"
PLAIN = Path(__file__).resolve().parents[2] / "examples" / "torchrun_ddp.py"
TIMEOUT_S = 4


def job_arguments(tmp_path: Path, strategy: str, *hangs: str) -> list[str]:
    arguments = ["--nnodes", "1:2", "--settle", "10", "--lease-ttl", "2", "--strategy", strategy]
    arguments += ["--hang-timeout", str(TIMEOUT_S), "--snapshot-every", "1"]
    arguments += ["--checkpoint-dir", str(tmp_path / "checkpoints"), str(HANGING)]
    return [*arguments, "--busy-s", str(2 * TIMEOUT_S), "--hang", ",".join(hangs)]


def world_of(told: Story, generation: int) -> dict[str, Any]:
    def started_world() -> dict[str, Any] | None:
        return next((w for w in told.of("world") if w["generation"] == generation), None)

    world: dict[str, Any] = told.wait(f"generation {generation}", started_world)
    return world


def log_of(told: Story, node: str) -> str:
    return (told.directory() / node / "0.log").read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_stopped_and_looping_workers_are_replaced_busy_ones_not(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    arguments = job_arguments(tmp_path, "ddp", "1:busy@5", "2:loop@40")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(12)
        assert told.generation == 1, "one rank was busy, and the other waited for it"
        last = world_of(told, 1)["members"][-1]
        (worker,) = told.cluster.workers_of(told.cluster.nodes[last])
        os.kill(worker, signal.SIGSTOP)
        stopped, looped = world_of(told, 2), world_of(told, 3)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    pattern = r"rank 1 on \S+ hung \(no step for [\d.]+ s after step \d+; it is stopped by a signal"
    assert re.match(pattern, stopped["reason"]), stopped
    pattern = (
        r"rank 1 on \S+ hung \(no step for [\d.]+ s after step 39; it is at hanging.py:\d+ in h"
    )
    assert re.match(pattern, looped["reason"]), looped
    assert len(told.of("world")) == 6, "each node tells of three worlds"
    for node in told.cluster.nodes:
        log = log_of(told, node)
        assert log.count("made no step for") >= 2, log
        assert "hanging.py:" in log or 'hanging.py", line' in log, "the stack is in the log"
    assert told.lineage.recomputed <= 2
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


@pytest.mark.timeout(120)
def test_a_suspended_worker_is_replaced_within_seconds_by_default(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """No `--hang-timeout` is given: another hang would be one after a minute."""
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", "--settle", "10", "--lease-ttl", "2"]
    arguments += ["--checkpoint-dir", str(checkpoints), str(REGRESSION), "--pause", "0.05"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(12)
        last = world_of(told, 1)["members"][-1]
        (worker,) = told.cluster.workers_of(told.cluster.nodes[last])
        os.kill(worker, signal.SIGSTOP)
        stopped = world_of(told, 2)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    pattern = (
        r"rank 1 on \S+ hung \(no step for ([\d.]+) s after step \d+; it is stopped by a signal"
    )
    match = re.match(pattern, stopped["reason"])
    assert match and SUSPENDED_S <= float(match[1]) < FLOOR_S, stopped
    assert [event["rank"] for event in told.of("looked")] == [1], "no other rank is examined"
    assert told.lineage.recomputed <= 2
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


PTRACE_ATTACH, PTRACE_DETACH, EVERY_CHILD = 16, 17, 0x40000000


def held_by_a_debugger(pid: int, seconds: float) -> None:
    """Holds a process as a debugger does at a breakpoint."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, EVERY_CHILD)
    assert process_state(pid) == "t"
    time.sleep(seconds)
    libc.ptrace(PTRACE_DETACH, pid, None, None)


def slowed_by_signals(pid: int, seconds: float) -> None:
    """Lets a process run a fifth of the time, as programs do that limit its share of the CPU."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.08)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_worker_that_waits_is_replaced_by_default(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    """Steps take some 20 ms; each wait is one of 5 s, longer than a worker may be suspended. All
    other ranks wait in a collective for it, and the main thread's CPU time stands still mostly."""
    waits_s = 5.0
    waits = ("sleep", "child", "thread", "compute", "data", "busy")
    checkpoints = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", "--settle", "10", "--lease-ttl", "2"]
    arguments += ["--checkpoint-dir", str(checkpoints), str(HANGING), "--busy-s", str(waits_s)]
    arguments += ["--hang", ",".join(f"1:{kind}@{5 + i}" for i, kind in enumerate(waits))]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        told.wait_for_step(5 + len(waits))
        told.pause(0.5)
        last = world_of(told, 1)["members"][-1]
        (worker,) = told.cluster.workers_of(told.cluster.nodes[last])
        held_by_a_debugger(worker, waits_s)
        slowed_by_signals(worker, waits_s)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    assert told.generation == 1 and not told.of("looked"), told.logs()
    check_samples(told.lineage, told.directory())
    check_weights(checkpoints, reference)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", ["import", "plain"])
def test_a_process_that_is_stopped_before_it_says_anything_is_replaced(
    script: str, tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Its script imports what it needs, or never says anything: it is written for torchrun."""
    arguments = ["--nnodes", "1:2", "--lease-ttl", "2", "--hang-timeout", str(TIMEOUT_S)]
    if script == "import":
        arguments += [str(REGRESSION), "--slow-start", "4", "--slow-rank", "1"]
    else:
        arguments += [str(PLAIN), "--checkpoint", str(tmp_path / "model.pt"), "--epochs", "8"]
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        last = world_of(told, 1)["members"][-1]
        workers = told.wait("a worker", lambda: told.cluster.workers_of(told.cluster.nodes[last]))
        os.kill(workers[0], signal.SIGSTOP)
        stopped = world_of(told, 2)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    pattern = (
        r"rank 1 on \S+ hung \(no step for ([\d.]+) s before its first step; it is stopped by "
    )
    match = re.match(pattern, stopped["reason"])
    assert match and TIMEOUT_S <= float(match[1]) < 60, stopped


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_a_held_lock_and_a_collective_that_others_do_not_call(
    tmp_path: Path, job: str, etcd: EtcdServer, reference: dict[str, Tensor]
) -> None:
    arguments = job_arguments(tmp_path, "zero2", "1:gil@15", "2:collective@40")
    with story(tmp_path, etcd.endpoint, job, arguments, nodes=2) as told:
        held, stuck = world_of(told, 2), world_of(told, 3)
        codes = told.wait_for_end()
    assert set(codes.values()) == {0}, told.logs()
    pattern = r"rank 1 on \S+ hung \(no step for [\d.]+ s after step 14; it does not answer"
    assert re.match(pattern, held["reason"]), held
    for part in (
        "the ranks wait for each other; rank 0: ",
        "; rank 1: ",
        "to wait for other ranks, at h",
    ):
        assert part in stuck["reason"], stuck
    assert len(told.of("world")) == 6, "each node tells of three worlds"
    assert all(log_of(told, node).count("made no step for") >= 2 for node in told.cluster.nodes)
    check_samples(told.lineage, told.directory())
    check_weights(tmp_path / "checkpoints", reference)


@pytest.mark.timeout(120)
def test_a_rank_that_breaks_before_its_forward_is_found(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """Under zero3 the others wait in their forward, and it waits for them: for 30 minutes."""
    told = {
        "log": str(tmp_path / "log"),
        "loops": [{"epochs": 100}],
        "strategy": "zero3",
        "exit": [1, 5, "before"],
    }
    arguments = ["--nnodes", "2", "--hang-timeout", str(TIMEOUT_S), "--lease-ttl", "2"]
    script = [str(SCRIPTS / "loops.py"), json.dumps(told)]
    with story(tmp_path, etcd.endpoint, job, [*arguments, *script], nodes=2) as seen:
        codes = seen.wait_for_end()
    assert set(codes.values()) == {64}, seen.logs()
    reason = next(event["reason"] for event in seen.of("round"))
    assert "the ranks wait for each other" in reason, reason
    assert len(seen.of("world")) == 2, "it is not tried again"
    assert re.search(r"rank 1: .*, having left its loop at loops.py:\d+ in _loop", reason), reason
