"""Determines where the nodes of a run meet, from this project's options and from torchrun's.

Pure, but for the options that `check_rendezvous` sets. Rules, the first that applies:
 Z1  --standalone: an etcd of this node alone; every address that was given is ignored.
 Z2  --etcd: these endpoints, whatever torchrun's options say.
 Z3  --rdzv-backend etcd, etcd-v2 or elasticzero, or --rdzv-endpoint without a backend: its
     endpoints are etcd's.
 Z4  --rdzv-backend c10d: the host of --rdzv-endpoint starts an etcd at that port. With port 0, and
     with one node and no endpoint, it is an etcd of this node alone.
 Z5  --rdzv-backend static, or none with --master-addr, and more than one node: the host of
     --master-addr starts an etcd at --master-port.
 Z6  nothing of these: an etcd of this node alone, if there is to be one node.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from elasticzero.errors import UserError
from elasticzero.launcher.addresses import host_and_port, without_brackets
from elasticzero.options.sources import Origin, ValueSource

C10D_PORT, STATIC_PORT = 29400, 29500
"""Default ports of torch's rendezvous."""
ETCD_BACKENDS = ("etcd", "etcd-v2", "elasticzero")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]|^\.")
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_NUMBERS = {"join_timeout": float, "last_call_timeout": float, "lease_ttl": int}
_BECOMES = {"last_call_timeout": "settle"}
_FILES = {
    "cacert": "etcd_cacert",
    "ca_cert": "etcd_cacert",
    "cert": "etcd_cert",
    "ssl_cert": "etcd_cert",
    "key": "etcd_key",
    "ssl_cert_key": "etcd_key",
}
"""Options that the keys of torch's etcd backends for certificate files become."""
_OWN = ("etcd_cacert", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")
_ETCD_FROM = ("rdzv_endpoint", "master_addr", "rdzv_backend", "standalone")
"""Options of torchrun that say where nodes meet; of equally strong ones the first counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedEtcd:
    """Describes an etcd that one node of the run starts."""

    host: str
    port: int
    starts_here: bool | None
    """True if this node starts it; None: it does if the host is this machine."""

    @property
    def endpoint(self) -> str:
        return host_and_port(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Describes where the nodes find each other."""

    etcd: str | None = None
    """Endpoints as --etcd takes them; None: an etcd of this node alone."""
    hosted: HostedEtcd | None = None
    """The etcd at `etcd` if a node of the run starts it; None: it runs already."""
    job: str | None = None
    node_rank: int | None = None
    """This node's index in the first world, if the nodes are numbered."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of `run` by name, from --rdzv-conf."""
    lines: tuple[str, ...] = ()
    """Lines that are printed for the user."""


def resolve_rendezvous(options: Mapping[str, Any], most_nodes: int) -> Rendezvous:
    """Returns where the nodes meet.

    Args:
        options: Values of the options of `run`, by name.
        most_nodes: Maximum number of nodes of the run.

    Raises:
        UserError: Options contradict each other, or one is invalid.
    """
    conf = parse_conf(options["rdzv_conf"])
    settings, idle = _settings(conf)
    lines = [f"--rdzv-conf {name} has no effect here" for name in idle]
    job = options["job"]
    if job is None and options["rdzv_id"] not in (None, ""):
        job = job_of(options["rdzv_id"])
        if job != options["rdzv_id"]:
            lines.append(f"--rdzv-id {options['rdzv_id']} is the job {job} here")
    backend, endpoint = options["rdzv_backend"], options["rdzv_endpoint"] or None
    if backend not in (None, "c10d", "static", *ETCD_BACKENDS):
        raise UserError(
            f"--rdzv-backend {backend}: c10d, static, etcd, etcd-v2 or elasticzero is expected"
        )
    if options["standalone"]:
        for flag, value in (("--etcd", options["etcd"]), ("--rdzv-endpoint", endpoint)):
            if value is not None:
                lines.append(f"--standalone: {flag} {value} is ignored")
        return Rendezvous(job=job, settings=settings, lines=tuple(lines))
    if options["etcd"]:
        if endpoint not in (None, options["etcd"]):
            lines.append(f"--etcd {options['etcd']} is used, --rdzv-endpoint {endpoint} is ignored")
        return Rendezvous(etcd=options["etcd"], job=job, settings=settings, lines=tuple(lines))
    if endpoint is not None and (backend is None or backend in ETCD_BACKENDS):
        if conf.get("protocol") == "https" and "://" not in endpoint:
            endpoint = ",".join(f"https://{part.strip()}" for part in endpoint.split(","))
        return Rendezvous(etcd=endpoint, job=job, settings=settings, lines=tuple(lines))
    if backend in ETCD_BACKENDS:
        raise UserError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT of an etcd")
    hosted = _hosted(options, backend, endpoint, most_nodes, conf)
    if hosted is None:
        if most_nodes == 1 and options["master_port"] is not None:
            lines.append("--master-port has no effect on one node: free ports are taken")
        return Rendezvous(job=job, settings=settings, lines=tuple(lines))
    return Rendezvous(
        etcd=hosted.endpoint,
        hosted=hosted,
        job=job or f"job-{hosted.port}",
        node_rank=options["node_rank"] if backend != "c10d" else None,
        settings=settings,
        lines=tuple(lines),
    )


def _hosted(
    options: Mapping[str, Any],
    backend: str | None,
    endpoint: str | None,
    most_nodes: int,
    conf: Mapping[str, str],
) -> HostedEtcd | None:
    """Applies Z4 and Z5; returns None if neither applies, or if the node runs alone.

    Args:
        options: Values of the options of `run`, by name.
        backend: Value of --rdzv-backend; None: it was not given.
        endpoint: Value of --rdzv-endpoint; None: it was not given.
        most_nodes: Maximum number of nodes of the run.
        conf: Keys and values of --rdzv-conf.

    Raises:
        UserError: The endpoint or `is_host` is invalid, or other nodes cannot know the port.
    """
    is_host = _flag(conf, "is_host")
    if backend == "c10d":
        host, port = split_endpoint(endpoint or "localhost", C10D_PORT)
        if port == 0 or (endpoint is None and most_nodes == 1):
            if most_nodes > 1:
                raise UserError(
                    f"--rdzv-endpoint {endpoint}: with --nnodes {options['nnodes']} the port must "
                    "be one that all nodes know, such as 29400"
                )
            return None
        return HostedEtcd(host=host, port=port, starts_here=is_host)
    if most_nodes == 1 or (backend is None and options["master_addr"] is None):
        return None
    if endpoint is not None:
        host, port = split_endpoint(endpoint, STATIC_PORT)
    else:
        host, port = options["master_addr"] or "127.0.0.1", options["master_port"] or STATIC_PORT
    rank = options["node_rank"]
    is_first = is_host if is_host is not None or rank is None else rank == 0
    return HostedEtcd(host=without_brackets(host), port=port, starts_here=is_first)


def split_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Parses `HOST`, `HOST:PORT` or `[IPV6]:PORT`; raises `UserError` for other text."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?", text.strip())
    if not match or int(match[2] or default_port) > 65535:
        raise UserError(
            f"--rdzv-endpoint {text}: HOST:PORT is expected, and brackets around an address of "
            "IPv6, as in [fd00::7]:29400"
        )
    return without_brackets(match[1]), int(match[2] or default_port)


def parse_conf(text: str | None) -> dict[str, str]:
    """Parses `KEY=VALUE,…` of --rdzv-conf; raises `UserError` for other text."""
    conf: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UserError(f"--rdzv-conf {part}: KEY=VALUE is expected")
        conf[name.strip()] = value.strip()
    return conf


def _settings(conf: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options of `run` that --rdzv-conf gives, and the keys without effect here."""
    settings: dict[str, Any] = {}
    idle = []
    for name, value in conf.items():
        if name in _NUMBERS:
            try:
                settings[_BECOMES.get(name, name)] = _NUMBERS[name](value)
            except ValueError:
                raise UserError(f"--rdzv-conf {name}={value}: seconds are expected") from None
        elif name in _FILES or name in _OWN:
            settings[_FILES.get(name, name)] = value
        elif name not in ("is_host", "protocol"):
            idle.append(name)
    return settings, idle


def _flag(conf: Mapping[str, str], name: str) -> bool | None:
    value = conf.get(name, "").lower()
    if value and value not in _YES + _NO:
        raise UserError(f"--rdzv-conf {name}={conf[name]}: true or false is expected")
    return None if not value else value in _YES


def job_of(rdzv_id: str) -> str:
    """Returns a job's name for an id of torchrun, which may have any character.

    The names of two different ids differ.
    """
    if not _UNSAFE.search(rdzv_id):
        return rdzv_id
    return f"{_UNSAFE.sub('_', rdzv_id)}-{crc32(rdzv_id.encode()):08x}"


def check_rendezvous(args: argparse.Namespace, most_nodes: int) -> Rendezvous:
    """Determines where this node finds the others, and sets `args` accordingly.

    It sets --etcd, --job and the options that --rdzv-conf gives, with their sources. Raises
    `UserError`.
    """
    _prefer_stronger(args)
    place = resolve_rendezvous(vars(args), most_nodes)
    if args.standalone and most_nodes > 1:
        raise UserError(f"--standalone is one node, but --nnodes is {args.nnodes}")
    if place.etcd is None and most_nodes > 1:
        raise UserError(
            f"--nnodes {args.nnodes} needs --etcd HOST:PORT, where the nodes find each other (or "
            "torchrun's --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or --master-addr HOST); "
            "for several nodes on this machine use: elasticzero local --nodes N"
        )
    if place.etcd is not None and not place.job:
        raise UserError("--etcd needs --job ID, the same on every node: it names the training run")
    _take_over(args, "etcd", place.etcd, _ETCD_FROM)
    _take_over(args, "job", place.job, ("rdzv_id", *_ETCD_FROM))
    _take_over(args, "host", args.host or args.local_addr, ("local_addr",))
    conf = args.sources["rdzv_conf"]
    for name, value in place.settings.items():
        if args.sources[name].origin < min(conf.origin, Origin.ENVIRONMENT):
            setattr(args, name, value)
            args.sources[name] = ValueSource(conf.origin, f"--rdzv-conf, {conf.text}")
    return place


def _take_over(args: argparse.Namespace, name: str, value: Any, others: Sequence[str]) -> None:
    """Sets an option to what torchrun's options mean; its source is the strongest of `others`.

    Args:
        args: Parsed options, which are changed.
        name: Name of the option.
        value: The value that torchrun's options give.
        others: Names of torchrun's options that may have given the value.
    """
    if getattr(args, name) == value:
        return
    setattr(args, name, value)
    other = max(others, key=lambda other: args.sources[other].origin)
    source = args.sources[other]
    args.sources[name] = ValueSource(source.origin, f"--{other.replace('_', '-')}, {source.text}")


def _prefer_stronger(args: argparse.Namespace) -> None:
    """Leaves out an option of this project where torchrun's is from a stronger source."""
    for name, torchruns in (("etcd", "rdzv_endpoint"), ("job", "rdzv_id"), ("host", "local_addr")):
        if args.sources[torchruns].origin > args.sources[name].origin:
            setattr(args, name, None)
