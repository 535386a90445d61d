"""Carries out the commands of operators on a running job: drain a node, scale, stop.

Each command changes the document `control`, which every agent watches. It does so by a transaction
on condition that the document has not changed since it was read; if two operators write at once,
one of them tries again. A command that was given before changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from elasticzero.errors import (
    AccessRefused,
    ExitCode,
    OperatorError,
    StoreUnavailable,
    UserError,
)
from elasticzero.launcher.islands.documents import REPORTS
from elasticzero.launcher.observability.job_status import Job, pending_drains
from elasticzero.launcher.protocol.documents import (
    Control,
    Done,
    Drain,
    Member,
    World,
    to_bytes,
)
from elasticzero.launcher.protocol.failure_policy import QUARANTINE_STRIKES
from elasticzero.launcher.store.api import Condition, Entry, Store, job_prefix
from elasticzero.launcher.store.decoding import document, unreadable_text
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.etcd.diagnose import unknown_host
from elasticzero.launcher.store.etcd.store import EtcdStore
from elasticzero.launcher.store.job_run import stored_run
from elasticzero.launcher.store.watch_cache import CONTROL, DONE, MEMBERS, WORLD, members_of
from elasticzero.options.diloco import FOLDER
from elasticzero.serialization import RecordError
from elasticzero.text import count_text, list_text, print_error, print_foreign, print_result, shown

TRIES = 20
"""Number of times that the document is read and written when others write it at the same time."""
POLL_S = 0.2
SAY_AFTER_S = 0.8
"""Seconds without an answer of etcd after which a command says that it waits for one."""
NAMES_SHOWN = 16
T = TypeVar("T")


@contextmanager
def _waiting_is_said(text: str) -> Iterator[None]:
    """Prints a text on stderr if what is done within takes long.

    Args:
        text: What is waited for.
    """
    timer = threading.Timer(SAY_AFTER_S, print_foreign, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def open_job_store(job: str, endpoints: Sequence[str], access: Access) -> Iterator[Store]:
    """Opens the job's part of etcd; if etcd does not answer, the error names its address.

    Args:
        job: The job's name.
        endpoints: Members of etcd.
        access: TLS and user for etcd.
    """
    store = EtcdStore(endpoints, job_prefix(job), access=access)
    try:
        with _waiting_is_said(f"waiting for etcd at {','.join(endpoints)}"):
            store.read(CONTROL)
        yield store
    except AccessRefused:
        raise
    except StoreUnavailable as error:
        names = ",".join(endpoints)
        raise StoreUnavailable(
            f"etcd at {names} does not answer; check --etcd, and that etcd runs"
            f"{unknown_host(endpoints)}"
        ) from error
    finally:
        store.close()


def read_job(store: Store, name: str) -> Job:
    """Reads the job from the store.

    Args:
        store: The job's store.
        name: The job's name.

    Raises:
        UserError: The store has no such job.
        OperatorError: Its world cannot be read.
    """
    lines: list[str] = []
    members = members_of(store.read(MEMBERS), lines.append)
    world, done, control = (_entry(store, key) for key in (WORLD, DONE, CONTROL))
    if not members and world is None and done is None and not lines:
        islands = [key.removeprefix(REPORTS) for key in store.read(REPORTS).entries]
        if islands:
            raise UserError(
                f"job {name!r} has islands, each of which is a job in itself: give one of them, "
                f"such as --job {name}/{FOLDER}/{islands[0]}"
            )
        raise UserError(f"etcd has no job {name!r}; check --job and --etcd")
    end = _document(Done, done, lines)
    return Job(
        name=name,
        members=members,
        world=_world(world, name),
        done=end,
        control=_document(Control, control, lines) or Control(),
        control_revision=control.mod_revision if control is not None else 0,
        unreadable_done_revision=done.mod_revision if done is not None and end is None else 0,
        unreadable=tuple(f"{job_prefix(name)}{line}" for line in lines),
    )


def _world(entry: Entry | None, name: str) -> World | None:
    try:
        return document(World, entry.value) if entry is not None else None
    except RecordError as error:
        raise OperatorError(
            f"{job_prefix(name)}{WORLD} in etcd cannot be read ({shown(str(error)):.200}), and the "
            "job's agents leave with their state; a command of another release may read it"
        ) from None


def _document(kind: type[T], entry: Entry | None, lines: list[str]) -> T | None:
    """Returns the document of an entry; None: there is none, or it cannot be read.

    Args:
        kind: The document's class.
        entry: What the store holds.
        lines: Gets a line on what cannot be read.
    """
    try:
        return document(kind, entry.value) if entry is not None else None
    except RecordError as error:
        assert entry is not None
        lines.append(unreadable_text(kind, entry.key, error))
        return None


def _entry(store: Store, key: str) -> Entry | None:
    return store.read(key).entries.get(key)


def update_control(store: Store, name: str, change: Callable[[Job], Control]) -> tuple[Job, bool]:
    """Writes the document that `change` returns for the job.

    Args:
        store: The job's store.
        name: The job's name, for messages.
        change: Returns the new document of a job; may raise.

    Returns:
        The job as it was, and whether anything changed.

    Raises:
        OperatorError: Others changed the document at each try.
    """
    for tries in range(TRIES):
        run = stored_run(store)  # first, so that what is read next is of this run or a later one
        job = read_job(store, name)
        if not tries:
            for line in job.unreadable:
                print_error(line)
        control = change(job)
        if control == job.control:
            return job, False
        conditions = [
            Condition(key=CONTROL, mod_revision=job.control_revision),
            Condition(key=DONE, mod_revision=job.unreadable_done_revision),
            run.unchanged(),
        ]
        put = {CONTROL: to_bytes(replace(control, run=run.number))}
        if store.write(put, conditions=conditions) is not None:
            return job, True
    raise OperatorError(
        f"other operators changed job {name} {TRIES} times in the meantime: try again"
    )


def _check_running(job: Job, what: str) -> None:
    if job.done is not None:
        raise UserError(f"{what}: job {job.name!r} is over: {job.done.reason}")


def drain(store: Store, name: str, node: str, wait_s: float | None) -> ExitCode:
    """Requests that a node leaves at the next boundary.

    Args:
        store: The job's store.
        name: The job's name.
        node: The node that is to leave.
        wait_s: Seconds to wait until it has left; None: do not wait.
    """
    chosen: list[Member] = []

    def change(job: Job) -> Control:
        _check_running(job, f"drain {node}")
        member = job.nodes.get(node)
        if member is None:
            raise UserError(
                f"drain {node}: job {name!r} has no such node; its nodes are "
                f"{list_text(job.nodes, NAMES_SHOWN)}"
            )
        chosen[:] = [member]
        if job.control.drains(member):
            return job.control
        new = Drain(node=node, incarnation=member.incarnation)
        return replace(job.control, drain=(*pending_drains(job), new))

    job, changed = update_control(store, name, change)
    when = "at the next step" if node in [m.node for m in job.placed] else "at once: it only waits"
    print_result(f"{node} leaves {when}" if changed else f"{node} was requested to leave before")
    (member,) = chosen

    def gone(now: Job) -> str | None:
        placed = now.world is not None and now.world.names(member)
        registered = now.members.get(node)
        if placed or (registered is not None and registered.incarnation == member.incarnation):
            return None
        return f"{node} has left; {_members_text(now)}"

    return _wait_until(store, name, wait_s, gone)


def scale(store: Store, name: str, least_most: tuple[int, int], wait_s: float | None) -> ExitCode:
    """Changes the minimum and the maximum number of nodes of a job.

    Args:
        store: The job's store.
        name: The job's name.
        least_most: Minimum and maximum number of nodes.
        wait_s: Seconds to wait until the job has as many as it can; None: do not wait.
    """
    least, most = least_most

    def change(job: Job) -> Control:
        _check_running(job, f"scale {least}:{most}")
        scaled = job.control.scaled + 1
        return replace(job.control, nnodes=least_most, scaled=scaled)

    job, changed = update_control(store, name, change)
    already = "" if changed else " already"
    print_result(
        f"job {name} has {least}:{most} nodes{already}: {_effect_of_scaling(job, least, most)}"
    )

    def fits(now: Job) -> str | None:
        count = len(now.placed)
        struck = now.world.strikes if now.world else ()
        aside = {s.node for s in struck if s.count >= QUARANTINE_STRIKES}
        free = [node for node in now.waiting if node not in aside]
        room = count < most and free and now.world is not None
        return None if count > most or room else _members_text(now)

    return _wait_until(store, name, wait_s, fits)


def _effect_of_scaling(job: Job, least: int, most: int) -> str:
    """Returns a sentence on what will happen, and when.

    Args:
        job: The job as it was before.
        least: The new minimum number of nodes.
        most: The new maximum number of nodes.
    """
    count, waiting = len(job.placed), job.waiting
    if job.world is None:
        return f"{count_text(len(waiting), 'node')} here, the first generation is still to come"
    if count > most:
        leaving = ", ".join(member.node for member in job.placed[most:])
        return f"at the next step {leaving} gives up its place and waits as a spare"
    if count < most and waiting:
        return f"{', '.join(waiting[: most - count])} joins at the next step"
    if count < least:
        return f"{count_text(count, 'node')} go on; the next change of the world waits for {least}"
    return "nothing changes now"


def stop(store: Store, name: str, wait_s: float | None) -> ExitCode:
    """Ends the job at the next boundary, with its state saved.

    Args:
        store: The job's store.
        name: The job's name.
        wait_s: Seconds to wait until it is over; None: do not wait.
    """

    def change(job: Job) -> Control:
        return job.control if job.done is not None else replace(job.control, stop=True)

    job, changed = update_control(store, name, change)
    if job.done is not None:
        print_result(f"job {name} is over already: {job.done.reason}")
        return ExitCode.DONE
    if not changed:
        print_result(f"job {name} was requested to stop before")
    elif not job.members:
        print_result(f"job {name} stops when one of its nodes registers: none is registered now")
    else:
        print_result(
            f"job {name} stops at the next step; its state is saved if there is a directory"
        )
    return _wait_until(store, name, wait_s, lambda _: None)


def _members_text(job: Job) -> str:
    world = job.world
    if world is None:
        return "there is no generation yet"
    names = list_text((member.node for member in world.members), NAMES_SHOWN)
    waiting = f"; {', '.join(job.waiting)} waiting" if job.waiting else ""
    return f"generation {world.generation} has {names}{waiting}"


def _wait_until(
    store: Store, name: str, wait_s: float | None, happened: Callable[[Job], str | None]
) -> ExitCode:
    """Polls the job until a change has happened or the job is over.

    Args:
        store: The job's store.
        name: The job's name.
        wait_s: Seconds to wait; None: do not wait.
        happened: Returns what has happened, as a text to print; None: nothing yet.

    Raises:
        OperatorError: `wait_s` seconds have passed.
    """
    if wait_s is None:
        return ExitCode.DONE
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            job = read_job(store, name)
        except StoreUnavailable:
            job = None
        if job is not None:
            if job.done is not None:
                print_result(f"the job is over: {job.done.reason}")
                return ExitCode.FAILED if job.done.outcome == "failed" else ExitCode.DONE
            if (text := happened(job)) is not None:
                print_result(text)
                return ExitCode.DONE
        if time.monotonic() > deadline_s:
            raise OperatorError(
                f"the change was requested, but it has not happened within {wait_s:g} s "
                f"(--wait-timeout); see: elasticzero status --job {name}"
            )
        time.sleep(POLL_S)
