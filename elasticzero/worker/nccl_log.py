"""Reads from NCCL's own log which network it takes, once in the life of a worker's process.

NCCL falls back to plain sockets in silence where a device, a right or a library is missing. It
reads `NCCL_DEBUG` once, before the first communicator of a process. So for that one this process
asks for the lines about its setup, in a file that is memory and has no name: whatever becomes of
the process, none is left. Once they are read the file takes no more, and NCCL drops what it would
write later. All of this is left alone where the user has asked NCCL for a log.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elasticzero.ipc.messages import NetworkTaken

ASKED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
"""Variables that ask for the lines about a communicator's setup. Lines about single collectives are
of another subsystem, so that NCCL does not even format them."""
VARIABLES = (*ASKED, "NCCL_DEBUG_FILE")
CONFIGURATION = ("/etc/nccl.conf", "~/.nccl.conf")
"""Files that NCCL reads variables from, besides that which NCCL_CONF_FILE names."""
MAX_LOG_BYTES = 4 << 20
"""Maximum number of bytes of the log that are read; the network stands near its beginning."""
INFINIBAND = Path("/sys/class/infiniband")
"""The machine's RDMA devices, which a container sees too, whether it may open them or not."""
VERBS = Path("/dev/infiniband")
"""The files by which a process opens them."""
Kind = Literal["sockets", "rdma", "other"]
_SOCKETS = ("Socket", "FastSocket")
_RDMA = ("InfiniBand", "RoCE", "EFA", "TCPXO")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_ASSIGNED = re.compile(r"NCCL INFO Assigned NET plugin (.+?) to comm", re.MULTILINE)
_VERSION = re.compile(r"\bNCCL version (\d[\w.]*)")
_PORTS = re.compile(r"NET/IB : Using (.+)$", re.MULTILINE)
_LINK = re.compile(r":\d+/(IB|RoCE)\b")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w.-]+)")
_VIA = re.compile(r" via NET/(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Says which network NCCL takes between nodes, by its own log."""

    name: str
    """Names it for people: InfiniBand, RoCE, EFA, TCPXO, sockets, or another one by NCCL's own
    name."""
    kind: Kind
    version: str = ""
    """Version of NCCL; empty: the log does not state it."""
    gpu_direct: bool | None = None
    """True if the network reads and writes the GPUs' memory by itself, on each connection; None: no
    connection of this rank goes over a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDevice:
    """Describes an RDMA device whose port is active."""

    name: str
    network: str
    """InfiniBand, RoCE or EFA."""


def parse(text: str) -> Network | None:
    """Returns the network that a log of NCCL states; None: it states none."""
    named = _NETWORK.search(text) or _ASSIGNED.search(text)
    if named is None:
        return None
    version = _VERSION.search(text)
    name = _common_name(named[1], text)
    connections = ["/GDRDMA" in via for via in _VIA.findall(text)]
    return Network(
        name=name,
        kind="sockets" if name == "sockets" else "rdma" if name in _RDMA else "other",
        version=version[1] if version is not None else "",
        gpu_direct=all(connections) if connections else None,
    )


def _common_name(name: str, text: str) -> str:
    """Returns a network's name for people.

    Args:
        name: Name that NCCL has for the network, or that of its plugin.
        text: The log, in which lines of the network tell more.
    """
    if name in _SOCKETS:
        return "sockets"
    if name.startswith("IB"):  # IB, and the plugins IBext, IBext_v8, ...
        links = {link for ports in _PORTS.findall(text) for link in _LINK.findall(ports)}
        return "RoCE" if links == {"RoCE"} else "InfiniBand"
    if name.endswith("Libfabric"):
        provider = _PROVIDER.search(text)
        its = provider[1] if provider is not None else ""
        return "EFA" if its.startswith("efa") else f"libfabric {its}".rstrip()
    return "TCPXO" if name == "FasTrak" else name


def fast_devices(folder: Path = INFINIBAND) -> tuple[FastDevice, ...]:
    """Returns the machine's RDMA devices with an active port, by name.

    Args:
        folder: Folder of the devices, as the kernel shows them.
    """
    devices = []
    with suppress(OSError):
        for device in sorted(folder.iterdir()):
            if (network := _network_of(device)) is not None:
                devices.append(FastDevice(name=device.name, network=network))
    return tuple(devices)


def _network_of(device: Path) -> str | None:
    """Returns the network of a device; None: none of its ports is active."""
    for port in sorted(device.glob("ports/*")):
        with suppress(OSError):
            if "ACTIVE" in (port / "state").read_text():
                if (device / "device" / "driver").resolve().name == "efa":
                    return "EFA"
                layer = (port / "link_layer").read_text().strip()
                return "InfiniBand" if layer == "InfiniBand" else "RoCE"
    return None


def warning(
    network: Network, devices: Sequence[FastDevice], variables: Mapping[str, str], verbs: bool
) -> str:
    """Returns a line where a machine has a faster network than NCCL takes; empty: it has none, or
    the user has chosen sockets.

    Args:
        network: What NCCL takes.
        devices: The machine's RDMA devices.
        variables: Environment of the worker.
        verbs: Whether this process sees the files by which such devices are opened.
    """
    chosen = variables.get("NCCL_IB_DISABLE", "0") not in ("", "0") or "NCCL_NET" in variables
    if network.kind != "sockets" or not devices or chosen:
        return ""
    best = next((d.network for d in devices if d.network == "EFA"), devices[0].network)
    names = [device.name for device in devices if device.network == best]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    if not verbs:
        advice = "give the container the devices, which it does not see at /dev/infiniband"
    elif best == "EFA":
        advice = "the plugin aws-ofi-nccl must be on LD_LIBRARY_PATH"
    else:
        advice = "NCCL needs libibverbs, and the right to open /dev/infiniband and to lock memory"
    return (
        f"NCCL takes sockets between nodes, though this machine has {best} ({shown}): {advice}; "
        "see docs/fast-networks.md"
    )


def message(network: Network, nodes: int) -> NetworkTaken:
    """Returns what the agent is told of a network, with a warning where this machine has a better
    one.

    Args:
        network: What NCCL takes.
        nodes: Number of nodes; a single one uses no network.
    """
    better = warning(network, fast_devices(), os.environ, VERBS.is_dir()) if nodes > 1 else ""
    return NetworkTaken(
        network=network.name,
        version=network.version,
        gpu_direct=network.gpu_direct,
        warning=better,
    )


class SetupLog:
    """Holds the log of the first communicator of this process."""

    def __init__(self, fd: int | None) -> None:
        """Takes over the descriptor of the file; None: NCCL writes no log for this process."""
        self._fd = fd

    @property
    def path(self) -> str:
        """Returns the path by which this process opens the file; empty: there is none."""
        return f"/proc/self/fd/{self._fd}" if self._fd is not None else ""

    def network(self) -> Network | None:
        """Returns what the log states; None: nothing, or it cannot be read."""
        if self._fd is None:
            return None
        with suppress(OSError):
            return parse(os.pread(self._fd, MAX_LOG_BYTES, 0).decode(errors="replace"))
        return None

    def close(self) -> None:
        """Frees the memory of the file, to which nothing can be written from now on."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with suppress(OSError):
            os.ftruncate(fd, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        os.close(fd)


_asked = False
"""True once this process has asked NCCL for a log, which it can do once."""


@contextmanager
def setup_log() -> Iterator[SetupLog]:
    """Has NCCL write a log of the communicator that is made in the context, the first of this
    process; the environment is afterwards what it was before."""
    global _asked
    log = SetupLog(None if _asked or _is_configured(os.environ) else _memory_file())
    _asked = True
    if not log.path:
        yield log
        return
    os.environ.update(ASKED, NCCL_DEBUG_FILE=log.path)
    try:
        yield log
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
        log.close()


def _is_configured(variables: Mapping[str, str]) -> bool:
    """Returns whether the user has asked NCCL for a log, in the environment or in a file."""
    if any(name in variables for name in VARIABLES):
        return True
    for name in (*CONFIGURATION, variables.get("NCCL_CONF_FILE", "")):
        with suppress(OSError, RuntimeError):
            if name and "NCCL_DEBUG" in Path(name).expanduser().read_text(errors="replace"):
                return True
    return False


def _memory_file() -> int | None:
    """Returns the descriptor of a new file in memory that this process can open by its number;
    None: it cannot."""
    fd = None
    try:
        fd = os.memfd_create("nccl-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))
        return fd
    except OSError:  # NCCL would write on standard output instead
        if fd is not None:
            os.close(fd)
        return None
