"""Holds the TLS and authentication settings for etcd, and its endpoints."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticzero.errors import UserError
from elasticzero.launcher.addresses import without_brackets
from elasticzero.launcher.secrets import ETCD_PASSWORD, Secret, read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Holds certificates, user and password for etcd; raises `UserError` for values that cannot go
    together.

    With none of them, requests go to etcd without TLS and without a user.
    """

    cacert: str | None = None
    """PEM file of the authorities that sign etcd's certificate; None: the system's."""
    cert: str | None = None
    """PEM file of the certificate to show to etcd."""
    key: str | None = None
    """PEM file of its key."""
    user: str | None = None
    password: Secret | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            option, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise UserError(
                f"--etcd-{option} {getattr(self, option)} needs --etcd-{missing} FILE too"
            )
        if self.user is not None and ":" in self.user:
            raise UserError(
                "--etcd-user: a name without ':' is expected; the password comes from "
                f"--etcd-password-file FILE or {ETCD_PASSWORD}, never from the command line"
            )
        if self.user is not None and self.password is None:
            raise UserError(
                f"--etcd-user {self.user} needs a password: give --etcd-password-file FILE or "
                f"the environment variable {ETCD_PASSWORD}"
            )
        if self.user is None and self.password is not None:
            raise UserError("a password for etcd is given without a user: add --etcd-user NAME")

    @property
    def names_certificates(self) -> bool:
        return self.cacert is not None or self.cert is not None


def resolve_access(
    *,
    cacert: str | None,
    cert: str | None,
    key: str | None,
    user: str | None,
    password_file: str | None,
    environment: Mapping[str, str],
) -> Access:
    """Returns the access that the options describe.

    Args:
        cacert: PEM file of the authorities that sign etcd's certificate; None: the system's.
        cert: PEM file of the certificate to show to etcd.
        key: PEM file of its key.
        user: User of etcd.
        password_file: File with the user's password.
        environment: Variables of the process; a password in them has no effect without a user.

    Raises:
        UserError: The options are invalid.
    """
    variables = environment if user is not None else {}
    password = read_secret("--etcd-password-file", password_file, ETCD_PASSWORD, variables)
    return Access(cacert=cacert, cert=cert, key=key, user=user, password=password)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Names one member of etcd, as gRPC takes it."""

    address: str
    """HOST:PORT."""
    tls: bool

    def __str__(self) -> str:
        return self.address

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def parse_endpoint(text: str, access: Access) -> Endpoint:
    """Parses what the user wrote: HOST:PORT, with http:// or https:// or neither; raises
    `UserError`."""
    scheme, separator, rest = text.strip().rpartition("://")
    address = rest.rstrip("/")
    host, colon, port = address.rpartition(":")
    if separator and scheme not in ("http", "https"):
        raise UserError(f"etcd endpoint {text!r}: HOST:PORT or https://HOST:PORT is expected")
    if ":" in host and not host.startswith("["):
        raise UserError(
            f"etcd endpoint {text!r}: an address of IPv6 must be in brackets, as in [fd00::7]:2379"
        )
    is_host = bool(host) and (not host.startswith("[") or _is_ipv6(without_brackets(host)))
    if not colon or not is_host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"etcd endpoint {text!r} is not HOST:PORT, as in 10.0.0.7:2379")
    if scheme == "http" and access.names_certificates:
        raise UserError(
            f"etcd endpoint {text!r} is without TLS, but --etcd-cacert or --etcd-cert is given: "
            "write https://, or leave them out"
        )
    return Endpoint(address, scheme == "https" or access.names_certificates)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pems:
    """Holds the contents of the files that an `Access` names."""

    cacert: bytes | None
    cert: bytes | None
    key: bytes | None


def read_certificates(access: Access) -> Pems:
    """Returns the files' contents, checked; raises `UserError`, which names the option."""
    tls_context(access)
    default = ssl.get_default_verify_paths().cafile
    return Pems(
        cacert=_read("--etcd-cacert", access.cacert or default),
        cert=_read("--etcd-cert", access.cert),
        key=_read("--etcd-key", access.key),
    )


def _read(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}; name a PEM file") from None


def tls_context(access: Access) -> ssl.SSLContext:
    """Returns a context with which Python's own TLS does as gRPC does; raises `UserError` for
    invalid files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if access.cacert is None:
        context.load_default_certs()
    else:
        _read("--etcd-cacert", access.cacert)
        try:
            context.load_verify_locations(cafile=access.cacert)
        except ssl.SSLError:
            raise UserError(
                f"--etcd-cacert {access.cacert}: no certificate in it; a PEM file is expected"
            ) from None
    if access.cert is not None and access.key is not None:
        _read("--etcd-cert", access.cert)
        _read("--etcd-key", access.key)
        try:
            # An empty password: a key that needs one is refused instead of asking the terminal.
            context.load_cert_chain(access.cert, access.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise UserError(
                f"--etcd-cert {access.cert} and --etcd-key {access.key} are no certificate and its "
                f"key, as PEM and without a password ({_reason(error)})"
            ) from None
    return context


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or str(error)
    return str(reason).lower().replace("_", " ")
