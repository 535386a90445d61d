"""Maps the files of the rounds, which lie in the node's shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from elasticzero.islands.layout import FragmentLayout


def mapped(path: Path, layout: FragmentLayout, *, create: bool) -> Tensor:
    """Maps a fragment's file.

    Args:
        path: The file.
        layout: The fragment.
        create: Whether it is to be written, and made where it is missing.

    Returns:
        Its E elements.
    """
    dtype, elements = layout.torch_dtype, layout.offsets[-1]
    if create and elements:
        with open(path, "ab") as file:  # memory that is not there must be an error, and no signal
            os.posix_fallocate(file.fileno(), 0, elements * dtype.itemsize)
    return torch.from_file(str(path), shared=create, size=elements, dtype=dtype)
