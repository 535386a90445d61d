"""The queue of buckets: whatever ranks use, in any order, sums are those of plain additions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.wire import Wire
from elasticzero.parallel.buckets import queue
from elasticzero.parallel.wire import codecs
from elasticzero.spans import Span
from tests.support.bucket_training import (
    KINDS,
    RANKS,
    Case,
    Kind,
    Part,
    Trainer,
    as_used,
    cases,
    loss_of,
    plain_sums,
)
from tests.support.threaded_ranks import FakeGroup, patched


@pytest.mark.parametrize("is_launched", [False, True], ids=["at once", "whole buckets"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", [Wire(), Wire(format="bf16")], ids=str)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_sums_are_those_of_plain_additions(
    wire: Wire, kind: Kind, is_launched: bool, case: Case
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "is_launched", lambda tensor: is_launched)
        patch.setattr(codecs, "LEAST_ELEMENTS", 1)
        ranks = patched(FakeGroup(RANKS), patch)

        def train(rank: int) -> list[dict[str, Tensor | None]]:
            trainer = Trainer(case, kind, rank, wire)
            return [trainer.step(step) for step in range(len(case.steps))]

        told = ranks.run(train)
    for step in range(len(case.steps)):
        expected = as_used(case, step)
        if kind == "ddp":
            check_whole([sums[step] for sums in told], expected)
        else:
            check_chunks(case, kind, [sums[step] for sums in told], expected)


def check_whole(
    sums_of_ranks: list[dict[str, Tensor | None]], expected: dict[str, Tensor | None]
) -> None:
    for sums in sums_of_ranks:
        for name, total in expected.items():
            got = sums[name]
            assert (got is None) == (total is None), name
            assert got is None or total is None or torch.equal(got, total), name


def check_chunks(
    case: Case,
    kind: Kind,
    sums_of_ranks: list[dict[str, Tensor | None]],
    expected: dict[str, Tensor | None],
) -> None:
    used = {name for sums in sums_of_ranks for name, chunk in sums.items() if chunk is None}
    assert used == {name for name, total in expected.items() if total is not None}
    for bucket in range(3):
        names = case.names(bucket)
        if not names or not used & set(names):
            continue
        parts = []
        for name in names:
            total = expected[name]
            parts.append(torch.zeros(case.sizes[int(name)]).double() if total is None else total)
        whole = torch.cat(parts)
        chunks = [chunk for sums in sums_of_ranks if (chunk := sums[f"bucket {names}"]) is not None]
        if kind.endswith("rows"):
            assert all(torch.equal(chunk, whole) for chunk in chunks)
        else:
            got = torch.cat(chunks)
            assert torch.equal(got[: len(whole)], whole)
            assert not got[len(whole) :].any()


def one_bucket(*steps: list[Part], twice: frozenset[int] = frozenset()) -> Case:
    """Two parameters in one bucket; both ranks do the same."""
    each_rank = [[parts] * RANKS for parts in steps]
    return Case([2, 3], [1, 1], set(twice), each_rank, [False] * len(steps))


BOTH = Part([0, 1], counts=True)


def trained(kind: Kind, case: Case, body: Callable[[Trainer], Any]) -> tuple[list[Any], FakeGroup]:
    """Returns what `body` returns on each rank, and the collectives that it has made."""
    with pytest.MonkeyPatch.context() as patch:
        ranks = patched(FakeGroup(RANKS), patch)
        return ranks.run(lambda rank: body(Trainer(case, kind, rank))), ranks


@pytest.mark.parametrize(("kind", "exchanges"), [("ddp", 1), ("zero1", 1), ("zero2", 3)])
def test_a_bucket_is_exchanged_once_a_sum(kind: Kind, exchanges: int) -> None:
    """Whatever a rank has used: once in a global batch, under stage 2 once in a micro-batch."""
    case = one_bucket([BOTH], [BOTH, Part([], counts=True), Part([1], counts=False)])

    def body(trainer: Trainer) -> int:
        trainer.step(0)
        trainer.step(1)
        return len(trainer.exchange.buckets)

    (buckets, _), group = trained(kind, case, body)
    table = int(kind == "zero2")  # of what came too late in the first global batch
    assert len(group.calls) == buckets * (1 + exchanges) + table


def test_what_comes_too_late_is_exchanged_again_in_the_first_global_batch() -> None:
    first_0_then_1 = Part([1, 0], counts=True)  # a backward goes from the last to the first
    case = one_bucket([first_0_then_1], [first_0_then_1], twice=frozenset({1}))
    _, group = trained("zero2", case, lambda trainer: [trainer.step(step) for step in range(2)])
    assert sorted(kind for kind, _ in group.calls) == [
        "all-reduce all ranks",
        *["reduce-scatter"] * 3,
    ]


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_micro_batch_of_weight_0_needs_no_graph(kind: Kind) -> None:
    def body(trainer: Trainer) -> dict[str, Tensor | None]:
        loss = loss_of(trainer.case, trainer.parameters, (0, trainer.rank, 0))
        parts = [MicroBatch(positions=Span(0, 1), weight=1, last=last) for last in (False, True)]
        trainer.queue.backward(loss, 1.0, parts[0])
        trainer.queue.backward(torch.tensor(torch.nan), 0.0, parts[1])
        return trainer.sums(0)

    case = one_bucket([BOTH])
    sums, _ = trained(kind, case, body)
    if kind == "ddp":
        check_whole(sums, plain_sums(case, 0))
    else:
        check_chunks(case, kind, sums, plain_sums(case, 0))


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_gradient_after_the_sums_is_refused(kind: Kind) -> None:
    def body(trainer: Trainer) -> None:
        loss = loss_of(trainer.case, trainer.parameters, (0, trainer.rank, 0))
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        trainer.queue.backward(loss, 1.0, part)
        trainer.exchange.finish()
        with pytest.raises(UserError, match="'0' got a gradient after the gradients were summed"):
            trainer.parameters[0].sum().backward()
        trainer.queue.clear()
        trainer.parameters[0].sum().backward()  # of the next global batch

    trained(kind, one_bucket([BOTH]), body)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_gradients_in_parts_that_the_first_batch_has_not_shown(kind: Kind) -> None:
    def body(trainer: Trainer) -> None:
        trainer.step(0)
        trainer.case.twice.add(0)
        with pytest.raises(UserError, match="needs use_reentrant=False"):
            trainer.step(1)

    trained(kind, one_bucket([BOTH], [BOTH]), body)


def failing(value: Tensor) -> Tensor:
    """Returns a copy whose backward raises."""

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("the script's own")

    copied = value.clone()
    copied.register_hook(fail)
    return copied


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_backward_that_failed_after_a_sum_has_begun_is_not_begun_again(kind: Kind) -> None:
    """The sums have what it computed, so that a second one would count twice."""

    def body(trainer: Trainer) -> None:
        trainer.step(0)
        first, last = (bucket.parameters[0] for bucket in trainer.exchange.buckets)
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        with pytest.raises(ArithmeticError, match="the script's own"):
            trainer.queue.backward(failing(last.sum()) + first.sum(), 1.0, part)
        with pytest.raises(UserError, match="got a gradient after the gradients were summed"):
            trainer.queue.backward(last.sum() + first.sum(), 1.0, part)
        trainer.exchange.finish()
        trainer.queue.clear()
        trainer.step(1)

    case = one_bucket([BOTH], [BOTH])
    case.bucket_of = [0, 1]
    trained(kind, case, body)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_global_batch_that_was_not_applied_takes_no_further_backward(kind: Kind) -> None:
    """A script that catches the error of its step goes on with gradients that nobody dropped."""

    def body(trainer: Trainer) -> None:
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        for _ in range(2):
            trainer.queue.backward(
                torch.cat([p.view(-1) for p in trainer.parameters]).sum(), 1.0, part
            )
            trainer.exchange.finish()
            with pytest.raises(UserError, match="got a gradient after the gradients were summed"):
                trainer.queue.backward(torch.ones((), requires_grad=True) * 1, 1.0, part)
            with pytest.raises(UserError, match="got a gradient after the gradients were summed"):
                trainer.queue.backward(trainer.parameters[0].sum(), 1.0, part)
            trainer.queue.clear()

    trained(kind, one_bucket([BOTH]), body)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_a_backward_that_failed_before_any_sum_is_begun_again(kind: Kind) -> None:
    def body(trainer: Trainer) -> dict[str, Tensor | None]:
        trainer.step(0)
        part = MicroBatch(positions=Span(0, 1), weight=1, last=True)
        with pytest.raises(ArithmeticError, match="the script's own"):
            trainer.queue.backward(failing(trainer.parameters[0].sum()), 1.0, part)
        return trainer.step(1)

    case = one_bucket([BOTH], [BOTH])
    sums, _ = trained(kind, case, body)
    if kind == "ddp":
        check_whole(sums, plain_sums(case, 1))
    else:
        check_chunks(case, kind, sums, plain_sums(case, 1))


@pytest.mark.parametrize(("kind", "is_taken"), [("ddp", True), ("zero1", True), ("zero2", False)])
def test_a_backward_of_the_scripts_own_between_micro_batches(kind: Kind, is_taken: bool) -> None:
    """Kept buckets are still open for it; those of stage 2 have been summed."""

    def body(trainer: Trainer) -> dict[str, Tensor | None]:
        trainer.step(0)
        for last in (False, True):
            loss = loss_of(trainer.case, trainer.parameters, (1, trainer.rank, int(last)))
            part = MicroBatch(positions=Span(0, 1), weight=1, last=last)
            trainer.queue.backward(loss, 1.0, part)
            if not last:
                (trainer.parameters[0] * 64).sum().backward()
        return trainer.sums(1)

    case = one_bucket([BOTH], [BOTH, BOTH])
    if not is_taken:
        with pytest.raises(UserError, match="'0' got a gradient after"):
            trained(kind, case, body)
        return
    sums, _ = trained(kind, case, body)
    expected = plain_sums(case, 1)
    assert expected["0"] is not None
    expected["0"] += 64 * RANKS
    if kind == "ddp":
        check_whole(sums, expected)
    else:
        check_chunks(case, kind, sums, expected)
