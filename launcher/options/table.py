"""The options of `elasticzero run`: their flags, their variables and their defaults.

Flag over environment over default, resolved here and nowhere else. Every option of `run` may be
given as `ELASTICZERO_<OPTION>`; torchrun's options are taken too, and its `PET_<OPTION>`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elasticzero.launcher.options.option import Option, spellings
from elasticzero.launcher.options.parser import Parser
from elasticzero.launcher.options.spelling import spelled_out
from elasticzero.launcher.options.torchrun import TORCHRUN_OPTIONS
from elasticzero.launcher.secrets import ETCD_PASSWORD, TOKEN
from elasticzero.spans import STRATEGIES

DEFAULT_HTTP_PORT = 9400
"""The first one that is tried where none is given."""

JOB_OPTIONS = (
    Option(
        ("--etcd", "--rdzv-endpoint"),
        "etcd endpoints, HOST:PORT,…; with TLS https://HOST:PORT,…",
        metavar="HOST:PORT",
    ),
    Option(
        ("--job", "--rdzv-id"), "name of the training run; the same on every node", metavar="ID"
    ),
    Option(
        ("--etcd-cacert",),
        "PEM file of the authority that signs etcd's certificate; default: the system's",
        metavar="FILE",
    ),
    Option(("--etcd-cert",), "PEM file of the certificate to show to etcd", metavar="FILE"),
    Option(("--etcd-key",), "PEM file of its key", metavar="FILE"),
    Option(
        ("--etcd-user",),
        f"user of etcd; the password comes from --etcd-password-file or {ETCD_PASSWORD}",
        metavar="NAME",
    ),
    Option(("--etcd-password-file",), "file with that user's password", metavar="FILE"),
    Option(
        ("--token-file",),
        f"file with the password of what agents serve, the same on every node; or {TOKEN}; "
        "default: the first node makes one and puts it into etcd",
        metavar="FILE",
    ),
)
"""What it takes to come to a job: for `run`, and for the commands on a running job."""

RUN_OPTIONS = (
    Option(
        ("--nnodes",), "fewest and most nodes, MIN:MAX or N", "1:1", metavar="MIN:MAX", pet=True
    ),
    Option(
        ("--nproc-per-node",),
        "workers on this node: a number, auto, gpu or cpu",
        "auto",
        metavar="N",
        pet=True,
    ),
    *(replace(option, flags=option.flags[:1]) for option in JOB_OPTIONS),
    Option(("--strategy",), "how state lies on the ranks", "ddp", choices=STRATEGIES),
    Option(("--checkpoint-dir",), "directory that all nodes share", metavar="DIR"),
    Option(
        ("--checkpoint-every",),
        "steps between checkpoints; 0: at the end only",
        0,
        int,
        metavar="N",
    ),
    Option(
        ("--save-timeout",),
        "seconds for which saves of the last state are tried again, before the job ends without it",
        600.0,
        float,
        metavar="S",
    ),
    Option(
        ("--keep",),
        "checkpoints that stay: the newest N good ones; default: all",
        metavar="N",
    ),
    Option(
        ("--keep-every",),
        "with --keep: also those of steps that K divides stay, for good",
        metavar="K",
    ),
    Option(
        ("--snapshot-every",),
        "steps between snapshots in the nodes' memory; 0: none; auto: as often as half a "
        "percent of the time allows",
        "auto",
        metavar="N",
    ),
    Option(
        ("--snapshot-dir",),
        "shared memory that snapshots lie in; what finds no room there goes to a file in the "
        "temporary directory (TMPDIR)",
        "/dev/shm",
        metavar="DIR",
    ),
    Option(
        ("--verify-replicas",),
        "steps from one proof to the next that parameters, optimizer state and tracked objects "
        "are equal on all ranks; 0: none; auto: as often as 0.03 percent of the time allows",
        "auto",
        metavar="EVERY",
    ),
    Option(
        ("--spares",),
        "nodes beyond MAX that wait, ready to take a lost one's place; default: all that come",
        metavar="N",
    ),
    Option(
        ("--max-restarts",),
        "failures in a row without progress before giving up",
        3,
        int,
        metavar="N",
        pet=True,
    ),
    Option(
        ("--hang-timeout",),
        "seconds without a step after which workers are replaced; auto: ten times the longest of "
        "the last steps, at least 60; 0: never",
        "auto",
        metavar="S",
    ),
    Option(
        ("--exit-timeout",),
        "seconds that a worker's process may go on after its script and exit functions; 0: any",
        30.0,
        float,
        metavar="S",
    ),
    Option(
        ("--keep-workers",),
        "keep the processes of workers over a change of the world, where nothing speaks against it",
        False,
        is_switch=True,
        has_off=True,
    ),
    Option(
        ("--strict-checkpoint",),
        "end the job when a checkpoint is damaged, instead of going on from the one before",
        False,
        is_switch=True,
    ),
    Option(
        ("--log-dir",),
        "workers' output goes to DIR/JOB/NODE/LOCAL_RANK.log, and no more to the terminal",
        metavar="DIR",
        pet=True,
    ),
    Option(
        ("--tee",),
        "repeat workers' output here too, also with --log-dir; torchrun's --tee STREAMS (as "
        "--redirects) is taken too",
        False,
        is_switch=True,
    ),
    Option(
        ("--node-name",),
        "name of this node, its own among all; default: the host's, with a number where another "
        "agent of the job runs on it",
        metavar="NAME",
    ),
    Option(
        ("--host",),
        "address under which other nodes reach this one; gloo uses its interface",
        metavar="ADDRESS",
    ),
    Option(
        ("--http-port",),
        f"port of /metrics, /healthz, /status; 0: any; default: {DEFAULT_HTTP_PORT}, or the next "
        "one that is free",
        None,
        int,
        metavar="PORT",
    ),
    Option(("--http-host",), "address the HTTP server listens on", "0.0.0.0", metavar="ADDRESS"),
    Option(
        ("--settle",),
        "seconds without a new node before the first generation starts below MAX",
        3.0,
        float,
        metavar="S",
    ),
    Option(
        ("--lease-ttl",), "seconds after which a silent node is presumed gone", 5, int, metavar="S"
    ),
    Option(
        ("--preemption",),
        "the cloud whose preemption notices make this node leave; auto: the one that answers",
        "auto",
        choices=("auto", "none", "aws", "gcp", "azure"),
    ),
    Option(
        ("--grace",),
        "seconds from SIGTERM to the end of this node: what starts it kills it then",
        25.0,
        float,
        metavar="S",
    ),
    Option(
        ("--join-timeout",), "seconds to wait for etcd and for MIN nodes", 600.0, float, metavar="S"
    ),
    Option(("--restart",), "run a job again that is already done", False, is_switch=True),
    Option(
        ("--standalone",),
        "one node, with an etcd of its own (the default when MAX is 1)",
        False,
        is_switch=True,
        pet=True,
    ),
)


def run_options() -> dict[str, str]:
    """Flag -> environment variable, for every option of `elasticzero run`."""
    return {option.flags[0]: option.variable for option in RUN_OPTIONS}


TEE_STREAMS = Option(
    ("--tee-streams",), argparse.SUPPRESS, metavar="STREAMS", own=False, also_from="PET_TEE"
)
"""What `--tee` becomes where torchrun's value follows it, and what `PET_TEE` says."""

_IN_LOCAL = ("--module", "--no-python", "--redirects", "--local-ranks-filter", "--role")
"""Those of torchrun's options that `elasticzero local` takes."""


def add_job_options(parser: Parser) -> None:
    """The options of a command on a running job: which, and how its etcd is reached."""
    _add(parser, JOB_OPTIONS, required=("etcd", "job"))


def add_run_options(parser: Parser) -> None:
    """The options of `run`, torchrun's among them, and what is to be run."""
    _add_command(parser, [*RUN_OPTIONS, TEE_STREAMS, *TORCHRUN_OPTIONS])


def add_local_options(parser: Parser, own: Sequence[Option], omit: Sequence[str]) -> None:
    """The options of `local`: its own, those of `run` but for the flags in `omit`, and what is to
    be run."""
    job = {option.flags[0]: option for option in JOB_OPTIONS}
    shared = [job.get(o.flags[0], o) for o in RUN_OPTIONS if o.flags[0] not in omit]
    torchruns = [option for option in TORCHRUN_OPTIONS if option.flags[0] in _IN_LOCAL]
    _add_command(parser, [*own, *shared, TEE_STREAMS, *torchruns], required=("nodes",))


def _add_command(parser: Parser, options: Sequence[Option], required: Sequence[str] = ()) -> None:
    _add(parser, options, required)
    parser.add_argument("script", help="training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.prepare = lambda words: spelled_out(words, options)


def _add(parser: Parser, options: Sequence[Option], required: Sequence[str] = ()) -> None:
    for option in options:
        flags = [
            spelling
            for flag in option.flags
            for spelling in (spellings(flag) if flag.startswith("--") else [flag])
        ]
        text = option.help
        if option.default is not None and not option.is_switch:
            text += f" (default: {option.default})"
        if option.is_switch:
            action: Any = argparse.BooleanOptionalAction if option.has_off else "store_true"
            parser.add_argument(
                *flags, dest=option.name, action=action, default=argparse.SUPPRESS, help=text
            )
        else:
            parser.add_argument(
                *flags,
                dest=option.name,
                action="append" if option.is_list else "store",
                default=argparse.SUPPRESS,
                type=option.type,
                choices=option.choices,
                metavar=option.metavar,
                help=text,
            )

    def given(found: argparse.Namespace, option: Option) -> bool:
        return getattr(found, option.name) not in (None, "")

    def complete(found: argparse.Namespace) -> None:
        missing = [option for option in options if not hasattr(found, option.name)]
        found.by_flag = frozenset(o.name for o in options if o not in missing)
        found.defaulted = frozenset(
            o.name for o in missing if not any(os.environ.get(v) for v in o.variables)
        )
        for option in missing:
            setattr(found, option.name, option.default_in(os.environ))
        if absent := [o for o in options if o.name in required and not given(found, o)]:
            wanted = " and ".join(_wanted(option) for option in absent)
            parser.error(f"{wanted} {'is' if len(absent) == 1 else 'are'} wanted")

    parser.complete = complete


def _wanted(option: Option) -> str:
    variable = f" (or {option.variable})" if option.own else ""
    return f"{option.flags[0]} {option.metavar}{variable}"
