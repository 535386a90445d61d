"""How endpoints are read, tokens kept, and refusals explained; no etcd."""

from __future__ import annotations

import asyncio

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.etcd.access import Access, Endpoint, parse_endpoint
from elasticzero.launcher.store.etcd.auth import TokenCache, explain_refusal, is_old_login
from elasticzero.launcher.store.membership import reachable_address

PLAIN = Access()
SIGNED = Access(cacert="ca.pem")
USER = Access(user="trainer", password=Secret("hidden-away"))


@pytest.mark.parametrize(
    ("text", "access", "expected"),
    [
        ("h:2379", PLAIN, Endpoint("h:2379", tls=False)),
        ("http://h:2379/", PLAIN, Endpoint("h:2379", tls=False)),
        ("https://h:2379", PLAIN, Endpoint("h:2379", tls=True)),
        (" h:2379 ", SIGNED, Endpoint("h:2379", tls=True)),
        ("https://[::1]:2379", SIGNED, Endpoint("[::1]:2379", tls=True)),
    ],
)
def test_endpoints(text: str, access: Access, expected: Endpoint) -> None:
    assert parse_endpoint(text, access) == expected
    assert expected.host in ("h", "::1") and expected.port == 2379


@pytest.mark.parametrize("text", ["ftp://h:2379", "https://h", "https://h:0", "https://:1", "://"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        parse_endpoint(text, PLAIN)


@pytest.mark.parametrize(
    "text", ["fd00::7:2379", "http://fd00::7:2379", "https://::1:2379", "fd00::7", "::", "a:b:1"]
)
def test_ipv6_without_brackets_is_refused_in_a_sentence(text: str) -> None:
    """It is an address itself, and its last part is no port."""
    with pytest.raises(UserError, match=r"must be in brackets, as in \[fd00::7\]:2379"):
        parse_endpoint(text, PLAIN)


@pytest.mark.parametrize("text", ["[h]:2379", "[10.0.0.7]:2379", "[fd00::7]", "[fd00::7", "[]:1"])
def test_brackets_are_for_ipv6_and_stand_before_a_port(text: str) -> None:
    with pytest.raises(UserError):
        parse_endpoint(text, PLAIN)


def test_the_own_address_is_found_whatever_the_scheme() -> None:
    assert reachable_address("https://127.0.0.1:2379") == "127.0.0.1"
    assert reachable_address("127.0.0.1:2379") == "127.0.0.1"


def counted() -> tuple[list[str], TokenCache]:
    issued: list[str] = []

    async def ask() -> str:
        await asyncio.sleep(0)
        issued.append(f"token-{len(issued)}")
        return issued[-1]

    return issued, TokenCache(ask, life_s=60.0)


def test_a_token_is_asked_for_once_and_again_when_it_is_refused() -> None:
    async def play() -> None:
        issued, login = counted()
        assert [await login.token(), await login.token()] == ["token-0", "token-0"]
        login.invalidate("token-0")
        assert await login.token() == "token-1"
        login.invalidate("token-0")  # somebody who was slow to hear of it
        assert await login.token() == "token-1"
        assert len(issued) == 2

    asyncio.run(play())


def test_many_who_are_refused_ask_once() -> None:
    async def play() -> None:
        issued, login = counted()
        first = await login.token()

        async def refused() -> str:
            login.invalidate(first)
            return await login.token()

        assert await asyncio.gather(*(refused() for _ in range(8))) == ["token-1"] * 8
        assert issued == ["token-0", "token-1"]

    asyncio.run(play())


def test_an_old_token_is_replaced() -> None:
    async def play() -> None:
        tokens = iter("ab")

        async def ask() -> str:
            return next(tokens)

        login = TokenCache(ask, life_s=0.01)
        assert await login.token() == "a"
        await asyncio.sleep(0.02)
        assert await login.token() == "b"

    asyncio.run(play())


def test_one_that_could_not_be_had_is_asked_for_again() -> None:
    answers: list[Exception | str] = ["there", UserError("no")]

    async def ask() -> str:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def play() -> None:
        login = TokenCache(ask, life_s=60.0)
        with pytest.raises(UserError):
            await login.token()
        assert await login.token() == "there"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("detail", "access", "old", "text"),
    [
        ("etcdserver: invalid auth token", USER, True, None),
        ("etcdserver: revision of auth store is old", USER, True, None),
        ("etcdserver: user name is empty", USER, True, None),
        ("etcdserver: user name is empty", PLAIN, True, "give --etcd-user"),
        ("etcdserver: permission denied", USER, False, "user 'trainer' may not do this"),
        ("etcdserver: permission denied", PLAIN, False, "this certificate's user may not"),
        ("etcdserver: request timed out", USER, False, None),
    ],
)
def test_refusals(detail: str, access: Access, old: bool, text: str | None) -> None:
    assert is_old_login(detail) == old
    refused = explain_refusal(Endpoint("h:2379", tls=True), access, detail)
    assert (refused is None) == (text is None)
    assert text is None or text in (refused or "")
