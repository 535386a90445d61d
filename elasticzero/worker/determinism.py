"""Makes a worker's own computation repeatable to the last bit, for `--deterministic`."""

from __future__ import annotations

import os
from typing import Any

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""The workspace with which cuBLAS is deterministic; it is read when a GPU is first used."""


def compute_deterministically(*, fixed_threads: bool) -> None:
    """Has torch choose deterministic kernels, and refuse operations that have none.

    fixed_threads: the user has set OMP_NUM_THREADS; otherwise one thread is used, because the
    number that is chosen for a machine depends on how many workers it runs.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    if not fixed_threads:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    filling: Any = torch.utils.deterministic  # which has the property at run time alone
    filling.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
