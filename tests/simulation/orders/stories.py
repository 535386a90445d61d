"""What happens to two nodes: each story has a default order, in which all goes well."""

from __future__ import annotations

from elasticzero.launcher.store.api import Condition
from elasticzero.launcher.store.job_run import begin_next_run
from elasticzero.launcher.store.watch_cache import DONE, MEMBERS
from tests.simulation.orders.pair import Happening, Pair, Story
from tests.simulation.orders.workers import Workers


def _always(pair: Pair) -> bool:
    return True


def _begin(pair: Pair) -> None:
    pair.begin_process("a")
    pair.begin_process("b")


def _ended_nodes(pair: Pair) -> list[str]:
    return [node for node in pair.processes if pair.ended(node)]


def _may_begin_again(pair: Pair) -> bool:
    """The job is over, no node of it is registered, and a machine is free for the next run."""
    free = bool(_ended_nodes(pair)) and pair.done is not None
    return free and not pair.etcd.read(MEMBERS).entries


def _begin_again(pair: Pair) -> None:
    store = pair.connection()
    entry = store.read(DONE).entries[DONE]
    over = Condition(key=DONE, mod_revision=entry.mod_revision, value=entry.value)
    assert begin_next_run(store, over)
    pair.begin_process(_ended_nodes(pair)[0])


def _trains(pair: Pair, node: str) -> Workers | None:
    """The workers of a node that train."""
    process = pair.processes.get(node)
    workers = process.worker_group if process is not None and process.lives else None
    return workers if workers is not None and workers.state.running else None


def _both_train(pair: Pair) -> bool:
    groups = [_trains(pair, node) for node in pair.processes]
    return bool(groups) and all(group is not None for group in groups)


def _b_fails(pair: Pair) -> None:
    workers, process = _trains(pair, "b"), pair.processes["b"]
    assert workers is not None
    workers.fail("environment", "OSError: a bad disk")
    process.receive("workers", workers.state)
    process.wake()


def _b_leaves(pair: Pair) -> None:
    pair.processes["b"].notice("SIGTERM")
    pair.processes["b"].wake()


def _lose_data(pair: Pair) -> None:
    pair.etcd.lose_data(None, cluster=pair.etcd.cluster + 1)


def _both_train_again(pair: Pair) -> bool:
    """Tells whether both train in a later generation."""
    groups = [_trains(pair, node) for node in pair.processes]
    return _both_train(pair) and all(g is not None and g.world.generation > 1 for g in groups)


def _restore(pair: Pair) -> None:
    pair.etcd.lose_data(pair.etcd.backups[-1], cluster=pair.etcd.cluster)


BEGIN = Happening("two nodes begin", _always, _begin)
BEGIN_AGAIN = Happening("the job is begun again", _may_begin_again, _begin_again)
FAIL = Happening("a worker of b fails", _both_train, _b_fails)
LEAVE = Happening("b is told to leave", _both_train, _b_leaves)
BACK_UP = Happening("etcd is backed up", _both_train, lambda pair: pair.etcd.back_up())
RESTORE = Happening("the backup is restored", _both_train_again, _restore)
LOSE = Happening("etcd loses its data", _both_train, _lose_data)
STORIES = {
    "start": Story((BEGIN,), _always),
    "restart": Story((BEGIN, BEGIN_AGAIN), _both_train),
    "failure": Story((BEGIN, FAIL), _both_train),
    "leave": Story((BEGIN, LEAVE), _both_train),
    "loss": Story((BEGIN, LOSE), _both_train),
    "restore": Story((BEGIN, BACK_UP, FAIL, RESTORE), _both_train),
}
