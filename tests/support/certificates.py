"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.authority import JobAuthority
from elasticzero.launcher.tls.credentials import NodeName
from elasticzero.launcher.tls.files import CredentialFiles
from elasticzero.security.certificates import Credentials

BOTH_ENDS = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates, whose files lie in `folder` under the authority's name."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self.subject, self.subject, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def sign(
        self,
        name: str,
        *addresses: x509.GeneralName,
        usages: Sequence[x509.ObjectIdentifier] = BOTH_ENDS,
    ) -> Pair:
        """A certificate of a server at these addresses, or of the client `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self.subject, key.public_key()).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if addresses:
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        pair = Pair(
            self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key"
        )
        pair.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


class Mounted:
    """A Secret as Kubernetes mounts it: the files lead through a link to a directory of them all,
    which is turned to another directory at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self._version = folder, 0
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(f"..data/{name}")

    @property
    def files(self) -> CredentialFiles:
        certificate, key, authorities = (
            str(self.folder / name) for name in ("tls.crt", "tls.key", "ca.crt")
        )
        return CredentialFiles(certificate=certificate, key=key, authorities=authorities)

    def turn(self, certificate: bytes, key: bytes, authorities: bytes) -> None:
        self._version += 1
        version = self.folder / f"..v{self._version}"
        version.mkdir()
        for name, data in (("tls.crt", certificate), ("tls.key", key), ("ca.crt", authorities)):
            (version / name).write_bytes(data)
        new = self.folder / "..data_tmp"
        new.symlink_to(version.name)
        os.replace(new, self.folder / "..data")

    def sign(self, authority: Authority, name: str, address: x509.GeneralName = LOOPBACK) -> None:
        """Turns to a new certificate, as cert-manager does when one is to be renewed."""
        pair = authority.sign(name, address)
        self.turn(pair.cert.read_bytes(), pair.key.read_bytes(), authority.cert.read_bytes())


def credentials_of(token: str) -> Credentials:
    """What a node of the job has that is given this token."""
    name = NodeName(job="j", run=1, node="a")
    return JobAuthority(Secret(token), "j").issue(name, ["127.0.0.1"], time.time())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
