"""Strategies `zero1` and `zero2`: parameters whole, optimizer state partitioned in flat buckets.

An optimizer works on this rank's pieces of the parameters in its chunk of each bucket, or on the
whole parameters that are dealt to this rank where it needs these. Where a parameter has 16 bits it
works on 32-bit masters. A queue of buckets sums the gradients while a backward runs; `gather`
brings the parameters up to date while the script goes on to its next forward (Rajbhandari et al.,
"ZeRO", 2020).

A parameter that no rank has used in a global batch has no gradient, and its pieces stay as they
are; where one rank has used it, zeros stand for the gradients of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.wire import EXACT
from elasticzero.parallel.base import NONE_STORED, Setting
from elasticzero.parallel.buckets.gather import ParameterGather, stepped_together
from elasticzero.parallel.buckets.layout import DealtNames, FlatBucket, deal
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.buckets.queue import BucketQueue
from elasticzero.parallel.buckets.reduce_scatter import ReduceScatter
from elasticzero.parallel.gradients import GradientHook, check_frozen, check_hooks, refuse_hooks
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.mirror import Mirror, MirroredChunk, Mirrors
from elasticzero.parallel.optimizers.groups import open_optimizers
from elasticzero.parallel.optimizers.moves import Division, Place
from elasticzero.parallel.optimizers.pieces import MasteredValues, ParameterPiece
from elasticzero.parallel.optimizers.state import working_dtype
from elasticzero.parallel.parameter_changes import (
    ForwardChanges,
    ParameterMemory,
    kind_difference,
    memory_of,
    overlap,
    shared_outside,
)
from elasticzero.parallel.partitioned import PartitionedOptimizer
from elasticzero.parallel.pieced import PiecedStrategy
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.rank_groups.group import RankGroup
from elasticzero.spans import Span
from elasticzero.state.model import MODEL, LoadTarget, LocalTensor, RankState, Spec, spec_of
from elasticzero.torch_internals.hooks import GradientHooks
from elasticzero.torch_internals.tensors import without_torch_functions


class FlatBuckets(PiecedStrategy):
    """Implements `Strategy`."""

    def __init__(self, setting: Setting, stage: int) -> None:
        self.model = setting.model
        self._name = f"zero{stage}"
        check_hooks(setting.named.parameters, self._name)
        mesh = setting.place
        self._parameters = setting.named.parameters
        specs = {name: spec_of(p) for name, p in self._parameters.items()}
        made = setting.factory(list(self._parameters.values()))
        self.optimizers = open_optimizers(made, setting.named, "elements")
        ranks = setting.mirrors if setting.world_size > 1 else ()
        copies = {rank: self.optimizers.copies() for rank in ranks}
        self._pieced = PartitionedOptimizer(self.optimizers, specs, mesh, setting.agreement)
        trained = {
            name: parameter
            for name, parameter in self._parameters.items()
            if name in self.optimizers.group_of and parameter.requires_grad and parameter.numel()
        }
        if (error := overlap(trained)) is not None:
            raise error
        self._trained, self._stage, self._plan = trained, stage, setting.bucket_plan
        self._wire = EXACT if setting.alone else setting.options.wire
        self.residual = Residual(self._wire, mesh, _replicas(mesh))
        self.traffic = Traffic()
        self._lay(mesh, shared_outside((*setting.model.parameters(), *setting.model.buffers())))
        self._pieced.place(self._own_pieces())
        self._rest = {n: p for n, p in self._parameters.items() if n not in trained}
        self._frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad}
        self._gather = ParameterGather(setting.model, self._buckets, mesh, self.traffic)
        mirrors = [
            Mirror(rank, [self._mirrored(b, rank) for b in self._buckets], optimizers, specs, mesh)
            for rank, optimizers in copies.items()
        ]
        self._mirrors = Mirrors(setting, mirrors, self.optimizers)
        self._changes = ForwardChanges(
            self._parameters, setting.ranks_of_one_release, self.optimizers.options_number
        )
        self._hooks = GradientHooks(self._parameters)
        self._part: MicroBatch | None = None
        self._rest_memory = ParameterMemory(self._rest)

    def _lay(self, mesh: Mesh, shared: Collection[int]) -> None:
        """Lays the parameters in buckets that the ranks of a row divide.

        Args:
            mesh: The rows of ranks.
            shared: Addresses of memory that the script has other tensors of.
        """
        self.shards = mesh.shards
        self._buckets = [
            FlatBucket(
                contents,
                [self._trained[name] for name in contents.names],
                mesh.shard,
                mesh.shards,
                shared=shared,
            )
            for contents in self._dealt(mesh.shards, self._plan)
        ]
        self._forward_order = list(reversed(self._buckets))
        self._parts: list[Sequence[FlatBucket]] = []
        """The buckets that the newest step has stepped together."""
        self._pieced.chunks = [
            MasteredValues(b.own_C, b.master_C) for b in self._buckets if b.master_C is not None
        ]
        self._scatter = ReduceScatter(
            self._buckets, self._stage, mesh, self._wire, self.residual, self.traffic
        )
        self._queue = BucketQueue(self._scatter)

    def _dealt(self, shards: int, plan: BucketPlan) -> list[DealtNames]:
        order = plan.filling_order(list(self._parameters))
        trained = {name: self._trained[name] for name in order if name in self._trained}
        group_of = self.optimizers.group_of
        return list(deal(trained, group_of, shards, plan.size_bytes, self._wire))

    def _own_pieces(self) -> dict[str, ParameterPiece]:
        return {piece.name: piece for bucket in self._buckets for piece in bucket.pieces()}

    def _division(self, shards: int, plan: BucketPlan | None = None) -> Division:
        places: dict[str, Place] = {}
        for contents in self._dealt(shards, plan or self._plan):
            numels = [self._trained[name].numel() for name in contents.names]
            places |= contents.places(numels, shards)
        return Division(places)

    def enter_world(self, mesh: Mesh, plan: BucketPlan | None = None) -> None:
        """Lays the parameters, which are up to date, in the buckets of another world."""
        brought, self._plan = self._take_brought(), plan or self._plan
        self._queue.close()
        shared: set[int] = set()
        for bucket in self._buckets:
            shared |= {memory_of(bucket.parameters[index]) for index in bucket.outside}
            if bucket.has_readers():
                shared.add(memory_of(bucket.flat_E))
        self.residual.enter_world(mesh, _replicas(mesh))
        self._lay(mesh, shared)
        self._gather.enter_world(self._buckets, mesh)
        self._pieced.enter_world(mesh, self._own_pieces(), brought)
        self._changes.enter_world(mesh.world_size, anew=plan is not None)

    def expect(self, part: MicroBatch) -> None:
        self._changes.begin()
        self._part = part

    def backward(self, loss: Tensor, fraction: float, only: tuple[str, ...] | None = None) -> None:
        assert self._part is not None
        self._gather.finish()  # of what no module has needed
        refuse_hooks(self._hooks.names(), self._name)
        if fraction != 0:
            self._pieced.losses.add(loss, fraction)
        inputs = self.optimizers.begin_turn(only, self._parameters)
        self._queue.backward(loss, fraction, self._part, inputs)

    def finish(
        self, factor: float, max_norm: float | None, hook: GradientHook | None = None
    ) -> None:
        check_frozen(self._frozen)
        reduced: list[Tensor] = []
        if hook is None:  # else it may change them
            self._pieced.begin_count()
        for bucket, reduced_C in zip(self._buckets, self._scatter.reduced(), strict=True):
            reduced.append(self._give_gradients(bucket, reduced_C))
            self._pieced.count(bucket.names)
        self._pieced.complete(
            self._queue.used,
            factor,
            max_norm,
            hook=hook,
            number=self._changes.end() or 0,
            exchange=self._mirrors.exchange(lambda: reduced),
        )
        self._mirrors.take(self._pieced, max_norm)
        self._prepare_step()

    def _prepare_step(self) -> None:
        """Does what a step needs but the gradients' values."""
        has_gradients = self.optimizers.has_gradients
        order = [bucket for bucket in self._forward_order if has_gradients(bucket.names[0])]
        self._parts = stepped_together(order)
        self._pieced.prepare_step([[n for b in part for n in b.names] for part in self._parts])
        self._drop_whole()

    def _give_gradients(self, bucket: FlatBucket, reduced_C: Tensor) -> Tensor:
        """Gives the pieces of a bucket their gradients, which are parts of the returned chunk; none
        where the global batch is for other optimizers."""
        start = bucket.bounds[bucket.rank]
        gradient_C = reduced_C.to(working_dtype(reduced_C.dtype))
        if not self.optimizers.has_gradients(bucket.names[0]):
            return gradient_C
        for name, offset in zip(bucket.names, bucket.offsets, strict=True):
            if (piece := self._pieced.pieces.get(name)) is not None:
                first = offset + piece.start - start
                part = gradient_C[first : first + piece.parameter.numel()]
                piece.parameter.grad = part.view_as(piece.parameter)
        return gradient_C

    def _mirrored(self, bucket: FlatBucket, rank: int) -> MirroredChunk:
        values_C = bucket.part(bucket.flat_E, rank).clone()
        master_C = None if bucket.master_C is None else values_C.to(bucket.master_C.dtype)
        pieces = list(bucket.pieces_of(rank, values_C, master_C))

        def renew() -> None:
            if self._gather.up_to_date(bucket):
                values_C.copy_(bucket.part(bucket.flat_E, rank))

        return MirroredChunk(
            pieces=pieces,
            places=[bucket.place(piece, rank) for piece in pieces],
            gradient_C=torch.zeros_like(values_C if master_C is None else master_C),
            renew=renew,
        )

    def _difference(self) -> str:
        return self._changes.sentence()

    def _drop_whole(self) -> None:
        self._queue.clear()
        for parameter in self._rest.values():
            parameter.grad = None

    def apply(self) -> None:
        if not self._pieced.is_prepared:
            self._prepare_step()
        self._mark_changed()
        self._pieced.step(self._gather_part)
        self._mirrors.step()
        self.residual.keep(self._trained.keys() - self._pieced.outcome.used)
        self.residual.end_step(applied=True)
        self._gather.leave_pending()
        for bucket in self._buckets:
            bucket.give_out()

    def _gather_part(self, index: int) -> None:
        for bucket in self._parts[index]:
            self._gather.begin(bucket)

    def take_changes(self) -> UserError | None:
        if (error := self._pieced.emptied()) is not None:
            return error
        # A parameter that was moved had been waited for.
        moved = self._moved()
        for bucket, indices in moved.items():
            for index in indices:
                now, place = bucket.parameters[index], bucket.places[index]
                if (error := kind_difference(bucket.names[index], now, place)) is not None:
                    return error
        if (error := self._overlap(moved)) is not None:
            return error
        if moved and self._leave_memory(moved):
            moved = self._moved()
        if moved:
            parameters = [b.parameters[i] for b, indices in moved.items() for i in indices]
            flats = {memory_of(bucket.flat_E) for bucket in self._buckets}
            shared = shared_outside(parameters)
            # Copies first: two parameters may have each other's places.
            values = {b: {i: _outside(b.parameters[i], flats) for i in moved[b]} for b in moved}
            for bucket in moved:
                bucket.take_in(values[bucket], shared, flats)
        return self._rest_memory.difference()

    def _moved(self) -> dict[FlatBucket, list[int]]:
        """Returns the parameters that do not lie in their places, by their index, by bucket."""
        return {bucket: indices for bucket in self._buckets if (indices := bucket.moved())}

    def _leave_memory(self, moved: Mapping[FlatBucket, Sequence[int]]) -> bool:
        """Has buckets that a parameter has just left leave their memory to tensors of the script's
        that share it; returns whether one did."""
        with without_torch_functions():
            inside = Counter(memory_of(p) for b in self._buckets for p in b.parameters)
        left = [
            bucket
            for bucket, indices in moved.items()
            if set(indices) - set(bucket.outside)
            and bucket.has_readers(inside[memory_of(bucket.flat_E)])
        ]
        for bucket in left:
            bucket.leave_memory()
        return bool(left)

    def _overlap(self, moved: Mapping[FlatBucket, Sequence[int]]) -> UserError | None:
        """Returns the error for a parameter that was moved to where another one lies."""
        memories = {memory_of(bucket.flat_E) for bucket in self._buckets}
        parameters = {b.names[i]: b.parameters[i] for b, indices in moved.items() for i in indices}
        if any(memory_of(parameter) in memories for parameter in parameters.values()):
            self._gather.finish()
            parameters = {name: self._parameters[name] for b in self._buckets for name in b.names}
        return overlap(parameters)

    def settle(self) -> None:
        self._gather.finish()

    def rank_state(self) -> RankState:
        share = self._state(self._pieced)
        share.residual, share.residual_sum = self.residual.present(), self.residual.summed
        share.factors = self.residual.factors()
        return share

    @contextmanager
    def changing(self) -> Iterator[RankState]:
        with super().changing() as state:
            yield state
        for bucket in self._buckets:
            bucket.give_out()

    def mirrored_states(self) -> dict[int, RankState]:
        states = {}
        for mirror in self._mirrors.up_to_date():
            mirror.renew()
            states[mirror.rank] = self._state(mirror.pieced)
            states[mirror.rank].residual = self.residual.none()
            states[mirror.rank].factors = self.residual.factors()
            for piece in mirror.pieced.pieces.values():
                values = piece.parameter.detach() if piece.values is None else piece.values
                states[mirror.rank].held[MODEL + piece.name] = LocalTensor(values, piece.start)
        return states

    def _state(self, pieced: PartitionedOptimizer) -> RankState:
        """Returns the state of the rank that these pieces are of."""
        # Nothing here asks a bucket's parameter, whose every use waits while it is gathered: what
        # this rank writes is up to date already, and a peer that is gone would fail the wait.
        share = RankState(frozen={MODEL + name for name in self._frozen})
        for bucket in self._buckets:
            names = tuple(MODEL + name for name in bucket.names)
            for name, view in zip(names, bucket.places, strict=True):
                share.specs[name] = spec_of(view)
                share.held[name] = LocalTensor(view)
            group = bucket.group()
            share.partitions.append(group.partition(names))
            pieced.share(share, group)
        share.add_even({MODEL + name: p.detach() for name, p in self._rest.items()})
        return share

    def replicas(self) -> dict[str, Tensor]:
        self.settle()
        self._changes.request()
        whole = {MODEL + name: p.detach() for name, p in self._parameters.items()}
        return whole | self._pieced.norm()

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        self.settle()
        if (error := self.take_changes()) is not None:
            raise error
        places = {n: p.data for n, p in self._rest.items()}
        places |= {n: t for b in self._buckets for n, t in zip(b.names, b.places, strict=True)}
        slots = [
            LoadTarget(MODEL + name, Span(0, places[name].numel()), places[name])
            for name in self._parameters
        ]
        with (
            self._pieced.filling(stored, small) as piece_targets,
            self._mirrors.filling(stored, small) as copies,
        ):
            yield [*slots, *piece_targets, *copies]
        self._mirrors.restored()
        for bucket in self._buckets:
            bucket.give_out()


def _replicas(mesh: Mesh) -> RankGroup | None:
    """Returns the ranks that hold the same part of the state as this one, where there are any."""
    return mesh.replica_group if mesh.replicas > 1 else None


def _outside(parameter: Tensor, flats: Collection[int]) -> Tensor:
    """Returns the values of a parameter, in memory that is no bucket's."""
    return parameter.data.clone() if memory_of(parameter) in flats else parameter.data
