"""The ranks' store beside torch's TCPStore: the same requests have the same answers."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticzero.security.certificates import Credentials
from elasticzero.torch_internals.groups import PrefixStore, Store, TorchStore
from tests.support.certificates import credentials_of
from tests.support.rank_stores import served

RANKS = 3
SHORT, LONG = timedelta(milliseconds=5), timedelta(seconds=30)
KEYS = ["a", "b/c", "ü"]
Call = tuple[int, str, tuple[Any, ...]]
"""The rank that calls, the method and its arguments."""


@pytest.fixture(scope="module")
def torch_stores() -> list[Store]:
    """torch's store as each rank has it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        fd = bound.detach()
    first = TorchStore(
        "127.0.0.1",
        port,
        RANKS,
        is_master=True,
        timeout=LONG,
        wait_for_workers=False,
        master_listen_fd=fd,
        use_libuv=True,
    )
    others = [
        TorchStore("127.0.0.1", port, RANKS, timeout=LONG, wait_for_workers=False)
        for _ in range(RANKS - 1)
    ]
    return [first, *others]


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return credentials_of("a-token-of-the-job")


@contextmanager
def rank_stores(tls: Credentials | None = None) -> Iterator[list[Store]]:
    with served(RANKS, tls=tls) as store:
        yield [store.first, *(store.rank(rank) for rank in range(1, RANKS))]


def drawn(draw: random.Random) -> Call:
    key = draw.choice(KEYS)
    value = draw.choice([b"", b"text", draw.randbytes(20)])
    keys = draw.sample([*KEYS, "n"], draw.randint(1, 3))
    arguments: dict[str, tuple[Any, ...]] = {
        "set": (key, value),
        "get": (key,),
        "wait": (keys,),
        "check": (keys,),
        "add": ("n", draw.choice([-3, 0, 1, 1 << 40])),
        "compare_set": (key, draw.choice([b"", b"text"]), value),
        "delete_key": (draw.choice([*KEYS, "n"]),),
        "num_keys": (),
        "append": (key, value),
        "multi_get": (keys,),
        "multi_set": (KEYS[:2], [value, b"other"]),
    }
    name = draw.choice([*arguments])
    return draw.randrange(RANKS), name, arguments[name]


def answer(stores: list[Store], call: Call, *, of_torch: bool) -> Any:
    """What a call returns, or the kind of its error; a wait is short where it is in vain. At
    torch's store it is left out: a call after it may take 5 s."""
    rank, name, arguments = call
    store = stores[rank]
    if name in ("get", "wait", "multi_get"):
        keys = [arguments[0]] if name == "get" else arguments[0]
        is_in_vain = not store.check(keys)
        if is_in_vain and of_torch:
            return dist.DistStoreError
        store.set_timeout(SHORT if is_in_vain else LONG)
    try:
        return getattr(store, name)(*arguments)
    except dist.DistError as error:
        return type(error)


def prefixed(stores: list[Store], prefix: str) -> list[Store]:
    """The stores below a prefix. A PrefixStore is of C++: what is called on it is called from there
    on the store."""
    return [PrefixStore(prefix, store) for store in stores]


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("called", ["from Python", "by torch's C++"])
@pytest.mark.parametrize("seed", range(8))
def test_both_stores_give_the_same_answers(
    seed: int, called: str, encrypted: bool, torch_stores: list[Store], credentials: Credentials
) -> None:
    """Of torch's store one rank makes all calls, for its `set` returns before the value is there:
    another rank may not find it. Ours returns later."""
    draw = random.Random(seed)
    calls = [drawn(draw) for _ in range(80)]
    with rank_stores(credentials if encrypted else None) as stores:
        tested = stores if called == "from Python" else prefixed(stores, "prefix")
        told = []
        for used in (tested, prefixed(torch_stores[:1] * RANKS, f"{seed} {called} {encrypted}")):
            before = used[0].num_keys()
            answers = [answer(used, call, of_torch=used is not tested) for call in calls]
            counts = {i for i, call in enumerate(calls) if call[1] == "num_keys"}
            told.append([a - before if i in counts else a for i, a in enumerate(answers)])
    different = [
        (call, *pair) for call, *pair in zip(calls, *told, strict=True) if pair[0] != pair[1]
    ]
    assert not different


@pytest.fixture(params=["torch's", "ours", "ours, encrypted"])
def below_a_prefix(
    request: pytest.FixtureRequest, torch_stores: list[Store], credentials: Credentials
) -> Iterator[list[Store]]:
    """Both kinds of store, as torch's process groups have them."""
    with ExitStack() as opened:
        of_torch = request.param == "torch's"
        tls = credentials if request.param == "ours, encrypted" else None
        stores = torch_stores if of_torch else opened.enter_context(rank_stores(tls))
        yield prefixed(stores, request.node.name)


def test_gloo_connects_its_ranks_by_the_store(below_a_prefix: list[Store]) -> None:
    """Each rank is a thread: gloo's groups of one process reach each other as those of several."""
    stores = below_a_prefix
    with ThreadPoolExecutor(RANKS) as pool, ExitStack() as alive:

        def joined(rank: int) -> Any:
            return dist.ProcessGroupGloo(stores[rank], rank, RANKS, LONG)

        groups = list(pool.map(joined, range(RANKS)))
        alive.callback(groups.clear)

        def summed(rank: int) -> float:
            tensor = torch.tensor([float(rank + 1)])
            groups[rank].allreduce([tensor]).wait()
            return tensor.item()

        assert list(pool.map(summed, range(RANKS))) == [6.0] * RANKS


def test_a_key_that_never_comes_is_an_error_of_the_same_kind(below_a_prefix: list[Store]) -> None:
    """After it the connection can be used as before."""
    store = below_a_prefix[1]
    store.set_timeout(SHORT)
    for call in (
        lambda: store.get("never"),
        lambda: store.wait(["never", "nor this"]),
        lambda: store.multi_get(["never"]),
        lambda: store.wait(["never"], SHORT),
    ):
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 5ms, keys: .*never"):
            call()
    store.set_timeout(LONG)
    assert store.add("n", 1) == 1
