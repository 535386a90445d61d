"""Prints what `elasticzero run` or `elasticzero local` would do with these options: `--dry-run`.

Nothing is started, and nothing stays behind: directories that the checks create are removed again.
No secret is printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import ElasticZeroError, ExitCode
from elasticzero.ipc.assignment import Resume, torchrun_environment
from elasticzero.ipc.channel import CHANNEL_FD_VARIABLE, WAKEUP_FD_VARIABLE
from elasticzero.launcher.addresses import loopback
from elasticzero.launcher.agent.assignments import assignments
from elasticzero.launcher.cli.masking import masked_text, masked_variable, masked_words
from elasticzero.launcher.cli.resolved_run import ResolvedRun, resolve_run
from elasticzero.launcher.local.cluster import cluster_environment
from elasticzero.launcher.local.command import agent_arguments, check_cluster
from elasticzero.launcher.local.faults import most_nodes
from elasticzero.launcher.options.parser import Parser, shown_value
from elasticzero.launcher.options.private_network import (
    GLOO_INTERFACE_VARIABLE,
    NCCL_INTERFACE_VARIABLE,
    NCCL_TRANSPORT_VARIABLE,
    SOCKETS,
)
from elasticzero.launcher.options.table import (
    ALL_RUN_OPTIONS,
    DRY_RUN,
    LOCAL_OPTIONS,
    add_run_options,
    all_local_options,
)
from elasticzero.launcher.protocol.documents import Member, World
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.options.option import Option, split_default
from elasticzero.options.sources import Origin
from elasticzero.text import count_text, print_result, table_text

LOCAL_ETCD = "127.0.0.1:2379"
"""Stands for the etcd that `local` starts."""
_EACH_WORKER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_ERROR_FILE", CHANNEL_FD_VARIABLE, WAKEUP_FD_VARIABLE),
)
"""Variables that differ between workers or generations."""


def dry_run(args: argparse.Namespace) -> int:
    """Checks and prints what `run` would do; raises the error with which it would end."""
    resolved = _resolved(args)
    parts = [_option_table(args, ALL_RUN_OPTIONS), _workers_text(args, resolved)]
    _print("run", parts, resolved)
    return int(ExitCode.DONE)


def dry_run_local(args: argparse.Namespace) -> int:
    """Checks and prints what `local` would do; raises the error with which it would end."""
    most = most_nodes(args.nodes, check_cluster(args))
    node_options = ["--job", args.job or "local", "--node-name", "node-0", "--host", loopback()]
    node_options += [f"--log-dir={args.log_dir}"] if args.log_dir else []
    with _variables(cluster_environment(most)):
        agent = _parsed_run([*node_options, *agent_arguments(args, args.etcd or LOCAL_ETCD, most)])
        resolved = _resolved(agent)
    parts = [_option_table(args, all_local_options()), _workers_text(agent, resolved)]
    _print("local", parts, resolved)
    return int(ExitCode.DONE)


def _parsed_run(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of an agent's `run` with these words after it."""
    parser = Parser(prog="elasticzero run", allow_abbrev=False)
    add_run_options(parser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse_unknown(unknown[0])
    return args


def _print(command: str, parts: Iterable[str], resolved: ResolvedRun) -> None:
    head = f"Nothing is started. This is what `elasticzero {command}` would do.\n"
    lines = "".join(f"{line}\n" for line in resolved.lines)
    held = (resolved.token, resolved.access.password)
    secrets = [secret.reveal for secret in held if secret is not None]
    print_result(masked_text("\n".join([head + lines, *parts]), secrets), end="")


@contextmanager
def _variables(added: Mapping[str, str]) -> Iterator[None]:
    """Adds variables to the environment of this process for a while."""
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _resolved(args: argparse.Namespace) -> ResolvedRun:
    """Returns what `run` would start; raises its error, and removes what the checks have
    created."""
    places = [Path(args.log_dir).absolute()] if args.log_dir else []
    with suppress(ElasticZeroError):  # what is wrong with it is said in its turn
        where = open_directory(args.checkpoint_dir).where if args.checkpoint_dir else "://"
        places += [] if "://" in where else [Path(where)]
    created = {p for place in places for p in (place, *place.parents) if not os.path.exists(p)}
    kept: set[Path] = set()
    with suppress(OSError):
        kept = set(places[0].iterdir()) if args.log_dir else kept
    try:
        resolved = resolve_run(args)
        logs = resolved.options.log_dir.parent
        created |= {logs} if args.log_dir else {logs, logs.parent}
    finally:
        for path in sorted(created - kept, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # what holds anything stays
                path.rmdir()
    if resolved.storage_error is not None:
        raise resolved.storage_error
    return resolved


def _option_table(args: argparse.Namespace, options: Sequence[Option]) -> str:
    """Returns a table of the options: those of torchrun only where they were given."""
    rows = []
    for option in options:
        source = args.sources[option.name]
        ours = (option.has_variable or option in LOCAL_OPTIONS) and option is not DRY_RUN
        if ours or (source.origin > Origin.DEFAULT and option is not DRY_RUN):
            name = option.flags[0].removeprefix("--")
            rows.append((name, _value_text(option, getattr(args, option.name)), source.text))
    rows.append(("script", args.script, args.sources["script"].text))
    script_arguments = shlex.join(masked_words(args.arguments)) or "-"
    rows.append(("args", script_arguments, args.sources["arguments"].text))
    return table_text(("OPTION", "VALUE", "FROM"), rows)


def _value_text(option: Option, value: Any) -> str:
    if value is None:
        described = split_default(option.help)[1]
        return f"({described})" if described else "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return shown_value(value)


def _workers_text(args: argparse.Namespace, resolved: ResolvedRun) -> str:
    options, (least, most) = resolved.options, resolved.nodes
    launch = options.launch
    nodes = count_text(most, "node") if least == most else f"{least} to {most} nodes"
    rows = _environment_rows(args, resolved)
    return (
        f"{count_text(options.nproc, 'worker')} on each of {nodes}\n"
        f"command    {shlex.join(masked_words(_command(launch)))}\n"
        f"directory  {launch.directory}\n\n"
        f"{table_text(('VARIABLE OF A WORKER', 'FROM', 'VALUE'), rows)}"
    )


def _command(launch: Launch) -> list[str]:
    """Returns the command that does what a worker does."""
    python = [] if launch.is_program else [sys.executable, *(["-m"] if launch.is_module else [])]
    return [*python, launch.target, *launch.arguments]


def _environment_rows(
    args: argparse.Namespace, resolved: ResolvedRun
) -> list[tuple[str, str, str]]:
    """Returns the whole environment of the first worker in a first generation of MAX nodes."""
    options = resolved.options
    inherited = options.launch.environment
    members = tuple(
        Member(f"node-{i}", "", args.host or "", 0, 0, options.nproc)
        for i in range(resolved.nodes[1])
    )
    world = World(
        generation=1,
        token="",
        members=members,
        strategy=options.policy.strategy,
        resume=Resume(tier="fresh"),
        reason="",
    )
    variables = torchrun_environment(assignments(options, world, 0, Secret(""))[0])
    variables |= {CHANNEL_FD_VARIABLE: "(a descriptor)", WAKEUP_FD_VARIABLE: "(a descriptor)"}
    variables |= {"MASTER_PORT": "(a free port)"}
    if not args.host:
        variables["MASTER_ADDR"] = "(the address of rank 0's node)"
    if not args.log_dir:
        variables["TORCHELASTIC_ERROR_FILE"] = "(in the temporary directory of logs)"
    interfaces = {GLOO_INTERFACE_VARIABLE: "(the interface of --host)"}
    if options.private_network is not None:
        interfaces[NCCL_INTERFACE_VARIABLE] = "(the interface of --host)"
        interfaces[NCCL_TRANSPORT_VARIABLE] = SOCKETS
    variables |= {name: text for name, text in interfaces.items() if name not in inherited}
    rows = []
    for name, value in sorted({**inherited, **variables}.items()):
        if name in variables:
            origin = "each worker's own" if name in _EACH_WORKER else "elasticzero"
        else:
            origin = "environment" if os.environ.get(name) == value else "elasticzero"
        rows.append((name, origin, masked_variable(name, value)))
    return rows
