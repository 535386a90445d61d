"""Makes the certificates of a job from the job's token, which all of its nodes hold.

The key of the job's authority is derived from the token and the job's name. So each node has the
same authority without having received it from anywhere, and nobody without the token can sign with
it. The authority's certificate differs in its signature only from one making to the next.

A node's certificate can be seen by all that reach its port, and shows which guess of a token is
right. That is why the derivation is slow (scrypt, RFC 7914).
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elasticzero.launcher.addresses import without_brackets
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.credentials import NodeName
from elasticzero.security.certificates import Credentials

CURVE = ec.SECP256R1()
"""Curve of all keys: browsers and Prometheus know it."""
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve's group (SEC 2, section 2.4.2): private keys are from 1 to one below."""
SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20}
"""A guess of the token costs 32 MiB and about 0.1 s."""
SALT = "elasticzero job authority 1"
FROM, UNTIL = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (1970, 2120))
"""Times within which the authority's certificate is valid."""
MARGIN_S = 7 * 86400.0
"""Seconds for which a node's certificate is valid, before it is made and after it: as far may the
clocks of two nodes be apart."""
RENEW_S = 86400.0
"""Seconds after which a node makes another certificate."""
MAX_COMMON_NAME = 64
"""Maximum number of characters of a common name (RFC 5280, appendix A)."""


class JobAuthority:
    """Signs the certificates of the nodes of one job."""

    def __init__(self, token: Secret, job: str) -> None:
        """Derives the authority.

        Args:
            token: The job's token.
            job: The job's name.
        """
        salt = f"{SALT}\0{job}".encode()
        # 16 bytes beyond the size of the order: the remainder prefers no key.
        seed = hashlib.scrypt(token.reveal.encode(), salt=salt, dklen=48, **SCRYPT)
        self._key = ec.derive_private_key(1 + int.from_bytes(seed) % (ORDER - 1), CURVE)
        self._name = _name(f"ElasticZero job {job}")
        self.certificate = self._own_certificate()
        """The authority's certificate, as PEM."""

    def _own_certificate(self) -> str:
        public_key = self._key.public_key()
        digest = hashlib.sha256(_public_bytes(public_key)).digest()
        builder = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(int.from_bytes(digest[:16]) | 1)
            .not_valid_before(FROM)
            .not_valid_after(UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )
        return _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(self, node: NodeName, addresses: Collection[str], now: float) -> Credentials:
        """Returns a new certificate of a node with its key.

        Args:
            node: The node.
            addresses: Addresses and names at which others reach it.
            now: The present Unix time.
        """
        key = ec.generate_private_key(CURVE)
        made = datetime.datetime.fromtimestamp(now, datetime.UTC)
        margin = datetime.timedelta(seconds=MARGIN_S)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [x509.UniformResourceIdentifier(node.uri), *_general_names(addresses)]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(node.node))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(made - margin)
            .not_valid_after(made + margin)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Credentials(
            authorities=self.certificate, certificate=_pem(certificate), key=pem.decode()
        )


class IssuedCredentials:
    """Is the source of the certificates that a node makes itself: a new one every `RENEW_S`."""

    def __init__(
        self,
        authority: JobAuthority,
        node: NodeName,
        addresses: Collection[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Makes the first one.

        Args:
            authority: Signs the certificates.
            node: The node.
            addresses: Addresses and names at which others reach it; duplicates count once.
            clock: Returns the Unix time, which may jump.
        """
        self._authority, self._node, self._clock = authority, node, clock
        self._addresses = tuple(dict.fromkeys(filter(None, addresses)))
        self._made_at = clock()
        self._credentials = authority.issue(node, self._addresses, self._made_at)

    def __call__(self) -> Credentials:
        """Returns the certificate that counts now."""
        now = self._clock()
        if abs(now - self._made_at) >= RENEW_S:
            self._credentials = self._authority.issue(self._node, self._addresses, now)
            self._made_at = now
        return self._credentials


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:MAX_COMMON_NAME])])


def _general_names(addresses: Collection[str]) -> Iterator[x509.GeneralName]:
    """Yields addresses and names as certificates have them; what is neither is left out."""
    for address in addresses:
        try:
            yield x509.IPAddress(ipaddress.ip_address(without_brackets(address).partition("%")[0]))
        except ValueError:
            with suppress(ValueError):
                yield x509.DNSName(address)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
