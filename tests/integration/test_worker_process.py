"""Real worker processes over gloo: how a generation ends, and how the next goes on."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticzero import checkpoint as ez_checkpoint
from elasticzero.checkpoint.format.names import step_directory
from elasticzero.errors import ExitCode
from elasticzero.ipc.assignment import Resume, Source
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import (
    FLAG_GROW,
    FLAG_LEAVE,
    Abort,
    Captured,
    Finished,
    Request,
    Restored,
    Stopping,
)
from elasticzero.log_output import REPORTED
from elasticzero.spans import STRATEGIES
from tests.integration.test_strategies import assert_close, plain
from tests.integration.training_exact import SAMPLES, Model
from tests.integration.training_harness import Pool, Running
from tests.support.cases import drawn, slow
from tests.support.deadlines import patience

SCRIPT = Path(__file__).parent / "training_exact.py"


def start(
    pool: Pool, folder: Path, world_size: int, told: dict[str, Any], **options: Any
) -> Running:
    """All ranks on one node, so that every snapshot is found on disk."""
    options = {"node": "node", "snapshot_root": str(folder / "snapshots"), **options}
    options.setdefault("generation", 1)
    return pool.start(SCRIPT, [json.dumps(told)], world_size, **options)


def committed(log: Path, resumed: list[int]) -> list[int]:
    """The samples of the steps that count: of generation g those up to where g + 1 resumed."""
    used: dict[tuple[int, int], list[int]] = {}
    for line in log.read_text().splitlines():
        generation, _, step, indices = json.loads(line)
        limit = resumed[generation - 1] if generation <= len(resumed) else 1 << 60
        if step <= limit:
            recorded = used.setdefault((generation, step), indices)
            assert recorded == indices, "ranks disagree on the samples of a step"
    steps = [step for _, step in sorted(used)]
    assert steps == list(range(1, len(steps) + 1))
    return [index for key in sorted(used) for index in used[key]]


@pytest.mark.parametrize("strategy", drawn("zero3"))
def test_a_drain_hands_over_in_memory_without_losing_a_step(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"strategy": strategy, "micro": 2, "clip": 0.5, "log": str(tmp_path / "log")}
    told["epochs"] = 8
    first = start(pool, tmp_path, 3, told | {"pause": 0.05})
    first.until(first.reached(5))
    first.workers[1].channel.send(Request(flags=FLAG_LEAVE))
    first.until(first.ended)
    assert [w.exit_code for w in first.workers] == [0, 0, 0], first.logs()
    stops = [w.last(Stopping) for w in first.workers]
    assert len({stop.step for stop in stops}) == 1 and all(stop.clean for stop in stops)
    assert {stop.complete for stop in stops} == {strategy == "ddp"}
    assert stops[0].reason == "a node leaves"
    if strategy != "ddp":
        assert {(w.last(Captured).rank, w.last(Captured).world_size) for w in first.workers} == {
            (0, 3), (1, 3), (2, 3)
        }  # fmt: skip
    resume = first.resume()
    assert resume.step == stops[0].step < 56
    second = start(
        pool,
        tmp_path,
        2,
        told,
        generation=2,
        resume=resume,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )
    assert second.finish() == 56
    restored = second.workers[0].last(Restored)
    assert (restored.step, restored.tier) == (resume.step, "ram") and restored.bytes_read > 0
    assert_close(tmp_path / "checkpoints", plain(56, weighted=False))
    samples = committed(tmp_path / "log", [resume.step])
    assert len(samples) == 8 * SAMPLES
    for epoch in range(8):
        used = samples[epoch * SAMPLES : (epoch + 1) * SAMPLES]
        assert sorted(used) == list(range(SAMPLES))


@pytest.mark.parametrize("strategy", ["zero1", slow("zero3")])
def test_half_precision_keeps_its_masters_over_a_drain(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    told = {"strategy": strategy, "steps": 40, "dtype": "bfloat16", "clip": 0.5}
    first = start(pool, tmp_path, 3, told | {"pause": 0.01})
    first.until(first.reached(4))
    first.workers[0].channel.send(Request(flags=FLAG_LEAVE))
    first.until(first.ended)
    assert all(w.all(Captured) for w in first.workers), first.logs()
    directory = tmp_path / "checkpoints"
    second = start(
        pool, tmp_path, 2, told, generation=2, resume=first.resume(), checkpoint_dir=str(directory)
    )
    assert second.finish() == 40
    state = ez_checkpoint.load(directory)
    masters = {n: t for n, t in state.items() if n.endswith("/master")}
    assert len(masters) == 10
    for name, master in masters.items():
        weight = state[name.replace("optimizer/", "model/").removesuffix("/master")]
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), weight)
    assert any(not torch.equal(m.bfloat16().float(), m) for m in masters.values())


def test_a_killed_worker_is_noticed_by_all_others(pool: Pool, tmp_path: Path) -> None:
    """Five ranks: the others are not all connected to it in the running collective."""
    told = {"strategy": "ddp", "steps": 40, "clip": 0.5, "die": [2, 17]}
    first = start(pool, tmp_path, 5, told)
    first.until(lambda: first.workers[2].exit_code is not None)
    died_s = first.workers[2].ended_s
    first.until(first.ended)
    others = [w for w in first.workers if w.rank != 2]
    assert max(w.ended_s for w in others) - died_s < 10.0
    assert [w.exit_code for w in others] == [75] * 4, first.logs()
    assert {w.last(Failed).blame for w in others} == {"peer"}
    stops = [w.last(Stopping) for w in others]
    assert all(stop.complete for stop in stops if stop.clean)
    resume = first.resume()
    assert resume.step >= 17
    told.pop("die")
    second = start(
        pool,
        tmp_path,
        4,
        told,
        generation=2,
        resume=resume,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )
    assert second.finish() == 40
    assert_close(tmp_path / "checkpoints", plain(40, weighted=False))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(3, {}), pytest.param(4, {"row": 2, "shard": "node"}, id="four ranks, state within nodes")],
)
def test_a_stopped_peer_is_left_behind_when_the_agent_says_so(
    pool: Pool, ranks: int, options: dict[str, Any]
) -> None:
    """With state within nodes the others wait in collectives of their rows and of replicas."""
    told = {"strategy": "zero2", "steps": 100000, "clip": 0.5}
    running = pool.start(SCRIPT, [json.dumps(told)], ranks, **options)
    running.until(running.reached(3))
    stopped, *others = running.workers
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(0.2)
    told_s = time.monotonic()
    for worker in others:
        worker.channel.send(Abort(reason="the lease of node0 lapsed"))
    running.until(lambda: all(w.exit_code is not None for w in others), 10)
    assert max(w.ended_s for w in others) - told_s < 30.0
    assert [w.exit_code for w in others] == [75] * (ranks - 1), running.logs()
    assert all(w.all(Stopping) for w in others)
    os.kill(stopped.pid, signal.SIGKILL)
    running.until(running.ended)


def test_groups_are_shut_one_alone_and_then_all(pool: Pool, tmp_path: Path) -> None:
    """While one is shut another one is used, by the same processes; connections of a script that it
    has opened meanwhile stay. Then rank 0 waits for its row's other rank, and rank 2 for rank 0,
    which has its place."""
    script = Path(__file__).parent / "training_shut.py"
    worlds = [pool.start(script, [str(rank), str(tmp_path)], 1) for rank in range(4)]
    for running in worlds:
        running.until(running.ended, 60)
        assert running.workers[0].exit_code == 0, running.logs()
    for name in ("alone-0", "alone-1", "ended-0", "ended-2"):
        assert re.search("Connection (closed|reset)", (tmp_path / name).read_text())


def test_a_restore_from_a_silent_node_ends_when_the_agent_aborts(
    pool: Pool, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        sources = (Source(rank=0, node="gone", address=address),)
        resume = Resume(tier="ram", step=4, generation=1, sources=sources)
        running = start(pool, tmp_path, 1, {"strategy": "ddp"}, generation=2, resume=resume)
        running.until(lambda: bool(select.select([silent], [], [], 0)[0]))
        running.workers[0].channel.send(Abort(reason="the lease of gone lapsed"))
        running.until(running.ended)
    assert running.workers[0].exit_code == ExitCode.LEFT, running.logs()
    assert not running.workers[0].all(Failed), running.logs()


def test_an_error_of_the_script_is_its_own_and_the_state_is_kept(
    pool: Pool, tmp_path: Path
) -> None:
    told = {"strategy": "ddp", "steps": 40, "fail": [1, 7]}
    running = start(pool, tmp_path, 3, told)
    running.until(running.ended)
    assert [w.exit_code for w in running.workers] == [75, 1, 75], running.logs()
    failed = running.workers[1].last(Failed)
    assert (failed.blame, failed.final, failed.step) == ("user", False, 7)
    assert failed.message == "ZeroDivisionError: asked for by the test"
    assert "ZeroDivisionError" in running.workers[1].log.read_text()
    assert running.workers[1].last(Stopping).clean
    assert {running.workers[r].last(Failed).blame for r in (0, 2)} == {"peer"}
    assert running.resume().step == 7


def test_a_batch_smaller_than_the_world_is_the_users_to_mend(pool: Pool, tmp_path: Path) -> None:
    running = start(pool, tmp_path, 3, {"strategy": "ddp", "steps": 4, "batch": 2})
    running.until(running.ended)
    failed = [w.last(Failed) for w in running.workers]
    failures = [f for f in failed if f.blame == "user"]
    assert failures and all(f.final for f in failures)
    assert "smaller than the world of 3" in failures[0].message
    text = running.workers[failed.index(failures[0])].log.read_text()
    assert text.startswith(f"{REPORTED}\nerror: global_batch is 2")
    assert re.search(r"raise it, or run on fewer \(training_exact\.py:\d+ in \w+\)\n", text), text
    assert text.count("Traceback") == 1


def test_a_worker_does_not_outlive_its_agent(pool: Pool, tmp_path: Path) -> None:
    running = start(pool, tmp_path, 2, {"strategy": "ddp", "steps": 100000})
    running.until(running.reached(2))
    for worker in running.workers:
        worker.channel.close()
        worker.exit_code = 1
    deadline_s = time.monotonic() + patience(60)
    while not set(running.workers) <= pool.ended().keys():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_peer_that_never_comes_is_waited_for_in_vain_only_so_long(
    pool: Pool, tmp_path: Path
) -> None:
    told = {"strategy": "ddp", "steps": 4}
    running = pool.start(SCRIPT, [json.dumps(told)], 1, of=2, start_timeout_s=0.5)
    running.until(running.ended)
    worker = running.workers[0]
    assert worker.exit_code == 75
    failed = worker.last(Failed)
    assert failed.blame == "peer"
    assert failed.message == "rank 1 did not call elasticzero.run() within 0.5 s", failed.message


def test_a_host_that_refuses_is_waited_for_and_a_silent_one_is_not(
    pool: Pool, tmp_path: Path
) -> None:
    told = json.dumps({"strategy": "ddp", "steps": 4})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        alone = {"rank": 1, "master_port": port, "connect_timeout_s": 1.0, "start_timeout_s": 1.5}
        refused = pool.start(SCRIPT, [told], 1, of=2, **alone)
        refused.until(refused.ended, 20)
        taken.listen(0)
        with socket.create_connection(("127.0.0.1", port)):  # no room for another
            silent = pool.start(SCRIPT, [told], 1, of=2, **(alone | {"start_timeout_s": 60.0}))
            silent.until(silent.ended, 20)
    for running in (refused, silent):
        (worker,) = running.workers
        assert worker.exit_code == 75
        failed = worker.last(Failed)
        assert failed.blame == "peer"
        assert failed.message.startswith(f"rank 0 at 127.0.0.1:{port} was not reached in time")
    assert "refused" in refused.workers[0].last(Failed).message


def test_growth_at_the_last_boundary_leaves_nothing_to_do_but_the_end(
    pool: Pool, tmp_path: Path
) -> None:
    told = {"strategy": "zero1", "steps": 12, "out": str(tmp_path / "out"), "pause": 0.05}
    first = start(pool, tmp_path, 1, told)
    first.until(first.reached(12))
    first.workers[0].channel.send(Request(flags=FLAG_GROW))
    first.until(first.ended)
    worker = first.workers[0]
    if worker.all(Finished):
        pytest.skip("the request came after the last boundary")
    second = start(pool, tmp_path, 2, told, generation=2, resume=first.resume())
    assert second.finish() == 12
    assert json.loads((tmp_path / "out").read_text())["step"] == 12


@pytest.mark.parametrize("damage", ["bytes", "cannot be read", "other model"])
def test_a_checkpoint_that_cannot_be_used_says_why(pool: Pool, tmp_path: Path, damage: str) -> None:
    told = {"strategy": "ddp", "steps": 4}
    options = {"checkpoint_dir": str(tmp_path / "checkpoints")}
    start(pool, tmp_path, 2, told, **options).finish()
    if damage == "bytes":
        step = tmp_path / "checkpoints" / step_directory(4)
        shard = sorted(step.glob("*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-3] ^= 1
        shard.write_bytes(data)
    elif damage == "cannot be read":
        shard = sorted((tmp_path / "checkpoints" / step_directory(4)).glob("*.safetensors"))[1]
        shard.unlink()
        shard.mkdir()
    else:
        told["width"] = 5
    resume = Resume(tier="storage", step=4)
    running = start(pool, tmp_path, 1, told, generation=2, resume=resume, **options)
    running.until(running.ended)
    failed = running.workers[0].last(Failed)
    assert running.workers[0].exit_code == 1
    assert not running.workers[0].last(Stopping).clean
    if damage == "bytes":
        assert (failed.blame, failed.bad_step, failed.final) == ("checkpoint", 4, False)
    elif damage == "cannot be read":
        assert (failed.blame, failed.bad_step, failed.final) == ("environment", 4, False)
        assert "is a directory, and a regular file is expected" in failed.message
    else:
        assert (failed.blame, failed.bad_step, failed.final) == ("user", None, True)
        assert "model/out.weight is F64[3, 7], and F64[5, 7] is expected" in failed.message


def test_checkpoints_are_written_on_the_way_and_a_run_goes_on_from_them(
    pool: Pool, tmp_path: Path
) -> None:
    told = {"strategy": "zero3", "steps": 10, "clip": 0.5, "pause": 0.3}
    options = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": 4}
    start(pool, tmp_path, 2, told, **options).finish()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [step_directory(step) for step in (4, 8, 10)]
    resume = Resume(tier="storage", step=8)
    told |= {"steps": 31, "pause": 0.0}
    resumed = start(pool, tmp_path, 3, told, generation=2, resume=resume, **options)
    assert resumed.finish() == 31
    assert_close(tmp_path / "checkpoints", plain(31, weighted=False))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_model_is_given_to_rank_0(pool: Pool, tmp_path: Path, strategy: str) -> None:
    directory, state = tmp_path / "checkpoints", tmp_path / "state"
    told = {"strategy": strategy, "steps": 5, "state": str(state)}
    start(pool, tmp_path, 3, told, checkpoint_dir=str(directory)).finish()
    state_dict = json.loads(state.read_text())
    assert list(state_dict) == list(Model().state_dict())
    saved = ez_checkpoint.load(directory)
    for name, values in state_dict.items():
        stored = saved.get(f"model/{name}", saved.get("model/out.weight"))
        assert stored is not None and stored.tolist() == values, name
