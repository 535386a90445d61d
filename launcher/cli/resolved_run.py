"""Resolves the command line of `elasticzero run` as far as that starts nothing."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from elasticzero.errors import StorageError
from elasticzero.launcher.agent.config import AgentOptions, agent_options
from elasticzero.launcher.options.rendezvous import Rendezvous, check_rendezvous
from elasticzero.launcher.options.spelling import meant_variable
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.launcher.options.tls_settings import TlsSettings, check_tls
from elasticzero.launcher.options.torchrun import check_signals, without_effect
from elasticzero.launcher.options.validation import check_access, given_token, parse_nnodes
from elasticzero.launcher.secrets import Secret, forget_secrets
from elasticzero.launcher.store.etcd.access import Access


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """Holds what the command line, the environment and the file of `--config` mean."""

    options: AgentOptions
    nodes: tuple[int, int]
    """The fewest and the most nodes."""
    rendezvous: Rendezvous
    access: Access
    token: Secret | None
    tls: TlsSettings
    signals: tuple[signal.Signals, ...]
    """Signals at which this node leaves, besides SIGTERM."""
    storage_error: StorageError | None
    """Reason for which the checkpoint directory cannot be written now; a job that already runs
    elsewhere may go on without it."""
    lines: tuple[str, ...]
    """Lines that are printed for the user."""


def _misspelt(environment: Iterable[str]) -> list[str]:
    """Returns a line for each variable whose name is nearly that of an option's."""
    hints = ((name, meant_variable(name, RUN_OPTIONS)) for name in environment)
    return [f"{name} is set, and no option has this name{hint}" for name, hint in hints if hint]


def resolve_run(args: argparse.Namespace) -> ResolvedRun:
    """Checks all options of `run`; raises the error with which the command ends.

    It creates the directory of logs, and that of checkpoints. The environment's secrets are removed
    from it, so that no process inherits them.
    """
    least, most = parse_nnodes(args.nnodes)
    rendezvous = check_rendezvous(args, most)
    access, token = check_access(args), given_token(args)
    tls = check_tls(args, token)
    forget_secrets(os.environ)
    signals = check_signals(args.signals_to_handle)
    options, storage_error = agent_options(args, (least, most))
    return ResolvedRun(
        options=options,
        nodes=(least, most),
        rendezvous=rendezvous,
        access=access,
        token=token,
        tls=tls,
        signals=signals,
        storage_error=storage_error,
        lines=(*rendezvous.lines, *without_effect(vars(args)), *_misspelt(os.environ)),
    )
