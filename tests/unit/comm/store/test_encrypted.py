"""The ranks' store of a job with TLS: what passes on the network, and who is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch.distributed as dist

from elasticzero.comm.rendezvous import RankInfo, rendezvous
from elasticzero.comm.store.client import RankStore, connect
from elasticzero.comm.store.wire import Message, Operation
from elasticzero.errors import RetryError
from elasticzero.security.certificates import Credentials
from tests.support.certificates import credentials_of
from tests.support.rank_stores import LIMIT_S, SECRET, served
from tests.unit.comm.test_tls_stream import Relay

LOCALHOST = "127.0.0.1"


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return credentials_of("a-token-of-the-job")


@pytest.mark.parametrize("encrypted", [False, True])
def test_keys_and_values_are_encrypted(encrypted: bool, credentials: Credentials) -> None:
    with (
        served(2, tls=credentials if encrypted else None) as store,
        closing(Relay((LOCALHOST, store.port))) as relay,
    ):
        address = LOCALHOST, int(relay.address.split()[1])
        channel = connect(address, 1, SECRET, LIMIT_S)
        if encrypted:
            channel.encrypt(credentials, LIMIT_S)
        with closing(RankStore(channel, LIMIT_S)) as rank:
            store.first.set("theirs", b"the value of rank 0")
            rank.set("ours", b"the value of rank 1")
            assert rank.get("theirs") == b"the value of rank 0"
        assert store.first.get("ours") == b"the value of rank 1"
        for text in (b"theirs", b"the value of rank 0", b"ours", b"the value of rank 1"):
            assert (text in relay.seen) == (not encrypted)


def test_values_of_any_size_are_whole(credentials: Credentials) -> None:
    """A record of TLS has 16 KiB; a value may have more, and both ends have bounded buffers."""
    with served(3, tls=credentials) as store:
        ranks = [store.rank(1), store.rank(2)]
        for size in (0, 1, (1 << 14) - 20, 1 << 14, 3_000_000):
            ranks[0].set("key", bytes(range(251)) * (size // 251) + b"x" * (size % 251))
            assert len(ranks[1].get("key")) == size
            assert ranks[1].get("key") == store.first.get("key")


def test_a_rank_that_sets_up_no_tls_keeps_no_other_waiting(credentials: Credentials) -> None:
    with served(3, tls=credentials) as store:
        address = LOCALHOST, store.port
        with closing(connect(address, 1, SECRET, LIMIT_S)):
            assert store.rank(2).add("n", 1) == 1


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"request"])
def test_what_is_no_tls_ends_a_proven_connection(data: bytes, credentials: Credentials) -> None:
    """Among it is a request that is not encrypted: it does not reach the table."""
    with served(3, tls=credentials) as store:
        channel = connect((LOCALHOST, store.port), 1, SECRET, LIMIT_S)
        with closing(channel):
            if data == b"request":
                with pytest.raises(OSError):
                    channel.ask(Message(Operation.SET, 0, (b"key", b"value")), LIMIT_S)
            else:
                channel._plain.sendall(data)
                channel._plain.shutdown(socket.SHUT_WR)
                channel._plain.settimeout(LIMIT_S)
                with suppress(ConnectionError):
                    while part := channel._plain.recv(4096):
                        assert part[:1] == b"\x15", "an alert, and nothing else"
        assert store.rank(2).num_keys() == 0


def test_nothing_is_read_of_a_server_of_another_authority(credentials: Credentials) -> None:
    """It has proven the secret, and shows another certificate than goes with it."""
    with served(3, tls=credentials) as store:
        channel = connect((LOCALHOST, store.port), 1, SECRET, LIMIT_S)
        with closing(channel), pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            channel.encrypt(credentials_of("another-token-of-the-job"), LIMIT_S)
        assert store.rank(2).num_keys() == 0


def test_a_lost_server_is_the_error_of_a_lost_peer(credentials: Credentials) -> None:
    with served(2, tls=credentials) as store, ThreadPoolExecutor(1) as pool:
        rank = store.rank(1)
        waits = pool.submit(rank.get, "never")
        while not store.server._table._waits:
            store.first.num_keys()
        store.server.close()
        with pytest.raises(dist.DistNetworkError):
            waits.result(LIMIT_S)


@pytest.fixture
def infos(credentials: Credentials) -> Iterator[tuple[RankInfo, RankInfo]]:
    """Two ranks that are to meet in a job with TLS."""
    bound = socket.socket()
    bound.bind((LOCALHOST, 0))
    port = bound.getsockname()[1]
    first = RankInfo(
        rank=0,
        world_size=2,
        token="t",
        password="p",
        master_port=port,
        store_fd=bound.detach(),
        tls=credentials,
        start_timeout_s=LIMIT_S,
    )
    yield first, replace(first, rank=1, store_fd=None)


def test_ranks_meet_with_the_certificates_of_their_job(infos: tuple[RankInfo, RankInfo]) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous, infos[0])
        with closing(rendezvous(infos[1])) as store, closing(first.result(LIMIT_S)) as other:
            store.set("key", "value")
            assert other.get("key") == b"value"


def test_a_rank_with_another_certificate_does_not_meet(infos: tuple[RankInfo, RankInfo]) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous, replace(infos[0], start_timeout_s=1.0))
        stranger = replace(infos[1], tls=credentials_of("another-token-of-the-job"))
        with pytest.raises(RetryError, match="no TLS with rank 0"):
            rendezvous(stranger)
        with pytest.raises(RetryError, match="rank 1 did not call"):
            first.result(LIMIT_S)
