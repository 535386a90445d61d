"""Defines what a job's manifests depend on, and checks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from elasticzero.errors import UserError
from elasticzero.launcher.options.spelling import meant_variable
from elasticzero.launcher.options.table import RUN_OPTIONS
from elasticzero.launcher.tls.credentials import TlsMode
from elasticzero.ops.kubernetes.clouds import CLOUDS, GPU, CloudNodes, Grace, grace_of
from elasticzero.ops.kubernetes.extras import AMD, NVIDIA, Volume, accelerators, check_resources

MAX_NAME = 40
"""Most characters of a job's id: names of CronJobs, which add to it, may have 52."""
MAX_SCRIPT_BYTES = 900_000
"""Most bytes of a script in a ConfigMap, which may have 1 MiB in all."""
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"(\d+)([KMGT]i)")
KEY = re.compile(r"[-._a-zA-Z0-9]+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KINDS = ("job", "jobset", "trainjob")
"""Kinds of object that the agents' pods can belong to."""
ZONES = ("spread", "one")
"""Values of --zones: the agents lie evenly in the zones, or all in the zone of the first."""
ETCD_IMAGE = "gcr.io/etcd-development/etcd:v3.6.16"
SET_BY = {
    "ELASTICZERO_JOB": "--name and --run set it",
    "ELASTICZERO_NNODES": "--nnodes sets it",
    "ELASTICZERO_ETCD": "--etcd sets it",
    "ELASTICZERO_ETCD_CACERT": "--etcd-tls sets it",
    "ELASTICZERO_ETCD_CERT": "--etcd-tls sets it",
    "ELASTICZERO_ETCD_KEY": "--etcd-tls sets it",
    "ELASTICZERO_GRACE": "--grace-period sets it",
    "ELASTICZERO_CHECKPOINT_DIR": "--checkpoints sets it",
    "ELASTICZERO_TOKEN": "--token-secret sets it",
    "ELASTICZERO_TLS": "--tls sets it",
    "ELASTICZERO_TLS_CERT": "--tls sets it",
    "ELASTICZERO_TLS_KEY": "--tls sets it",
    "ELASTICZERO_TLS_CA": "--tls sets it",
    "ELASTICZERO_HTTP_PORT": "probes, the Service and the NetworkPolicy name the same port",
    "ELASTICZERO_NODE_NAME": "it differs from pod to pod",
    "ELASTICZERO_HOST": "it differs from pod to pod",
    "ELASTICZERO_ZONE": "it differs from pod to pod",
    "ELASTICZERO_LAUNCH_ID": "it differs from Job to Job",
}
"""Variables that --env does not change, with the reason."""
NO_MONITORING = "none"
"""Value of --monitoring with which nothing outside of the job reaches its metrics."""
IN_MEMORY = "emptyDir"
"""Value of --etcd-storage with which etcd's data last as long as its pod."""


def imported_names(script: str) -> list[str]:
    """Returns the top names of the modules that a script imports, in the order of their names;
    nothing for a text that is no Python."""
    names = set[str]()
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(script)):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.partition(".")[0])
    return sorted(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScript:
    """Holds a script that goes into a ConfigMap."""

    file_name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """Says which etcd a job uses."""

    endpoints: str = ""
    """Endpoints of an etcd that runs already; empty: the job has one of its own."""
    members: int = 3
    storage: str = ""
    """Storage class of its volumes; empty: the cluster's default; `emptyDir`: no volume."""
    tls: bool = False
    """True: etcd shows certificates and demands them of its clients."""
    backup: bool = False
    """True: a snapshot of etcd is written to a volume every hour."""
    image: str = ETCD_IMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Says what one agent's pod asks for."""

    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""
    """Size of /dev/shm, which holds snapshots and counts against the memory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become environment variables."""
    token_secret: str = ""
    """Secret whose key `token` holds the job's token; empty: the first node makes a token."""
    service_account: str = ""
    pull_secret: str = ""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further resources by name, such as the GPUs of another maker, or huge pages."""
    volumes: tuple[Volume, ...] = ()
    tmp_size: str = "20Gi"
    """Size of /tmp, on the machine's disk."""
    has_fixed_user: bool = True
    """False: the cluster chooses the user and the group of all pods, etcd's too."""

    @property
    def has_nvidia(self) -> bool:
        """Returns whether the pod has GPUs of NVIDIA, or parts of one."""
        return bool(self.gpus) or any(map(NVIDIA.fullmatch, self.resources))

    @property
    def accelerators(self) -> int:
        """Returns how many GPUs the pod has, of whatever maker."""
        return self.gpus + accelerators(self.resources)

    @property
    def workers(self) -> str:
        """Returns the number of the pod's workers as `--nproc-per-node` takes it.

        `gpu` counts NVIDIA's devices, and ends the agent with a sentence where a pod has none.
        """
        if self.has_nvidia:
            return "gpu"
        return self.resources.get(AMD, "auto")

    @property
    def devices(self) -> Mapping[str, str]:
        """Returns what the pod asks for beside CPUs and memory."""
        gpus = {GPU: str(self.gpus)} if self.gpus else {}
        return {**gpus, **self.resources}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """Holds the options of `elasticzero k8s render`."""

    name: str
    image: str
    nnodes: tuple[int, int]
    """The fewest and the most nodes."""
    script: LocalScript | str
    """The script, or its path in the image."""
    arguments: tuple[str, ...] = ()
    run: str = ""
    """Distinguishes this run from others of the name; empty: there is one."""
    restart: bool = False
    """True: a job that is done begins again, from its newest checkpoint."""
    cloud_name: str = "none"
    spot: bool = False
    grace_period_s: int | None = None
    checkpoints: str = "none"
    """A URL, the name of a storage class, or `none`."""
    checkpoint_size: str = "100Gi"
    checkpoint_every: int = 500
    strategy: str = "ddp"
    kind: str = "job"
    monitoring: str = "monitoring"
    """Namespace of the pods that scrape metrics; `none`: there are none."""
    zones: str = "spread"
    """Whether the agents lie in many zones, or in one."""
    queue: str = ""
    """Kueue's LocalQueue that admits the job; empty: none."""
    make_queue: bool = False
    """True: the queue is rendered too, with room for the most nodes."""
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    pod: PodOptions = field(default_factory=PodOptions)
    tls: TlsMode | None = None
    """Where the agents' certificates come from; None: from the job's token if it has a Secret, and
    else there are none."""

    def __post_init__(self) -> None:
        check_job_name(self.name, "--name")
        if self.run and not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", self.run):
            raise UserError(f"--run {self.run}: lower-case letters, digits and '-' are expected")
        if len(self.job) > MAX_NAME:
            raise UserError(f"--name and --run: {self.job} is longer than {MAX_NAME} characters")
        least, most = self.nnodes
        if not 1 <= least <= most:
            raise UserError(f"--nnodes {least}:{most}: MIN must be at least 1 and not above MAX")
        _check_choices(self)
        check_resources(self.pod.resources)
        _check_sizes(self)
        _check_script(self.script)
        _check_etcd(self.etcd)
        if self.tls == "job" and not self.pod.token_secret:
            raise UserError("--tls job makes certificates of the job's token: give --token-secret")
        for name in self.pod.environment:
            if not VARIABLE.fullmatch(name):
                raise UserError(f"--env {name}: KEY=VALUE is expected")
            if name in SET_BY:
                raise UserError(f"--env {name}: the manifests give its value; {SET_BY[name]}")
            if hint := meant_variable(name, RUN_OPTIONS):
                raise UserError(f"--env {name}: no option of elasticzero run has this name{hint}")

    @property
    def job(self) -> str:
        """Returns the job's id, which is also the name of its Kubernetes object."""
        return f"{self.name}-{self.run}" if self.run else self.name

    @property
    def tls_mode(self) -> TlsMode:
        return self.tls or ("job" if self.pod.token_secret else "off")

    @property
    def cloud(self) -> CloudNodes:
        return CLOUDS[self.cloud_name]

    @property
    def grace(self) -> Grace:
        return grace_of(self.cloud, spot=self.spot, period_s=self.grace_period_s)

    @property
    def has_claim(self) -> bool:
        """Returns whether checkpoints lie on a volume that is claimed for them."""
        return self.checkpoints != "none" and "://" not in self.checkpoints

    @property
    def cpus(self) -> str:
        return self.pod.cpus or str(4 * self.pod.accelerators or 2)

    @property
    def memory(self) -> str:
        return self.pod.memory or f"{32 * self.pod.accelerators or 8}Gi"

    @property
    def shared_memory(self) -> str:
        if self.pod.shared_memory:
            return self.pod.shared_memory
        match = QUANTITY.fullmatch(self.memory)
        assert match is not None
        return half_of(int(match[1]), match[2])


def half_of(count: int, unit: str) -> str:
    """Returns half of a quantity such as 8Gi, in the next smaller unit where it is odd."""
    if count % 2 == 0:
        return f"{count // 2}{unit}"
    smaller = {"Ti": "Gi", "Gi": "Mi", "Mi": "Ki"}.get(unit)
    return f"{count * 512}{smaller}" if smaller else f"{count // 2}{unit}"


def bytes_of_quantity(text: str) -> int:
    """Returns the bytes of a quantity such as 8Gi."""
    match = QUANTITY.fullmatch(text)
    if match is None:
        raise UserError(f"{text}: a size such as 512Mi or 8Gi is expected")
    return int(match[1]) << 10 * (" KMGT".index(match[2][0]))


def check_job_name(text: str, what: str) -> str:
    """Checks a job's name, and returns it.

    Args:
        text: the name.
        what: flag or command that gave it, with which the error begins.

    Raises:
        UserError: Kubernetes takes no such name, or it leaves no room for what is added to it.
    """
    if not NAME.fullmatch(text) or len(text) > MAX_NAME:
        raise UserError(
            f"{what} {text}: lower-case letters, digits and '-' are expected, with a letter first "
            f"and at most {MAX_NAME} characters"
        )
    return text


def _check_choices(options: RenderOptions) -> None:
    if options.cloud_name not in CLOUDS:
        raise UserError(f"--cloud {options.cloud_name}: one of {', '.join(CLOUDS)} is expected")
    if options.kind not in KINDS:
        raise UserError(f"--kind {options.kind}: one of {', '.join(KINDS)} is expected")
    if options.spot and not options.cloud.spot_labels:
        raise UserError(
            "--spot needs --cloud gke, eks or aks: it is by their labels that spot nodes are known"
        )
    if options.zones not in ZONES:
        raise UserError(f"--zones {options.zones}: one of {', '.join(ZONES)} is expected")
    if options.make_queue and not options.queue:
        raise UserError("--make-queue needs --queue NAME")
    if not NAMESPACE.fullmatch(options.monitoring):
        raise UserError(
            f"--monitoring {options.monitoring}: the name of a namespace, or none, is expected"
        )
    if options.queue and not NAME.fullmatch(options.queue):
        raise UserError(f"--queue {options.queue}: the name of a LocalQueue is expected")
    checkpoints = options.checkpoints
    is_class = re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", checkpoints)
    if not (is_class or re.fullmatch(r"[a-z0-9]+://[^/\s]+\S*", checkpoints)):
        raise UserError(
            f"--checkpoints {checkpoints}: a URL such as s3://bucket/folder, the name of a "
            "storage class whose volumes many nodes can write at once, or none is expected"
        )
    if options.grace_period_s is not None and options.grace_period_s < 2:
        raise UserError(f"--grace-period {options.grace_period_s}: 2 seconds or more are expected")


def _check_sizes(options: RenderOptions) -> None:
    if options.pod.gpus < 0 or options.checkpoint_every < 0:
        raise UserError("--gpus and --checkpoint-every: 0 or more is expected")
    sizes = {
        "--memory": options.memory,
        "--shared-memory": options.pod.shared_memory or "1Gi",
        "--checkpoint-size": options.checkpoint_size,
        "--tmp-size": options.pod.tmp_size,
    }
    for flag, size in sizes.items():
        if not QUANTITY.fullmatch(size):
            raise UserError(f"{flag} {size}: a size such as 512Mi or 8Gi is expected")
    if bytes_of_quantity(options.shared_memory) >= bytes_of_quantity(options.memory):
        raise UserError(
            f"--shared-memory {options.shared_memory} counts against the pod's memory: it must be "
            f"less than --memory {options.memory}"
        )
    if not re.fullmatch(r"[1-9]\d*m?", options.cpus):
        raise UserError(f"--cpus {options.cpus}: a number of CPUs such as 2 or 500m is expected")


def _check_script(script: LocalScript | str) -> None:
    if isinstance(script, str):
        if not script.startswith("/"):
            raise UserError(
                f"{script}: the path of a script in the image must be absolute, such as "
                "/app/train.py"
            )
        return
    if not KEY.fullmatch(script.file_name):
        raise UserError(
            f"{script.file_name}: the script's name may have letters, digits, '.', '_' "
            "and '-' only, to go into a ConfigMap"
        )
    if len(script.text.encode()) > MAX_SCRIPT_BYTES:
        raise UserError(
            f"{script.file_name} has more than {MAX_SCRIPT_BYTES} bytes, which a ConfigMap cannot "
            "hold: put it into the image, and give its absolute path there"
        )


def _check_etcd(etcd: EtcdOptions) -> None:
    if etcd.members < 1 or etcd.members % 2 == 0:
        raise UserError(f"--etcd-members {etcd.members}: an odd number such as 1 or 3 is expected")
    set_by_flag = {
        "--etcd-tls": etcd.tls and not etcd.endpoints.startswith("https://"),
        "--etcd-backup": etcd.backup,
        "--etcd-storage": bool(etcd.storage),
        "--etcd-image": etcd.image != ETCD_IMAGE,
    }
    if etcd.endpoints:
        for flag, is_set in set_by_flag.items():
            if is_set:
                raise UserError(
                    f"{flag} is for an etcd of the job's own, but --etcd {etcd.endpoints} names "
                    "another" + (", without https://" if flag == "--etcd-tls" else "")
                )
