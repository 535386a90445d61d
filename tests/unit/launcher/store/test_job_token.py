"""Secrets are read and never shown; the nodes of a job agree on one token."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher import secrets as secret
from elasticzero.launcher.secrets import Secret, forget_secrets, read_secret
from elasticzero.launcher.store import job_token
from elasticzero.launcher.tls.credentials import TLS_MODES, TlsMode
from elasticzero.launcher.workers.process import worker_environment
from tests.support.memory_store import MemoryServer, MemoryStore

GIVEN = Secret("given-by-the-operator")


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(time.monotonic)


def stored(store: MemoryStore) -> dict[str, object]:
    record: dict[str, object] = json.loads(store.read("token").entries["token"].value)
    return record


def test_the_first_node_makes_it_and_the_others_take_it(server: MemoryServer) -> None:
    first, second = MemoryStore(server), MemoryStore(server)
    token = job_token.agree_on_token(first, None).secret
    assert len(token.reveal) >= 32
    assert job_token.agree_on_token(second, None).secret == token
    assert job_token.token_for_operator(second, None) == token
    assert stored(first)["token"] == token.reveal


def test_nodes_that_come_at_once_agree(server: MemoryServer) -> None:
    start = threading.Barrier(8)
    tokens: list[Secret] = []

    def come() -> None:
        store = MemoryStore(server)
        start.wait(20)
        tokens.append(job_token.agree_on_token(store, None).secret)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(tokens) == 8 and len(set(tokens)) == 1


def test_of_one_that_is_given_the_store_learns_the_digest_alone(server: MemoryServer) -> None:
    store = MemoryStore(server)
    assert job_token.agree_on_token(store, GIVEN).secret == GIVEN
    assert job_token.agree_on_token(store, GIVEN).secret == GIVEN
    entry = store.read("token").entries["token"]
    assert GIVEN.reveal.encode() not in entry.value
    assert job_token.token_for_operator(store, None) is None
    assert job_token.token_for_operator(store, GIVEN) == GIVEN
    with pytest.raises(UserError, match="not that of the job's nodes"):
        job_token.token_for_operator(store, Secret("quite-another-token"))


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (GIVEN, None, "no token was given"),
        (GIVEN, Secret("quite-another-token"), "another token than"),
        (None, GIVEN, "another token than"),
    ],
)
def test_a_node_with_another_token_does_not_join(
    server: MemoryServer, first: Secret | None, second: Secret | None, text: str
) -> None:
    store = MemoryStore(server)
    job_token.agree_on_token(store, first)
    with pytest.raises(UserError, match=text) as caught:
        job_token.agree_on_token(store, second)
    assert "--token-file" in str(caught.value)
    for token in (first, second):
        assert token is None or token.reveal not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["short", "with a blank in the middle", "ünprintable-in-ascii", "tab\t" * 8]
)
def test_a_token_that_cannot_serve(text: str) -> None:
    with pytest.raises(UserError, match="at least 16") as caught:
        job_token.check_given(Secret(text))
    assert text not in str(caught.value)


def test_no_repr_shows_a_secret() -> None:
    for shown in (repr(GIVEN), str(GIVEN), f"{GIVEN}", f"{[GIVEN]!r}"):
        assert GIVEN.reveal not in shown
    record = job_token.Record(digest="d", token=GIVEN.reveal)
    assert GIVEN.reveal not in repr(record)


def test_a_file_goes_before_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-the-file\n")
    environment = {secret.TOKEN: "from-the-environment"}
    assert read_secret("--x", str(path), secret.TOKEN, environment) == Secret("from-the-file")
    assert read_secret("--x", None, secret.TOKEN, environment) == Secret("from-the-environment")
    assert read_secret("--x", None, secret.TOKEN, {}) is None
    assert read_secret("--x", None, secret.TOKEN, {secret.TOKEN: ""}) is None


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two\nlines\n", b"\xff\xfe", b"a" * 5000], ids=repr
)
def test_a_file_without_a_secret(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"--token-file {path}"):
        read_secret("--token-file", str(path), secret.TOKEN, {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_secret("--token-file", str(tmp_path / "none"), secret.TOKEN, {})
    with pytest.raises(UserError, match="Is a directory"):
        read_secret("--token-file", str(tmp_path), secret.TOKEN, {})


def test_nothing_that_is_started_inherits_secrets() -> None:
    rest = {"PATH": "/bin", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    environment = {secret.TOKEN: "t", secret.ETCD_PASSWORD: "p", **rest}
    assert worker_environment(environment) == rest, "what the user's script needs is left"
    forget_secrets(environment)
    assert environment == rest


ODD = {
    "no JSON": b"secret-of-the-job not json",
    "no record": b"[]",
    "no text": b'{"digest": "0", "token": 7}',
    "no header": b'{"digest": "0", "token": "a\\nb"}',
    "no ASCII": b'{"digest": "\\u00e9"}',
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_record_that_cannot_be_read_is_refused(value: bytes, server: MemoryServer) -> None:
    """It ended agents and commands in tracebacks; what stands there may be a secret."""
    store = MemoryStore(server)
    store.write({"token": value})
    for read in (job_token.agree_on_token, job_token.token_for_operator):
        for token in (None, GIVEN):
            with pytest.raises(UserError, match="the key `token` of the job, cannot be read") as no:
                read(store, token)
            assert "secret-of-the-job" not in str(no.value)
    agreed = job_token.Agreed(GIVEN, job_token.Record(digest="0"), 1)
    assert not job_token.is_record_of(store.read("token").entries["token"], agreed)


@pytest.mark.parametrize(
    ("token", "tls", "mode"),
    [(None, None, "off"), (GIVEN, None, "job"), (GIVEN, "off", "off"), (None, "files", "files")],
)
def test_a_job_goes_on_with_the_certificates_it_began_with(
    server: MemoryServer, token: Secret | None, tls: TlsMode | None, mode: TlsMode
) -> None:
    store = MemoryStore(server)
    assert job_token.stored_tls(store) == "off"
    assert job_token.agree_on_token(store, token, tls).record.tls == mode
    assert job_token.agree_on_token(store, token).record.tls == mode
    assert job_token.agree_on_token(store, token, mode).record.tls == mode
    assert job_token.stored_tls(store) == mode
    for other in TLS_MODES:
        if other != mode:
            with pytest.raises(UserError, match=f"--tls {other} .* begun with --tls {mode}"):
                job_token.agree_on_token(store, token, other)


def test_a_job_of_the_release_before_goes_on_without_tls(server: MemoryServer) -> None:
    store = MemoryStore(server)
    digest = hashlib.sha256(GIVEN.reveal.encode()).hexdigest()
    store.write({"token": json.dumps({"digest": digest, "token": None}).encode()})
    assert job_token.agree_on_token(store, GIVEN).record.tls == "off"
    with pytest.raises(UserError, match="begun with --tls off"):
        job_token.agree_on_token(store, GIVEN, "job")


def test_a_job_without_tls_stores_what_the_release_before_stores(server: MemoryServer) -> None:
    store = MemoryStore(server)
    job_token.agree_on_token(store, GIVEN, "off")
    assert stored(store).keys() == {"digest", "token"}


def test_a_record_of_another_mode_is_not_the_jobs(server: MemoryServer) -> None:
    """A node that comes first to a store that has lost its data writes what is its default."""
    store, emptied = MemoryStore(server), MemoryStore(MemoryServer(time.monotonic))
    agreed = job_token.agree_on_token(store, GIVEN, "off")
    assert job_token.is_record_of(store.read("token").entries["token"], agreed)
    job_token.agree_on_token(emptied, GIVEN)
    assert not job_token.is_record_of(emptied.read("token").entries["token"], agreed)
