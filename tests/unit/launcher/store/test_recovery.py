"""Agents write anew what the store has lost, against the store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticzero.launcher.protocol.documents import (
    Alarm,
    Control,
    Done,
    Drain,
    World,
    merged,
    outranks,
    to_bytes,
)
from elasticzero.launcher.store.api import Store
from elasticzero.launcher.store.job_token import KEY, agree_on_token
from elasticzero.launcher.store.watch_cache import ALARM, CONTROL, DONE, MEMBERS, WORLD
from tests.support.memory_store import MemoryServer
from tests.unit.launcher.store.nodes import Node, stands, world
from tests.watching import DEADLINE_S


def test_a_wiped_store_is_written_anew(server: MemoryServer, node: Callable[..., Node]) -> None:
    """Training went on, but no agent wrote its world again: the next failure stopped all."""
    a, b = node("a"), node("b")
    asked = Control(drain=(Drain(node="c", incarnation="c"),), nnodes=(1, 4), stop=True)
    alarm = Alarm(node="a", kind="failure", reason="rank 0 failed")
    written = world(7, "a", "b")
    documents = {WORLD: written, CONTROL: asked, f"{ALARM}7": alarm}
    a.store.write({key: to_bytes(value) for key, value in documents.items()})
    a.look()
    b.look()
    before = stands(server)

    server.restore(None)
    for one in (a, b):
        one.turns()
        assert one.observer.world()[0] == written
        assert one.observer.control() == asked
        assert one.observer.alarm(7) == alarm
    assert stands(server) == before
    assert [len(one.messages) for one in (a, b)] == [2, 1], "the second found nothing missing"
    assert "generation 7 goes on" in a.messages[0]
    assert not a.observer.retained and not b.observer.retained


def test_until_it_is_written_what_was_known_counts(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    a = node("a")
    a.store.write({WORLD: to_bytes(world(3, "a")), DONE: to_bytes(_done())})
    a.look()
    server.restore(None, cluster=2)
    a.look()
    assert a.observer.world() == (world(3, "a"), 0)
    assert a.observer.done() == _done()


def _done() -> Done:
    return Done(outcome="finished", step=9, reason="finished after step 9")


def test_a_job_that_is_done_stays_done_after_a_wipe(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    a = node("a")
    a.store.write({WORLD: to_bytes(world(3, "a")), DONE: to_bytes(_done())})
    a.look()
    server.restore(None)
    a.turns()
    assert stands(server)[DONE]["outcome"] == "finished"


def test_newcomers_to_the_emptied_store_join_the_old_world(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """Their world, its end and their token give way: the old members train with theirs."""
    a = node("a")
    a.store.write({WORLD: to_bytes(world(5, "a"))})
    a.look()
    server.restore(None)
    new = node("new")
    assert new.agreed.secret != a.agreed.secret
    new.store.write({WORLD: to_bytes(world(1, "new", token="n")), DONE: to_bytes(_done())})
    new.look()
    a.look()
    assert a.observer.done() is None, "an end of another history"
    a.turns()
    documents = stands(server)
    assert documents[WORLD]["generation"] == 5
    assert DONE not in documents
    assert documents[KEY]["token"] == a.agreed.secret.reveal
    new.turns()
    assert new.observer.world()[0] == world(5, "a")
    assert new.observer.done() is None
    assert agree_on_token(new.store, None).secret == a.agreed.secret


def test_of_two_agents_the_one_that_knows_more_wins(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """One was cut off while the others went on to another generation, and writes first."""
    behind, ahead = node("behind"), node("ahead")
    behind.store.write({WORLD: to_bytes(world(4, "behind", "ahead"))})
    behind.look()
    behind.store.write({WORLD: to_bytes(world(5, "ahead"))})
    ahead.look()
    server.restore(None)
    behind.recovery.poll(behind.now_s)
    behind.store.read(WORLD)
    behind.turns()
    assert stands(server)[WORLD]["generation"] == 4
    ahead.turns()
    assert stands(server)[WORLD]["generation"] == 5
    behind.turns()
    assert behind.observer.world()[0] == world(5, "ahead")


def test_an_old_backup_gives_way_to_what_is_known(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    a = node("a")
    a.store.write({WORLD: to_bytes(world(2, "a", "b"))})
    backup = server.backup()
    a.store.write({WORLD: to_bytes(world(3, "a"))})
    a.look()
    server.restore(backup, cluster=9)
    a.turns()
    assert stands(server)[WORLD]["generation"] == 3
    assert "members/a" in stands(server)


def test_a_loss_that_no_revision_tells_of_is_found(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """Others use the same etcd, and have brought its revision past the old one."""
    a = node("a")
    a.store.write({WORLD: to_bytes(world(2, "a"))})
    a.look()
    server.restore(None)
    for i in range(50):
        server.write({f"other/{i}": b"1"}, (), (), 0)
    a.turns()
    assert a.store.history.number == 1
    assert stands(server)[WORLD]["generation"] == 2


def test_the_oldest_node_of_a_backup_finds_that_it_is_the_oldest_again(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """It had lapsed after the backup, and the others had passed the revisions that it knew of: it
    waited for the one that had become the oldest, and that one for it."""
    a, b = node("a"), node("b")
    backup = server.backup()
    server.revoke(1)
    a.lose_lease()
    a.turns()
    assert oldest(b.store) == "members/b"

    server.restore(backup)
    for i in range(20):
        server.write({f"other/{i}": b"1"}, (), (), 0)
    a.lose_lease()
    a.turns()
    assert a.store.history.number == 1, a.messages
    assert "members/a was put at revision" in a.messages[0]
    assert oldest(b.store) == "members/a"


def oldest(store: Store) -> str:
    return next(iter(store.read(MEMBERS, limit=1).entries))


def test_a_loss_before_a_node_is_registered_is_found_once(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    """It has agreed on the token in the former history: the record that another node then wrote
    looked like a second loss, and until then nothing told of the first."""
    a = node("a", before_joining=lambda: server.restore(None, cluster=2))
    a.turns()
    assert a.store.history.number == 1
    assert "cluster 2 answers" in a.messages[0]
    assert KEY in stands(server)
    a.lose_lease()
    a.turns()
    assert a.store.history.number == 1, a.messages


@pytest.mark.parametrize("told", [(), (WORLD,)], ids=["not-told", "told"])
def test_an_alarm_that_goes_with_later_worlds_is_no_loss(
    server: MemoryServer, node: Callable[..., Node], told: tuple[str, ...]
) -> None:
    """The second world after an alarm takes it along; a watch may tell of that first."""
    a, b = node("a"), node("b")
    alarm = to_bytes(Alarm(node="a", kind="failure", reason="rank 0 failed"))
    a.store.write({WORLD: to_bytes(world(7, "a", "b")), f"{ALARM}7": alarm})
    b.look()
    a.store.write({WORLD: to_bytes(world(8, "a", "b"))})
    a.store.write({WORLD: to_bytes(world(9, "a", "b"))}, deletes=[f"{ALARM}7"])
    b.look(ALARM)
    assert b.observer.alarm(7) is not None, "until it is known whether it is lost"
    b.look(*told or (ALARM,))
    b.turn()
    assert not b.messages and not b.observer.retained
    assert b.observer.world()[0] == world(9, "a", "b")


def test_an_alarm_that_is_gone_alone_is_a_loss(
    server: MemoryServer, node: Callable[..., Node]
) -> None:
    a = node("a")
    alarm = to_bytes(Alarm(node="a", kind="failure", reason="rank 0 failed"))
    a.store.write({WORLD: to_bytes(world(7, "a")), f"{ALARM}7": alarm})
    a.look()
    a.store.write({CONTROL: to_bytes(Control())}, deletes=[f"{ALARM}7"])
    a.turns()
    assert "what it held is gone" in a.messages[0]
    assert f"{ALARM}7" in stands(server)


def test_a_job_begun_again_is_no_loss(server: MemoryServer, node: Callable[..., Node]) -> None:
    """--restart deletes the world, once no node is registered; the token's record stays."""
    a = node("a")
    a.store.write({WORLD: to_bytes(world(8, "a"))})
    a.look()
    server.write({}, [MEMBERS, WORLD], (), 0)
    server.revoke(1)
    a.lose_lease()
    a.turns()
    assert a.store.history.number == 0
    assert a.observer.world() == (None, 0)


def test_two_that_write_at_once_agree(server: MemoryServer, node: Callable[..., Node]) -> None:
    nodes = [node(name) for name in "abcd"]
    names = [one.name for one in nodes]
    nodes[0].store.write({WORLD: to_bytes(world(6, *names))})
    for one in nodes:
        one.look()
    server.restore(None, cluster=3)
    threads = [threading.Thread(target=one.turns) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert stands(server)[WORLD]["generation"] == 6
    assert {f"members/{name}" for name in names} <= stands(server).keys()
    assert len({one.agreed.secret.reveal for one in nodes}) == 1


@pytest.mark.parametrize(
    ("higher", "lower"),
    [
        (world(1, "a", run=2), world(9, "b", step=50, run=1)),
        (world(2, "a"), world(1, "a", step=50)),
        (world(2, "a", step=9, token="z"), world(2, "a", step=8, token="a")),
        (world(2, "a", step=9, token="a"), world(2, "a", step=9, token="b")),
    ],
)
def test_of_two_histories_one_wins(higher: World, lower: World) -> None:
    assert outranks(higher, lower) and not outranks(lower, higher)
    assert outranks(lower, None)
    assert not outranks(higher, replace(higher, reason="the same world"))


def test_no_wish_of_operators_is_lost() -> None:
    remembered = Control(drain=(Drain(node="a", incarnation="1"),), nnodes=(2, 3))
    stored = Control(
        drain=(Drain(node="b", incarnation="1"), Drain(node="a", incarnation="1")),
        nnodes=(1, 2),
        stop=True,
    )
    both = merged(remembered, stored)
    assert both.drain == (Drain(node="a", incarnation="1"), Drain(node="b", incarnation="1"))
    assert both.nnodes == (2, 3) and both.stop
    assert merged(Control(), stored) == stored


def test_of_two_sizes_the_later_one_counts() -> None:
    """Two agents know different ones, and the one that is behind writes last."""
    behind, ahead = Control(nnodes=(2, 3), scaled=1), Control(nnodes=(1, 2), scaled=2)
    for both in (merged(behind, ahead), merged(ahead, behind)):
        assert both.nnodes == (1, 2) and both.scaled == 2
