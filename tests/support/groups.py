"""Ends the process groups that tests make in their own process."""

from __future__ import annotations

import torch.distributed as dist

from elasticzero.comm import gloo

_ended: list[dist.ProcessGroup] = []
"""Groups whose destructor must not run: it may hang for good with Python's lock held."""


def end_groups() -> None:
    """Has torch forget the groups of this process, if there are any."""
    if dist.is_initialized():
        _ended.extend(dist.distributed_c10d._world.pg_map)
        gloo._wait_until_idle()
        dist.destroy_process_group()
