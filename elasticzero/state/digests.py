"""Computes digests of tensors and of plain values, which are equal if every byte is equal.

On the CPU a digest is the xxh3_64 of the bytes: it misses a difference once in 2**64. On a GPU the
bytes are read as 32-bit words in rows and columns, and a digest is the sum of all words in 64 bits,
each multiplied by a fixed weight of its row plus one of its column, of which one is odd and one
even. That finds every difference in one word. Differences in several words are missed about once in
2**31, with one exception: equal changes of alternating sign at the corners of a rectangle cancel
out. Only one number per tensor is copied from the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor

from elasticzero.torch_internals.tensors import count_of_changes

COLUMNS = 2048
_SAMPLED_FROM = 1024
"""Bytes of which one element counts for the mark of a change."""
_SMALL_BYTES = 65536
"""Bytes of a tensor of which all elements count."""
_BITS = 62
"""Bits of a digest, so that it can be sent as a positive number and its complement as a negative
one."""


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the digest of each tensor, by name; waits for the GPU if one of them is on it."""
    with torch.no_grad():
        numbers = {name: _of_bytes(_flat(tensor)) for name, tensor in tensors.items()}
    on_gpu = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    gpu_numbers = torch.stack(list(on_gpu.values())).tolist() if on_gpu else []
    on_cpu = {name: value for name, value in numbers.items() if isinstance(value, int)}
    of_gpu = {name: _of_number(word) for name, word in zip(on_gpu, gpu_numbers, strict=True)}
    return {name: on_cpu[name] if name in on_cpu else of_gpu[name] for name in tensors}


def change_marks(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns, for each tensor by name, what is another if its elements have changed.

    On a GPU that is its digest. On the CPU a digest costs as much as a copy. There it is the
    tensor's place in memory, torch's count of its changes, and the digest of one element in each
    `_SAMPLED_FROM` bytes; of a small tensor, of all. What is missed is a change that torch does not
    count, as one through `.data`, if it touches no such element: it is shorter than 1 KiB.
    """
    on_gpu = digests({name: t for name, t in tensors.items() if t.device.type != "cpu"})
    marks: dict[str, tuple[int, ...]] = {name: (digest,) for name, digest in on_gpu.items()}
    for name, tensor in tensors.items():
        if name not in marks:
            step = _SAMPLED_FROM // tensor.element_size() if tensor.nbytes > _SMALL_BYTES else 1
            sample = _flat(tensor.detach().reshape(-1)[::step].contiguous())
            marks[name] = (tensor.data_ptr(), count_of_changes(tensor), _of_cpu(sample))
    return marks


def of_value(value: Any) -> int:
    """Returns the digest of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_intdigest(text.encode())


def combined(table: Mapping[str, int]) -> int:
    """Returns one number of 62 bits for a whole table."""
    return of_value([[name, table[name]] for name in sorted(table)]) >> (64 - _BITS)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Tells whether two tensors on one device have the same bytes, in the order of their elements.

    They are compared as large words where they lie so, which takes an eighth of the time.
    """
    flats = [_flat(tensor.contiguous()) for tensor in (first, second)]
    if not any(n % 8 for flat in flats for n in (flat.nbytes, flat.storage_offset())):
        flats = [flat.view(torch.int64) for flat in flats]
    return torch.equal(*flats)


def _flat(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, in the order of its elements."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _of_bytes(flat: Tensor) -> int | Tensor:
    return _of_cpu(flat) if flat.device.type == "cpu" else sums_of(flat)


def _of_cpu(flat: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(flat.numpy().data)


def sums_of(flat: Tensor) -> Tensor:
    """Returns a 64-bit number for bytes on any device, as a tensor on that device."""
    whole = flat.numel() // 4 * 4
    if flat.storage_offset() % 4:
        flat = flat.clone()
    whole_words, rest = flat[:whole].view(torch.int32), flat[whole:].to(torch.int64)
    table = whole_words[: whole_words.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    tail = torch.cat([whole_words[table.numel() :].to(torch.int64), rest])
    of_columns, of_tail = _weights(flat.device)
    rows, columns = (table.sum(dim, dtype=torch.int64) for dim in (1, 0))
    by_row = (rows * _spread(torch.arange(len(rows), device=flat.device))).sum()
    by_column = (columns * of_columns).sum()
    return by_row + by_column + (tail * of_tail[: len(tail)]).sum()


def _of_number(word: int) -> int:
    return xxhash.xxh3_64_intdigest(word.to_bytes(8, "little", signed=True))


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (even weights of the columns, odd weights of the words beyond the last whole row)."""
    numbers = torch.arange(2 * COLUMNS + 4, device=device) + (1 << 32)
    return _spread(numbers[:COLUMNS]) - 1, _spread(numbers[COLUMNS:])


def _spread(numbers: Tensor) -> Tensor:
    """Returns pseudo-random odd numbers, the same for the same numbers."""
    mixed = numbers * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1
