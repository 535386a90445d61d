"""Finds out how a command reads what a job's agents serve."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass

from elasticzero.errors import UserError
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.options.validation import given_token
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.job_token import stored_tls, token_for_operator
from elasticzero.launcher.tls.credentials import TlsMode
from elasticzero.launcher.tls.files import read_authorities
from elasticzero.security.certificates import client_context
from elasticzero.text import print_result


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCredentials:
    """Holds what an operator has given a command to read a job with."""

    token: Secret | None = None
    """The job's token, if the operator has it."""
    authorities_file: str | None = None
    """File of --tls-ca."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccess:
    """Says how a job's agents are reached, as far as the operator can."""

    scheme: str
    """Scheme of what they serve: http, or https."""
    agents: AgentAccess | None
    """None: the job's token was not given, and the store has its digest alone."""


def operator_credentials(args: argparse.Namespace) -> OperatorCredentials:
    """Returns what the options of a command give; raises `UserError` for an invalid token."""
    return OperatorCredentials(token=given_token(args), authorities_file=args.tls_ca)


def access_for_operator(store: Store, job: str, operator: OperatorCredentials) -> JobAccess:
    """Returns how a command reaches a job's agents.

    Args:
        store: The job's store.
        job: The job's name.
        operator: What the operator has given.

    Raises:
        UserError: The job has another token, or the authorities of its certificates are not given.
    """
    token = token_for_operator(store, operator.token)
    mode = stored_tls(store)
    scheme = "http" if mode == "off" else "https"
    if token is None:
        return JobAccess(scheme=scheme, agents=None)
    if mode == "off":
        return JobAccess(scheme=scheme, agents=AgentAccess(token))
    context = _context(mode, job, token, operator.authorities_file)
    return JobAccess(scheme=scheme, agents=AgentAccess(token, lambda: context))


def _context(mode: TlsMode, job: str, token: Secret, file: str | None) -> ssl.SSLContext:
    """Returns the context of connections to a job's agents.

    Args:
        mode: Where the job's certificates come from.
        job: The job's name.
        token: The job's token.
        file: File of --tls-ca, which mode `files` needs.

    Raises:
        UserError: The file is missing, or has no certificate.
    """
    if mode == "job":
        from elasticzero.launcher.tls.authority import JobAuthority

        return client_context(JobAuthority(token, job).certificate)
    if file is None:
        raise UserError(
            f"the certificates of job {job!r} come from files: give --tls-ca FILE, the file of "
            "the authorities that sign them"
        )
    try:
        return client_context(read_authorities(file))
    except (ssl.SSLError, ValueError):
        raise UserError(f"--tls-ca {file}: no certificate in it; a PEM file is expected") from None


def print_authority(job: str, token: Secret) -> None:
    """Prints the certificate of the authority that signs for a job's nodes (`--tls job`).

    Args:
        job: The job's name.
        token: The job's token.
    """
    from elasticzero.launcher.tls.authority import JobAuthority

    print_result(JobAuthority(token, job).certificate, end="")
