"""The table of options of `elasticzero run` and `elasticzero local`.

One row gives an option its flags, its environment variable, its default and its help, says how its
value is checked, which field of `AgentOptions` it fills, and what `local` does with it. The parser,
the checks, the options of agents and `docs/reference/configuration.md` all come from here.

A flag goes before the environment, and the environment before the default. Every option of `run`
may be given as `ELASTICZERO_<OPTION>`; torchrun's options are taken too, and its `PET_<OPTION>`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from elasticzero.launcher.options.option import Option
from elasticzero.launcher.options.parser import Parser, add_command, add_options
from elasticzero.launcher.options.torchrun import TORCHRUN_OPTIONS
from elasticzero.launcher.options.values import (
    at_least_zero,
    lease_seconds,
    seconds_or_auto,
    steps_or_auto,
    whole_number,
)
from elasticzero.launcher.secrets import ETCD_PASSWORD, TOKEN
from elasticzero.spans import STRATEGIES

DEFAULT_HTTP_PORT = 9400
"""The first one that is tried where none is given."""

JOB_OPTIONS = (
    Option(
        ("--etcd", "--rdzv-endpoint"),
        "etcd endpoints, HOST:PORT,…; with TLS https://HOST:PORT,…",
        metavar="HOST:PORT",
        in_local="taken",
    ),
    Option(
        ("--job", "--rdzv-id"),
        "name of the training run; the same on every node",
        metavar="ID",
        in_local="taken",
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
        ("--nnodes",),
        "fewest and most nodes, MIN:MAX or N",
        "1:1",
        metavar="MIN:MAX",
        pet=True,
        in_local="absent",
    ),
    Option(
        ("--nproc-per-node",),
        "workers on this node: a number, auto, gpu or cpu",
        "auto",
        metavar="N",
        pet=True,
    ),
    *(replace(option, flags=option.flags[:1]) for option in JOB_OPTIONS),
    Option(
        ("--strategy",),
        "how state lies on the ranks",
        "ddp",
        choices=STRATEGIES,
        field="policy.strategy",
    ),
    Option(("--checkpoint-dir",), "directory that all nodes share", metavar="DIR"),
    Option(
        ("--checkpoint-every",),
        "steps between checkpoints; 0: at the end only",
        0,
        int,
        metavar="N",
        parse=at_least_zero("0 or more steps are expected"),
        field="checkpoint_every",
    ),
    Option(
        ("--save-timeout",),
        "seconds for which saves of the last state are tried again, before the job ends without it",
        600.0,
        float,
        metavar="S",
        parse=at_least_zero("0 or more seconds are expected", finite=True),
        field="policy.save_timeout_s",
    ),
    Option(
        ("--keep",),
        "checkpoints that stay: the newest N good ones; default: all",
        metavar="N",
        parse=whole_number("a whole number, 1 or more, is expected"),
        field="keep.last",
    ),
    Option(
        ("--keep-every",),
        "with --keep: also those of steps that K divides stay, for good",
        metavar="K",
        parse=whole_number("a whole number, 1 or more, is expected"),
        field="keep.every",
    ),
    Option(
        ("--snapshot-every",),
        "steps between snapshots in the nodes' memory; 0: none; auto: as often as half a "
        "percent of the time allows",
        "auto",
        metavar="N",
        parse=steps_or_auto,
        field="snapshot_every",
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
        parse=steps_or_auto,
        field="verify_every",
    ),
    Option(
        ("--spares",),
        "nodes beyond MAX that wait, ready to take a lost one's place; default: all that come",
        metavar="N",
        parse=whole_number("a number of nodes, 0 or more, is expected"),
        field="policy.spares",
    ),
    Option(
        ("--max-restarts",),
        "failures in a row without progress before giving up",
        3,
        int,
        metavar="N",
        pet=True,
        parse=at_least_zero("0 or more is expected"),
        field="policy.max_restarts",
    ),
    Option(
        ("--hang-timeout",),
        "seconds without a step after which workers are replaced; auto: ten times the longest of "
        "the last steps, at least 60; 0: never",
        "auto",
        metavar="S",
        parse=seconds_or_auto,
        field="policy.hang_timeout_s",
    ),
    Option(
        ("--exit-timeout",),
        "seconds that a worker's process may go on after its script and exit functions; 0: any",
        30.0,
        float,
        metavar="S",
        parse=at_least_zero("0 or more seconds are expected", finite=True),
    ),
    Option(
        ("--keep-workers",),
        "keep the processes of workers over a change of the world, where nothing speaks against it",
        False,
        is_switch=True,
        has_off=True,
        field="keep_workers",
    ),
    Option(
        ("--strict-checkpoint",),
        "end the job when a checkpoint is damaged, instead of going on from the one before",
        False,
        is_switch=True,
        field="policy.strict_checkpoint",
    ),
    Option(
        ("--log-dir",),
        "workers' output goes to DIR/JOB/NODE/LOCAL_RANK.log, and no more to the terminal",
        metavar="DIR",
        pet=True,
        in_local="taken",
    ),
    Option(
        ("--log-level",),
        "the least level of the lines that the agent writes about the job",
        "info",
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        ("--log-format",),
        "json: one JSON object a line, with the time, level, node, generation and rank",
        "text",
        choices=("text", "json"),
        in_local="absent",
    ),
    Option(
        ("--tee",),
        "repeat workers' output here too, also with --log-dir; torchrun's --tee STREAMS (as "
        "--redirects) is taken too",
        False,
        is_switch=True,
        in_local="taken",
    ),
    Option(
        ("--node-name",),
        "name of this node, its own among all; default: the host's, with a number where another "
        "agent of the job runs on it",
        metavar="NAME",
        in_local="absent",
    ),
    Option(
        ("--host",),
        "address under which other nodes reach this one; gloo uses its interface",
        metavar="ADDRESS",
        in_local="absent",
    ),
    Option(
        ("--http-port",),
        f"port of /metrics, /healthz, /status; 0: any; default: {DEFAULT_HTTP_PORT}, or the next "
        "one that is free",
        None,
        int,
        metavar="PORT",
        in_local="absent",
    ),
    Option(
        ("--http-host",),
        "address the HTTP server listens on",
        "0.0.0.0",
        metavar="ADDRESS",
        in_local="absent",
    ),
    Option(
        ("--settle",),
        "seconds without a new node before the first generation starts below MAX",
        3.0,
        float,
        metavar="S",
        field="policy.settle_s",
    ),
    Option(
        ("--lease-ttl",),
        "seconds after which a silent node is presumed gone",
        5,
        int,
        metavar="S",
        parse=lease_seconds,
        field="policy.lease_ttl_s",
    ),
    Option(
        ("--preemption",),
        "the cloud whose preemption notices make this node leave; auto: the one that answers",
        "auto",
        choices=("auto", "none", "aws", "gcp", "azure"),
        field="preemption",
        in_local="absent",
    ),
    Option(
        ("--grace",),
        "seconds from SIGTERM to the end of this node: what starts it kills it then",
        25.0,
        float,
        metavar="S",
        parse=at_least_zero("0 or more seconds are expected"),
        field="grace_s",
    ),
    Option(
        ("--join-timeout",),
        "seconds to wait for etcd and for MIN nodes",
        600.0,
        float,
        metavar="S",
        field="policy.join_timeout_s",
    ),
    Option(("--restart",), "run a job again that is already done", False, is_switch=True),
    Option(
        ("--standalone",),
        "one node, with an etcd of its own (the default when MAX is 1)",
        False,
        is_switch=True,
        pet=True,
        in_local="absent",
    ),
)


TEE_STREAMS = Option(
    ("--tee-streams",),
    argparse.SUPPRESS,
    metavar="STREAMS",
    own=False,
    also_from="PET_TEE",
    in_local="taken",
)
"""What `--tee` becomes where torchrun's value follows it, and what `PET_TEE` says."""

_ALL_OF_RUN = (*RUN_OPTIONS, TEE_STREAMS, *TORCHRUN_OPTIONS)

LOCAL_OPTIONS = (
    Option(("--nodes",), "nodes at the start", type=int, metavar="N", own=False),
    Option(
        ("--fault",),
        "kill-node, kill-worker, drain or join, when the job reaches STEP; "
        "kill-node:NODE@STEP names the node",
        metavar="WHAT@STEP",
        is_list=True,
        own=False,
    ),
    Option(("--nnodes",), "fewest and most nodes (default: 1:N)", metavar="MIN:MAX", own=False),
)
"""Options of `local` that `run` does not have, or has with another meaning."""


def add_job_options(parser: Parser) -> None:
    """The options of a command on a running job: which, and how its etcd is reached."""
    add_options(parser, JOB_OPTIONS, required=("etcd", "job"))


def add_run_options(parser: Parser) -> None:
    """The options of `run`, torchrun's among them, and what is to be run."""
    add_command(parser, _ALL_OF_RUN)


def add_local_options(parser: Parser) -> None:
    """The options of `local`: its own, those of `run` that it takes, and what is to be run."""
    job = {option.flags[0]: option for option in JOB_OPTIONS}
    shared = [job.get(o.flags[0], o) for o in _ALL_OF_RUN if o.in_local != "absent"]
    add_command(parser, [*LOCAL_OPTIONS, *shared], required=("nodes",))


def given_words(args: argparse.Namespace) -> list[str]:
    """The words with which `local` passes its options on to each agent's `run`."""
    passed_on = (option for option in _ALL_OF_RUN if option.in_local == "passed on")
    return [word for o in passed_on for word in o.words(getattr(args, o.name))]
