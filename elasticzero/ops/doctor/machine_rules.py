"""Judges the machine itself: its packages, GPUs, memory, limits and clock.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticzero.launcher.options.validation import count_gpus
from elasticzero.ops.doctor.facts import (
    GpuFacts,
    LimitFacts,
    SharedMemoryFacts,
    VersionFacts,
)
from elasticzero.ops.doctor.finding import Finding, release_of
from elasticzero.text import count_text, size_text

CONTAINER_SHM_BYTES = 64 << 20
"""Size of /dev/shm in a container for which nobody has asked for more."""
FULL_SHM_BYTES = 64 << 20
"""Free bytes below which shared memory counts as full."""
FEW_OPEN_FILES, TOO_FEW_OPEN_FILES = 4096, 1024
FEW_PROCESSES, TOO_FEW_PROCESSES = 4096, 512
SHOWN = ("torch", "etcd3", "grpcio", "protobuf")
"""Packages whose versions are printed."""
MORE_MEMORY = (
    "give the container more (docker run --shm-size, in Kubernetes an emptyDir with medium: Memory "
    "at /dev/shm), or name a larger place by --snapshot-dir"
)


def judge_versions(facts: VersionFacts) -> Iterator[Finding]:
    """Judges Python and the packages, each by the range that elasticzero supports."""
    wrong = []
    for name, spec in facts.required.items():
        version = facts.packages.get(name)
        if version is None:
            wrong.append(f"{name} is not installed")
        elif not in_range(version, spec):
            wrong.append(f"{name} {version} is not {spec}")
    if wrong:
        yield Finding(
            topic="versions",
            level="problem",
            text="; ".join(wrong),
            advice="install elasticzero again with pip, which takes versions that fit",
        )
    if facts.messages_error:
        yield Finding(topic="versions", level="problem", text=facts.messages_error)
    if not wrong and not facts.messages_error:
        named = [f"{name} {facts.packages[name]}" for name in SHOWN if facts.packages.get(name)]
        shown = ", ".join([f"Python {facts.python}", f"elasticzero {facts.elasticzero}", *named])
        yield Finding(topic="versions", level="ok", text=shown)


def in_range(version: str, spec: str) -> bool:
    """Returns whether a version fits bounds such as `>=2.10,<2.16`; conditions of other kinds count
    as met."""
    release = release_of(version)
    for part in spec.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*(\S+)\s*", part)
        if match is None:
            continue
        bound = release_of(match[2])
        width = max(len(release), len(bound))
        padded, padded_bound = (n + (0,) * (width - len(n)) for n in (release, bound))
        if (padded < padded_bound) == (match[1] == ">="):
            return False
    return True


def judge_shared_memory(facts: SharedMemoryFacts) -> Finding:
    """Judges whether snapshots find room in shared memory."""
    topic = "shared memory"
    if facts.error:
        what, _, step = facts.error.partition("; ")
        return Finding(topic=topic, level="problem", text=what, advice=step)
    free, size = size_text(facts.free_bytes), size_text(facts.size_bytes)
    text = f"{facts.folder} has {free} free of {size}"
    need = facts.needed_bytes
    if need is not None and facts.free_bytes < need:
        room = facts.overflow_free_bytes if facts.overflow else 0
        rest = (
            f"the rest goes to {facts.overflow}, which is slower"
            if facts.free_bytes + room >= need
            else "the rest finds no room on a disk either, so no snapshots are taken"
        )
        text = f"{text}, and snapshots need {size_text(need)}: {rest}"
        return Finding(topic=topic, level="problem", text=text, advice=MORE_MEMORY)
    if facts.size_bytes <= CONTAINER_SHM_BYTES and need is None:
        text += ", what a container has if nothing is said"
        return Finding(topic=topic, level="problem", text=text, advice=MORE_MEMORY)
    if facts.free_bytes < FULL_SHM_BYTES and need is None:
        advice = f"remove what fills it (`ls -l {facts.folder}`), or {MORE_MEMORY}"
        return Finding(topic=topic, level="problem", text=f"{text}: it is full", advice=advice)
    if need is not None:
        return Finding(topic=topic, level="ok", text=f"{text}; snapshots need {size_text(need)}")
    return Finding(
        topic=topic,
        level="ok",
        text=f"{text}; `elasticzero plan` says what snapshots need, and --snapshot-size compares",
    )


def judge_gpu(facts: GpuFacts) -> Finding:
    """Judges whether torch sees the GPUs that the machine has."""
    torch = facts.torch
    if torch is None:
        return Finding(
            topic="gpu",
            level="problem",
            text=f"torch cannot be imported: {facts.torch_error}",
            advice="install torch for this machine (https://pytorch.org)",
        )
    installed = len(facts.listed) if facts.listed is not None else facts.device_files
    if installed == 0 and torch.devices == 0:
        return Finding(
            topic="gpu", level="note", text="this machine has no NVIDIA GPU: workers use the CPU"
        )
    expected = count_gpus(installed, facts.visible)
    if torch.devices == expected:
        names = sorted({line.partition(",")[0].strip() for line in facts.listed or ()})
        built = f"CUDA {torch.cuda}, NCCL {torch.nccl or 'not known'}"
        text = f"torch sees {count_text(expected, 'GPU')} ({', '.join([*names, built])})"
        if expected == 0:
            hint = "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist"
            text = f"CUDA_VISIBLE_DEVICES={facts.visible} hides all {installed} GPUs"
            return Finding(topic="gpu", level="note", text=text, advice=hint)
        return Finding(topic="gpu", level="ok", text=text)
    why = torch.error or f"CUDA_VISIBLE_DEVICES={facts.visible}"
    advice = (
        "install a torch that is built for CUDA"
        if torch.cuda is None
        else f"see that the driver is new enough for CUDA {torch.cuda} (nvidia-smi shows which it "
        "takes), and that the container got the GPUs"
    )
    return Finding(
        topic="gpu",
        level="problem",
        text=f"the machine has {count_text(expected, 'GPU')} for this user and torch sees "
        f"{torch.devices} ({why})",
        advice=advice,
    )


def judge_limits(facts: LimitFacts, memory: SharedMemoryFacts) -> Iterator[Finding]:
    """Judges the limits of open files, processes and memory."""
    fine = []
    if facts.open_files is not None and facts.open_files < FEW_OPEN_FILES:
        yield Finding(
            topic="limits",
            level="problem" if facts.open_files < TOO_FEW_OPEN_FILES else "note",
            text=f"a process may have {facts.open_files} open files",
            advice="raise it with `ulimit -n 65536`, LimitNOFILE= of systemd or docker run "
            "--ulimit; data loaders with many workers need it",
        )
    else:
        fine.append(f"{facts.open_files or 'any number of'} open files")
    bounds = [n for n in (facts.processes, facts.pids_left) if n is not None]
    if bounds and min(bounds) < FEW_PROCESSES:
        yield Finding(
            topic="limits",
            level="problem" if min(bounds) < TOO_FEW_PROCESSES else "note",
            text=f"{min(bounds)} more processes and threads may be started",
            advice="raise it with `ulimit -u`, docker run --pids-limit, or the kubelet's "
            "podPidsLimit",
        )
    else:
        fine.append(f"{min(bounds) if bounds else 'any number of'} processes")
    if facts.memory_bytes is None:
        fine.append("no limit of memory")
    else:
        left = size_text(max(0, facts.memory_bytes - facts.memory_used_bytes))
        fine.append(f"{left} of {size_text(facts.memory_bytes)} of memory left to the container")
        if memory.size_bytes > facts.memory_bytes:
            yield Finding(
                topic="limits",
                level="note",
                text=f"{memory.folder} could hold {size_text(memory.size_bytes)}, and the "
                f"container may use {size_text(facts.memory_bytes)} of memory in all",
                advice="count snapshots as memory of the container, or the kernel kills workers",
            )
    yield Finding(topic="limits", level="ok", text=", ".join(fine))


def judge_clock(synchronized: bool | None) -> Finding:
    """Judges whether the machine's clock is synchronized, as far as the kernel says."""
    if synchronized:
        return Finding(topic="clock", level="ok", text="it is synchronized")
    text = "the kernel does not say" if synchronized is None else "the kernel says that it is not"
    return Finding(
        topic="clock",
        level="note",
        text=f"{text} synchronized" if synchronized is False else f"{text} if it is synchronized",
        advice="run an NTP client (chrony, systemd-timesyncd): the job does not need it, but times "
        "in logs cannot be compared, and certificates may count as expired",
    )
