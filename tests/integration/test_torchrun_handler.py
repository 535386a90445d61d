"""The rendezvous handler that torchrun gets: torch's contract, over a real etcd and real stores."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from elasticzero.launcher.store.etcd.server import EtcdServer
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.torchrun.node import rendezvous_prefix
from tests.integration.etcd_members import Members, Tls
from tests.support.certificates import LOOPBACK, Authority
from tests.support.deadlines import patience

PATIENCE_S = 60.0
TTL_S = 2
_ids = itertools.count()


class Nodes:
    """Handlers of one rendezvous, each asked from a thread of its own."""

    def __init__(self, endpoint: str, pool: ThreadPoolExecutor) -> None:
        self.endpoint, self.run_id = endpoint, f"run-{os.getpid()}-{next(_ids)}"
        self._pool = pool
        self.handlers: list[RendezvousHandler] = []

    def new(self, nodes: tuple[int, int], **conf: Any) -> RendezvousHandler:
        times = {"join_timeout": PATIENCE_S, "last_call_timeout": 0.3, "lease_ttl": TTL_S}
        parameters = RendezvousParameters(
            "elasticzero", self.endpoint, self.run_id, *nodes, timeout=900, **{**times, **conf}
        )
        self.handlers.append(get_rendezvous_handler(parameters))
        return self.handlers[-1]

    def ask(self, *handlers: RendezvousHandler) -> list[Future[RendezvousInfo]]:
        return [self._pool.submit(handler.next_rendezvous) for handler in handlers]

    def together(self, *handlers: RendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(PATIENCE_S) for future in self.ask(*handlers)]


@pytest.fixture
def nodes(etcd: EtcdServer) -> Iterator[Nodes]:
    with ThreadPoolExecutor(8) as pool:
        torchrun_nodes = Nodes(etcd.endpoint, pool)
        yield torchrun_nodes
        for handler in torchrun_nodes.handlers:
            handler.shutdown()


def wait_for(what: str, so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while not so():
        assert time.monotonic() < deadline_s, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.02)


def ranks(infos: list[RendezvousInfo]) -> list[int]:
    return [info.rank for info in infos]


def test_nodes_meet_at_the_store_of_the_first(nodes: Nodes) -> None:
    a, b = nodes.new((2, 2)), nodes.new((2, 2))
    infos = nodes.together(a, b)
    assert sorted(ranks(infos)) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    infos[0].store.set("said", "hello")
    assert infos[1].store.get("said") == b"hello"
    addresses = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        for info in infos
        if info.bootstrap_store_info is not None
    }
    assert len(addresses) == 1
    with socket.create_connection(addresses.pop(), timeout=30):
        pass
    assert (a.get_backend(), a.get_run_id()) == ("elasticzero", nodes.run_id)
    assert isinstance(a, RendezvousHandler) and a.use_agent_store
    assert not a.is_closed() and a.num_nodes_waiting() == b.num_nodes_waiting() == 0


def test_workers_may_have_a_store_of_their_own(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    a, b = nodes.new((2, 2)), nodes.new((2, 2))
    infos = nodes.together(a, b)
    ports = {i.bootstrap_store_info.master_port for i in infos if i.bootstrap_store_info}
    assert len(ports) == 1 and not a.use_agent_store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports.pop()), timeout=30)


def test_a_newcomer_joins_and_the_others_keep_their_order(
    nodes: Nodes,
) -> None:
    a, b = nodes.new((1, 3)), nodes.new((1, 3))
    before = ranks(nodes.together(a, b))
    c = nodes.new((1, 3))
    (coming,) = nodes.ask(c)
    wait_for("both see it", lambda: min(a.num_nodes_waiting(), b.num_nodes_waiting()) > 0)
    infos = nodes.together(a, b)
    assert ranks(infos) == before
    assert coming.result(PATIENCE_S).rank == 2
    assert {info.world_size for info in infos} == {3}
    assert not any(handler.num_nodes_waiting() for handler in (a, b, c))


def test_a_node_whose_workers_failed_calls_the_others(nodes: Nodes) -> None:
    a, b = nodes.new((2, 2)), nodes.new((2, 2))
    before = ranks(nodes.together(a, b))
    (again,) = nodes.ask(b)
    wait_for("the other sees it", lambda: a.num_nodes_waiting() > 0)
    (info,) = nodes.together(a)
    assert [info.rank, again.result(PATIENCE_S).rank] == before


LONE_NODE = """
import os, signal, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
endpoint, run_id = sys.argv[1:]
handler = get_rendezvous_handler(RendezvousParameters(
    "elasticzero", endpoint, run_id, 1, 2, last_call_timeout=60, lease_ttl=2))
handler.next_rendezvous()
print("placed", flush=True)
def end(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, end)
signal.pause()
"""


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_lost_node_is_noticed_and_a_spare_takes_its_place(nodes: Nodes, how: str) -> None:
    a = nodes.new((1, 2), last_call_timeout=PATIENCE_S)
    command = [sys.executable, "-c", LONE_NODE, nodes.endpoint, nodes.run_id]
    spare = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            first = nodes.together(a)[0]
            assert other.stdout is not None and other.stdout.readline() == "placed\n"
            if how == "kill":
                spare = nodes.ask(nodes.new((1, 2)))
            assert a.num_nodes_waiting() == 0
            getattr(other, how)()
            wait_for("its end is seen", lambda: a.num_nodes_waiting() > 0)
            (info,) = nodes.together(a)
        finally:
            other.kill()
    assert (first.world_size, info.rank, info.world_size) == (2, 0, 1 + len(spare))
    assert ranks([future.result(PATIENCE_S) for future in spare]) == [1] * len(spare)


def test_a_run_that_ended_is_closed_and_its_id_can_be_used_again(
    nodes: Nodes,
) -> None:
    a, b = nodes.new((2, 2)), nodes.new((2, 2))
    nodes.together(a, b)
    assert a.shutdown()
    wait_for("the other knows", b.is_closed)
    assert b.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError, match=f"{nodes.endpoint} is closed: the workers of"):
        b.next_rendezvous()
    assert b.shutdown()
    again = nodes.new((1, 1))
    assert nodes.together(again)[0].world_size == 1


def test_a_failed_node_makes_the_others_give_up_at_once(nodes: Nodes) -> None:
    a, b = nodes.new((2, 2)), nodes.new((2, 2))
    nodes.together(a, b)
    try:
        raise RuntimeError("the script is broken")
    except RuntimeError:
        a.shutdown()
    wait_for("the other shall ask", lambda: b.num_nodes_waiting() > 0)
    with pytest.raises(RendezvousClosedError, match="RuntimeError: the script is broken"):
        b.next_rendezvous()


def test_a_rendezvous_can_be_closed_by_hand(nodes: Nodes) -> None:
    a = nodes.new((1, 1))
    assert not a.is_closed()
    nodes.together(a)
    a.set_closed()
    wait_for("it knows", a.is_closed)
    a.set_closed()
    with pytest.raises(RendezvousClosedError):
        a.next_rendezvous()


def test_a_node_too_many_waits_and_is_sent_home_in_the_end(nodes: Nodes) -> None:
    a, spare = nodes.new((1, 1)), nodes.new((1, 1), join_timeout=0.5)
    nodes.together(a)
    (waiting,) = nodes.ask(spare)
    time.sleep(1.0)  # longer than its join_timeout
    assert not waiting.done() and a.num_nodes_waiting() == 0
    a.shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result(PATIENCE_S)


def test_too_few_nodes_time_out_and_close_nothing(nodes: Nodes) -> None:
    a = nodes.new((2, 2), join_timeout=1)
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2 nodes.*|etcd"):
        a.next_rendezvous()
    assert a.shutdown()
    assert len(nodes.together(nodes.new((2, 2)), nodes.new((2, 2)))) == 2


def test_no_etcd_is_an_error_that_names_it(nodes: Nodes) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        nodes.endpoint = f"127.0.0.1:{nobody.getsockname()[1]}"
        a = nodes.new((1, 1), connect_timeout=1, close_timeout=0)
        with pytest.raises(RendezvousConnectionError, match=rf"etcd at {nodes.endpoint} did not"):
            a.next_rendezvous()
        with pytest.raises(RendezvousConnectionError, match=nodes.endpoint):
            a.is_closed()


def test_documents_that_make_no_sense_are_an_error_of_state(nodes: Nodes) -> None:
    with EtcdStore([nodes.endpoint], rendezvous_prefix(nodes.run_id)) as store:
        store.write({"world": b"{}"})
    a = nodes.new((1, 1))
    with pytest.raises(RendezvousStateError, match=rf"{nodes.endpoint}.*another --rdzv-id"):
        a.next_rendezvous()


@pytest.mark.parametrize(
    ("endpoint", "conf", "says"),
    [
        ("", {}, "--rdzv-endpoint HOST:PORT"),
        ("host:port", {}, "not HOST:PORT"),
        ("host:1", {"join_timeuot": 1}, "join_timeuot: unknown; there are join_timeout"),
        ("host:1", {"join_timeout": "soon"}, "join_timeout=soon: a number of seconds"),
        ("host:1", {"lease_ttl": "1"}, "lease_ttl=1: etcd grants"),
        (
            "host:1",
            {"etcd_user": "trainer"},
            "etcd_user=trainer needs a password: give --rdzv-conf etcd_password_file=FILE",
        ),
        (
            "https://host:1",
            {"etcd_cacert": "nowhere.pem"},
            "--rdzv-conf etcd_cacert=nowhere.pem: No such",
        ),
    ],
)
def test_parameters_that_cannot_be_meant(endpoint: str, conf: dict[str, Any], says: str) -> None:
    parameters = RendezvousParameters("elasticzero", endpoint, "id", 1, 1, **conf)
    with pytest.raises(ValueError, match=says):
        get_rendezvous_handler(parameters)


@pytest.mark.timeout(90)
def test_two_nodes_meet_behind_tls_with_a_user(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pems", "ours")
    server, client = authority.sign("etcd", LOOPBACK), authority.sign("agent")
    tls = Tls(cert=server.cert, key=server.key, ca=authority.cert, clients=True)
    (tmp_path / "password").write_text("the-users-password")
    conf = {
        "etcd_cacert": str(authority.cert),
        "etcd_cert": str(client.cert),
        "etcd_key": str(client.key),
        "etcd_user": "trainer",
        "etcd_password_file": str(tmp_path / "password"),
        "last_call_timeout": PATIENCE_S,
    }
    with (
        Members(tmp_path / "etcd", tls=tls, options={"bcrypt-cost": "4"}) as etcd,
        ThreadPoolExecutor(2) as pool,
    ):
        etcd.enable_users("trainer", "the-users-password")
        nodes = Nodes(etcd.endpoints, pool)
        a, b = nodes.new((1, 2), **conf), nodes.new((1, 2), **conf)
        assert sorted(ranks(nodes.together(a, b))) == [0, 1]
        for handler in (a, b):
            handler.shutdown()


@pytest.mark.slow  # a wiped etcd is one, and more
def test_an_outage_of_etcd_longer_than_the_leases_disturbs_nobody() -> None:
    ttl_s = 3
    with EtcdServer() as etcd, ThreadPoolExecutor(8) as pool:
        nodes = Nodes(etcd.endpoint, pool)
        a, b = (nodes.new((1, 2), lease_ttl=ttl_s, last_call_timeout=PATIENCE_S) for _ in "ab")

        def stay_quiet(for_s: float) -> None:
            until_s = time.monotonic() + for_s
            while time.monotonic() < until_s:
                assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
                time.sleep(0.05)

        nodes.together(a, b)
        etcd.pause()
        stay_quiet(ttl_s + 2.5)
        etcd.resume()
        stay_quiet(ttl_s + 1.5)
        (again,) = nodes.ask(a)
        wait_for("the other sees it", lambda: b.num_nodes_waiting() > 0)
        (info,) = nodes.together(b)
        assert {info.world_size, again.result(PATIENCE_S).world_size} == {2}
        for handler in nodes.handlers:
            handler.shutdown()


def test_nodes_meet_again_after_etcd_was_wiped(tmp_path: Path) -> None:
    """What they know is written anew; a newcomer and those that were there come together."""
    with Members(tmp_path / "etcd") as etcd, ThreadPoolExecutor(8) as pool:
        nodes = Nodes(etcd.endpoints, pool)
        a, b = (nodes.new((1, 3), last_call_timeout=2.0) for _ in "ab")
        assert {info.world_size for info in nodes.together(a, b)} == {2}
        etcd.wipe()
        time.sleep(TTL_S + 1.0)
        assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
        new = nodes.new((1, 3))
        (asked,) = nodes.ask(new)
        wait_for("both see it", lambda: min(a.num_nodes_waiting(), b.num_nodes_waiting()) > 0)
        infos = [*nodes.together(a, b), asked.result(PATIENCE_S)]
        assert sorted(ranks(infos)) == [0, 1, 2]
        for handler in nodes.handlers:
            handler.shutdown()


@pytest.mark.cold
def test_torch_finds_the_plug_in_and_loads_nothing_with_it() -> None:
    program = (
        "import sys, torch.distributed.elastic.rendezvous\n"
        "assert 'elasticzero.launcher.torchrun.plugin' in sys.modules, 'run: pip install -e .'\n"
        "assert not {'grpc', 'etcd3', 'google.protobuf'} & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
