"""Finds out about the machine itself: packages, GPUs, memory, limits and clock."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from elasticzero.errors import OperatorError, UserError
from elasticzero.launcher.options.validation import check_folder, overflow_folder
from elasticzero.ops.doctor.facts import (
    GpuFacts,
    LimitFacts,
    SharedMemoryFacts,
    TorchFacts,
    VersionFacts,
)
from elasticzero.version import __version__

COMMAND_S = 60.0
"""Seconds within which nvidia-smi, and an import of torch, must have ended."""
TIMEX_BYTES = 512
"""Room for the kernel's struct timex, which has 208 bytes on 64-bit Linux."""
TIME_ERROR = 5
"""Value of adjtimex(2) where the clock is not synchronized."""
CGROUP = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Value from which on a limit counts as none: cgroup v1 has a number where v2 has `max`."""
_REQUIREMENT = re.compile(r"([\w.-]+)\s*([<>=!~][^;]*)?(;.*)?")
_ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch
facts = {"version": torch.__version__, "devices": 0, "cuda": torch.version.cuda}
facts["nccl"], facts["error"] = None, ""
if torch.version.cuda is not None:
    try:
        facts["devices"] = torch.cuda.device_count()
        if torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        torch.cuda.init()
    except Exception as error:
        facts["error"] = str(error).splitlines()[0] if str(error) else type(error).__name__
        facts["devices"] = 0
else:
    facts["error"] = "this torch is built without CUDA"
print(json.dumps(facts))
"""


def version_facts() -> VersionFacts:
    """Returns the installed versions, and those that elasticzero's own metadata require."""
    required: dict[str, str] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for entry in importlib.metadata.requires("elasticzero") or ():
            match = _REQUIREMENT.fullmatch(entry.strip())
            if match is not None and not match[3]:
                required[match[1]] = match[2] or ""
    return VersionFacts(
        python=platform.python_version(),
        elasticzero=__version__,
        packages={name: _installed(name) for name in required},
        required=required,
        messages_error=_messages_error(),
    )


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _messages_error() -> str:
    try:
        from elasticzero.launcher.store.etcd.protobuf import load_messages

        load_messages()
    except OperatorError as error:
        return str(error)
    except ImportError as error:
        return f"etcd cannot be spoken to: {error}; install elasticzero again with pip"
    return ""


def gpu_facts() -> GpuFacts:
    """Returns the GPUs of the machine, and what torch sees in a process of its own."""
    files = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    torch, torch_error = _torch_facts()
    return GpuFacts(
        device_files=len(files),
        listed=_nvidia_smi(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=torch,
        torch_error=torch_error,
    )


def _nvidia_smi() -> tuple[str, ...] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
        return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
    return None


def _torch_facts() -> tuple[TorchFacts | None, str]:
    """Returns what torch says, or why it says nothing. The launcher itself imports no torch."""
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"the import did not end within {COMMAND_S:g} s"
    except OSError as error:
        return None, str(error)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        error_lines = done.stderr.strip().splitlines()
        return None, error_lines[
            -1
        ] if error_lines else f"the process ended with status {done.returncode}"
    return TorchFacts(**json.loads(lines[-1])), ""


def shared_memory_facts(folder: str, needed_bytes: int | None) -> SharedMemoryFacts:
    """Returns the room for snapshots, in shared memory and on the disk for what does not fit.

    Args:
        folder: directory of snapshots, as --snapshot-dir gives it.
        needed_bytes: bytes of a node's snapshots; None: not known.
    """
    try:
        place = check_folder(folder)
    except UserError as error:
        return SharedMemoryFacts(folder=folder, needed_bytes=needed_bytes, error=str(error))
    overflow = overflow_folder(place)
    size, free = _room(place)
    return SharedMemoryFacts(
        folder=str(place),
        size_bytes=size,
        free_bytes=free,
        overflow=str(overflow) if overflow is not None else "",
        overflow_free_bytes=_room(overflow)[1] if overflow is not None else 0,
        needed_bytes=needed_bytes,
    )


def _room(folder: Path) -> tuple[int, int]:
    """Returns the size, and the free bytes, of the file system that holds a folder."""
    stats = os.statvfs(folder)
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def free_on_disk(folder: Path) -> int | None:
    """Returns the free bytes of the file system that a folder lies in, or will once it is made;
    None: none of its parents can be read."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return _room(place)[1]
    return None


def limit_facts() -> LimitFacts:
    """Returns the limits of this process, and those of its control group."""
    group = _cgroup_folders()
    pids = _number("pids.max", group)
    return LimitFacts(
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        processes=None if os.geteuid() == 0 else _soft_limit(resource.RLIMIT_NPROC),
        pids_left=None if pids is None else pids - (_number("pids.current", group) or 0),
        memory_bytes=_first("memory.max", "memory.limit_in_bytes", group),
        memory_used_bytes=_first("memory.current", "memory.usage_in_bytes", group) or 0,
    )


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_folders() -> list[Path]:
    """Returns the folders that may hold the limits of this process's control group, v2 first."""
    folders = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(","):
                root = CGROUP / name if name else CGROUP
                folders += [root / path.lstrip("/"), root]  # within a container the root is its own
    return [*folders, CGROUP]


def _number(name: str, folders: list[Path]) -> int | None:
    """Returns the number in the first file of this name; None where it says `max` or is missing."""
    for folder in folders:
        with suppress(OSError):
            text = (folder / name).read_text().strip()
            return int(text) if text.isdigit() and int(text) < NO_LIMIT else None
    return None


def _first(name: str, older: str, folders: list[Path]) -> int | None:
    number = _number(name, folders)
    return number if number is not None else _number(older, folders)


def clock_synchronized() -> bool | None:
    """Returns whether the kernel's clock is synchronized; None where the system does not say."""
    with suppress(OSError, AttributeError):
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
        return None if state < 0 else state != TIME_ERROR
    return None
