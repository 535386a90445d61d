"""Defines what one end of a connection shows of itself, and by what it knows the other end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from elasticzero.security.certificates import Credentials

TlsMode = Literal["off", "job", "files"]
"""Says where a job's certificates come from: there are none, each node makes its own from the job's
token, or files hold them."""
TLS_MODES: tuple[TlsMode, ...] = get_args(TlsMode)
SCHEME = "elasticzero"
"""Scheme of the name that a certificate gives a node."""
_NAME = re.compile(rf"{SCHEME}://([A-Za-z0-9._-]+)/(\d{{1,9}})/([A-Za-z0-9._-]+)\Z")


CredentialsSource = Callable[[], Credentials]
"""Returns the credentials that count now: the same object as long as they have not changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeName:
    """Names a node of a run of a job in the certificate that it has made."""

    job: str
    run: int
    node: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.job}/{self.run}/{self.node}"


def node_name_in(certificate: dict[str, Any] | None) -> NodeName | None:
    """Returns the node that a verified certificate names, as `SSLSocket.getpeercert` has it; None:
    it names none, as a certificate of files."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        match = _NAME.match(value) if kind == "URI" else None
        if match is not None:
            return NodeName(job=match[1], run=int(match[2]), node=match[3])
    return None
