"""TLS, certificates, user and password towards a real etcd: what opens, and what is said of what
does not."""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticzero.cli.main import main
from elasticzero.errors import AccessRefused, StoreUnavailable, UserError
from elasticzero.launcher.secrets import ETCD_PASSWORD, Secret
from elasticzero.launcher.store.api import job_prefix
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.etcd.event_loop import call_soon, wait_for
from elasticzero.launcher.store.etcd.store import EtcdStore, Timeouts
from tests.integration.clusters import REGRESSION, elasticzero
from tests.integration.etcd_members import Members, Tls
from tests.support.certificates import LOOPBACK, Authority, Pair
from tests.support.deadlines import patience
from tests.watching import DEADLINE_S, Told, has

PASSWORD = "correct-horse"
TOKEN_TTL_S = 1
SHORT = Timeouts(request_s=1.0)
AT_ONCE_S = 30.0
"""Long for a slow machine, and short beside a join timeout."""


@dataclasses.dataclass(frozen=True)
class Pems:
    ca: Path
    other_ca: Path
    server: Pair
    elsewhere: Pair
    client: Pair
    stranger: Pair


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Pems:
    folder = tmp_path_factory.mktemp("pems")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    return Pems(
        ca=ours.cert,
        other_ca=others.cert,
        server=ours.sign("etcd", LOOPBACK),
        elsewhere=ours.sign("elsewhere"),
        client=ours.sign("agent"),
        stranger=others.sign("stranger"),
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with Members(tmp_path_factory.mktemp("plain")) as members:
        yield members


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, pems: Pems) -> Iterator[Members]:
    tls = Tls(cert=pems.server.cert, key=pems.server.key, ca=pems.ca, clients=True)
    with Members(tmp_path_factory.mktemp("mutual"), tls=tls) as members:
        yield members


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory, pems: Pems) -> Iterator[Members]:
    """TLS, and users whose tokens live for a second after their last use."""
    tls = Tls(cert=pems.server.cert, key=pems.server.key, ca=pems.ca)
    options = {"auth-token-ttl": str(TOKEN_TTL_S), "bcrypt-cost": "4"}
    with Members(tmp_path_factory.mktemp("users"), tls=tls, options=options) as members:
        members.enable_users("trainer", PASSWORD)
        yield members


def trainer(pems: Pems, password: str = PASSWORD) -> Access:
    return Access(cacert=str(pems.ca), user="trainer", password=Secret(password))


def shown(pems: Pems, pair: Pair | None) -> Access:
    if pair is None:
        return Access(cacert=str(pems.ca))
    return Access(cacert=str(pems.ca), cert=str(pair.cert), key=str(pair.key))


def check_works(store: EtcdStore) -> None:
    """Read, write, watch and lease."""
    told = Told()
    store.watch("k/", told)
    lease = store.lease(5)
    assert store.write({"k/a": b"1"}, lease=lease)
    told.until(has(k__a=b"1"))
    before_s = lease.confirmed_s
    lease.close(revoke=True)
    told.until(lambda s: not s.entries and s.revision > 1 and len(told.snapshots) > 1)
    assert lease.confirmed_s >= before_s and not lease.lost


def test_a_certificate_on_each_side(mutual: Members, pems: Pems) -> None:
    bare = mutual.endpoints.removeprefix("https://")
    for endpoint in (mutual.endpoints, bare):
        with EtcdStore([endpoint], job_prefix("mutual"), access=shown(pems, pems.client)) as store:
            check_works(store)


def test_a_user_with_a_password_over_tls(users: Members, pems: Pems) -> None:
    with EtcdStore([users.endpoints], job_prefix("users"), access=trainer(pems)) as store:
        check_works(store)


REFUSED: list[tuple[str, str, Callable[[Pems], Access], str]] = [
    (
        "users",
        "https://",
        lambda p: Access(cacert=str(p.other_ca)),
        "not accepted by --etcd-cacert",
    ),
    ("users", "https://", lambda p: Access(), "not accepted by the system's authorities"),
    ("users", "", lambda p: Access(), "speaks TLS: write https://"),
    ("users", "https://", lambda p: Access(cacert=str(p.ca)), "admits only users.*--etcd-user"),
    ("users", "https://", lambda p: trainer(p, "wrong"), "refuses user 'trainer' or its password"),
    ("plain", "https://", lambda p: Access(cacert=str(p.ca)), "does not speak TLS"),
    ("mutual", "https://", lambda p: shown(p, None), "give --etcd-cert and --etcd-key"),
    ("mutual", "https://", lambda p: shown(p, p.stranger), "refuses --etcd-cert .*stranger"),
]


@pytest.mark.parametrize(
    ("which", "scheme", "access", "text"), REFUSED, ids=[case[-1] for case in REFUSED]
)
def test_a_door_that_stays_shut_says_why(
    request: pytest.FixtureRequest,
    pems: Pems,
    caplog: pytest.LogCaptureFixture,
    which: str,
    scheme: str,
    access: Callable[[Pems], Access],
    text: str,
) -> None:
    members: Members = request.getfixturevalue(which)
    endpoint = scheme + members.endpoints.partition("://")[2]
    began_s = time.monotonic()
    with (
        EtcdStore([endpoint], job_prefix("j"), access=access(pems), timeouts=SHORT) as store,
        pytest.raises(AccessRefused, match=text) as refused,
    ):
        store.read("k")
    assert time.monotonic() - began_s < AT_ONCE_S
    assert "127.0.0.1:" in str(refused.value)
    for secret in ("wrong", PASSWORD):
        assert f" {secret}" not in str(refused.value) and secret not in caplog.text


def test_a_name_that_is_not_in_the_certificate(tmp_path: Path, pems: Pems) -> None:
    tls = Tls(cert=pems.elsewhere.cert, key=pems.elsewhere.key, ca=pems.ca)
    with (
        Members(tmp_path, tls=tls) as members,
        EtcdStore(
            [members.endpoints], job_prefix("j"), access=shown(pems, None), timeouts=SHORT
        ) as store,
        pytest.raises(AccessRefused, match=r"not accepted .*127\.0\.0\.1.*as the certificate does"),
    ):
        store.read("k")


def test_a_user_who_may_do_nothing_here(users: Members, pems: Pems) -> None:
    access = trainer(pems)
    with (
        EtcdStore([users.endpoints], "/somewhere-else/", access=access) as store,
        pytest.raises(AccessRefused, match=r"'trainer' may not do this.*readwrite on the prefix"),
    ):
        store.read("k")


def test_an_etcd_without_users_takes_anyone(
    plain: Members, caplog: pytest.LogCaptureFixture
) -> None:
    access = Access(user="trainer", password=Secret(PASSWORD))
    with EtcdStore([plain.endpoints], job_prefix("any"), access=access) as store:
        check_works(store)
    messages = [record.getMessage() for record in caplog.records]
    assert any("without TLS" in text for text in messages)
    assert sum("has no users enabled" in text for text in messages) == 1
    assert PASSWORD not in caplog.text


def test_the_next_endpoint_is_taken_with_tls_too(users: Members, pems: Pems) -> None:
    dead = "https://127.0.0.1:1"
    with EtcdStore([dead, users.endpoints], job_prefix("two"), access=trainer(pems)) as store:
        check_works(store)


def test_a_token_that_has_run_out_is_replaced(users: Members, pems: Pems) -> None:
    """etcd forgets a token that is not used; reads, writes, watches and leases go on."""
    with (
        EtcdStore([users.endpoints], job_prefix("late"), access=trainer(pems)) as store,
        EtcdStore([users.endpoints], job_prefix("late"), access=trainer(pems)) as other,
    ):
        told = Told()
        store.watch("k", told)
        lease = store.lease(9)
        assert store.write({"k": b"1"}, lease=lease)
        told.until(has(k=b"1"))
        login = store._connection._login
        assert login is not None
        first = wait_for(login.token())
        time.sleep(TOKEN_TTL_S + 2.5)
        assert store.write({"k": b"2"}, lease=lease)
        assert wait_for(login.token()) != first
        told.until(has(k=b"2"))
        assert [e.value for e in store.read("k").entries.values()] == [b"2"]
        time.sleep(TOKEN_TTL_S + 2.5)
        stream = store._watches._stream
        assert stream is not None
        call_soon(
            stream.outgoing.put_nowait, None
        )  # ends it: one begins anew, with a token that etcd has forgotten
        assert other.write({"k": b"3"})
        told.until(has(k=b"3"))
        assert not lease.lost
        assert store.reachable


def test_a_login_is_renewed_before_it_is_too_old(users: Members, pems: Pems) -> None:
    timeouts = Timeouts(login_s=0.2)
    with EtcdStore(
        [users.endpoints], job_prefix("old"), access=trainer(pems), timeouts=timeouts
    ) as store:
        login = store._connection._login
        assert login is not None
        store.read("k")
        first = wait_for(login.token())
        time.sleep(0.3)
        store.read("k")
        assert wait_for(login.token()) != first


def test_etcd_starts_anew_and_knows_no_token(users: Members, pems: Pems) -> None:
    with EtcdStore(
        [users.endpoints], job_prefix("anew"), access=trainer(pems), timeouts=SHORT
    ) as store:
        told = Told()
        store.watch("k", told)
        assert store.write({"k": b"1"})
        told.until(has(k=b"1"))
        users.kill()
        users.start(*users.members)
        deadline_s = time.monotonic() + patience(DEADLINE_S)
        while True:
            try:
                assert store.write({"k": b"2"})
                break
            except StoreUnavailable:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        told.until(has(k=b"2"))


def test_a_password_changed_under_way_is_an_outage_until_it_is_changed_back(
    users: Members, pems: Pems
) -> None:
    with EtcdStore([users.endpoints], job_prefix("pw"), access=trainer(pems)) as store:
        assert store.write({"k": b"1"})
        told = Told()
        store.watch("k", told)
        told.until(has(k=b"1"))
        users.control("role", "add", "spare", user="root:root")
        assert store.write({"k": b"2"}), "a change of roles makes no token invalid for long"
        _change_password(users, "another")
        with pytest.raises(StoreUnavailable, match="refuses user 'trainer'"):
            store.write({"k": b"3"})
        _change_password(users, PASSWORD)
        assert store.write({"k": b"4"})
        told.until(has(k=b"4"))


def _change_password(members: Members, password: str) -> None:
    members.control("user", "delete", "trainer", user="root:root")
    members.control("user", "add", f"trainer:{password}", user="root:root")
    members.control("user", "grant-role", "trainer", "trainer", user="root:root")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--etcd-key", "{client.key}"], "--etcd-key .* needs --etcd-cert"),
        (["--etcd-cert", "{client.cert}"], "--etcd-cert .* needs --etcd-key"),
        (["--etcd-cacert", "none.pem"], "--etcd-cacert none.pem: No such file"),
        (["--etcd-cacert", "{client.key}"], "--etcd-cacert .*: no certificate in it"),
        (["--etcd-cert", "none", "--etcd-key", "{client.key}"], "--etcd-cert none: No such file"),
        (
            ["--etcd-cert", "{client.cert}", "--etcd-key", "{stranger.key}"],
            "are no certificate and its key",
        ),
        (["--etcd-user", "trainer"], f"needs a password: .*{ETCD_PASSWORD}"),
        (["--etcd-user", "trainer:correct-horse"], "never from the command line"),
        (["--etcd-password-file", "none"], "--etcd-password-file none: No such file"),
        (["--etcd-password-file", "{ca}"], "the secret alone"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_and_words_that_do_not_fit(
    pems: Pems, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"ca": pems.ca, "client": pems.client, "stranger": pems.stranger}
    full = [word.format(**named) for word in arguments]
    common = ["--etcd", "https://127.0.0.1:1", "--job", "j"]
    assert main(["run", *common, *full, str(REGRESSION)]) == 64
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert re.search(text, stderr), stderr
    assert "correct-horse" not in stderr


def test_http_with_certificates_is_a_contradiction(pems: Pems) -> None:
    with pytest.raises(UserError, match="without TLS, but --etcd-cacert"):
        EtcdStore(["http://h:2379"], "/j/", access=Access(cacert=str(pems.ca)))


def test_a_key_that_needs_a_password_is_refused_and_nobody_is_asked(
    tmp_path: Path, pems: Pems
) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(pems.client.key), "-aes128", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(locked)], check=True, timeout=30)
    access = Access(cacert=str(pems.ca), cert=str(pems.client.cert), key=str(locked))
    with pytest.raises(UserError, match="without a password"):
        EtcdStore(["h:2379"], "/j/", access=access)


@pytest.mark.parametrize("command", ["run", "status"])
def test_the_command_line_ends_at_once_with_one_line(
    command: str, users: Members, pems: Pems, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("quite-wrong\n")
    arguments = [command, "--etcd", users.endpoints, "--job", "j", "--etcd-user", "trainer"]
    arguments += ["--etcd-cacert", str(pems.ca), "--etcd-password-file", str(tmp_path / "password")]
    arguments += ["--http-port", "0", str(REGRESSION)] if command == "run" else []
    began_s = time.monotonic()
    completed = subprocess.run(
        elasticzero(*arguments), capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - began_s < AT_ONCE_S
    assert completed.returncode == 69, completed.stderr
    assert "refuses user 'trainer' or its password" in completed.stderr
    assert (
        "Traceback" not in completed.stderr
        and "quite-wrong" not in completed.stderr + completed.stdout
    )


def test_grpc_itself_prints_nothing(users: Members, pems: Pems) -> None:
    arguments = ["status", "--etcd", users.endpoints, "--job", "j"]
    arguments += ["--etcd-cacert", str(pems.other_ca)]
    completed = subprocess.run(
        elasticzero(*arguments), capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 69
    *waiting, error = completed.stderr.splitlines()  # on a slow machine it says that it waits
    assert waiting in ([], [f"waiting for etcd at {users.endpoints}"])
    assert error.startswith("error: etcd at 127.0.0.1:") and "not accepted" in error


def test_no_log_and_no_repr_shows_the_password(
    users: Members, pems: Pems, caplog: pytest.LogCaptureFixture
) -> None:
    access = trainer(pems)
    with (
        caplog.at_level(logging.DEBUG),
        EtcdStore([users.endpoints], job_prefix("quiet"), access=access) as store,
    ):
        store.read("k")
        assert PASSWORD not in repr(access) + str(access) + repr(vars(store._connection))
    assert PASSWORD not in caplog.text


def test_a_command_says_that_it_waits_for_etcd() -> None:
    """It was silent for the six seconds until it gave up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, answers nothing
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            elasticzero("status", "--job", "j", "--etcd", endpoint),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 69, done.stderr
    waiting, error = done.stderr.splitlines()
    assert waiting == f"waiting for etcd at {endpoint}"
    assert error.startswith(f"error: etcd at {endpoint} does not answer; ")
