"""The contexts of a certificate: they are made once in a process, and count no longer than it."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticzero.security import certificates
from elasticzero.security.certificates import Credentials, contexts_of
from tests.support.certificates import credentials_of
from tests.support.rank_stores import served
from tests.unit.comm.test_control_tree import joined


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return credentials_of("a-token-of-the-job")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the contexts that are made."""
    counts = Counter[str]()

    def counting(name: str) -> None:
        make: Callable[..., ssl.SSLContext] = getattr(certificates, name)

        def count(*arguments: object) -> ssl.SSLContext:
            counts[name] += 1
            return make(*arguments)

        monkeypatch.setattr(certificates, name, count)

    counting("server_context")
    counting("client_context")
    contexts_of.cache_clear()
    return counts


def test_a_certificate_has_one_pair_of_contexts(
    credentials: Credentials, made: Counter[str]
) -> None:
    """An assignment brings an equal certificate, which is not the same object."""
    pair = contexts_of(credentials)
    pair.check()
    assert contexts_of(replace(credentials)) is pair
    assert made == {"server_context": 1, "client_context": 1}


def test_a_renewed_certificate_takes_effect_at_once(credentials: Credentials) -> None:
    """It shows the new one, and takes those whom the new one takes."""
    before, renewed = contexts_of(credentials), credentials_of("a-token-of-the-job")
    after = contexts_of(renewed)
    assert after.credentials == renewed and after is not before
    stranger = contexts_of(credentials_of("another-token-of-the-job"))
    for server, client in ((stranger, after), (after, stranger)):
        mixed = replace(server, client=client.client)
        with pytest.raises(ssl.SSLError):
            mixed.check()
    replace(before, client=after.client).check()  # both are of the job


def test_contexts_that_cannot_be_made_are_tried_again(credentials: Credentials) -> None:
    mixed = replace(credentials, key=credentials_of("another-token-of-the-job").key)
    for _ in range(2):
        with pytest.raises(ssl.SSLError):
            contexts_of(mixed)
    contexts_of(credentials).check()


@pytest.mark.parametrize("ranks", [2, 20])
def test_a_rank_needs_one_pair_for_all_its_connections(
    ranks: int, credentials: Credentials, made: Counter[str]
) -> None:
    """The store, each connection of the tree, and each source of a snapshot had one of their
    own."""
    with served(ranks, tls=credentials) as store:
        for rank in range(1, ranks):
            store.rank(rank)
    with joined(ranks, tls=credentials):
        pass
    assert made == {"server_context": 1, "client_context": 1}
