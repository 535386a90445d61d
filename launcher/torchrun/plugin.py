"""Implements torchrun's rendezvous: `torchrun --rdzv-backend elasticzero --rdzv-endpoint …`.

torch loads this module whenever it imports its own rendezvous package, in every process and for
every backend, and from within that import. So nothing heavy is imported before a handler is made.
No other file of the launcher imports torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
    )

    from elasticzero.launcher.store.etcd.access import Access
    from elasticzero.launcher.torchrun.node import NodePlacement, RendezvousNode, RendezvousRefused
    from elasticzero.launcher.torchrun.rules import RoundLimits
    from elasticzero.torch_internals.groups import TCPStore
else:
    RendezvousHandler = object  # `create` registers the class with torch's

DEFAULT_ETCD_PORT = 2379
OPTIONS = ("join_timeout", "last_call_timeout", "close_timeout", "connect_timeout", "lease_ttl")
"""Names that --rdzv-conf accepts, in seconds; the first three are torch's own."""
ACCESS = ("etcd_cacert", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")
"""Other names that --rdzv-conf accepts: files and a user, as `elasticzero run` takes them."""
TORCHS_OWN = ("timeout", "read_timeout", "keep_alive_interval", "keep_alive_max_attempt")
"""Options of torch's handlers that have no meaning here; torchrun always gives the first."""
MEET_TIMEOUT_S = 60.0
"""Maximum seconds for the nodes of a new world to meet at rank 0's store."""
STORE_TIMEOUT_S = 60.0
ARRIVED = "elasticzero/arrived"
LOOK_S = 0.02
PROBE_S = 2.0


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Makes a handler of torchrun's parameters; this is the entry point."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Returns a handler; raises `ValueError` for invalid parameters."""
    from torch.distributed.elastic.rendezvous import api
    from torch.distributed.elastic.utils.logging import get_logger

    from elasticzero.errors import UserError
    from elasticzero.launcher.secrets import forget_secrets
    from elasticzero.launcher.store.etcd.store import EtcdStore
    from elasticzero.launcher.store.membership import reachable_address
    from elasticzero.launcher.torchrun.node import RendezvousNode, rendezvous_prefix

    api.RendezvousHandler.register(Handler)
    limits = _limits(parameters)
    endpoints = _endpoints(parameters.endpoint)
    try:
        access = _access(parameters.config)
        store = EtcdStore(endpoints, rendezvous_prefix(parameters.run_id), access=access)
    except UserError as error:
        raise ValueError(_with_torchrun_names(str(error))) from None
    forget_secrets(os.environ)
    host = parameters.local_addr or reachable_address(endpoints[0].rpartition("://")[2])
    log_line = get_logger(__name__).info
    node = RendezvousNode(store, ",".join(endpoints), host, limits, log_line)
    return Handler(parameters.backend, parameters.run_id, node)


def _endpoints(text: str) -> list[str]:
    """Returns HOST[:PORT],… with etcd's usual port where none is given."""
    endpoints = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not endpoints:
        raise ValueError("the elasticzero rendezvous needs --rdzv-endpoint HOST:PORT of an etcd v3")
    with_port = []
    for endpoint in endpoints:
        _, colon, port = endpoint.rpartition("://")[2].rpartition(":")
        has_port = bool(colon) and not port.endswith("]")
        with_port.append(endpoint if has_port else f"{endpoint}:{DEFAULT_ETCD_PORT}")
    return with_port


def _access(config: Mapping[str, Any]) -> Access:
    """Returns how etcd is accessed; raises `UserError`."""
    from elasticzero.launcher.store.etcd.access import resolve_access

    values = {option.removeprefix("etcd_"): config.get(option) for option in ACCESS}
    return resolve_access(**values, environment=os.environ)


def _with_torchrun_names(text: str) -> str:
    """Rewords an error about options of `elasticzero run` by their names in --rdzv-conf."""
    for option in sorted(ACCESS, key=len, reverse=True):
        text = text.replace(f"--{option.replace('_', '-')} ", f"--rdzv-conf {option}=")
    return text


def _limits(parameters: RendezvousParameters) -> RoundLimits:
    from elasticzero.launcher.torchrun.rules import RoundLimits

    config: Mapping[str, Any] = parameters.config
    unknown = sorted(set(config) - {*OPTIONS, *ACCESS, *TORCHS_OWN})
    if unknown:
        raise ValueError(
            f"--rdzv-conf {unknown[0]}: unknown; there are {', '.join(OPTIONS + ACCESS)}"
        )
    seconds = {}
    for option in OPTIONS:
        if option in config:
            try:
                seconds[f"{option}_s"] = float(config[option])
            except ValueError:
                raise ValueError(
                    f"--rdzv-conf {option}={config[option]}: a number of seconds is expected"
                ) from None
    return RoundLimits(min_nodes=parameters.min_nodes, max_nodes=parameters.max_nodes, **seconds)


class Handler(RendezvousHandler):
    """Implements torch's `RendezvousHandler` over a `RendezvousNode`."""

    def __init__(self, backend: str, run_id: str, node: RendezvousNode) -> None:
        """Creates a handler of a node that has no place yet.

        Args:
            backend: Name of the rendezvous backend, as torchrun was given it.
            run_id: Name of the run, as torchrun was given it.
            node: This node's part in the rendezvous.
        """
        self._backend, self._run_id = backend, run_id
        self._node = node
        self._store: TCPStore | None = None
        """Store of the present world, or of the one before it until there is a next: the workers of
        nodes that have not left that one yet must not lose it."""

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Returns whether the workers use the agents' store, which outlives them."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns this node's rank among the nodes, and a store that all of them have reached."""
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

        from elasticzero.launcher.torchrun.node import RendezvousRefused

        store = None
        while store is None:
            try:
                place = self._node.next_placement()
            except RendezvousRefused as error:
                raise _as_torch_error(error) from None
            store = self._rendezvous(place)
        self._node.begin()
        self._store = store
        info = RendezvousStoreInfo(place.host, place.port)
        if not self.use_agent_store:
            host = self._node.host
            info = RendezvousStoreInfo.build(place.index, store, local_addr=host)
        return RendezvousInfo(store, place.index, place.size, info)

    def is_closed(self) -> bool:
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        from elasticzero.errors import StoreUnavailable

        try:
            return self._node.closed()
        except StoreUnavailable as error:
            raise RendezvousConnectionError(str(error)) from None

    def set_closed(self) -> None:
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        from elasticzero.errors import StoreUnavailable

        try:
            self._close(f"closed by {self._node.name}", failed=False)
        except StoreUnavailable as error:
            raise RendezvousConnectionError(str(error)) from None

    def num_nodes_waiting(self) -> int:
        """Returns a number above 0 when a node waits, and when one is lost too.

        torchrun then starts its workers again, without counting that as a restart.
        """
        change = self._node.change()
        return len(change.lost) + len(change.newcomers)

    def shutdown(self) -> bool:
        """Leaves; a node that trained ends the run for all, as with torch's own handlers.

        torchrun does not say how it ended; it calls this while its error is on the way. That of one
        node makes the others give up at once, instead of waiting for a node that is gone.
        """
        from elasticzero.errors import StoreUnavailable

        error = sys.exc_info()[1]
        name = self._node.name
        reason = f"the workers of {name} finished"
        if error is not None:
            lines = str(error).strip().splitlines() or [""]
            reason = f"{name} ended with {type(error).__name__}: {lines[0][:200]}"
        closed = True
        try:
            if self._node.ends_the_run():
                self._close(reason, failed=error is not None)
        except StoreUnavailable:
            closed = False
        self._node.leave()
        return closed

    def _close(self, reason: str, *, failed: bool) -> None:
        from elasticzero.launcher.protocol.documents import Done

        outcome = Done(outcome="failed" if failed else "finished", step=0, reason=reason)
        self._node.close_rendezvous(outcome)

    def _rendezvous(self, place: NodePlacement) -> TCPStore | None:
        """Returns the store of a new world once all its nodes are there; None: the world no longer
        exists.

        So no worker is started in a world of which a node was lost while it was made.
        """
        from torch.distributed import DistError

        deadline_s = time.monotonic() + MEET_TIMEOUT_S
        # torch's store blocks far past its timeout on a host that is dead or silent.
        if place.socket is None and not self._wait(
            lambda: _listens(place.host, place.port), place, deadline_s
        ):
            return None
        try:
            store = _open(place)
            store.add(ARRIVED, 1)
            if self._wait(lambda: store.add(ARRIVED, 0) >= place.size, place, deadline_s):
                return store
        except DistError:
            # The first node has given this world up, or is gone: that will be seen in etcd.
            self._wait(lambda: False, place, deadline_s)
        return None

    def _wait(self, condition: Callable[[], bool], place: NodePlacement, deadline_s: float) -> bool:
        """Waits for a condition.

        Args:
            condition: Returns whether the condition holds.
            place: This node's place in its world.
            deadline_s: Time (monotonic) at which the wait ends with an error.

        Returns:
            True once the condition holds; False if a node of the world was lost before.
        """
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        while not condition():
            if self._node.change().lost or self._node.closed():
                return False
            if time.monotonic() > deadline_s:
                first = place.world.members[0].node
                raise RendezvousConnectionError(
                    f"the {place.size} nodes of generation {place.world.generation} did not meet "
                    f"within {MEET_TIMEOUT_S:g} s at {place.host}:{place.port}, the store of "
                    f"{first}: check that all nodes reach that address; --local-addr on "
                    "a node names another for it"
                )
            time.sleep(LOOK_S)
        return True


def _open(place: NodePlacement) -> TCPStore:
    """Opens the store of a world: the first node serves it, the others connect to it."""
    from elasticzero.torch_internals.groups import TCPStore

    lifetime = timedelta(seconds=STORE_TIMEOUT_S)
    if place.socket is None:
        return TCPStore(place.host, place.port, timeout=lifetime, wait_for_workers=False)
    return TCPStore(
        place.host,
        place.port,
        is_master=True,
        timeout=lifetime,
        wait_for_workers=False,
        master_listen_fd=place.socket.detach(),
        use_libuv=True,
    )


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_S):
            return True
    except OSError:
        return False


def _as_torch_error(error: RendezvousRefused) -> Exception:
    """Returns torch's error of the same meaning."""
    from torch.distributed.elastic.rendezvous import api

    kinds = {
        "closed": api.RendezvousClosedError,
        "over": api.RendezvousGracefulExitError,
        "timeout": api.RendezvousTimeoutError,
        "connection": api.RendezvousConnectionError,
        "state": api.RendezvousStateError,
    }
    return kinds[error.kind](str(error))
