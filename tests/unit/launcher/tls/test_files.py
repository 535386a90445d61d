"""Certificates in files: what is refused, and how they are read anew when they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from elasticzero.errors import UserError
from elasticzero.launcher.tls.contexts import TlsContexts
from elasticzero.launcher.tls.files import LOOK_S, FileCredentials
from tests.support.certificates import LOOPBACK, Authority, Mounted


def at_once(work: Callable[[], None]) -> None:
    work()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pems", "ours")


@pytest.fixture
def mounted(tmp_path: Path, authority: Authority) -> Mounted:
    mounted = Mounted(tmp_path / "secret")
    mounted.sign(authority, "first")
    return mounted


def common_name(pem: str) -> str:
    subject = x509.load_pem_x509_certificate(pem.encode()).subject
    return str(subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)


def test_changed_files_are_read_anew(mounted: Mounted, authority: Authority) -> None:
    clock = [0.0]
    source = FileCredentials(mounted.files, lambda: clock[0], at_once)
    contexts = TlsContexts(source)
    first = contexts.server()
    mounted.sign(authority, "second")
    assert contexts.server() is first, "it is not looked at so often"
    clock[0] += LOOK_S
    second = contexts.server()
    assert second is not first and common_name(source().certificate) == "second"
    clock[0] += LOOK_S
    assert contexts.server() is second, "nothing has changed"
    mounted.sign(Authority(mounted.folder.parent / "new", "new"), "third")
    clock[0] += LOOK_S
    assert common_name(contexts.credentials.authorities) == "new"


def test_what_does_not_go_together_is_not_used(
    mounted: Mounted, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    source = FileCredentials(mounted.files, lambda: clock[0], at_once)
    one, other = authority.sign("one", LOOPBACK), authority.sign("other", LOOPBACK)
    ca = authority.cert.read_bytes()
    odd = (
        (one.cert.read_bytes(), other.key.read_bytes(), ca),
        (b"", one.key.read_bytes(), ca),
        (one.cert.read_bytes(), one.key.read_bytes(), b"\xff"),
    )
    for data in odd:
        mounted.turn(*data)
        for _ in range(3):
            clock[0] += LOOK_S
            assert common_name(source().certificate) == "first"
    (mounted.folder / "..data").unlink()
    clock[0] += LOOK_S
    assert common_name(source().certificate) == "first"
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(odd) + 1 and all("the earlier one is" in line for line in lines)
    mounted.sign(authority, "last")
    clock[0] += LOOK_S
    assert common_name(source().certificate) == "last"


def test_a_change_between_two_reads_is_read_again(
    mounted: Mounted, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is turned after the certificate is read, and before its key is."""
    from elasticzero.launcher.tls import files as module

    clock = [0.0]
    source = FileCredentials(mounted.files, lambda: clock[0], at_once)
    mounted.sign(authority, "second")
    read = module._read

    def turning(flag: str, path: str) -> str:
        text = read(flag, path)
        if flag == "--tls-cert":
            monkeypatch.setattr(module, "_read", read)
            mounted.sign(authority, "third")
        return text

    monkeypatch.setattr(module, "_read", turning)
    clock[0] += LOOK_S
    assert common_name(source().certificate) == "first"
    clock[0] += LOOK_S
    assert common_name(source().certificate) == "third"


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named(mounted: Mounted, name: str) -> None:
    (mounted.folder / name).unlink()
    flag = {"tls.crt": "--tls-cert", "tls.key": "--tls-key", "ca.crt": "--tls-ca"}[name]
    with pytest.raises(UserError, match=f"{flag} .*{name}: No such file"):
        FileCredentials(mounted.files)


def test_a_certificate_for_servers_alone_is_refused(mounted: Mounted, authority: Authority) -> None:
    """The other nodes would refuse it at each connection, long after the start."""
    pair = authority.sign("server", LOOPBACK, usages=[ExtendedKeyUsageOID.SERVER_AUTH])
    mounted.turn(pair.cert.read_bytes(), pair.key.read_bytes(), authority.cert.read_bytes())
    with pytest.raises(UserError, match="purpose"):
        FileCredentials(mounted.files)


def test_no_connection_waits_for_a_file_system_that_hangs(
    mounted: Mounted, authority: Authority
) -> None:
    """It is looked at again once the look that hangs is over."""
    clock, looks = [0.0], list[Callable[[], None]]()
    source = FileCredentials(mounted.files, lambda: clock[0], looks.append)
    mounted.sign(authority, "second")
    for _ in range(3):
        clock[0] += LOOK_S
        assert common_name(source().certificate) == "first"
    assert len(looks) == 1
    looks[0]()
    assert common_name(source().certificate) == "second"
    clock[0] += LOOK_S
    source()
    assert len(looks) == 2
