"""Makes what a trainer evaluates the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor


@contextmanager
def averages_of_one_rank(args: transformers.TrainingArguments) -> Iterator[None]:
    """Lets the trainer's loss be a mean over this rank's labels alone: while it trains the session
    weighs the ranks, and a batch that is evaluated has a loss of its own."""
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = True


def without_fillers(
    trainer: transformers.Trainer, inputs: Mapping[str, Any]
) -> tuple[Mapping[str, Any], int]:
    """Returns a batch that is evaluated without the samples that accelerate has added to it, and
    their number. It adds them so that all ranks have as many. A batch that has nothing else stays
    whole: what it gives is dropped.

    Args:
        trainer: The trainer, which divides the batches of its dataset among the ranks.
        inputs: Tensors of one row for each sample.
    """
    state, size = trainer.accelerator.gradient_state, trainer.args.eval_batch_size
    if not state.end_of_dataloader or state.remainder <= 0 or find_batch_size(inputs) != size:
        return inputs, 0
    of_rank = state.remainder - trainer.accelerator.process_index * size
    if not 0 < of_rank < size:
        return inputs, 0
    kept = recursively_apply(lambda rows: rows[:of_rank] if _has_rows(rows, size) else rows, inputs)
    return kept, size - of_rank


def with_fillers(outputs: Any, number: int) -> Any:
    """Returns outputs with as many rows as those of other ranks: the last row is repeated.

    Args:
        outputs: Tensors, in containers or not, or None.
        number: The number of rows that are added to each.
    """
    if not number or outputs is None:
        return outputs
    return recursively_apply(lambda rows: _lengthened(rows, number), outputs)


def _has_rows(tensor: Tensor, number: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == number


def _lengthened(rows: Tensor, number: int) -> Tensor:
    if not rows.dim():
        return rows
    return rows[[*range(len(rows)), *[-1] * number]]
