"""Checks the options on TLS, and says what they mean for this node."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from elasticzero.errors import UserError
from elasticzero.launcher.secrets import TOKEN, Secret
from elasticzero.launcher.tls.credentials import TlsMode
from elasticzero.launcher.tls.files import CredentialFiles, FileCredentials


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Holds what a node was told about TLS."""

    mode: TlsMode | None = None
    """None: the node does as the others of its job."""
    files: CredentialFiles | None = None
    """The files of mode `files`."""


def check_tls(args: argparse.Namespace, token: Secret | None) -> TlsSettings:
    """Returns what the options of `run` say about TLS.

    Args:
        args: Parsed options.
        token: The job's token, if one was given.

    Raises:
        UserError: The options do not go together, or the files are of no use.
    """
    paths = {"--tls-cert": args.tls_cert, "--tls-key": args.tls_key, "--tls-ca": args.tls_ca}
    present = [flag for flag, path in paths.items() if path]
    if args.tls != "files":
        if present:
            raise UserError(f"{present[0]} {paths[present[0]]} is for --tls files")
        if args.tls == "job" and token is None:
            raise UserError(
                "--tls job makes certificates from the job's token: give --token-file FILE, or "
                f"the environment variable {TOKEN}, on every node"
            )
        return TlsSettings(mode=args.tls)
    missing = [flag for flag in paths if flag not in present]
    if missing:
        raise UserError(f"--tls files needs {missing[0]} FILE too")
    files = CredentialFiles(certificate=args.tls_cert, key=args.tls_key, authorities=args.tls_ca)
    FileCredentials(files)
    return TlsSettings(mode="files", files=files)
