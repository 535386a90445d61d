"""Defines the options of `run` on TLS.

They are a part of the table of options, which `table` describes. `tls_settings` checks them: this
file stands alone so that a command that only parses options loads no more.
"""

from __future__ import annotations

from elasticzero.launcher.tls.credentials import TLS_MODES
from elasticzero.options.option import Option, grouped
from elasticzero.options.values import expanded_path

TLS_OPTIONS = grouped(
    "tls",
    Option(
        ("--tls",),
        "Agents' HTTP servers and transfers of snapshots use no TLS, certificates that each node "
        "makes from the job's token, or certificates in files. (default: job where a token is "
        "given and the job begins, else as its other nodes do)",
        choices=TLS_MODES,
    ),
    Option(
        ("--tls-cert",),
        "With --tls files, this PEM file holds the certificate of this node; it is read again "
        "when it changes, as the two others are.",
        metavar="FILE",
        expand=expanded_path,
    ),
    Option(
        ("--tls-key",),
        "With --tls files, this PEM file holds the private key of the certificate.",
        metavar="FILE",
        expand=expanded_path,
    ),
)
(TLS_AUTHORITIES,) = grouped(
    "tls",
    Option(
        ("--tls-ca",),
        "With --tls files, the certificates of the job's nodes must be signed by an authority in "
        "this PEM file, which signs for this job alone: each of its certificates opens the job.",
        metavar="FILE",
        expand=expanded_path,
    ),
)
