"""Defines the options of torchrun that `elasticzero run` takes besides its own.

`--nnodes`, `--nproc-per-node`, `--max-restarts`, `--standalone`, `--log-dir` and `--tee` are
options of both; this project's own table has them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from elasticzero.errors import UserError
from elasticzero.options.option import Option
from elasticzero.options.values import expanded_items

DEFAULT_ROLE = "default"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_NEVER = frozenset({"SIGKILL", "SIGSTOP"})
_WITHOUT_VARIABLE = ("--logs-specs", "--numa-binding", "--print-completion")
"""Options that torchrun itself takes from the command line only."""


def _mapped(flag: str, help: str, metavar: str | None = None, **fields: Any) -> Option:
    flags = (flag, *fields.pop("also", ()))
    in_local = fields.pop("in_local", "absent")
    return Option(
        flags,
        help,
        metavar=metavar,
        pet=flag not in _WITHOUT_VARIABLE,
        has_variable=False,
        in_local=in_local,
        group="options of torchrun",
        **fields,
    )


MAPPED = (
    _mapped(
        "--rdzv-backend",
        "With c10d or static, the host of --rdzv-endpoint or --master-addr starts an etcd; with "
        "etcd, etcd-v2 or elasticzero, an etcd runs at --rdzv-endpoint.",
        "NAME",
    ),
    _mapped(
        "--rdzv-endpoint",
        "It has the meaning of --etcd, unless --rdzv-backend is c10d or static.",
        "ADDRESS",
    ),
    _mapped("--rdzv-id", "It has the meaning of --job.", "ID"),
    _mapped(
        "--rdzv-conf",
        "These keys are used: join_timeout, last_call_timeout, lease_ttl, is_host, and those of "
        "etcd's certificates.",
        "KEY=VALUE,…",
        expand=partial(expanded_items, separator="="),
    ),
    _mapped(
        "--node-rank", "The node of rank 0 starts the etcd of a static rendezvous.", "N", type=int
    ),
    _mapped("--master-addr", "The etcd of a static rendezvous runs on this host.", "HOST"),
    _mapped(
        "--master-port",
        "The etcd of a static rendezvous listens on this port. (default: 29500)",
        "PORT",
        type=int,
    ),
    _mapped("--local-addr", "It has the meaning of --host.", "ADDRESS"),
    _mapped(
        "--role",
        "Workers find this text in the variable ROLE_NAME.",
        "NAME",
        default=DEFAULT_ROLE,
        in_local="passed on",
    ),
    _mapped(
        "--redirects",
        "These streams are kept off the terminal: 0 none, 1 stdout, 2 stderr, 3 both, or by "
        "local rank as in 0:3,1:1.",
        "STREAMS",
        also=("-r",),
        in_local="taken",
    ),
    _mapped(
        "--local-ranks-filter",
        "Only the output of these local ranks is repeated on the terminal.",
        "RANK,…",
        in_local="taken",
    ),
    _mapped(
        "--log-line-prefix-template",
        "This text stands before each line of a worker that is repeated on the terminal, in the "
        "place of [RANK]; ${rank}, ${local_rank}, ${role_name} and ${hostname} are filled in.",
        "TEXT",
        also_from="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        in_local="passed on",
    ),
    _mapped(
        "--print-completion",
        "The script that completes commands and options in this shell is printed, and nothing "
        "runs; `elasticzero completion` prints the same.",
        "SHELL",
        stands_alone=True,
        in_file=False,
    ),
    _mapped(
        "--no-python",
        "SCRIPT is a program, which runs without Python.",
        is_switch=True,
        default=False,
        in_local="passed on",
    ),
    _mapped(
        "--signals-to-handle",
        "This node leaves at these signals, as at SIGTERM.",
        "NAME,…",
    ),
    _mapped(
        "--virtual-local-rank",
        "Each worker has LOCAL_RANK 0 and sees its own GPU only.",
        is_switch=True,
        default=False,
    ),
    _mapped(
        "--module",
        "SCRIPT is a module, as with python -m.",
        is_switch=True,
        default=False,
        also=("-m",),
        in_local="passed on",
        is_listed=True,
    ),
)
"""Options with a meaning here."""

_IDLE = {
    "--run-path": "scripts always run in the worker's interpreter by runpy.run_path",
    "--monitor-interval": "the end of a worker is noticed at once",
    "--start-method": "workers are always forked from a server that has imported torch",
    "--event-log-handler": "events are always written to LOG_DIR/JOB/NODE/events.jsonl",
    "--duplicate-stdout-filters": "search the workers' log files instead",
    "--duplicate-stderr-filters": "search the workers' log files instead",
    "--logs-specs": "workers' logs always are LOG_DIR/JOB/NODE/LOCAL_RANK.log",
    "--numa-binding": "workers are not bound to CPUs; use numactl with --no-python",
    "--shutdown-timeout": "a script that does not end at SIGTERM is killed after 2 s",
}
SILENT = ("--run-path",)
"""Options whose effect holds anyway, so no line is printed about them."""

IDLE = tuple(
    Option(
        (flag,),
        f"It has no effect: {why}.",
        metavar=None if flag == "--run-path" else "VALUE",
        is_switch=flag == "--run-path",
        default=False if flag == "--run-path" else None,
        pet=flag not in _WITHOUT_VARIABLE,
        has_variable=False,
        in_local="absent",
        group="options of torchrun without effect",
    )
    for flag, why in _IDLE.items()
)
"""Options that are accepted and have no meaning here."""

TORCHRUN_OPTIONS = MAPPED + IDLE


def without_effect(values: Mapping[str, Any]) -> list[str]:
    """Returns a line for each option that was given and has no effect.

    Args:
        values: Values of all options, by name.
    """
    return [
        f"{option.flags[0]} has no effect: {_IDLE[option.flags[0]]}"
        for option in IDLE
        if values.get(option.name) is not None and option.flags[0] not in SILENT
    ]


def check_signals(text: str | None) -> tuple[signal.Signals, ...]:
    """Returns the signals of --signals-to-handle at which this node leaves, besides SIGTERM.

    SIGINT always interrupts the node. Raises `UserError` for names that are no such signals.
    """
    signals = []
    for name in filter(None, (part.strip() for part in (text or "").split(","))):
        if name not in signal.Signals.__members__ or name in _NEVER:
            raise UserError(
                f"--signals-to-handle {name}: no signal of this name can be handled; names are "
                "expected, such as SIGTERM,SIGUSR1"
            )
        if name not in ("SIGTERM", "SIGINT"):
            signals.append(signal.Signals[name])
    return tuple(signals)
