"""Compares a restored state with what was read: training goes on from nothing else.

What an owner makes of a value that it is given, an optimizer or a module, is its own affair, and so
is what it forgets. So the state is taken once more after a restore, as a capture takes it. Values
that lie where they were read to need no look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from elasticzero.errors import CheckpointMismatch
from elasticzero.parallel.optimizers.whole_state import TREES
from elasticzero.state.auxiliary import BoundaryCopy
from elasticzero.state.digests import same_bits
from elasticzero.state.model import EXTRA, LoadTarget, RankState

_WHAT = {"entries": "entries of no parameter", "state_dicts": "its state_dict"}
"""Says what is stored by optimizer; all else is stored by parameter."""


def check_shares(
    targets: Iterable[LoadTarget], share: RankState, where: str, *, converts: bool = False
) -> None:
    """Compares parameters and optimizer state with what was read for them.

    Args:
        targets: What was read, and the tensors that were filled with it.
        share: The state of this rank, taken after the restore.
        where: The checkpoint, for the message.
        converts: True if another strategy has written the state, which may keep it in another
            dtype: 32-bit masters have 32-bit optimizer state, and 16-bit parameters 16-bit state.

    Raises:
        CheckpointMismatch: A tensor is another one now, or is not kept.
    """
    for target in targets:
        name, read = target.name, target.tensor.detach().reshape(-1)
        if name not in share.specs:
            if read.any():  # zeros stand for a state that was never made
                raise CheckpointMismatch(f"{where} has {name!r}, which is not kept once it is read")
            continue
        if (local := share.held.get(name)) is None:
            continue  # a copy of another rank's
        start, stop = target.span.start - local.start, target.span.stop - local.start
        if start < 0 or stop > local.tensor.numel():
            continue  # a copy of another rank's part
        present = local.tensor.detach().reshape(-1)[start:stop]
        check_tensor(name, read.to(present.dtype) if converts else read, present, where)


def check_optimizers(read: Mapping[str, Any], present: Mapping[str, Any], where: str) -> None:
    """Compares what optimizers keep besides tensors with what was read.

    Args:
        read: What `RankState.optimizers` was.
        present: What it is after the restore.
        where: The checkpoint, for the message.

    Raises:
        CheckpointMismatch: An optimizer keeps something else now.
    """
    if not read.get("whole") or not present.get("whole"):
        return  # strategies that deal parts keep none of it
    for kind in TREES:
        for name, tree in read.get(kind, {}).items():
            if _without_names(tree) != _without_names(present.get(kind, {}).get(name)):
                of_parameter = f"what it keeps for parameter {name!r}"
                what = _WHAT.get(kind, of_parameter)
                raise CheckpointMismatch(
                    f"{where} has something else in an optimizer's state ({what}) than there is "
                    "once it is restored: mend the optimizer's load_state_dict, or what it calls"
                )


def _without_names(tree: Any) -> Any:
    """Returns a tree without the names of its tensors: which of two equal ones is first may
    differ."""
    if isinstance(tree, list):
        return [_without_names(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1 and "$tensor" in tree:
        return "$tensor"
    return {key: _without_names(item) for key, item in tree.items()}


def check_tensor(name: str, read: Tensor, present: Tensor, where: str) -> None:
    """Raises `CheckpointMismatch` if a restored tensor is not what was read.

    Args:
        name: Its stored name.
        read: What was read.
        present: What its owner has now.
        where: The checkpoint, for the message.
    """
    if read.dtype != present.dtype or read.shape != present.shape:
        raise CheckpointMismatch(
            f"{where} has {name!r} as {read.dtype} of shape {list(read.shape)}, and it is "
            f"{present.dtype} of shape {list(present.shape)} once it is restored"
        )
    if read.data_ptr() == present.data_ptr() or same_bits(read, present.to(read.device)):
        return
    raise CheckpointMismatch(
        f"{where} has other values of {name!r} than there are once it is restored: what loads it "
        "changes it, so that training would not go on from where it was"
    )


def check_modules(
    buffers: Mapping[str, Tensor],
    extra: tuple[Mapping[str, Any], Mapping[str, Tensor]],
    present: BoundaryCopy,
    where: str,
) -> None:
    """Compares buffers and the extra state of modules with what was read.

    Args:
        buffers: The buffers that were read, by name.
        extra: The extra states that were read, encoded, and the tensors in them by full name.
        present: A copy that was taken after the restore.
        where: The checkpoint, for the message.

    Raises:
        CheckpointMismatch: One is another now.
    """
    for name, buffer in buffers.items():
        check_tensor(name, buffer, present.buffers.of(name), where)
    encoded, tensors = extra
    for name, value in encoded.items():
        if present.json.get("modules", {}).get(name) != value:
            raise CheckpointMismatch(
                f"{where} has {name!r}, and the module's get_extra_state returns something else "
                "once set_extra_state was given it"
            )
    for name in tensors:
        if name.startswith(EXTRA):
            check_tensor(name, tensors[name], present.tensors[name], where)
