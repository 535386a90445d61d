"""Defines the table of options of `elasticzero run` and `elasticzero local`.

One row gives an option its flags, its environment variable, its default and its help, says how its
value is checked, which field of `AgentOptions` it fills, and what `local` does with it. The parser,
the checks, the options of agents, the file of `--config`, the help, the completion of shells and
`docs/reference/configuration.md` all come from here.

A flag goes before the environment, the environment before the file of `--config`, and the file
before the default. Every option of `run` may be given as `ELASTICZERO_<OPTION>`; torchrun's options
are taken too, and its `PET_<OPTION>`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from elasticzero.launcher.options.logs import LOG_OPTIONS
from elasticzero.launcher.options.parser import Parser, add_command, add_options
from elasticzero.launcher.options.private_network import FLAG as PRIVATE_NETWORK
from elasticzero.launcher.options.private_network import private_network
from elasticzero.launcher.options.tls import TLS_AUTHORITIES, TLS_OPTIONS
from elasticzero.launcher.options.torchrun import TORCHRUN_OPTIONS
from elasticzero.launcher.secrets import ETCD_PASSWORD, TOKEN
from elasticzero.options.diloco import island_nodes_of
from elasticzero.options.option import Option, grouped
from elasticzero.options.training import TRAINING_OPTIONS
from elasticzero.options.values import Number, expanded_path, module_names, port_number

DEFAULT_HTTP_PORT = 9400
"""First port that is tried if none is given."""
_SECONDS = Number(
    unit="seconds", convert=float, is_finite=False, expected="0 or more seconds are expected"
)

CONFIG = Option(
    ("--config",),
    "What no flag and no variable gives is read from this TOML file: its keys are the options' "
    "names, script and args.",
    metavar="FILE",
    expand=expanded_path,
    in_local="taken",
    in_file=False,
    is_listed=True,
)
DRY_RUN = Option(
    ("--dry-run",),
    "Nothing is started: the options are checked, and printed with where each comes from, the "
    "workers' command and their environment.",
    False,
    is_switch=True,
    has_variable=False,
    in_local="taken",
    in_file=False,
    is_listed=True,
)
COMMAND_OPTIONS = (CONFIG, DRY_RUN)
"""Options of `run` and `local` that concern the command itself and no job."""

_JOB_AND_ETCD = grouped(
    "job and etcd",
    Option(
        ("--etcd", "--rdzv-endpoint"),
        "etcd is reached at these endpoints, separated by commas; https://HOST:PORT uses TLS.",
        metavar="HOST:PORT",
        in_local="taken",
        is_listed=True,
    ),
    Option(
        ("--job", "--rdzv-id"),
        "The job has this name, which is the same on every node.",
        metavar="ID",
        in_local="taken",
        is_listed=True,
    ),
    Option(
        ("--etcd-cacert",),
        "etcd's certificate must be signed by the authority in this PEM file. (default: one of "
        "the system's authorities)",
        metavar="FILE",
        expand=expanded_path,
    ),
    Option(
        ("--etcd-cert",),
        "This PEM file holds the client certificate that is shown to etcd.",
        metavar="FILE",
        expand=expanded_path,
    ),
    Option(
        ("--etcd-key",),
        "This PEM file holds the private key of the client certificate.",
        metavar="FILE",
        expand=expanded_path,
    ),
    Option(
        ("--etcd-user",),
        "This user logs in to etcd; the password comes from --etcd-password-file or "
        f"{ETCD_PASSWORD}.",
        metavar="NAME",
    ),
    Option(
        ("--etcd-password-file",),
        "This file holds the password of the etcd user.",
        metavar="FILE",
        expand=expanded_path,
    ),
    Option(
        ("--token-file",),
        "This file holds the job's token, the password of the agents' HTTP servers, which is "
        f"the same on every node; {TOKEN} may hold it instead. (default: the first node makes a "
        "token and stores it in etcd)",
        metavar="FILE",
        expand=expanded_path,
    ),
)
JOB_OPTIONS = (*_JOB_AND_ETCD, TLS_AUTHORITIES)
"""Options that say which job, and how to reach it: for `run`, and for the commands on a running
job."""

RUN_OPTIONS = (
    *grouped(
        "nodes and workers",
        Option(
            ("--nnodes",),
            "The job runs on MIN to MAX nodes; N means exactly N.",
            "1:1",
            metavar="MIN:MAX",
            pet=True,
            in_local="absent",
            is_listed=True,
        ),
        Option(
            ("--nproc-per-node",),
            "This node runs N workers; gpu and cpu mean one for each GPU or CPU, and auto means "
            "gpu where there are GPUs and 1 elsewhere.",
            "auto",
            metavar="N",
            pet=True,
            is_listed=True,
        ),
        Option(
            ("--spares",),
            "At most N nodes beyond MAX wait to replace a lost node. (default: all that come)",
            metavar="N",
            parse=Number(unit="nodes", expected="a number of nodes, 0 or more, is expected"),
            field="policy.spares",
        ),
        Option(
            ("--node-name",),
            "This node has this name, which must be unique in the job. (default: the host name, "
            "with a number where another agent of the job runs on this machine)",
            metavar="NAME",
            in_local="absent",
        ),
        Option(
            ("--zone",),
            "This node is in this part of the cluster, such as a zone of a cloud or a rack, which "
            "may fail as a whole; nodes keep the replicas of nodes in another one. (default: not "
            "known)",
            metavar="ZONE",
            field="zone",
            in_local="absent",
        ),
        Option(
            ("--island-nodes",),
            "With --strategy diloco, MIN to MAX nodes are one island: they train together, and "
            "take part in rounds as one. N means 1 to N. (default: each node is an island)",
            metavar="MIN:MAX",
            parse=island_nodes_of,
            field="island_nodes",
        ),
        Option(
            ("--island",),
            "This node is of this island, such as a zone in which the network is fast. (default: "
            "with --island-nodes, one that has a place)",
            metavar="NAME",
            in_local="absent",
        ),
        Option(
            ("--standalone",),
            "The job runs on one node, with an etcd of its own; this is the default when MAX is 1.",
            False,
            is_switch=True,
            pet=True,
            in_local="absent",
            is_listed=True,
        ),
        Option(
            ("--settle",),
            "The first generation starts with fewer than MAX nodes once no node has come for S "
            "seconds.",
            3.0,
            float,
            metavar="S",
            parse=_SECONDS,
            field="policy.settle_s",
        ),
        Option(
            ("--join-timeout",),
            "The agent waits S seconds for etcd and for MIN nodes; then it fails.",
            600.0,
            float,
            metavar="S",
            parse=_SECONDS,
            field="policy.join_timeout_s",
        ),
    ),
    *(replace(option, flags=option.flags[:1]) for option in JOB_OPTIONS),
    *grouped(
        "job and etcd",
        Option(
            ("--lease-ttl",),
            "A node that has been silent for S seconds is presumed lost.",
            5,
            int,
            metavar="S",
            parse=Number(
                unit="seconds",
                least=2,
                convert=float,
                expected="etcd grants no lease below 2 s",
            ),
            field="policy.lease_ttl_s",
        ),
        Option(
            ("--restart",),
            "A job that has ended runs again, from its newest checkpoint.",
            False,
            is_switch=True,
            is_listed=True,
        ),
        Option(
            ("--launch-id",),
            "Nodes that were started together share this id, such as the uid of a Kubernetes Job; "
            "one that comes after the end of the job exits as the others did. Another launch needs "
            "--restart, or another --job.",
            metavar="ID",
            field="launch_id",
            in_local="absent",
        ),
    ),
    *TRAINING_OPTIONS,
    *grouped(
        "failures",
        Option(
            ("--max-restarts",),
            "The job is restarted at most N times in a row without progress; then it fails.",
            3,
            int,
            metavar="N",
            pet=True,
            parse=Number(unit="restarts", expected="0 or more is expected"),
            field="policy.max_restarts",
            is_listed=True,
        ),
        Option(
            ("--hang-timeout",),
            "Workers are replaced after S seconds without a step; auto is ten times the "
            "longest of the last steps and at least 60 (2 for a process that a signal has "
            "suspended), 0 disables it.",
            "auto",
            metavar="S",
            parse=Number(
                unit="seconds",
                convert=float,
                alternatives={"auto": None},
                expected="seconds, 0 or auto is expected",
            ),
            field="policy.hang_timeout_s",
            is_listed=True,
        ),
        Option(
            ("--exit-timeout",),
            "A worker's process is killed if it still runs S seconds after its script and "
            "exit functions have ended; 0 sets no limit.",
            30.0,
            float,
            metavar="S",
            parse=replace(_SECONDS, is_finite=True),
        ),
        Option(
            ("--keep-workers",),
            "The next generation reuses the workers' processes where that is safe.",
            False,
            is_switch=True,
            has_off=True,
            field="keep_workers",
            is_listed=True,
        ),
        Option(
            ("--standby",),
            "Processes that have run the script up to elasticzero.run stand by for workers that "
            "are lost, where that takes long; off starts none.",
            "auto",
            choices=("auto", "off"),
            field="standby",
        ),
        Option(
            ("--preload",),
            "Workers begin with these modules, which the script imports and which take long, "
            "already imported.",
            "",
            metavar="MODULE,…",
            parse=module_names,
            field="preload",
        ),
        Option(
            ("--changes-inside",),
            "Nodes come and go without a stop of the others' loops: auto, where ranks use gloo; "
            "on, also where they use NCCL, which was not tried yet; off, never.",
            "auto",
            choices=("auto", "on", "off"),
            field="policy.changes_inside",
        ),
        Option(
            ("--preemption",),
            "This node leaves when this cloud announces its preemption; auto detects the cloud.",
            "auto",
            choices=("auto", "none", "aws", "gcp", "azure"),
            field="preemption",
            in_local="absent",
        ),
        Option(
            ("--grace",),
            "This node leaves within S seconds after SIGTERM, because the scheduler is "
            "expected to kill it then.",
            25.0,
            float,
            metavar="S",
            parse=_SECONDS,
            field="grace_s",
            is_listed=True,
        ),
    ),
    *LOG_OPTIONS,
    *TLS_OPTIONS,
    *grouped(
        "network",
        Option(
            ("--host",),
            "Other nodes reach this node at this address; gloo uses its network interface. "
            "(default: the address from which this node reaches etcd)",
            metavar="ADDRESS",
            in_local="absent",
        ),
        Option(
            (PRIVATE_NETWORK,),
            "Workers' groups and rank 0's store listen in this network alone, such as 10.8.0.0/24, "
            "fd00::/64 or the interface wg0, or several, separated by commas; a node whose address "
            "is not in it does not start.",
            metavar="CIDR|IFACE",
            parse=private_network,
            field="private_network",
            in_local="absent",
        ),
        Option(
            ("--http-port",),
            "The agent serves the status page, /metrics, /healthz and more at this port; 0 takes "
            f"any free port. (default: {DEFAULT_HTTP_PORT}, or the next one that is free)",
            None,
            int,
            metavar="PORT",
            parse=port_number,
            in_local="absent",
            is_listed=True,
        ),
        Option(
            ("--http-host",),
            "The agent's HTTP server listens on this address; :: is every address, of IPv4 and of "
            "IPv6.",
            "::",
            metavar="ADDRESS",
            in_local="absent",
        ),
        Option(
            ("--http-names",),
            "Clients without the job's token may reach the agent's HTTP server under these names, "
            "separated by commas. (default: its addresses, and names that only machines in its own "
            "network can have)",
            metavar="NAMES",
            in_local="absent",
        ),
        Option(
            ("--open-status",),
            "The agent serves the status of the job and of the node, and so the status page, to "
            "everyone; otherwise they need the job's token.",
            False,
            is_switch=True,
            field="open_status",
        ),
    ),
)


TEE_STREAMS = Option(
    ("--tee-streams",),
    argparse.SUPPRESS,
    metavar="STREAMS",
    has_variable=False,
    also_from="PET_TEE",
    in_local="taken",
    in_file=False,
)
"""`--tee` becomes this where torchrun's value follows it; `PET_TEE` gives it too."""

ALL_RUN_OPTIONS = (*COMMAND_OPTIONS, *RUN_OPTIONS, TEE_STREAMS, *TORCHRUN_OPTIONS)
"""Every option of `run`, also those of torchrun."""

LOCAL_OPTIONS = grouped(
    "the cluster on this machine",
    Option(
        ("--nodes",),
        "The cluster starts with N nodes.",
        type=int,
        metavar="N",
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--nnodes",),
        "The job runs on MIN to MAX nodes. (default: 1:N)",
        metavar="MIN:MAX",
        has_variable=False,
        is_listed=True,
    ),
    Option(
        ("--fault",),
        "WHAT happens at step WHEN, or WHEN is 30s: 30 seconds after the first workers were "
        "started, whatever the script. WHAT is kill-node, kill-worker, drain or join; "
        "WHAT:NODE@WHEN chooses the node.",
        metavar="WHAT@WHEN",
        is_list=True,
        has_variable=False,
        is_listed=True,
    ),
)
"""Options of `local` that `run` does not have, or has with another meaning."""


def add_job_options(parser: Parser) -> None:
    """Adds the options of a command on a running job: which job, and how its etcd is reached."""
    add_options(parser, JOB_OPTIONS, required=("etcd", "job"))


def add_run_options(parser: Parser) -> None:
    """Adds the options of `run`, also those of torchrun, and the script."""
    add_command(parser, ALL_RUN_OPTIONS, has_short_help=True)


def all_local_options() -> list[Option]:
    """Returns the options of `local`, and those of `run` that it takes."""
    job = {option.flags[0]: option for option in JOB_OPTIONS}
    shared = [job.get(o.flags[0], o) for o in ALL_RUN_OPTIONS if o.in_local != "absent"]
    return [*LOCAL_OPTIONS, *shared]


def add_local_options(parser: Parser) -> None:
    """Adds the options of `local`, and the script."""
    add_command(parser, all_local_options(), required=("nodes",), has_short_help=True)


def passed_on_arguments(args: argparse.Namespace) -> list[str]:
    """Returns the words by which `local` passes its options on to each agent's `run`."""
    passed_on = (option for option in ALL_RUN_OPTIONS if option.in_local == "passed on")
    return [word for o in passed_on for word in o.words(getattr(args, o.name))]
