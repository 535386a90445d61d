"""Trains the model of `training_exact` under zero3, with its state in host memory or not.

Argument: JSON as for `training_exact`, with offload (which ranks ask for it: all, none or the
first), and at will fused (the optimizer is) and found (a file: where each rank's state lies).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import elasticzero as ez
from elasticzero.torch_internals.fsdp import groups_below
from tests.integration.training_exact import train


def asked(session: ez.Session, told: dict[str, Any]) -> bool:
    return told["offload"] == "all" or (told["offload"] == "first" and session.rank == 0)


def describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The devices of what is divided and of what is not, whether rows are pinned, and whether FSDP2
    copies them from the CPU."""
    rows = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    pieces = [p for group in optimizer.param_groups for p in group["params"]]
    kept: list[dict[str, Any]] = list(optimizer.state.values())
    state = [tensor for entry in kept for tensor in entry.values()]
    devices: dict[str, Sequence[torch.Tensor]]
    devices = {"rows": rows, "whole": whole, "pieces": pieces, "state": state}
    placement: dict[str, Any] = {
        name: sorted({tensor.device.type for tensor in tensors})
        for name, tensors in devices.items()
    }
    placement["pinned"] = all(row.is_pinned() for row in rows if row.numel())
    placement["copied"] = all(
        of.offload_to_cpu for group in groups_below(model) for of in group.fsdp_params
    )
    return placement


def main(session: ez.Session, told: dict[str, Any]) -> None:
    prepare: Any = session.prepare
    laid: list[Any] = []

    def prepare_and_keep(*args: Any, **options: Any) -> Any:
        laid.extend(prepare(*args, **options, cpu_offload=asked(session, told)))
        return tuple(laid)

    session.prepare = prepare_and_keep  # type: ignore[method-assign]
    if told.get("fused"):
        torch.optim.__dict__["AdamW"] = partial(torch.optim.AdamW, fused=True)
    train(session, told)
    if "found" in told:
        text = json.dumps(describe(*laid))
        Path(f"{told['found']}-{session.rank}").write_text(text)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    ez.run(partial(main, told=told))
