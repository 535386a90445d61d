"""Defines the facts that the probes collect, before anything is judged.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elasticzero.checkpoint.storage.trial import StorageTrial
from elasticzero.launcher.store.etcd.version import EtcdVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdFacts:
    """Says how etcd answers; without endpoints, what could be started instead."""

    endpoints: tuple[str, ...]
    """Endpoints that were given; empty: none were."""
    binary: str | None = None
    """Path of an etcd that can be started here, for a job on one node."""
    versions: tuple[EtcdVersion, ...] = ()
    """Versions and clocks, of those endpoints that have answered."""
    writes_s: tuple[float, ...] = ()
    """Seconds that each write of a key took."""
    error: str = ""
    """Why nothing could be written; empty: writes have succeeded, or no endpoint was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """Says whether an agent's HTTP server could listen."""

    port: int
    is_given: bool
    """True if the port was given; otherwise an agent takes the next one that is free."""
    error: str = ""
    """Why it cannot listen there; empty: it can."""


PeerState = Literal["open", "refused", "silent", "unreachable", "unknown name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """Says how the ports of another node answer."""

    host: str
    states: Mapping[int, PeerState]
    """State of each port that was tried. `refused`: the host answers, and nothing listens there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNetworkFacts:
    """Says whether a node of this machine would start in the private network that it is confined
    to."""

    network: str
    """The value of --require-private-network."""
    address: str = ""
    """Address at which other nodes would reach this one."""
    error: str = ""
    """Why the node would be refused; empty: it would not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """Holds what was read of the way to another node, as texts."""

    host: str
    address: str = ""
    """Address of the host that is taken; empty: none has a route."""
    source: str = ""
    """This machine's address on that route."""
    route: str | None = None
    """Answer of `ip -j route get`; None: there is none."""
    interface: str = ""
    """Interface that has the source address, which tells the route where `ip` does not."""
    links: str | None = None
    """Answer of `ip -j -d link show`; None: there is none."""
    sysfs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Files of /sys/class/net by interface and name; the text of a folder is empty."""
    policies: str | None = None
    """Answer of `ip xfrm policy`; None: there is none, as where this user may not read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryFacts:
    """Says how much room there is for snapshots."""

    folder: str
    size_bytes: int = 0
    free_bytes: int = 0
    overflow: str = ""
    """Folder on a disk for snapshots that find no room; empty: there is no other folder."""
    overflow_free_bytes: int = 0
    needed_bytes: int | None = None
    """Bytes of a node's snapshots; None: the user did not say."""
    error: str = ""
    """Why the folder cannot be used; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """Says how the checkpoint directory stores files; `where` is empty if none was given."""

    where: str = ""
    trial: StorageTrial | None = None
    free_bytes: int | None = None
    """Free bytes of the file system; None for an object store."""
    nearest: str = ""
    """The innermost directory above it that exists; empty: the directory itself exists, or is no
    directory on a disk."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """Says what torch sees of the GPUs."""

    version: str
    devices: int
    cuda: str | None = None
    """Version of CUDA that torch was built for; None: it was built without."""
    nccl: str | None = None
    error: str = ""
    """Why CUDA cannot be used; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Says which GPUs the machine has, and what torch sees of them."""

    device_files: int
    """Number of files /dev/nvidia0, /dev/nvidia1, …"""
    listed: tuple[str, ...] | None = None
    """A line for each GPU that nvidia-smi lists; None: there is no nvidia-smi, or it fails."""
    visible: str | None = None
    """Value of CUDA_VISIBLE_DEVICES; None: it is unset."""
    torch: TorchFacts | None = None
    torch_error: str = ""
    """Why the process that imports torch gave no answer; empty: it gave one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Says which versions are installed."""

    python: str
    elasticzero: str
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each package that elasticzero needs; None: it is not installed."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Versions that are supported, as `>=2.10,<2.16`."""
    messages_error: str = ""
    """Why the messages of etcd cannot be loaded from the packages etcd3 and protobuf; empty: they
    can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFacts:
    """Says what the system and the container allow; None: no limit, or it is not known."""

    open_files: int | None = None
    processes: int | None = None
    pids_left: int | None = None
    """Processes and threads that the control group still allows."""
    memory_bytes: int | None = None
    """Limit of the control group."""
    memory_used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudFacts:
    """Says whether a cloud's metadata server answers."""

    choice: str
    """The value of --preemption."""
    cloud: str = ""
    """Name of the cloud that answers; empty: none does."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Holds all facts of one examination."""

    etcd: EtcdFacts
    port: PortFacts
    peers: tuple[PeerFacts, ...]
    network: PrivateNetworkFacts | None = None
    """None: no private network is required."""
    paths: tuple[PathFacts, ...] = ()
    """Ways to the peers."""
    memory: SharedMemoryFacts
    storage: StorageFacts
    gpu: GpuFacts
    clock_synchronized: bool | None
    """True if the kernel says that its clock is synchronized; None: it does not say."""
    versions: VersionFacts
    limits: LimitFacts
    cloud: CloudFacts
