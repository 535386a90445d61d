"""Gives optimizers their first state from the files that have the model's first values.

Rank 0 reads, where training begins, and sends each tensor to the others, which keep what is theirs.
State that the files have by number gets names by the order of the script's own groups.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from elasticzero.checkpoint.convert.import_plan import ImportOptions
from elasticzero.checkpoint.format.dtypes import torch_dtype
from elasticzero.checkpoint.rewrite.reshard import ForeignCheckpoint
from elasticzero.checkpoint.rewrite.sources import TensorSource
from elasticzero.checkpoint.storage.base import as_storage_error
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.errors import CheckpointDamaged, CheckpointMismatch, UserError
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.nested import tensor_names
from elasticzero.parallel import Strategy
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.snapshots.pretrained.model import BUFFER_BYTES, Opened, Pretrained
from elasticzero.snapshots.restore import warn_of_lacking_state
from elasticzero.spans import Span
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.model import MODEL, OPTIMIZER, LoadTarget, Spec

log = logging.getLogger(__name__)

_CALL = "session.prepare(…, load=…, load_optimizer=True)"


class PretrainedOptimizer:
    """Has the first state of optimizers, from `session.prepare` to `session.restore`."""

    def __init__(
        self,
        stored: Pretrained,
        optimizers: Optimizers,
        link: AgentClient,
        groups: ProcessGroups | None,
    ) -> None:
        """Finds the state in the files, if this rank reads them.

        Args:
            stored: The files, and the model's tensors in them.
            optimizers: The script's optimizers.
            link: The client of the agent.
            groups: The process groups; None for one process alone.

        Raises:
            UserError: The files have no state of an optimizer, or that of another one.
        """
        self._link, self._groups = link, groups
        self._source: TensorSource | None = None
        self._stored_names: dict[str, str] = {}
        """The full name in the files of each tensor, by its name here."""
        self._description: dict[str, Any] | None = None
        """The tensors' dtypes and shapes, and the groups' options, as JSON; None: rank 0 has it."""
        if stored.opened is None:
            return
        try:
            foreign = _named(stored.opened, optimizers)
            names = _names_here(stored.opened, foreign)
            options = _options_here(stored.opened, foreign)
        except CheckpointDamaged as error:  # another try would find the same
            raise UserError(f"{_CALL}: {error}") from None
        except UserError as error:
            raise type(error)(f"{_CALL}: {error}") from None
        for note in foreign.notes:
            log.warning("session.prepare(…, load=…): %s", note)
        self._stored_names = names | {name: name for name in tensor_names(options)}
        self._source = foreign.open_source(BUFFER_BYTES)
        specs = {name: foreign.specs[full] for name, full in self._stored_names.items()}
        self._description = {
            "tensors": {name: [spec.dtype, *spec.shape] for name, spec in specs.items()},
            "groups": options,
        }

    def load(self, strategy: Strategy, auxiliary: AuxiliaryState) -> None:
        """Gives the optimizers their state and options; all ranks call this together.

        Args:
            strategy: The model and its optimizers, whose parameters have their values.
            auxiliary: The small state, which has the groups' options.

        Raises:
            CheckpointMismatch: It is the state of another optimizer.
        """
        description = self._shared_description()
        specs = {
            name: Spec(dtype=torch_dtype(dtype), shape=tuple(shape))
            for name, (dtype, *shape) in description["tensors"].items()
        }
        options = description["groups"]
        extra = {
            name: torch.empty(specs[name].shape, dtype=specs[name].dtype)
            for name in tensor_names(options)
        }
        of_optimizers = {name: spec for name, spec in specs.items() if name not in extra}
        try:
            with strategy.filling(of_optimizers) as slots:
                of_options = [LoadTarget(n, Span(0, t.numel()), t) for n, t in extra.items()]
                self._fill(specs, [*slots, *of_options])
        except CheckpointMismatch as error:
            text = str(error).replace("the checkpoint was written", "the files were written")
            raise CheckpointMismatch(f"{_CALL}: {text}") from None
        auxiliary.put_options(options, extra)
        if self._source is not None:
            warn_of_lacking_state(strategy, specs, {}, "the files for load=")

    def _shared_description(self) -> dict[str, Any]:
        """Returns rank 0's description."""
        if self._groups is None or self._groups.rank_info.world_size == 1:
            assert self._description is not None
            return self._description
        data = json.dumps(self._description).encode() if self._description is not None else b""
        size = torch.tensor([len(data)], device=self._groups.device)
        self._groups.broadcast({"size": size})
        held = bytearray(data or bytes(int(size.item())))
        sent = torch.frombuffer(held, dtype=torch.uint8).to(self._groups.device)
        shared: dict[str, Any] = json.loads(bytes(self._groups.broadcast_bytes(sent).tolist()))
        return shared

    def _fill(self, specs: Mapping[str, Spec], targets: Sequence[LoadTarget]) -> None:
        """Fills targets with the tensors of the files, one part after the other.

        Args:
            specs: The tensors, in an order that is the same on all ranks.
            targets: Where they go on this rank; those of other tensors are left as they are.
        """
        targets_of: dict[str, list[LoadTarget]] = {}
        for target in targets:
            targets_of.setdefault(target.name, []).append(target)
        for name, spec in specs.items():
            for span, part in self._parts(name, spec):
                for target in targets_of.get(name, ()):
                    low, high = max(span.start, target.span.start), min(span.stop, target.span.stop)
                    if low < high:
                        first = target.span.start
                        into = target.tensor.view(-1)[low - first : high - first]
                        into.copy_(part[low - span.start : high - span.start])

    def _parts(self, name: str, spec: Spec) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yields (span, elements) of a tensor, each valid until the next is requested."""
        width = spec.dtype.itemsize
        most = max(1, BUFFER_BYTES // width)
        for start in range(0, spec.numel, most):
            span = Span(start, min(start + most, spec.numel))
            data = torch.empty(len(span) * width, dtype=torch.uint8)
            if self._source is not None:
                self._read(self._source, name, span, data)
            if self._groups is not None and self._groups.rank_info.world_size > 1:
                sent = data.to(self._groups.device)
                data = self._groups.broadcast_bytes(sent).cpu()
            yield span, data.view(spec.dtype)

    def _read(self, source: TensorSource, name: str, span: Span, data: torch.Tensor) -> None:
        full, done = self._stored_names[name], 0
        with (
            self._link.busy("reading the optimizer's first state"),
            as_storage_error(f"cannot read {full}", or_missing=True),
        ):
            for chunk in source.chunks(full, span):
                part = torch.frombuffer(chunk, dtype=torch.uint8)
                data[done : done + part.numel()] = part
                done += part.numel()


def _named(opened: Opened, optimizers: Optimizers) -> ForeignCheckpoint:
    """Returns the files with names for the parameters of optimizers.

    Args:
        opened: The files.
        optimizers: The script's, whose groups have the parameters in their order.

    Raises:
        UserError: The files have no optimizer, or other groups.
    """
    groups = tuple(
        tuple(opened.stored[name].removeprefix(MODEL) for name in group.names)
        for group in optimizers.groups
    )
    options: ImportOptions = replace(opened.options, groups=groups)
    foreign = opened.plan(options).foreign
    has_state = any(name.startswith(OPTIMIZER) for name in foreign.specs)
    if not has_state and not foreign.state.get("groups"):
        raise UserError(
            "the files have no optimizer: leave load_optimizer out, or name the file or directory "
            "in which the program has saved both"
        )
    return foreign


def _names_here(opened: Opened, foreign: ForeignCheckpoint) -> dict[str, str]:
    """Returns the full name in the files of each entry of optimizers, by its name here.

    Raises `UserError` for a parameter that the model does not have.
    """
    model_names = _parameters_here(opened)
    names = {}
    for full in foreign.specs:
        if full.startswith(OPTIMIZER):
            parameter, _, key = full.removeprefix(OPTIMIZER).rpartition("/")
            if parameter not in model_names:
                raise UserError(
                    f"the files have state of an optimizer for {parameter!r}, which is no "
                    "parameter of the model"
                )
            names[f"{OPTIMIZER}{model_names[parameter]}/{key}"] = full
    return names


def _options_here(opened: Opened, foreign: ForeignCheckpoint) -> list[dict[str, Any]]:
    """Returns the files' groups with the names that parameters have here."""
    model_names = _parameters_here(opened)
    return [
        {"names": [model_names.get(n, n) for n in group["names"]], "options": group["options"]}
        for group in foreign.state.get("groups", ())
    ]


def _parameters_here(opened: Opened) -> dict[str, str]:
    """Returns the model's name of each tensor, by each of its names in the files."""
    model_names = {full.removeprefix(MODEL): name for name, full in opened.stored.items()}
    for alias, kept in opened.foreign.state.get("aliases", {}).items():
        if kept in model_names:
            model_names.setdefault(alias, model_names[kept])
    return model_names
