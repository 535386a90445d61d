"""Defines the options of one node's agent, and resolves them from the command line."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from elasticzero.checkpoint.steps.catalog import check_outside_steps, check_writable
from elasticzero.checkpoint.steps.owner import OwnerRecord
from elasticzero.checkpoint.steps.retention import RetentionPolicy
from elasticzero.checkpoint.storage.base import within
from elasticzero.checkpoint.storage.urls import open_directory
from elasticzero.errors import StorageError, UserError
from elasticzero.ipc.assignment import NodePlace, WorkerSettings
from elasticzero.launcher.observability.progress.display import is_pipe, is_terminal
from elasticzero.launcher.observability.progress.states import Mode, mode_of
from elasticzero.launcher.options.private_network import PrivateNetwork
from elasticzero.launcher.options.torchrun import DEFAULT_SIGNALS
from elasticzero.launcher.options.trackers import TrackerTarget
from elasticzero.launcher.options.validation import (
    check_folder,
    check_metrics_directory,
    check_name,
    check_script,
    check_trackers,
    make_log_directory,
    overflow_folder,
    parse_common_options,
    parse_nproc,
)
from elasticzero.launcher.protocol.policy import JobPolicy
from elasticzero.launcher.snapshots.shared_memory import snapshot_directory
from elasticzero.launcher.tls.contexts import TlsContexts
from elasticzero.launcher.workers.console_output import (
    PREFIX,
    ConsoleOutput,
    check_ranks,
    check_streams,
)
from elasticzero.launcher.workers.error_file import error_file
from elasticzero.launcher.workers.forking.requests import Launch
from elasticzero.launcher.workers.log_rotation import LogLimit
from elasticzero.launcher.workers.process import worker_environment
from elasticzero.launcher.workers.reserve.standby_rules import StandbyMode
from elasticzero.options.diloco import FOLDER, NAME, islands_of
from elasticzero.options.settings import TrainingSettings

STORAGE_LIMIT_S = 30.0
"""Seconds after which a checkpoint directory that has not answered counts as one that cannot be
written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Holds the options of `elasticzero run`, resolved."""

    job: str
    node: str
    policy: JobPolicy
    nproc: int
    launch: Launch
    log_dir: Path
    """Directory `<log-dir>/<job>/<node>`."""
    snapshot_dir: Path
    """Directory in shared memory that belongs to this agent alone."""
    overflow_dir: Path | None = None
    """Directory on a disk, for snapshots that find no room in shared memory; it belongs to this
    agent alone."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Settings that the options give every worker."""
    flops_per_sample: float | None = None
    """Floating-point operations of the model for one sample; None: not stated."""
    peak_flops: float | None = None
    """Most floating-point operations a second of one worker's device; None: not stated."""
    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    """Rule for which checkpoints are retained."""
    launch_id: str | None = None
    """Names the launch that this node belongs to; None: it has no name."""
    island: str | None = None
    """Island that this node is of; None: it has none, or has no place yet."""
    island_nodes: tuple[int, int] | None = None
    """Fewest and most nodes of an island; None: nothing was said of them."""
    zone: str | None = None
    """Part of the cluster that may fail as a whole, and that this node is in; None: not known."""
    grace_s: float = 25.0
    """Seconds that this node has from SIGTERM on."""
    preemption: str = "auto"
    """Cloud whose preemption notices are watched for: none, aws, gcp, azure, or auto."""
    keep_workers: bool = False
    """True: workers' processes outlive a generation where they can be reused."""
    standby: StandbyMode = "auto"
    """Says whether processes stand by for workers that are lost."""
    preload: tuple[str, ...] = ()
    """Modules of the user's that workers find imported."""
    private_network: PrivateNetwork | None = None
    """Network outside of which nothing of this node may listen for other nodes; None: it may
    anywhere."""
    open_status: bool = False
    """True: the status that the agent serves needs no token."""
    console: ConsoleOutput = field(default_factory=ConsoleOutput)
    """Selects the workers' output that is repeated on the terminal."""
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    logs: LogLimit = field(default_factory=LogLimit)
    """Limits the size of the workers' logs."""
    progress: Mode = "off"
    """Says how the agent shows what the job does."""
    log_to: tuple[TrackerTarget, ...] = ()
    """Trackers that get the job's scalars."""
    owner: OwnerRecord | None = None
    """Names the job in its checkpoint directory; None until its etcd has answered."""
    tls: TlsContexts | None = field(default=None, compare=False)
    """Contexts of connections between the job's agents; None: the job is without TLS, or its etcd
    has not answered."""

    @property
    def is_island(self) -> bool:
        """Returns whether this node is of an island, which trains by itself and averages with
        others."""
        return self.training.diloco is not None

    @property
    def job_of_island(self) -> str:
        """Returns the name under which this node's world is coordinated: an island is a job in
        itself."""
        return f"{self.job}/{FOLDER}/{self.island}" if self.is_island else self.job

    @property
    def node_places(self) -> list[NodePlace]:
        """Returns what the workers of this node are on it, in whatever world."""
        return [
            NodePlace(
                job=self.job,
                local_rank=local_rank,
                local_world_size=self.nproc,
                error_file=str(error_file(self.log_dir, local_rank)),
                settings=self.workers,
            )
            for local_rank in range(self.nproc)
        ]


def agent_options(
    args: argparse.Namespace, nodes: tuple[int, int]
) -> tuple[AgentOptions, StorageError | None]:
    """Returns the options of `elasticzero run`, checked.

    Args:
        args: Parsed options.
        nodes: The fewest and the most nodes.

    Returns:
        The options, and why the checkpoint directory cannot be written now, None where it can. Only
        a job that already runs elsewhere may go on without it.

    Raises:
        UserError: An option is invalid.
    """
    job = check_name(args.job or f"job-{uuid.uuid4().hex[:8]}", "--job")
    node = check_name(args.node_name or socket.gethostname(), "--node-name")
    nproc = parse_nproc(args.nproc_per_node)
    launch = launch_of(args)
    console = console_of(args)
    parsed = parse_common_options(args)
    check_trackers(parsed.agent["log_to"])
    check_metrics_directory(os.environ)
    memory = check_folder(args.snapshot_dir)
    overflow = overflow_folder(memory)
    diloco = islands_of(args.strategy, parsed.training.diloco)
    folder = "" if diloco is None else f"/{FOLDER}"
    directory, storage_error = _checkpoint_directory(args, folder)
    workers = worker_settings(args, nproc, os.environ)
    training = replace(parsed.training, checkpoint_dir=directory)
    island = _island_name(args, is_island=diloco is not None)
    if diloco is not None:
        nodes = parsed.agent["island_nodes"] or ((1, nodes[1]) if island else (1, 1))
        # The ranks of an island learn of its samples together, so that none can come in between.
        policy = {**parsed.policy, "strategy": diloco.inner, "changes_inside": "off"}
        if diloco.inner == "zero3" and nodes[1] > 1:
            raise UserError(
                "--diloco inner=zero3 divides parameters, and of an island of several nodes all "
                "ranks must have whole ones: take another inner strategy, or leave out "
                f"{'--island-nodes' if args.island_nodes else '--island'}"
            )
        parsed = replace(parsed, policy=policy)
        training = replace(training, diloco=diloco)
    options = AgentOptions(
        job=job,
        node=node,
        island=island,
        policy=JobPolicy(min_nodes=nodes[0], max_nodes=nodes[1], **parsed.policy),
        nproc=nproc,
        launch=launch,
        log_dir=make_log_directory(args.log_dir, job) / node,
        snapshot_dir=snapshot_directory(job, node, memory),
        overflow_dir=snapshot_directory(job, node, overflow) if overflow else None,
        training=training,
        console=console,
        workers=workers,
        logs=LogLimit(**parsed.logs),
        progress=progress_mode(args, as_json=args.log_format == "json"),
        **parsed.agent,
    )
    return options, storage_error


def on_island(options: AgentOptions, island: str) -> AgentOptions:
    """Returns the options of a node that is of this island, which saves in a folder of its own."""
    training = options.training
    if training.checkpoint_dir is not None:
        training = replace(training, checkpoint_dir=f"{training.checkpoint_dir}/{island}")
    return replace(options, island=island, training=training)


def _island_name(args: argparse.Namespace, *, is_island: bool) -> str | None:
    """Returns what `--island` says; raises `UserError` where there are no islands."""
    for flag, value in (("--island", args.island), ("--island-nodes", args.island_nodes)):
        if value is not None and not is_island:
            raise UserError(f"{flag} needs --strategy {NAME}, whose nodes are islands")
    return None if args.island is None else check_name(args.island, "--island")


def _checkpoint_directory(
    args: argparse.Namespace, folder: str
) -> tuple[str | None, StorageError | None]:
    """Returns the resolved directory, and why it cannot be written, where other nodes may be able
    to.

    Args:
        args: Parsed options.
        folder: Folder in it in which islands save, with a slash before it; empty: there are none.
    """
    if args.checkpoint_dir is None:
        return None, None
    place = open_directory(
        args.checkpoint_dir.rstrip("/") + folder if folder else args.checkpoint_dir
    )
    if folder:  # it holds no checkpoints of its own
        check_outside_steps(place.where)
    check = place.check_writable if folder else partial(check_writable, place)
    try:
        within(STORAGE_LIMIT_S, place.where, check)
    except StorageError as error:
        if not args.etcd:
            raise
        return place.where, error
    return place.where, None


def launch_of(args: argparse.Namespace) -> Launch:
    """Returns what the workers run; raises `UserError` where there is no such script."""
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
    """Returns the other settings of workers.

    Args:
        args: Parsed options.
        nproc: Number of workers of this node.
        environment: Variables of the agent, in which OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES
            count.

    Raises:
        UserError: CUDA_VISIBLE_DEVICES has fewer GPUs than --virtual-local-rank needs.
    """
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


def progress_mode(args: argparse.Namespace, *, as_json: bool = False) -> Mode:
    """Returns how this process shows what the job does.

    Args:
        args: Parsed options.
        as_json: Whether lines of the log are JSON.
    """
    return mode_of(
        "off" if args.quiet else args.progress,
        os.environ,
        error_is_terminal=is_terminal(sys.stderr),
        output_is_pipe=is_pipe(sys.stdout),
        as_json=as_json,
    )


def console_of(args: argparse.Namespace) -> ConsoleOutput:
    """Returns which of the workers' output is repeated here; raises `UserError`."""
    return ConsoleOutput(
        tee=args.tee,
        tee_streams=check_streams("--tee", args.tee_streams),
        redirects=check_streams("--redirects", args.redirects),
        ranks=check_ranks(args.local_ranks_filter),
        log_dir=bool(args.log_dir),
        prefix=args.log_line_prefix_template or PREFIX,
        role=args.role,
        hostname=socket.gethostname(),
    )
