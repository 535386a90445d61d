"""Says which modules workers have imported when they begin.

The list stands apart from `fork_server.py`, which is the program of the process that imports them.
"""

from __future__ import annotations

import importlib.util

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "numpy",
    "elasticzero.entry_point",
    "elasticzero.comm.gloo",
    "elasticzero.parallel.ddp",
    "elasticzero.parallel.zero",
    "elasticzero.parallel.fsdp",
)
"""Modules that a worker would import anyway, and the strategies, which are imported when
created."""


def preloaded_modules(checkpoint_dir: str | None) -> tuple[str, ...]:
    """Returns the modules for the fork server to import: `MODULES`, and the one that reads
    checkpoints."""
    scheme = (checkpoint_dir or "").partition("://")[0]
    package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(scheme)
    installed = package is not None and importlib.util.find_spec(package) is not None
    return (*MODULES, package) if installed and package else MODULES
