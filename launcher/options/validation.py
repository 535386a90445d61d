"""Checks the values of options; each error names the option."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.errors import UserError, directory_problem
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.launcher.secrets import TOKEN, Secret, read_secret
from elasticzero.launcher.store.etcd.access import (
    Access,
    parse_endpoint,
    read_certificates,
    resolve_access,
)
from elasticzero.launcher.store.job_token import check_given
from elasticzero.options.resolve import ParsedOptions, check_checkpoint_options, parse_options

UNSAFE_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")


def endpoints_of(args: argparse.Namespace) -> list[str]:
    """Returns the etcd endpoints that were given; empty if none was."""
    return [part.strip() for part in args.etcd.split(",")] if args.etcd else []


def check_access(args: argparse.Namespace) -> Access:
    """Returns how etcd is accessed; raises `UserError` if files, user or password are invalid."""
    access = resolve_access(
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
    """Returns the job's token, if one was given; raises `UserError` for an invalid one."""
    return check_given(read_secret("--token-file", args.token_file, TOKEN, os.environ))


def parse_nnodes(text: str, what: str = "--nnodes") -> tuple[int, int]:
    """Parses `MIN:MAX` or `N`; raises `UserError`, which begins with `what`."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(text))
    if not match:
        raise UserError(f"{what} {text}: a number or MIN:MAX is expected, such as 2:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UserError(f"{what} {text}: MIN must be at least 1 and not above MAX")
    return least, most


def parse_nproc(text: str) -> int:
    """Returns the number of workers of a node.

    Args:
        text: A number; `gpu`, one for each GPU; `cpu`, one for each core; `auto`, as `gpu`, or 1
            without GPUs.

    Raises:
        UserError: The text is invalid, or there is no GPU for `gpu`.
    """
    value = str(text)
    if value in ("auto", "gpu"):
        devices = [d for d in Path("/dev").glob("nvidia[0-9]*") if d.name[6:].isdigit()]
        gpus = count_gpus(len(devices), os.environ.get("CUDA_VISIBLE_DEVICES"))
        if gpus == 0 and value == "gpu":
            raise UserError(
                "--nproc-per-node gpu: this node has no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides "
                "them; use cpu or a number"
            )
        return gpus or 1
    if value == "cpu":
        return os.cpu_count() or 1
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"--nproc-per-node {value}: a number from 1, auto, gpu or cpu is expected")
    return int(value)


def count_gpus(devices: int, visible: str | None) -> int:
    """Returns the number of GPUs that CUDA shows a process.

    Args:
        devices: Number of GPUs of the node.
        visible: Value of CUDA_VISIBLE_DEVICES, a list of numbers or names that ends at the first
            invalid one; of MIG instances only one is shown. None: it is not set.
    """
    if visible is None or not devices:
        return devices
    shown = 0
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            return 1
        if not (int(name) < devices if name.isdigit() else name.startswith("GPU-")):
            break
        shown += 1
    return shown


def check_script(script: str, *, is_module: bool, is_program: bool = False) -> str:
    """Returns the absolute path of the script or program, or the module's name.

    Args:
        script: What the command line or the file names.
        is_module: Whether it is the name of a module (-m).
        is_program: Whether it is a program that Python does not run (--no-python).

    Raises:
        UserError: It does not exist, or is named as both a module and a program.
    """
    if is_program and is_module:
        raise UserError("--no-python and -m exclude each other: a module is run by Python")
    if is_program:
        program = shutil.which(script)
        if program is None:
            raise UserError(
                f"--no-python {script}: there is no such program, or it is not executable"
            )
        return os.path.abspath(program)
    if is_module:
        check_module("-m", script, os.getcwd(), "here")
        return script
    path = Path(script).absolute()
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"the training script {path} {problem}")
    return str(path)


def check_module(flag: str, name: str, directory: str, place: str) -> None:
    """Checks that there is a module, or the package that it is of. Nothing is imported.

    Args:
        flag: The option that names it.
        name: Its name.
        directory: A directory where it may lie, besides those on Python's path.
        place: That directory in words.

    Raises:
        UserError: There is none.
    """
    top = name.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [directory, *sys.path])
    if spec is None and top not in sys.builtin_module_names:
        raise UserError(f"{flag} {name}: there is no module {top!r} {place} or on Python's path")


def make_log_directory(log_dir: str | None, job: str) -> Path:
    """Creates DIR/JOB for logs.

    Args:
        log_dir: Value of --log-dir; None: a new temporary directory.
        job: Name of the job.

    Raises:
        UserError: Logs cannot be written there.
    """
    what = f"--log-dir {log_dir}" if log_dir else "the directory for logs"
    try:
        root = Path(log_dir or tempfile.mkdtemp(prefix="elasticzero-logs-")).absolute()
        directory = root / job
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        where = f": {error.filename}" if error.filename and not log_dir else ""
        raise UserError(
            f"{what}: logs cannot be written there ({directory_problem(error)}{where}); "
            "give another --log-dir DIR"
        ) from None
    return directory


def check_metrics_directory(environment: Mapping[str, str]) -> None:
    """Raises `UserError` if prometheus_client would fail to write its files.

    With its variable set it keeps every metric in a file there, in each process.
    """
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        folder = environment.get(variable)
        if folder is None:
            continue
        path = Path(folder or ".")
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            raise UserError(
                f"{variable}={folder}: a directory that can be written is expected, in which "
                "prometheus_client keeps metrics; make it, or unset the variable"
            )


def check_trackers(targets: Sequence[TrackerTarget]) -> None:
    """Raises `UserError` if the package of a tracker is not installed here; any node may lead."""
    for target in targets:
        if importlib.util.find_spec(target.kind) is None:
            raise UserError(
                f"--log-to {target.kind}: the package {target.kind} is not installed here; "
                f"pip install 'elasticzero[{target.kind}]', on every node"
            )


def check_name(text: str, what: str) -> str:
    """Returns the text; raises `UserError` unless it is safe as a name in keys and paths."""
    if not text or UNSAFE_IN_A_NAME.search(text) or text.startswith("."):
        raise UserError(
            f"{what} {text!r}: letters, digits, '.', '_' and '-' only, not starting with '.'"
        )
    return text


def check_folder(text: str) -> Path:
    """Returns the folder of --snapshot-dir; raises `UserError` if it cannot hold snapshots."""
    folder = Path(text).absolute()
    if not folder.exists():
        why = "does not exist; make it, or give a directory of shared memory such as /dev/shm"
    elif not folder.is_dir():
        why = "is no directory; give a directory of shared memory such as /dev/shm"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written by this user; change its owner or mode, or give another directory"
    else:
        return folder
    raise UserError(f"--snapshot-dir {text} {why}")


def overflow_folder(snapshot_folder: Path) -> Path | None:
    """Returns the folder for snapshots that do not fit into the first one.

    It is the temporary directory; None: that is the first one itself.
    """
    folder = Path(tempfile.gettempdir()).absolute()
    return None if folder.resolve() == snapshot_folder.resolve() else folder


def _check_preload(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises `UserError` for modules to import beforehand that are not there, or of no use."""
    if names and args.no_python:
        raise UserError(
            "--preload and --no-python exclude each other: a program imports its modules itself"
        )
    folder = os.getcwd() if args.module else os.path.dirname(os.path.abspath(args.script or ""))
    for name in names:
        check_module("--preload", name, folder, "beside the script")


def parse_common_options(args: argparse.Namespace) -> ParsedOptions:
    """Checks and converts the options that depend on the words alone; raises `UserError`.

    The fields of `AgentOptions` include the retention policy then. `local` does not take all
    options.
    """
    parsed = parse_options(RUN_OPTIONS, vars(args))
    keep = RetentionPolicy(**parsed.keep)
    check_checkpoint_options(parsed)
    _check_preload(args, parsed.agent["preload"])
    return replace(parsed, agent={**parsed.agent, "keep": keep})
