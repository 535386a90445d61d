"""Makes the contexts of a node's connections as the job's mode has it."""

from __future__ import annotations

import socket
from collections.abc import Collection

from elasticzero.errors import UserError
from elasticzero.launcher.addresses import LOOPBACKS
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.contexts import TlsContexts
from elasticzero.launcher.tls.credentials import NodeName, TlsMode
from elasticzero.launcher.tls.files import CredentialFiles, FileCredentials


def node_contexts(
    mode: TlsMode,
    name: NodeName,
    token: Secret,
    addresses: Collection[str],
    files: CredentialFiles | None,
) -> TlsContexts | None:
    """Returns the contexts of a node; None: its job is without TLS.

    Args:
        mode: Where the job's certificates come from.
        name: The node.
        token: The job's token.
        addresses: Addresses and names at which others reach the node, besides its machine's own.
        files: The files that this node was given.

    Raises:
        UserError: The job's certificates come from files, and this node was given none, or they
            are of no use.
    """
    match mode:
        case "off":
            return None
        case "job":
            # Only a job with TLS needs the package, which takes its time to import.
            from elasticzero.launcher.tls.authority import IssuedCredentials, JobAuthority

            names = (*addresses, socket.gethostname(), "localhost", *LOOPBACKS)
            return TlsContexts(IssuedCredentials(JobAuthority(token, name.job), name, names))
        case "files":
            if files is None:
                raise UserError(
                    "the job has begun with --tls files: give this node --tls files, --tls-cert, "
                    "--tls-key and --tls-ca as its other nodes"
                )
            return TlsContexts(FileCredentials(files))
