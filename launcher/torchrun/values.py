"""What torchrun's options mean for a run, and what workers find in their environment for them."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elasticzero.errors import UserError
from elasticzero.ipc.messages import WorkerSettings
from elasticzero.launcher.options.rendezvous import Rendezvous, rendezvous
from elasticzero.launcher.options.torchrun import DEFAULT_SIGNALS
from elasticzero.launcher.options.validation import check_script
from elasticzero.launcher.workers.console_output import Console, check_ranks, check_streams

if TYPE_CHECKING:
    from elasticzero.launcher.workers.fork_server import Launch

_NEVER = frozenset({"SIGKILL", "SIGSTOP"})


def check_rendezvous(args: argparse.Namespace, most_nodes: int) -> Rendezvous:
    """Where this node finds the others, put into `args` as --etcd, --job and what --rdzv-conf says
    besides; raises `UserError`."""
    _prefer_flags(args)
    found = rendezvous(vars(args), most_nodes)
    if args.standalone and most_nodes > 1:
        raise UserError(f"--standalone is one node, but --nnodes is {args.nnodes}")
    if found.etcd is None and most_nodes > 1:
        raise UserError(
            f"--nnodes {args.nnodes} needs --etcd HOST:PORT, where the nodes find each other (or "
            "torchrun's --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or --master-addr HOST); "
            "for several nodes on this machine use: elasticzero local --nodes N"
        )
    if found.etcd is not None and not found.job:
        raise UserError("--etcd needs --job ID, the same on every node: it names the training run")
    args.etcd, args.job = found.etcd, found.job
    args.host = args.host or args.local_addr
    for name, value in found.settings.items():
        if name in args.defaulted:
            setattr(args, name, value)
    return found


def _prefer_flags(args: argparse.Namespace) -> None:
    """torchrun's spelling on the command line goes before this project's in the environment."""
    for own, torchruns in (("etcd", "rdzv_endpoint"), ("job", "rdzv_id"), ("host", "local_addr")):
        if torchruns in args.by_flag and own not in args.by_flag:
            setattr(args, own, None)


def launch_of(args: argparse.Namespace) -> Launch:
    """What the workers run; raises `UserError` where there is no such script."""
    from elasticzero.launcher.workers.fork_server import Launch
    from elasticzero.launcher.workers.process import worker_environment

    script = check_script(args.script, is_module=args.module, is_program=args.no_python)
    environment = worker_environment(os.environ)
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = args.signals_to_handle or DEFAULT_SIGNALS
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return Launch(
        target=script,
        is_module=args.module,
        is_program=args.no_python,
        arguments=tuple(args.arguments),
        environment=environment,
        directory=os.getcwd(),
        exit_timeout_s=args.exit_timeout,
    )


def worker_settings(
    args: argparse.Namespace, nproc: int, environment: Mapping[str, str]
) -> WorkerSettings:
    """What else workers are told; raises `UserError`."""
    threads = 1 if nproc > 1 and "OMP_NUM_THREADS" not in environment else None
    devices = None
    if args.virtual_local_rank:
        shown = environment.get("CUDA_VISIBLE_DEVICES")
        devices = tuple(shown.split(",") if shown else map(str, range(nproc)))
        if len(devices) < nproc:
            raise UserError(
                f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={shown} has fewer GPUs than the "
                f"{nproc} workers of this node"
            )
    return WorkerSettings(
        role=args.role, max_restarts=args.max_restarts, threads=threads, devices=devices
    )


def console_of(args: argparse.Namespace) -> Console:
    """What of the workers' output is repeated here; raises `UserError`."""
    return Console(
        tee=args.tee,
        tee_streams=check_streams("--tee", args.tee_streams),
        redirects=check_streams("--redirects", args.redirects),
        ranks=check_ranks(args.local_ranks_filter),
        log_dir=bool(args.log_dir),
    )


def check_signals(text: str | None) -> tuple[signal.Signals, ...]:
    """The signals of --signals-to-handle at which this node leaves, besides SIGTERM; SIGINT
    interrupts it in any case. Raises `UserError`."""
    found = []
    for name in filter(None, (part.strip() for part in (text or "").split(","))):
        if name not in signal.Signals.__members__ or name in _NEVER:
            raise UserError(
                f"--signals-to-handle {name}: no signal of this name can be handled; names are "
                "expected, such as SIGTERM,SIGUSR1"
            )
        if name not in ("SIGTERM", "SIGINT"):
            found.append(signal.Signals[name])
    return tuple(found)
