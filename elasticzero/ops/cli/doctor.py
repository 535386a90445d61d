"""Examines this machine: `elasticzero doctor`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace

from elasticzero.errors import UserError
from elasticzero.launcher.options.parser import Parser, add_options
from elasticzero.launcher.options.private_network import FLAG, private_network
from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT, JOB_OPTIONS, RUN_OPTIONS
from elasticzero.launcher.options.validation import check_access, endpoints_of
from elasticzero.ops.doctor.facts import MachineFacts
from elasticzero.ops.doctor.finding import Finding
from elasticzero.ops.doctor.rules import findings
from elasticzero.options.option import Option, grouped
from elasticzero.options.values import port_number
from elasticzero.text import bytes_of, count_text, print_foreign, print_result

OF_RUN = (
    *("checkpoint_dir", "snapshot_dir", "http_port", "http_host", "preemption"),
    *("host", "require_private_network"),
)
"""Options of `run` that say what is to be examined."""
NOT_OF_JOB = ("job", "token_file", "tls_ca")
"""Options of the commands on a running job that concern no machine."""


def _size(flag: str, text: str | None) -> int | None:
    """Parses --snapshot-size; raises `UserError`."""
    try:
        return None if text is None else bytes_of(text)
    except ValueError:
        raise UserError(f"{flag} {text}: a size such as 40GiB is expected") from None


OWN_OPTIONS = grouped(
    "what is examined besides",
    Option(
        ("--peer",),
        "This other node must be reached at all ports; whether the way there is encrypted is said "
        "too.",
        metavar="HOST",
        is_list=True,
        has_variable=False,
    ),
    Option(
        ("--snapshot-size",),
        "The snapshots of a node take SIZE bytes, as `elasticzero plan` computes them.",
        metavar="SIZE",
        has_variable=False,
    ),
)


def add_doctor_options(parser: Parser) -> None:
    """Adds the options of `doctor`, and sets its `run_command`."""
    parser.add_argument(
        "--json", action="store_true", help="The findings are printed as JSON, for scripts."
    )
    job = [replace(option, group="etcd") for option in JOB_OPTIONS if option.name not in NOT_OF_JOB]
    run = [
        replace(option, group="what a node of the job would use")
        for option in RUN_OPTIONS
        if option.name in OF_RUN
    ]
    add_options(parser, [*job, *run, *OWN_OPTIONS])
    parser.set_defaults(run_command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    results = findings(_examine(args))
    problems = sum(finding.level == "problem" for finding in results)
    if args.json:
        shown = {"problems": problems, "findings": [asdict(finding) for finding in results]}
        print_result(json.dumps(shown, indent=2))
    else:
        print_result(report_text(results), end="")
    return 1 if problems else 0


def _subject(args: argparse.Namespace) -> str:
    """Returns what is examined, as far as it may take long."""
    asked = [*endpoints_of(args), *(args.peer or ()), *filter(None, [args.checkpoint_dir])]
    return ", ".join(["this machine", *asked])


def _examine(args: argparse.Namespace) -> MachineFacts:
    from elasticzero.ops.doctor import machine_probes as machine
    from elasticzero.ops.doctor import service_probes as service
    from elasticzero.ops.doctor.path_probes import path_facts, private_network_facts

    access = check_access(args)
    needed = _size("--snapshot-size", args.snapshot_size)
    port_given = port_number("--http-port", args.http_port)
    port = DEFAULT_HTTP_PORT if port_given is None else port_given
    peers = args.peer or ()
    network = private_network(FLAG, args.require_private_network)
    if not args.json:
        print_foreign(f"examining {_subject(args)}; this takes some seconds")
    return MachineFacts(
        etcd=service.etcd_facts(endpoints_of(args), access),
        port=service.port_facts(args.http_host, port, is_given=port_given is not None),
        peers=tuple(service.peer_facts(host, port or DEFAULT_HTTP_PORT) for host in peers),
        network=private_network_facts(network, args.host, endpoints_of(args)),
        paths=tuple(map(path_facts, peers)),
        memory=machine.shared_memory_facts(args.snapshot_dir, needed),
        storage=service.storage_facts(args.checkpoint_dir),
        gpu=machine.gpu_facts(),
        clock_synchronized=machine.clock_synchronized(),
        versions=machine.version_facts(),
        limits=machine.limit_facts(),
        cloud=service.cloud_facts(args.preemption, os.environ),
    )


def report_text(results: list[Finding]) -> str:
    """Returns a line for each finding, and one that counts them."""
    width = max(len(finding.topic) for finding in results)
    lines = [
        f"{finding.level:<7}  {finding.topic:<{width}}  {finding.text}"
        f"{f'; {finding.advice}' if finding.advice else ''}"
        for finding in results
    ]
    problems = sum(finding.level == "problem" for finding in results)
    notes = sum(finding.level == "note" for finding in results)
    end = f"{count_text(problems, 'problem')}, {count_text(notes, 'note')}"
    return "\n".join([*lines, end]) + "\n"
