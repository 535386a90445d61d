"""The authority of a job comes from its token alone, and a node's certificate is of it alone."""

from __future__ import annotations

import datetime
import ssl
from itertools import pairwise

import pytest
from cryptography import x509

from elasticzero.errors import UserError
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.authority import (
    MARGIN_S,
    MAX_COMMON_NAME,
    RENEW_S,
    IssuedCredentials,
    JobAuthority,
)
from elasticzero.launcher.tls.contexts import TlsContexts, context_pair
from elasticzero.launcher.tls.credentials import NodeName, node_name_in
from elasticzero.security.certificates import Credentials

TOKEN = Secret("a-token-of-the-job")
NAME = NodeName(job="j.1_a", run=3, node="node-7")
NOW = 1.8e9


@pytest.fixture(scope="module")
def authority() -> JobAuthority:
    return JobAuthority(TOKEN, NAME.job)


def parsed(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def test_nodes_derive_the_same_authority_and_strangers_another(authority: JobAuthority) -> None:
    same, other_token, other_job = (
        parsed(JobAuthority(Secret(token), job).certificate)
        for token, job in (
            (TOKEN.reveal, NAME.job),
            ("a-token-of-the-jobs", NAME.job),
            (TOKEN.reveal, "j.1_b"),
        )
    )
    ours = parsed(authority.certificate)
    assert same.public_key() == ours.public_key()
    assert (same.subject, same.serial_number) == (ours.subject, ours.serial_number)
    assert other_token.public_key() != ours.public_key() != other_job.public_key()
    assert TOKEN.reveal not in authority.certificate


def test_a_certificate_names_its_node_and_addresses(authority: JobAuthority) -> None:
    addresses = ("10.1.2.3", "fd00::7", "fe80::1%eth0", "host.example", "not a näme")
    issued = parsed(authority.issue(NAME, addresses, NOW).certificate)
    issued.verify_directly_issued_by(parsed(authority.certificate))
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [NAME.uri]
    assert names.get_values_for_type(x509.DNSName)[0] == "host.example"
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == [
        "10.1.2.3",
        "fd00::7",
        "fe80::1",
    ]
    margin = datetime.timedelta(seconds=MARGIN_S)
    assert issued.not_valid_after_utc - issued.not_valid_before_utc == 2 * margin


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        ({"subjectAltName": (("DNS", "x"), ("URI", NAME.uri))}, NAME),
        ({"subjectAltName": (("DNS", NAME.uri),)}, None),
        ({"subjectAltName": (("URI", "spiffe://j/3/node-7"),)}, None),
        ({"subjectAltName": (("URI", NAME.uri + "/more"),)}, None),
        ({"subject": ()}, None),
        (None, None),
    ],
)
def test_the_name_in_a_certificate(
    certificate: dict[str, object] | None, name: NodeName | None
) -> None:
    assert node_name_in(certificate) == name


def test_long_names_fit(authority: JobAuthority) -> None:
    node = "n" * (MAX_COMMON_NAME + 40)
    long = JobAuthority(TOKEN, "j" * 200)
    context_pair(long.issue(NodeName(job="j" * 200, run=1, node=node), ["::1"], NOW_REAL))


NOW_REAL = datetime.datetime.now(datetime.UTC).timestamp()


def test_a_certificate_is_renewed_whichever_way_the_clock_jumps(authority: JobAuthority) -> None:
    clock = [NOW_REAL]
    source = IssuedCredentials(authority, NAME, ["::1"], lambda: clock[0])
    contexts = TlsContexts(source)
    seen: list[tuple[Credentials, ssl.SSLContext]] = []
    for jump_s in (0.0, RENEW_S - 1, 1.0, -RENEW_S):
        clock[0] += jump_s
        seen.append((source(), contexts.client()))
    is_new = [before != after for before, after in pairwise(seen)]
    assert is_new == [False, True, True]


def test_a_renewal_that_fails_leaves_the_certificate_before(
    authority: JobAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [NOW_REAL]
    contexts = TlsContexts(IssuedCredentials(authority, NAME, [], lambda: clock[0]))
    before = contexts.server()
    clock[0] -= 365 * RENEW_S  # what is made then has expired now
    assert contexts.server() is before and contexts.server() is before
    assert [r.getMessage() for r in caplog.records if "certificate before" in r.getMessage()]
    assert len(caplog.records) == 1


def test_certificates_of_other_authorities_are_refused(authority: JobAuthority) -> None:
    other = JobAuthority(Secret("another-token-altogether"), NAME.job)
    issued = other.issue(NAME, ["::1"], NOW_REAL)
    mixed = Credentials(
        authorities=authority.certificate, certificate=issued.certificate, key=issued.key
    )
    with pytest.raises(UserError, match="no TLS connection can be made"):
        context_pair(mixed)
