"""Records which job writes into a checkpoint directory.

`.owner/job.json` is a JSON object. The first agent of a job writes it, and each commit renews it. A
job that finds the record of another one, which has not ended and was renewed lately, is refused:
each would remove the other's checkpoints. Nothing waits for a lock: a record is replaced only if it
still has the bytes that were read, by the storage's own conditional write.

A job or a run that takes the directory over removes what saves of the former one have left without
a manifest, so that none of them can be committed later (rule FC6 in `loose_files`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elasticzero.checkpoint.format.names import OWNER_DIRECTORY
from elasticzero.checkpoint.format.strict_json import strict_json
from elasticzero.checkpoint.steps.loose_files import remove_uncommitted
from elasticzero.checkpoint.storage.base import Directory, partial_name, read_small
from elasticzero.errors import StorageError, UserError
from elasticzero.serialization import OMIT_DEFAULT, decode, encode
from elasticzero.text import duration_text

VERSION = 1
LIVES_S = 600.0
"""Seconds after its last renewal for which a job counts as alive, if it has not ended."""
LIVES_INTERVALS = 3
"""It counts as alive for this number of intervals between its commits, if that is longer."""
_NAME = "job.json"
_LIMIT_BYTES = 1 << 16
_TRIES = 8
"""Maximum number of times that one process writes the record, against others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRecord:
    """Names the job that writes into a checkpoint directory."""

    version: int = VERSION
    job: str
    run: int = 1
    """Number of the job's run; a later run takes the directory over from an earlier one."""
    cluster: str = ""
    """Id of the job's etcd cluster, in hexadecimal."""
    etcd: tuple[str, ...] = ()
    """Endpoints of the job's etcd, as the agent that wrote this had them."""
    network: str = ""
    """Identifier of that agent's machine and its network, where `127.0.0.1` means the same."""
    since_s: float | None = None
    """Time by the storage's clock since when this job has the directory: older files are of earlier
    jobs. None: that of the record's own file."""
    every_s: float = field(default=0.0, metadata=OMIT_DEFAULT)
    """Seconds between the last two renewals."""
    renewals: int = 0
    unswept: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True from the moment when a job or a run takes the directory over, until the files of the
    former one's uncommitted saves are removed."""
    ended: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True once the job is over; then another one may have the directory at once."""

    def same_job(self, other: OwnerRecord) -> bool:
        """Returns whether two records are of one job, though perhaps of two runs."""
        return (self.job, self.cluster) == (other.job, other.cluster)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says which job has a directory."""

    owner: OwnerRecord
    age_s: float
    """Seconds since its record was renewed, by the storage's clock."""
    where: str

    @property
    def text(self) -> str:
        """Returns what the refused job is told."""
        owner = self.owner
        return (
            f"the checkpoint directory {self.where} belongs to job {owner.job!r}, which wrote "
            f"there {duration_text(self.age_s)} ago and has not ended: give this job another "
            f"directory; if {owner.job!r} is over, remove {self.where}/{OWNER_DIRECTORY}/{_NAME}"
        )


def read_owner(directory: Directory) -> tuple[OwnerRecord | None, bytes | None]:
    """Returns the record and its bytes; no record if there is none, or it cannot be understood."""
    try:
        data = read_small(directory.step(OWNER_DIRECTORY), _NAME, _LIMIT_BYTES)
    except FileNotFoundError:
        return None, None
    try:
        return decode(OwnerRecord, strict_json(data), "owner"), data
    except (ValueError, RecursionError):
        return None, data


def refusal(
    directory: Directory, job: OwnerRecord, is_gone: Callable[[OwnerRecord], bool]
) -> Refusal | None:
    """Returns which other job lives in the directory; None: `job` may write there.

    Args:
        directory: The checkpoint directory.
        job: The job that asks.
        is_gone: Returns whether the nodes of another job are known to be gone.
    """
    owner, _ = read_owner(directory)
    if owner is None or owner.ended or (owner.same_job(job) and owner.run <= job.run):
        return None
    age_s = _age_s(directory)
    lives_s = max(LIVES_S, LIVES_INTERVALS * owner.every_s)
    superseded = owner.same_job(job)
    if not superseded and (age_s > lives_s or is_gone(owner)):
        return None
    return Refusal(owner, age_s, directory.where)


def taken_by(directory: Directory, job: OwnerRecord) -> str | None:
    """Returns why a job that writes into the directory may write nothing more: another one, or a
    later run of it, has taken it; None: it may.

    The job's etcd may be another cluster by now, which has lost its data.

    Args:
        directory: The checkpoint directory.
        job: The job.
    """
    owner, _ = read_owner(directory)
    if owner is None or owner.job == job.job:
        return _later_run_text(directory, owner, job.run)
    other = refusal(directory, job, lambda _: False)
    return other.text if other is not None else None


def taken_by_later_run(directory: Directory, job: str, run: int) -> str | None:
    """Returns why a process of a job's run may write nothing into the directory: a later run of the
    job has taken it, whether that has ended or not; None: none has.

    Args:
        directory: The checkpoint directory.
        job: Name of the job.
        run: Number of the process's run.
    """
    owner, _ = read_owner(directory)
    return _later_run_text(directory, owner if owner and owner.job == job else None, run)


def _later_run_text(directory: Directory, owner: OwnerRecord | None, run: int) -> str | None:
    """Returns which later run of the job has the directory; None: none has.

    Args:
        directory: The checkpoint directory.
        owner: Record of the job; None: there is none.
        run: Number of the asking process's run.
    """
    if owner is None or owner.run <= run:
        return None
    return (
        f"run {owner.run} of job {owner.job!r} has taken the checkpoint directory "
        f"{directory.where} from run {run}, which writes nothing more there"
    )


def claim(directory: Directory, job: OwnerRecord, is_gone: Callable[[OwnerRecord], bool]) -> None:
    """Enters a job as the owner of a directory.

    When this returns, no save that another job or an earlier run of this one began before can be
    committed any more (FC6). A process that is killed before that leaves this to the next one.

    Args:
        directory: The checkpoint directory.
        job: The job, whose record is new.
        is_gone: Returns whether the nodes of another job are known to be gone.

    Raises:
        UserError: Another job lives in the directory; the error names it.
        StorageError: The record cannot be written, or a file cannot be removed.
    """
    for _ in range(_TRIES):
        owner, data = read_owner(directory)
        if owner is not None and owner.same_job(job) and owner.run == job.run and not owner.ended:
            if not owner.unswept or _sweep(directory, owner, data):
                return
            continue
        if (other := refusal(directory, job, is_gone)) is not None:
            raise UserError(other.text)
        unswept = owner is not None and (
            owner.unswept or owner.job != job.job or owner.run < job.run
        )
        if _write(directory, replace(job, unswept=unswept), data) and not unswept:
            return
    raise StorageError(f"{directory.where}: other jobs claim this directory all the time")


def _sweep(directory: Directory, owner: OwnerRecord, data: bytes | None) -> bool:
    """Removes the files of the former owner's uncommitted saves, and records that; False if the
    record was changed meanwhile.

    Args:
        directory: The checkpoint directory.
        owner: The record, which says that this is to be done.
        data: Its bytes.
    """
    taken_s, _ = _times_s(directory)
    if read_owner(directory)[1] != data:
        return False  # the time may be that of another record
    remove_uncommitted(directory, taken_s)
    return _write(directory, replace(owner, unswept=False), data)


def renew(directory: Directory, job: OwnerRecord) -> float:
    """Renews a job's record; returns since when the job has the directory, by the storage's clock.

    0 if that is not known yet: the record was lost, or is that of a job that is over.

    Args:
        directory: The checkpoint directory.
        job: The job.
    """
    for _ in range(_TRIES):
        owner, data = read_owner(directory)
        if owner is not None and owner.job == job.job and owner.run > job.run:
            return 0.0
        if owner is None or owner.job != job.job:
            if _write(directory, job, data):
                return 0.0
            continue
        before_s, now_s = _times_s(directory)
        since_s = owner.since_s if owner.since_s is not None else before_s
        renewed = replace(
            owner,
            cluster=job.cluster,
            etcd=job.etcd,
            network=job.network,
            ended=False,
            since_s=since_s,
            every_s=max(0.0, now_s - before_s) if owner.renewals else 0.0,
            renewals=owner.renewals + 1,
        )
        if _write(directory, renewed, data):
            return since_s
    return 0.0


def since(directory: Directory) -> float:
    """Returns since when the job that the record names has the directory, by the storage's clock; 0
    if no record says so."""
    owner, _ = read_owner(directory)
    if owner is not None and owner.since_s is not None:
        return owner.since_s
    return directory.files().get(OWNER_DIRECTORY, {}).get(_NAME, 0.0) if owner is not None else 0.0


def end(directory: Directory, job: OwnerRecord) -> None:
    """Records that a job is over, if the record is its own.

    Args:
        directory: The checkpoint directory.
        job: The job.
    """
    for _ in range(_TRIES):
        owner, data = read_owner(directory)
        if owner is None or owner.ended or not owner.same_job(job) or owner.run != job.run:
            return
        if _write(directory, replace(owner, ended=True), data):
            return


def _write(directory: Directory, record: OwnerRecord, instead_of: bytes | None) -> bool:
    """Writes the record; False if another one was written meanwhile.

    Args:
        directory: The checkpoint directory.
        record: The record.
        instead_of: Bytes of the record that it replaces; None: there is none.
    """
    data = json.dumps(encode(record)).encode() + b"\n"
    if data == instead_of:
        return True
    storage = directory.make(OWNER_DIRECTORY)
    return storage.create_exclusive(_NAME, data, instead_of=instead_of)


def _times_s(directory: Directory) -> tuple[float, float]:
    """Returns the times of the record's last write and of now, by the storage's clock."""
    probe = partial_name("probe")
    storage = directory.make(OWNER_DIRECTORY)
    storage.write(probe, [b"-"], size=1)
    try:
        times = directory.files().get(OWNER_DIRECTORY, {})
    finally:
        storage.remove(probe)
    return times.get(_NAME, 0.0), times.get(probe, 0.0)


def _age_s(directory: Directory) -> float:
    before_s, now_s = _times_s(directory)
    return max(0.0, now_s - before_s)
