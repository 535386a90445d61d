"""The options of `elasticzero run`: their flags, defaults and what their words may say.

Flag over environment over default, resolved here and nowhere else. Every option of `run` may be
given as `ELASTICZERO_<OPTION>`; torchrun's spellings are taken too.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticzero.checkpoint.retention import Keep
from elasticzero.errors import UserError
from elasticzero.launcher.etcd_access import Access, asked_for, parse_endpoint, read_certificates
from elasticzero.launcher.job_token import check_given
from elasticzero.launcher.secret import ETCD_PASSWORD, TOKEN, Secret, read_secret
from elasticzero.spans import STRATEGIES

DEFAULT_HTTP_PORT = 9400
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")
UNSAFE_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of `run`: its flags, the ones torchrun users know, its default."""

    flags: tuple[str, ...]
    help: str
    default: Any = None
    type: Any = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    is_switch: bool = False
    has_off: bool = False
    """A switch that `--no-…` turns off."""

    @property
    def name(self) -> str:
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        return f"ELASTICZERO_{self.name.upper()}"

    def default_in(self, environment: Mapping[str, str]) -> Any:
        """What holds without the flag; raises `UserError` where the variable's value makes no
        sense."""
        given = environment.get(self.variable)
        if not given:
            return self.default
        taken = _YES + _NO if self.is_switch else self.choices
        value = given.lower() if self.is_switch else given
        if taken is not None and value not in taken:
            raise UserError(f"{self.variable}={given}: one of {', '.join(taken)} is wanted")
        return value in _YES if self.is_switch else given


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
    Option(("--nnodes",), "fewest and most nodes, MIN:MAX or N", "1:1", metavar="MIN:MAX"),
    Option(
        ("--nproc-per-node",),
        "workers on this node: a number, auto, gpu or cpu",
        "auto",
        metavar="N",
    ),
    *JOB_OPTIONS,
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
        "steps between snapshots in the nodes' memory; 0: none; auto: as often as 1 %% of the time "
        "allows",
        "auto",
        metavar="N",
    ),
    Option(
        ("--max-restarts",),
        "failures in a row without progress before giving up",
        3,
        int,
        metavar="N",
    ),
    Option(
        ("--hang-timeout",),
        "seconds without a step after which workers are replaced; auto: ten times the longest of "
        "the last steps, at least 60; 0: never",
        "auto",
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
    Option(("--log-dir",), "workers' output goes to DIR/JOB/NODE/LOCAL_RANK.log", metavar="DIR"),
    Option(("--tee",), "repeat workers' output here too", False, is_switch=True),
    Option(
        ("--node-name",),
        "name of this node, its own among all; default: the host's",
        metavar="NAME",
    ),
    Option(("--host",), "address under which other nodes reach this one", metavar="ADDRESS"),
    Option(
        ("--http-port",),
        "port of /metrics, /healthz, /status; 0: any",
        DEFAULT_HTTP_PORT,
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
    ),
)


def run_options() -> dict[str, str]:
    """Flag -> environment variable, for every option of `elasticzero run`."""
    return {option.flags[0]: option.variable for option in RUN_OPTIONS}


def _spellings(flag: str) -> list[str]:
    return list(dict.fromkeys([flag, "--" + flag[2:].replace("-", "_")]))


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command on a running job: which, and how its etcd is reached."""
    for option in JOB_OPTIONS:
        value = os.environ.get(option.variable)
        parser.add_argument(
            *(spelling for flag in option.flags for spelling in _spellings(flag)),
            dest=option.name,
            required=value is None and option.name in ("etcd", "job"),
            default=value,
            metavar=option.metavar,
            help=option.help,
        )


def endpoints_of(args: argparse.Namespace) -> list[str]:
    """The etcd endpoints given, none if none was."""
    return [part.strip() for part in args.etcd.split(",")] if args.etcd else []


def check_access(args: argparse.Namespace) -> Access:
    """How etcd is approached; raises `UserError` where files, user or password are not in order."""
    access = asked_for(
        cacert=args.etcd_cacert,
        cert=args.etcd_cert,
        key=args.etcd_key,
        user=args.etcd_user,
        password_file=args.etcd_password_file,
        environment=os.environ,
    )
    endpoints = [parse_endpoint(text, access) for text in endpoints_of(args)]
    if not endpoints and access != Access():
        raise UserError(
            "certificates, user and password are for an etcd that is given by --etcd HOST:PORT"
        )
    if any(endpoint.tls for endpoint in endpoints):
        read_certificates(access)
    return access


def given_token(args: argparse.Namespace) -> Secret | None:
    """The job's token, if one was given; raises `UserError`."""
    return check_given(read_secret("--token-file", args.token_file, TOKEN, os.environ))


def add_run_options(parser: argparse.ArgumentParser, omit: Sequence[str] = ()) -> None:
    for option in RUN_OPTIONS:
        if option.flags[0] in omit:
            continue
        flags = [spelling for flag in option.flags for spelling in _spellings(flag)]
        default = option.default_in(os.environ)
        if option.is_switch:
            action: Any = argparse.BooleanOptionalAction if option.has_off else "store_true"
            parser.add_argument(*flags, action=action, default=default, help=option.help)
        else:
            parser.add_argument(
                *flags,
                dest=option.name,
                default=default,
                type=option.type,
                choices=option.choices,
                metavar=option.metavar,
                help=option.help
                + (f" (default: {option.default})" if option.default is not None else ""),
            )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m"
    )
    parser.add_argument("script", help="training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def parse_nnodes(text: str, what: str = "--nnodes") -> tuple[int, int]:
    """`MIN:MAX` or `N`; raises `UserError` that says `what` it is about."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(text))
    if not match:
        raise UserError(f"{what} {text}: a number or MIN:MAX is wanted, such as 2:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UserError(f"{what} {text}: MIN must be at least 1 and not above MAX")
    return least, most


def parse_nproc(text: str) -> int:
    """A number, or auto | gpu: one a GPU (auto without a GPU: 1), or cpu: one a core."""
    value = str(text)
    if value in ("auto", "gpu"):
        gpus = len([d for d in Path("/dev").glob("nvidia[0-9]*") if d.name[6:].isdigit()])
        if gpus == 0 and value == "gpu":
            raise UserError(
                "--nproc-per-node gpu: this node has no NVIDIA GPU; use cpu or a number"
            )
        return gpus or 1
    if value == "cpu":
        return os.cpu_count() or 1
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"--nproc-per-node {value}: a number from 1, auto, gpu or cpu is wanted")
    return int(value)


def check_script(script: str, is_module: bool) -> str:
    """Absolute path of the script (or the module's name); raises `UserError` if there is none."""
    if is_module:
        top = script.partition(".")[0]
        found = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        if found is None and top not in sys.builtin_module_names:
            raise UserError(f"-m {script}: there is no module {top!r} here or on Python's path")
        return script
    path = Path(script).absolute()
    if not path.is_file():
        raise UserError(f"the training script {path} does not exist")
    return str(path)


def check_name(text: str, what: str) -> str:
    """A name that is safe in keys and paths."""
    if not text or UNSAFE_IN_A_NAME.search(text) or text.startswith("."):
        raise UserError(
            f"{what} {text!r}: letters, digits, '.', '_' and '-' only, not starting with '.'"
        )
    return text


def _count(flag: str, text: str | None) -> int | None:
    if text is not None and not str(text).isdecimal():
        raise UserError(f"{flag} {text}: a whole number, 1 or more, is wanted")
    return None if text is None else int(text)


def _snapshot_every(text: str) -> int | None:
    """Steps, or None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UserError(f"--snapshot-every {text}: a number of steps, 0 or auto is wanted")
    return int(text)


def _hang_timeout(text: str) -> float | None:
    """Seconds, or None for auto."""
    if text == "auto":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UserError(f"--hang-timeout {text}: seconds, 0 or auto is wanted")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What options that are more than a number say."""

    keep: Keep
    snapshot_every: int | None
    """Steps; None: auto."""
    hang_timeout_s: float | None
    """None: auto; 0: never."""


def check_numbers(args: argparse.Namespace) -> Numbers:
    """The options that `run` and `local` share and that need nothing else; raises `UserError`."""
    if args.checkpoint_every < 0:
        raise UserError(f"--checkpoint-every {args.checkpoint_every}: 0 or more steps are wanted")
    if args.max_restarts < 0:
        raise UserError(f"--max-restarts {args.max_restarts}: 0 or more is wanted")
    if not args.grace >= 0:
        raise UserError(f"--grace {args.grace:g}: 0 or more seconds are wanted")
    if args.lease_ttl < 2:
        raise UserError(f"--lease-ttl {args.lease_ttl}: etcd grants no lease below 2 s")
    keep = Keep(last=_count("--keep", args.keep), every=_count("--keep-every", args.keep_every))
    if args.checkpoint_dir is None:
        idle = {
            "--checkpoint-every": args.checkpoint_every > 0,
            "--keep": keep.last is not None,
            "--strict-checkpoint": args.strict_checkpoint,
        }
        for flag, given in idle.items():
            if given:
                raise UserError(
                    f"{flag} needs --checkpoint-dir DIR: without it no checkpoint is written"
                )
    return Numbers(
        keep=keep,
        snapshot_every=_snapshot_every(args.snapshot_every),
        hang_timeout_s=_hang_timeout(args.hang_timeout),
    )
