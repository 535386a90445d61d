"""What a request's head shows of the job's secret: a proof counts once, and for one request."""

from __future__ import annotations

import http.client
import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticzero.checkpoint.storage.signed_requests import Credentials, SignedRequest
from elasticzero.launcher.http import authentication
from elasticzero.launcher.http.authentication import (
    NONCE_S,
    Authenticator,
    Nonces,
    Verdict,
    request_in,
)
from elasticzero.launcher.secrets import Secret
from elasticzero.security.proofs import run_secret

TOKEN = "the-job's-own-password"
MUTATIONS = 12_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 5000.0

    def __call__(self) -> float:
        return self.now_s


class Server:
    """An authenticator, and a client that has its secret."""

    def __init__(self, run: int = 1) -> None:
        self.clock = Clock()
        self.run = run
        self.authenticator = Authenticator(lambda: Secret(TOKEN), run, clock=self.clock)

    def nonce(self) -> str:
        return self.authenticator.nonces.issue()

    def judge(self, head: bytes) -> Verdict:
        return self.authenticator.judge(head)

    def head(
        self, nonce: str, count: int = 1, target: str = "/status", secret: str | None = None
    ) -> bytes:
        """A signed head, as a client of this run sends it."""
        request = SignedRequest(method="GET", target=target, byte_range="bytes=0-9", run="1")
        proven = request.prove(secret or run_secret(TOKEN, self.run), nonce, count)
        return head_of(Credentials(nonce, count, proven).header(), target=target)


def head_of(
    authorization: str,
    *,
    method: str = "GET",
    target: str = "/status",
    rest: str = "Range: bytes=0-9\r\nElasticZero-Run: 1\r\n",
) -> bytes:
    first = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:9400\r\n"
    return f"{first}{rest}Authorization: {authorization}\r\n\r\n".encode("latin-1")


def as_served(head: bytes) -> SignedRequest:
    """The request that the server's handler reads in a head."""
    file = io.BytesIO(head)
    method, target, _ = file.readline().decode("latin-1").split()
    headers = http.client.parse_headers(file)
    return SignedRequest(
        method=method,
        target=target,
        byte_range=headers.get("Range", "").strip(),
        run=headers.get("ElasticZero-Run", "").strip(),
    )


@pytest.mark.parametrize("run", [0, 1, 2, 7])
def test_a_proof_counts_once(run: int) -> None:
    server = Server(run)
    nonce = server.nonce()
    for count in (1, 2, 5):
        head = server.head(nonce, count)
        assert server.judge(head) is Verdict.PROOF
        assert server.judge(head) is Verdict.REFUSED, "it was replayed"
    assert server.judge(server.head(nonce, 4)) is Verdict.REFUSED, "a later one came first"
    assert server.judge(server.head(server.nonce())) is Verdict.PROOF


def test_the_token_of_a_request_is_still_the_token() -> None:
    """Browsers and nodes of the release before show it."""
    server = Server(run=3)
    assert server.judge(head_of(f"Bearer {TOKEN}")) is Verdict.TOKEN
    assert server.judge(head_of(f"bearer   {TOKEN}  ")) is Verdict.TOKEN
    for wrong in (f"Bearer {run_secret(TOKEN, 3)}", "Bearer ", f"Basic {TOKEN}", TOKEN, ""):
        assert server.judge(head_of(wrong)) is Verdict.STRANGER


def test_a_process_of_another_run_is_a_stranger() -> None:
    server = Server(run=2)
    for run in (1, 3):
        head = server.head(server.nonce(), secret=run_secret(TOKEN, run))
        assert server.judge(head) is Verdict.REFUSED
    assert server.judge(server.head(server.nonce())) is Verdict.PROOF


@pytest.mark.parametrize(
    "change",
    [
        {"method": "HEAD"},
        {"target": "/events"},
        {"target": "/status?most=9"},
        {"target": "//status"},
        {"rest": "Range: bytes=0-99\r\nElasticZero-Run: 1\r\n"},
        {"rest": "ElasticZero-Run: 1\r\n"},
        {"rest": "Range: bytes=0-9\r\nElasticZero-Run: 2\r\n"},
        {"rest": "Range: bytes=0-9\r\n"},
        {"rest": "Range: bytes=0-9\r\nRange: bytes=0-99\r\nElasticZero-Run: 1\r\n"},
        {"rest": "X: y\rRange: bytes=0-9\r\nElasticZero-Run: 1\r\n"},
        {"rest": "Range: bytes=0-9\r\n 9\r\nElasticZero-Run: 1\r\n"},
        {"rest": "not a header\r\nRange: bytes=0-9\r\nElasticZero-Run: 1\r\n"},
        {"rest": "Range : bytes=0-99\r\nRange: bytes=0-9\r\nElasticZero-Run: 1\r\n"},
    ],
    ids=lambda change: "-".join(change.values()).replace("\r\n", ";"),
)
def test_a_proof_is_valid_for_one_request_alone(change: dict[str, str]) -> None:
    server = Server()
    head = server.head(server.nonce())
    authorization = head.partition(b"Authorization: ")[2].decode().strip()
    assert server.judge(head_of(authorization, **change)) is Verdict.REFUSED
    assert server.judge(head) is Verdict.PROOF, "what was refused has not used it up"


def test_a_forged_nonce_asks_for_another_one() -> None:
    server, other = Server(), Server()
    nonce = server.nonce()
    changed = [
        f"{nonce[:at]}{'0' if nonce[at] != '0' else '1'}{nonce[at + 1 :]}" for at in range(64)
    ]
    for forged in (*changed, other.nonce(), "0" * 64, "f" * 64):
        assert server.judge(server.head(forged)) is Verdict.ASKS
    assert server.judge(server.head(nonce)) is Verdict.PROOF
    assert len(server.authenticator.nonces) == 1


def test_an_old_nonce_is_replaced_and_no_clock_of_a_client_counts() -> None:
    server = Server()
    nonce = server.nonce()
    server.clock.now_s += NONCE_S - 1
    assert server.judge(server.head(nonce, 1)) is Verdict.PROOF
    server.clock.now_s += 2
    assert server.judge(server.head(nonce, 2)) is Verdict.ASKS
    assert server.judge(server.head(nonce, 1)) is Verdict.ASKS, "it is not accepted again"


def test_nonces_that_nobody_proves_cost_no_memory() -> None:
    """A stranger could otherwise make the server forget what the holder has used."""
    server = Server()
    nonce = server.nonce()
    used = server.head(nonce)
    assert server.judge(used) is Verdict.PROOF
    for _ in range(3 * authentication.MAX_NONCES):
        asked = server.nonce()
        assert server.judge(server.head(asked, secret="a guess")) is Verdict.REFUSED
    assert len(server.authenticator.nonces) == 1
    assert server.judge(used) is Verdict.REFUSED
    assert server.judge(server.head(nonce, 2)) is Verdict.PROOF


def test_the_oldest_nonces_are_forgotten_but_never_accepted_again() -> None:
    clock = Clock()
    nonces = Nonces(clock, most=10)
    issued = []
    for _ in range(50):
        clock.now_s += 0.001
        issued.append(nonces.issue())
        assert nonces.is_current(issued[-1]) and nonces.accept(issued[-1], 1)
        assert len(nonces) <= 10
        assert not any(nonces.is_current(old) and nonces.accept(old, 1) for old in issued)
    current = [nonce for nonce in issued if nonces.is_current(nonce)]
    assert current == issued[-len(current) :] and 5 <= len(current) <= 10
    assert nonces.accept(current[0], 2), "the newer half goes on"


def test_a_request_that_asks_gets_a_nonce_and_others_do_not() -> None:
    server = Server()
    for text in ("ElasticZero", "elasticzero", "ElasticZero nonce=", "ElasticZero " + "a" * 9000):
        verdict = server.judge(head_of(text))
        assert verdict is Verdict.ASKS and verdict.is_challenged and not verdict.is_holder
    for text in ("ElasticZeroX", "ElasticZero-Run", "Elastic Zero", "Digest ElasticZero"):
        verdict = server.judge(head_of(text))
        assert verdict is Verdict.STRANGER and not verdict.is_challenged


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_signed_head_is_accepted(seed: int) -> None:
    """A head that reads as another request, or has another proof, proves nothing."""
    dice = random.Random(seed)
    server = Server()
    head = server.head(server.nonce(), 3)
    request = as_served(head)
    assert request_in(head) == request
    for number in range(MUTATIONS // 4):
        data = bytearray(head)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[at] = dice.randrange(256)
                case 1:
                    data[at:at] = dice.choice((b"\r\n", b"\r", b" ", b":", b"0", b"\x00", b"\xff"))
                case _:
                    del data[at : at + dice.randint(1, 9)]
        verdict = server.judge(bytes(data))
        if verdict is Verdict.PROOF:  # something else in it was changed, such as its Host
            assert as_served(bytes(data)) == request, (seed, number, bytes(data))
            head = server.head(server.nonce(), 3)
    assert server.judge(head) is Verdict.PROOF


@given(st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=300))
def test_any_text_is_a_verdict(text: str) -> None:
    server = Server()
    assert not server.judge(head_of(text)).is_holder
    assert not server.judge(head_of(f"ElasticZero {text}")).is_holder
