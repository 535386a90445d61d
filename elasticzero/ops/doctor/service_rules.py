"""Judges what the machine must reach: etcd, other nodes, storage and the cloud.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from elasticzero.ops.doctor.facts import (
    CloudFacts,
    EtcdFacts,
    PeerFacts,
    PortFacts,
    StorageFacts,
)
from elasticzero.ops.doctor.finding import Finding, release_of
from elasticzero.text import duration_text, list_text, size_text

OLDEST_ETCD = (3, 4)
UNSAFE_ETCD = ((3, 5, 0), (3, 5, 2))
"""First and last release that can lose agreement among members that crash (docs/etcd.md)."""
SLOW_WRITE_S, HOPELESS_WRITE_S = 0.1, 1.0
"""Median seconds of a write to etcd that are worth a note, and that are a problem: agents wait 2 s
for a request."""
CLOCK_DIFFERENCE_S = 2.0
SLOW_STORAGE_BYTES_PER_S = 50e6
EXAMPLE_CHECKPOINT_BYTES = 10e9
LITTLE_FREE_BYTES, NEXT_TO_NOTHING_BYTES = 5 << 30, 64 << 20


def judge_etcd(facts: EtcdFacts) -> Iterator[Finding]:
    """Judges whether etcd answers, fast enough, with a version and a clock that fit."""
    if not facts.endpoints:
        yield _judge_own_etcd(facts.binary)
        return
    names = ",".join(facts.endpoints)
    answering = {version.endpoint for version in facts.versions}
    if facts.error:
        yield Finding(
            topic="etcd",
            level="problem",
            text=facts.error,
            advice="" if "; " in facts.error else f"see whether etcd runs at {names}",
        )
        return
    versions = sorted({version.version for version in facts.versions if version.version})
    median_s = statistics.median(facts.writes_s)
    text = (
        f"{names} takes writes, {median_s * 1000:.1f} ms each (median of {len(facts.writes_s)}); "
        f"version {', '.join(versions) or 'not told'}"
    )
    if median_s >= SLOW_WRITE_S:
        yield Finding(
            topic="etcd",
            level="problem" if median_s >= HOPELESS_WRITE_S else "note",
            text=text,
            advice="give etcd a faster disk, for it syncs each write, or a less busy machine; a "
            "longer --lease-ttl makes nodes wait for it",
        )
    else:
        yield Finding(topic="etcd", level="ok", text=text)
    silent = [endpoint for endpoint in facts.endpoints if endpoint not in answering]
    if silent and answering:
        yield Finding(
            topic="etcd",
            level="note",
            text=f"{list_text(silent, 8)} gives no answer to GET /version",
            advice="see whether that member runs; the others do without it while they are a "
            "majority",
        )
    yield from _judge_etcd_versions(facts, versions)
    ahead = {v.endpoint: v.clock_ahead_s for v in facts.versions if v.clock_ahead_s is not None}
    for endpoint, ahead_s in ahead.items():
        if abs(ahead_s) >= CLOCK_DIFFERENCE_S:
            order = "before" if ahead_s > 0 else "behind"
            yield Finding(
                topic="clock",
                level="note",
                text=f"the clock of etcd at {endpoint} is {duration_text(abs(ahead_s))} {order} "
                "this machine's",
                advice="synchronize both by NTP: the job does not need it, but times in logs "
                "cannot be compared, and certificates may count as expired",
            )


def _judge_own_etcd(binary: str | None) -> Finding:
    text = "no --etcd is given, so none was tried; a job on one node starts its own"
    if binary is None:
        return Finding(
            topic="etcd",
            level="note",
            text="no --etcd is given, and no etcd is installed that could be started here",
            advice="give --etcd HOST:PORT, or pip install 'elasticzero[local]' for jobs on one "
            "machine",
        )
    return Finding(
        topic="etcd",
        level="note",
        text=f"{text} ({binary})",
        advice="give --etcd HOST:PORT for a job on several nodes",
    )


def _judge_etcd_versions(facts: EtcdFacts, versions: list[str]) -> Iterator[Finding]:
    for version in versions:
        if release_of(version)[:2] < OLDEST_ETCD:
            yield Finding(
                topic="etcd",
                level="problem",
                text=f"version {version} is older than 3.4",
                advice="install a current 3.5 or 3.6",
            )
        elif UNSAFE_ETCD[0] <= release_of(version) <= UNSAFE_ETCD[1]:
            several = len(facts.endpoints) > 1
            yield Finding(
                topic="etcd",
                level="problem" if several else "note",
                text=f"version {version} can lose agreement among members that crash",
                advice="install a current 3.5 or 3.6 before etcd has several members",
            )


def judge_port(facts: PortFacts) -> Finding:
    """Judges whether the agent's HTTP server has a port."""
    if not facts.error:
        return Finding(topic="http port", level="ok", text=f"port {facts.port} is free")
    text = f"port {facts.port} cannot be used: {facts.error}"
    if facts.is_given:
        return Finding(
            topic="http port",
            level="problem",
            text=text,
            advice="give another --http-port PORT, or 0 for any; `ss -ltnp` shows what listens",
        )
    return Finding(
        topic="http port",
        level="note",
        text=text,
        advice="nothing: an agent takes the next free one and says which; scrape that one",
    )


def judge_peer(facts: PeerFacts) -> Finding:
    """Judges whether another node can be reached at any port."""
    states = set(facts.states.values())
    shown = ", ".join(f"port {port} {state}" for port, state in facts.states.items())
    if "unknown name" in states:
        return Finding(
            topic="peer",
            level="problem",
            text=f"{facts.host} is no name that this machine can resolve",
            advice="give an address, or mend DNS or /etc/hosts on every node",
        )
    if states <= {"open", "refused"}:
        text = f"{facts.host} answers ({shown}; refused only means that nothing listens yet)"
        return Finding(topic="peer", level="ok", text=text)
    return Finding(
        topic="peer",
        level="problem",
        text=f"{facts.host} does not answer everywhere ({shown})",
        advice="open all TCP ports between the nodes: workers use ports that the kernel chooses",
    )


def judge_storage(facts: StorageFacts) -> Iterator[Finding]:
    """Judges whether checkpoints can be written, safely and fast."""
    topic = "storage"
    if not facts.where:
        yield Finding(
            topic=topic,
            level="note",
            text="no --checkpoint-dir is given, so none was tried",
            advice="give --checkpoint-dir DIR, which all nodes must reach",
        )
        return
    trial = facts.trial
    if trial is None:
        missing = f"{facts.where} does not exist, and " if facts.nearest else ""
        yield Finding(
            topic=topic,
            level="problem",
            text=f"{missing}{facts.error}",
            advice="give a directory that this user can write, or mend the storage",
        )
        return
    if facts.nearest:
        yield Finding(
            topic=topic,
            level="note",
            text=f"{facts.where} does not exist yet: a job makes it in {facts.nearest}",
            advice="if it should exist, see whether its name is right, and its file system mounted",
        )
    if not trial.same or trial.leftovers or not trial.exclusive:
        what = (
            "does not give back what was written"
            if not trial.same
            else "overwrites a file that must be created once"
            if not trial.exclusive
            else f"leaves other files behind ({list_text(trial.leftovers, 3)})"
        )
        yield Finding(
            topic=topic,
            level="problem",
            text=f"{facts.where} {what}",
            advice="take other storage: a POSIX file system, or an object store with conditional "
            "writes (If-None-Match); without them two nodes may commit one step",
        )
    speed = trial.size_bytes / max(trial.write_s, 1e-9)
    text = (
        f"{facts.where} writes {speed / 1e6:.0f} MB/s and reads "
        f"{trial.size_bytes / max(trial.read_s, 1e-9) / 1e6:.0f} MB/s "
        f"({size_text(trial.size_bytes)}, synced)"
    )
    slow = speed < SLOW_STORAGE_BYTES_PER_S
    took = f"a checkpoint of 10 GB takes {duration_text(EXAMPLE_CHECKPOINT_BYTES / speed)}"
    yield Finding(
        topic=topic,
        level="note" if slow else "ok",
        text=f"{text}; {took}" if slow else text,
        advice="save less often (--checkpoint-every), or take faster storage" if slow else "",
    )
    free = facts.free_bytes
    if free is not None and free < LITTLE_FREE_BYTES:
        yield Finding(
            topic=topic,
            level="problem" if free < NEXT_TO_NOTHING_BYTES else "note",
            text=f"{facts.where} has {size_text(free)} free",
            advice="free space, or keep fewer checkpoints (--keep)",
        )


def judge_cloud(facts: CloudFacts) -> Finding:
    """Judges whether a notice of preemption would be seen."""
    topic = "preemption"
    if facts.choice == "none":
        return Finding(topic=topic, level="ok", text="--preemption none: no notices are read")
    if facts.cloud:
        return Finding(
            topic=topic, level="ok", text=f"the metadata server of {facts.cloud} answers"
        )
    if facts.choice == "auto":
        return Finding(
            topic=topic,
            level="note",
            text="no cloud's metadata server answers, so only SIGTERM announces the end",
            advice="nothing outside a cloud; in one, let 169.254.169.254, port 80, be reached",
        )
    return Finding(
        topic=topic,
        level="problem",
        text=f"--preemption {facts.choice}: {'; '.join(facts.errors)}",
        advice="let 169.254.169.254, port 80, be reached from here, or give --preemption none",
    )
