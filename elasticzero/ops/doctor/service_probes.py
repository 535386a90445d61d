"""Finds out about what the machine must reach: etcd, other nodes, storage and the cloud."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticzero.checkpoint.steps.catalog import check_writable
from elasticzero.checkpoint.storage.base import within
from elasticzero.checkpoint.storage.trial import try_storage
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, OperatorError, RetryError, UserError
from elasticzero.launcher.addresses import bound_socket
from elasticzero.launcher.preemption.metadata import MetadataError
from elasticzero.launcher.preemption.providers import CLOUDS
from elasticzero.launcher.preemption.watcher import cloud_named
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.access import Access, parse_endpoint
from elasticzero.launcher.store.etcd.server import find_etcd
from elasticzero.launcher.store.etcd.version import read_version
from elasticzero.ops.doctor.facts import (
    CloudFacts,
    EtcdFacts,
    PeerFacts,
    PeerState,
    PortFacts,
    StorageFacts,
)
from elasticzero.ops.doctor.machine_probes import free_on_disk

WRITES = 11
"""Number of writes to etcd; their median is judged."""
LEASE_S = 10
"""Seconds until the key that is written expires, so that it goes even if this process is killed."""
CONNECT_S = 3.0
STORAGE_S = 60.0
"""Seconds after which storage that has not answered counts as one that cannot be used."""
WORKERS_PORT = 49152
"""Port that stands for those that workers choose: the first one of the dynamic ports."""


def etcd_facts(endpoints: Sequence[str], access: Access) -> EtcdFacts:
    """Returns how etcd answers: the version and clock of each endpoint, and the time of writes.

    Args:
        endpoints: HOST:PORT or URL of each member; empty: the result says what could be started.
        access: certificates, user and password for etcd.

    Raises:
        UserError: an endpoint or a certificate cannot be used.
    """
    if not endpoints:
        binary = find_etcd()
        return EtcdFacts(endpoints=(), binary=str(binary) if binary is not None else None)
    named = [parse_endpoint(text, access) for text in endpoints]
    answers = [read_version(endpoint, access) for endpoint in named]
    writes_s, error = _timed_writes(endpoints, access)
    return EtcdFacts(
        endpoints=tuple(map(str, named)),
        versions=tuple(version for version in answers if version is not None),
        writes_s=tuple(writes_s),
        error=error,
    )


def _timed_writes(endpoints: Sequence[str], access: Access) -> tuple[list[float], str]:
    """Returns the seconds that each of some writes took, and why they failed if they did."""
    writes_s: list[float] = []

    def observe(operation: str, seconds: float, failure: str | None) -> None:
        if operation == "write" and failure is None:
            writes_s.append(seconds)

    prefix = job_prefix(f".doctor-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        # Where its packages are broken the import fails, and that is a finding too.
        from elasticzero.launcher.store.etcd.store import EtcdStore

        with EtcdStore(endpoints, prefix, access=access, observe=observe) as store:
            lease = store.lease(LEASE_S)
            try:
                for number in range(WRITES):
                    store.write({"trial": str(number).encode()}, lease=lease)
            finally:
                lease.close(revoke=True)
    except (OperatorError, RetryError, ImportError) as error:
        return writes_s, str(error)
    return writes_s, ""


def port_facts(host: str, port: int, *, is_given: bool) -> PortFacts:
    """Returns whether a server could listen at a port of this machine.

    Args:
        host: the address to listen at.
        port: the port to try.
        is_given: whether the operator chose the port; else an agent takes the next free one.
    """
    try:
        with bound_socket(host, port) as probe:
            probe.listen(1)
    except (OSError, OverflowError) as error:
        return PortFacts(
            port=port, is_given=is_given, error=getattr(error, "strerror", "") or str(error)
        )
    return PortFacts(port=port, is_given=is_given)


def peer_facts(host: str, http_port: int) -> PeerFacts:
    """Returns how another node's HTTP port answers, and one of those that workers choose.

    Args:
        host: name or address of the node.
        http_port: port of its agent's HTTP server.
    """
    return PeerFacts(
        host=host, states={port: _state(host, port) for port in (http_port, WORKERS_PORT)}
    )


def _state(host: str, port: int) -> PeerState:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silent"
    except socket.gaierror:
        return "unknown name"
    except OSError:
        return "unreachable"
    return "open"


def storage_facts(url: str | None) -> StorageFacts:
    """Returns how a checkpoint directory stores files; folders that the trial makes are removed.

    Args:
        url: directory or URL; None: none was given.
    """
    if not url:
        return StorageFacts()
    where, nearest = url, ""
    try:
        directory = open_directory(url)
        where = directory.where
        disk = None if "://" in where else Path(where)
        made = [p for p in (disk, *disk.parents) if not os.path.exists(p)] if disk else []
        nearest = str(made[-1].parent) if made else ""
        try:
            within(STORAGE_S, where, lambda: check_writable(directory))
            trial = within(STORAGE_S, where, lambda: try_storage(url))
        finally:
            for path in made:  # as it was found, the deepest first
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
    except ElasticZeroError as error:
        return StorageFacts(where=where, nearest=nearest, error=str(error))
    free = None if disk is None else free_on_disk(disk)
    return StorageFacts(where=where, trial=trial, free_bytes=free, nearest=nearest)


def cloud_facts(choice: str, environment: Mapping[str, str]) -> CloudFacts:
    """Returns which cloud's metadata server answers.

    Args:
        choice: the value of --preemption: a cloud's name, auto or none.
        environment: variables that may give a server's address.
    """
    names = {"auto": tuple(CLOUDS), "none": ()}.get(choice, (choice,))
    errors = []
    for name in names:
        try:
            cloud = cloud_named(name, environment)
        except UserError as error:
            errors.append(str(error))
            continue
        try:
            cloud.probe()
            return CloudFacts(choice=choice, cloud=cloud.name)
        except MetadataError as error:
            errors.append(str(error))
        finally:
            cloud.close()
    return CloudFacts(choice=choice, errors=tuple(errors))
