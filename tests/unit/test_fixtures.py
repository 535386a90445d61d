"""Reads the checkpoints and etcd documents that an earlier version wrote, and writes them again.

`tests/fixtures/__init__.py` says what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elasticzero import checkpoint
from elasticzero.checkpoint.rewrite.reshard import TargetShape, reshard
from elasticzero.checkpoint.steps import catalog, verify
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.errors import UserError
from elasticzero.launcher.cli.control import read_job
from elasticzero.launcher.cli.status import status_text
from elasticzero.launcher.observability.job_status import collect_status
from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Member,
    Report,
    SkippedCheckpoint,
    World,
    outranks,
    to_bytes,
    world_from_bytes,
)
from elasticzero.launcher.protocol.failure_policy import root_cause
from elasticzero.launcher.protocol.invariants import check_invariants
from elasticzero.launcher.protocol.resume import choose_resume
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.store.job_token import KEY, Record, token_for_operator
from elasticzero.launcher.store.watch_cache import (
    ALARM,
    CONTROL,
    DONE,
    MEMBERS,
    WORLD,
    WatchCache,
    reports_of,
)
from elasticzero.spans import STRATEGIES
from tests.fixtures import CHECKPOINTS, FOLDER, STEPS, TOKEN, is_trained
from tests.support.memory_store import MemoryServer, MemoryStore

JOBS: dict[str, Any] = json.loads((FOLDER / "etcd.json").read_text())
KINDS: dict[str, type[Any]] = {
    r"world": World,
    r"control": Control,
    r"done": Done,
    r"token": Record,
    r"alarm/\d+": Alarm,
    r"members/node-\d": Member,
    r"reports/\d+/node-\d": Report,
}
"""The kind of document under each key of a job."""


@pytest.fixture(params=CHECKPOINTS)
def name(request: pytest.FixtureRequest) -> str:
    """Each checkpoint in turn."""
    return str(request.param)


def expected(name: str) -> dict[str, Tensor]:
    dtype = CHECKPOINTS[name].get("dtype", "float64")
    return load_file(FOLDER / "expected" / f"{dtype}.safetensors")


def assert_expected(directory: Path, name: str) -> dict[str, Tensor]:
    """Returns what a checkpoint directory holds, after comparing it with what plain PyTorch had."""
    loaded = checkpoint.load(directory)
    trained = expected(name)
    assert {n for n in loaded if is_trained(n)} == set(trained)
    for key, tensor in trained.items():
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape, key
        assert torch.allclose(loaded[key], tensor, rtol=0.0, atol=1e-9), key
    return loaded


def test_every_strategy_has_a_checkpoint() -> None:
    assert {chosen["strategy"] for chosen in CHECKPOINTS.values()} == set(STRATEGIES)


def test_an_earlier_checkpoint_is_loaded(name: str) -> None:
    path = FOLDER / "checkpoints" / name
    loaded = assert_expected(path, name)
    assert loaded["model/seen"] > STEPS
    assert {n for n in loaded if n.startswith("rng/")} == {
        f"rng/{source}/{rank}" for source in ("torch", "python", "numpy") for rank in (0, 1)
    }
    into = {key: torch.zeros_like(tensor) for key, tensor in expected(name).items()}
    filled = checkpoint.load(path, into)
    for key, tensor in into.items():
        assert filled[key] is tensor
        assert torch.equal(tensor, loaded[key]), key


def test_its_manifest_says_what_it_said(name: str) -> None:
    directory = DiskDirectory(FOLDER / "checkpoints" / name)
    assert catalog.newest_good(directory) == STEPS
    storage = catalog.resolve(directory.where)
    assert not list(verify.find_corruption(storage))
    manifest = catalog.read_manifest(storage)
    assert (manifest.step, manifest.generation, manifest.layout.world_size) == (STEPS, 1, 2)
    assert manifest.strategy == CHECKPOINTS[name]["strategy"]
    state = checkpoint.load_state(directory.where)
    position = {"epoch": 1, "offset": 16, "steps": STEPS, "order": [53, 0, True]}
    assert state["position"].items() >= position.items()
    assert state["tracked"]["scheduler"]["last_epoch"] == STEPS


@pytest.mark.parametrize(("world_size", "strategy"), [(1, None), (3, None), (5, "zero3")])
def test_an_earlier_checkpoint_is_resharded(
    tmp_path: Path, name: str, world_size: int, strategy: str | None
) -> None:
    path = FOLDER / "checkpoints" / name
    shape = TargetShape(world_size=world_size, strategy=strategy)
    reshard(catalog.resolve(path), DiskDirectory(tmp_path), shape)
    assert not list(verify.find_corruption(catalog.resolve(tmp_path)))
    before, after = checkpoint.load(path), assert_expected(tmp_path, name)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert checkpoint.load_state(tmp_path) == checkpoint.load_state(path)


def documents(job: str) -> Iterator[tuple[str, bytes]]:
    """Each document of a job, by its key below the job's prefix."""
    prefix = job_prefix(job)
    for key, value in [*JOBS[job]["present"].items(), *JOBS[job]["written"]]:
        assert key.startswith(prefix), key
        yield key.removeprefix(prefix), value.encode()


def kind_of(key: str) -> type[Any]:
    """The kind of document under a key."""
    (kind,) = [kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, key)]
    return kind


@pytest.mark.parametrize("job", JOBS)
def test_an_earlier_document_is_written_with_the_same_bytes(job: str) -> None:
    """No field is lost, added, renamed or moved: the bytes are the same."""
    kinds = set()
    for key, value in documents(job):
        parsed = document(kind_of(key), value)
        kinds.add(type(parsed))
        assert to_bytes(parsed) == value, key
    assert kinds >= set(KINDS.values()) - {Control}


@pytest.mark.parametrize("job", JOBS)
def test_a_later_field_is_read_and_may_be_absent(job: str) -> None:
    """Documents of earlier versions have no such field; those that have it are read as written."""
    damage = SkippedCheckpoint(step=4, message="rank-0 has 9 bytes", cause="node-1 is lost")
    for key, value in documents(job):
        parsed = document(kind_of(key), value)
        if isinstance(parsed, World):
            assert parsed.skipped is None
            later: Any = replace(parsed, skipped=damage)
        elif isinstance(parsed, Done):
            assert parsed.end_reason == ""
            later = replace(parsed, end_reason="the loss is low enough")
        else:
            continue
        assert document(type(later), to_bytes(later)) == later
        assert json.loads(to_bytes(later)).items() >= json.loads(value).items()


def test_every_kind_of_document_is_there() -> None:
    kinds = {kind_of(key) for job in JOBS for key, _ in documents(job)}
    assert kinds == set(KINDS.values())


@pytest.mark.parametrize("job", JOBS)
def test_earlier_worlds_follow_each_other(job: str) -> None:
    worlds = [world_from_bytes(value) for key, value in documents(job) if key == WORLD][1:]
    assert [world.generation for world in worlds] == [1, 2, 3]
    assert [world.resume.tier for world in worlds] == ["fresh", "ram", "ram"]
    for before, after in zip([None, *worlds], worlds, strict=False):
        check_invariants(before, after)
        assert outranks(after, before)
    assert worlds[1].setbacks and worlds[1].strikes


def store_of(values: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore(MemoryServer(lambda: 0.0))
    for key, value in values.items():
        store.write({key: value})
    return store


def present(job: str) -> dict[str, bytes]:
    """The documents in etcd while the job's nodes trained, by key below the job's prefix."""
    prefix = job_prefix(job)
    return {k.removeprefix(prefix): v.encode() for k, v in JOBS[job]["present"].items()}


def observer_of(values: Mapping[str, bytes]) -> WatchCache:
    """An agent's cache of a store that holds these documents, in generation 1."""
    store = store_of(values)
    observer = WatchCache(store, lambda: None)
    for prefix in (WORLD, CONTROL, DONE, ALARM, MEMBERS, reports_of(1)):
        observer.put(prefix, store.read(prefix))
    return observer


@pytest.mark.parametrize("job", JOBS)
def test_an_agent_reads_a_job_that_runs(job: str) -> None:
    observer = observer_of(present(job))
    world, revision = observer.world()
    members, reports = observer.members(), observer.reports(1)
    assert world is not None and revision and world.generation == 1
    assert members is not None and set(members) == {"node-0", "node-1"}
    assert all(world.names(member) for member in members.values())
    assert reports is not None and {r.phase for r in reports.values()} == {"restored"}
    assert {report.world for report in reports.values()} == {world.token}
    assert observer.done() is None and observer.alarm(1) is None
    assert observer.control() == Control()


@pytest.mark.parametrize(("job", "blame"), [("stopped", "killed"), ("failed", "user")])
def test_an_agent_reads_a_job_that_fails(job: str, blame: str) -> None:
    """The state to go on from is chosen as it was chosen then."""
    values: dict[str, bytes] = {}
    for key, value in documents(job):
        if key == WORLD and (following := world_from_bytes(value)).generation == 2:
            break
        values[key] = value
    observer = observer_of(values)
    alarm, reports, (world, _) = observer.alarm(1), observer.reports(1), observer.world()
    assert alarm is not None and alarm.kind == "failure"
    assert reports is not None and {r.phase for r in reports.values()} == {"stopped"}
    cause = root_cause(reports)
    assert cause is not None and cause[1].blame == blame
    chosen, then = choose_resume(world, reports, None), following.resume
    assert (chosen.tier, chosen.step, chosen.generation) == (then.tier, then.step, then.generation)
    assert set(chosen.sources) == set(then.sources)


@pytest.mark.parametrize(("job", "outcome"), [("stopped", "stopped"), ("failed", "failed")])
def test_a_command_reads_a_job_from_start_to_end(job: str, outcome: str) -> None:
    started_job = read_job(store_of(present(job)), job)
    assert started_job.done is None and set(started_job.nodes) == {"node-0", "node-1"}
    assert "node-1" in status_text(collect_status(started_job, {}, {}))
    ended = read_job(store_of(dict(documents(job))), job)
    assert ended.done is not None and ended.done.outcome == outcome
    assert ended.control.stop == (outcome == "stopped")
    if outcome == "stopped":
        (drained,) = ended.control.drain
        assert drained.node == "node-1" and ended.control.nnodes == (1, 1)
    else:
        assert ended.done.failure is not None and len(ended.done.setbacks) == 3


@pytest.mark.parametrize("job", JOBS)
def test_an_earlier_token_record_is_accepted(job: str) -> None:
    store = store_of(present(job))
    assert KEY in store.read("").entries
    assert token_for_operator(store, Secret(TOKEN)) == Secret(TOKEN)
    assert token_for_operator(store, None) is None
    with pytest.raises(UserError):
        token_for_operator(store, Secret("another-token-than-that"))
