"""Strategies `zero1` and `zero2` under `--deterministic`: each rank steps whole parameters.

The parameters are whole on all ranks. A rank has the optimizer's state of those that it owns, sums
their gradients by the fixed tree, steps them, and sends them to the others of its row. Both
strategies are the same here, because the partial sums of a rank are whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.wire import EXACT
from elasticzero.parallel.base import NONE_STORED, Setting
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.fixed_order.gradients import GradientTree, spread
from elasticzero.parallel.fixed_order.layout import OwnedParameters, owners_of
from elasticzero.parallel.gradients import GradientHook, check_frozen, check_hooks, refuse_hooks
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.groups import Optimizers, open_optimizers
from elasticzero.parallel.optimizers.moves import Division, Place
from elasticzero.parallel.optimizers.pieces import ParameterPiece, PartitionedGroup
from elasticzero.parallel.optimizers.state import working_dtype
from elasticzero.parallel.parameter_changes import ForwardChanges, ParameterMemory, overlap
from elasticzero.parallel.partitioned import PartitionedOptimizer
from elasticzero.parallel.pieced import PiecedStrategy
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.spans import Span
from elasticzero.state.model import (
    MODEL,
    LoadTarget,
    LocalTensor,
    Partition,
    RankState,
    Spec,
    spec_of,
)
from elasticzero.torch_internals.hooks import GradientHooks


class WholeParameters(PiecedStrategy):
    """Implements `Strategy`."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.model
        check_hooks(setting.named.parameters, "zero1 and zero2")
        mesh = setting.place
        self.residual, self.traffic = Residual(EXACT, mesh, None), Traffic()
        self._parameters = setting.named.parameters
        specs = {name: spec_of(p) for name, p in self._parameters.items()}
        made = setting.factory(list(self._parameters.values()))
        self.optimizers = open_optimizers(made, setting.named, "elements")
        self._pieced = PartitionedOptimizer(
            self.optimizers, specs, mesh, setting.agreement, fixed_order=True
        )
        trained = {
            name: parameter
            for name, parameter in self._parameters.items()
            if name in self.optimizers.group_of and parameter.requires_grad and parameter.numel()
        }
        if (error := overlap(trained)) is not None:
            raise error
        for parameter in trained.values():
            parameter.data = parameter.data.contiguous()
        self._trained = trained
        self._deal(mesh)
        self._pieced.place(self._own_pieces())
        self._rest = {n: p for n, p in self._parameters.items() if n not in trained}
        self._frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad}
        options = self.optimizers.options_number if setting.one_release else int
        self._changes = ForwardChanges(self._parameters, mesh.world_size, options)
        self._hooks = GradientHooks(self._parameters)
        self._part: MicroBatch | None = None
        self._memory = ParameterMemory(trained, may_overlap=False)
        self._lost: RuntimeError | None = None
        """Why other ranks' parameters have not come after the newest step; None: they have."""

    def _deal(self, mesh: Mesh) -> None:
        """Deals the parameters to the ranks of a row."""
        self._mesh = mesh
        self.shards = mesh.shards
        kinds = {name: tuple(sorted(self.optimizers.schema(name))) for name in self._trained}
        self._tree = GradientTree(self._trained, kinds, mesh)
        self._messages = [m for messages in self._tree.rounds for m in messages]
        self._owned = [m for m in self._messages if m.owner == mesh.shard]

    def _own_pieces(self) -> dict[str, ParameterPiece]:
        return {p.name: p for m in self._owned for p in _pieces(m, self.optimizers)}

    def _division(self, shards: int, plan: BucketPlan | None = None) -> Division:
        places: dict[str, Place] = {}
        for name, owner in owners_of(self._trained, shards).items():
            numel = self._trained[name].numel()
            places[name] = Place(0, numel, [0] * (owner + 1) + [numel] * (shards - owner))
        return Division(places)

    def enter_world(self, mesh: Mesh, plan: BucketPlan | None = None) -> None:
        """Deals the parameters to the ranks of another world."""
        brought = self._take_brought()
        self._deal(mesh)
        self._pieced.enter_world(mesh, self._own_pieces(), brought)
        self._changes.enter_world(mesh.world_size, anew=plan is not None)

    def expect(self, part: MicroBatch) -> None:
        self.settle()
        self._changes.begin()
        self._part = part

    def backward(self, loss: Tensor, fraction: float, only: tuple[str, ...] | None = None) -> None:
        assert self._part is not None
        refuse_hooks(self._hooks.names(), "zero1 and zero2")
        if fraction != 0:
            self._pieced.losses.add(loss, fraction)
        inputs = self.optimizers.begin_turn(only, self._parameters)
        self._tree.backward(loss, fraction, self._part, inputs)

    def finish(
        self, factor: float, max_norm: float | None, hook: GradientHook | None = None
    ) -> None:
        check_frozen(self._frozen)
        for message, flat in self._tree.reduce().items():
            for name, place in zip(message.names, message.unpack(flat), strict=True):
                piece = self._pieced.pieces[name].parameter
                piece.grad = place.view(piece.shape).to(piece.dtype)
        used, number = self._tree.used, self._changes.end() or 0
        self._pieced.complete(used, factor, max_norm, hook=hook, number=number)

    def _difference(self) -> str:
        return self._changes.sentence()

    def _drop_whole(self) -> None:
        self._tree.clear()
        for parameter in self._rest.values():
            parameter.grad = None

    def apply(self) -> None:
        self._drop_whole()
        self._mark_changed()
        self._pieced.prepare_step([list(self._pieced.pieces)])
        self._pieced.step()
        if self.shards > 1:
            try:
                for messages in self._tree.rounds:
                    self._spread(messages)
            except RuntimeError as error:  # the step is applied: what this rank owns is of it
                self._lost = error

    def _spread(self, messages: list[OwnedParameters]) -> None:
        """Gives all ranks the parameters of these messages, as their owners have stepped them."""
        shard = self._mesh.shard
        flats = {m: m.pack(m.parameters) if m.owner == shard else m.empty() for m in messages}
        spread(flats, self._mesh)
        for message, flat in flats.items():
            if message.owner != shard:
                data = [parameter.data for parameter in message.parameters]
                torch._foreach_copy_(data, message.unpack(flat))

    def take_changes(self) -> UserError | None:
        if (error := self._memory.difference() or self._pieced.emptied()) is not None:
            return error
        for message in self._owned:
            for name, parameter in zip(message.names, message.parameters, strict=True):
                piece = self._pieced.pieces[name]
                held = piece.parameter if piece.values is None else piece.values
                if held.data_ptr() == parameter.data_ptr() and parameter.is_contiguous():
                    continue
                parameter.data = parameter.data.contiguous()
                held.data = parameter.data.view(held.shape)
        return None

    def settle(self) -> None:
        if self._lost is not None:
            raise self._lost

    def rank_state(self) -> RankState:
        frozen = {MODEL + n for n, p in self._parameters.items() if not p.requires_grad}
        share = RankState(frozen=frozen)
        for message in self._messages:
            names = tuple(MODEL + name for name in message.names)
            owners = (message.owner,) * len(names)
            for name, parameter in zip(names, message.parameters, strict=True):
                share.specs[name] = spec_of(parameter)
                share.held[name] = LocalTensor(parameter.detach())
            share.partitions.append(Partition(rule="whole", names=names, ranks=owners))
            group = PartitionedGroup(rule="whole", names=tuple(message.names), owners=owners)
            self._pieced.share(share, group)
        share.add_even({MODEL + name: p.detach() for name, p in self._rest.items()})
        return share

    def mirrored_states(self) -> dict[int, RankState]:
        return {}

    def replicas(self) -> dict[str, Tensor]:
        self._changes.request()
        whole = {MODEL + name: p.detach() for name, p in self._parameters.items()}
        return whole | self._pieced.norm()

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        slots: list[LoadTarget] = []
        for name, parameter in self._parameters.items():
            slots.append(LoadTarget(MODEL + name, Span(0, parameter.numel()), parameter.data))
        with self._pieced.filling(stored, small) as targets:
            yield [*slots, *targets]


def _pieces(message: OwnedParameters, optimizers: Optimizers) -> Iterator[ParameterPiece]:
    """Yields whole parameters as pieces, which share memory with them or are their masters."""
    for name, parameter in zip(message.names, message.parameters, strict=True):
        in_shape = optimizers.group_of[name].nature.works_on == "parameters"
        seen = parameter.data if in_shape else parameter.data.view(-1)
        dtype = working_dtype(parameter.dtype)
        yield ParameterPiece(
            name,
            0,
            nn.Parameter(seen.to(dtype)),
            tuple(parameter.shape),
            values=None if dtype == seen.dtype else seen,
        )
