"""Implements `zero3`: torch's FSDP2 partitions parameters, gradients and state by rows.

The optimizer works on plain tensors that share memory with this rank's rows, or on 32-bit masters
of rows that have 16 bits. FSDP2 does not take 0-dim parameters, which stay whole on every rank; so
they can share a group with the others.

With `cpu_offload` rows, gradients and optimizer state lie in host memory. 0-dim parameters stay on
the device, where no module would copy them to: the optimizer works on a copy on the CPU, so that a
group of its has one device.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.wire import EXACT
from elasticzero.parallel.base import NONE_STORED, Setting
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.fsdp.blocks import device_mesh, partition
from elasticzero.parallel.fsdp.kept_rows import tie_to_world, watch_rows
from elasticzero.parallel.fsdp.rows import bring_rows, division
from elasticzero.parallel.fsdp.uses import Uses
from elasticzero.parallel.gradients import GradientHook, check_frozen, check_hooks, refuse_hooks
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.mirror import Mirror, MirroredChunk, Mirrors
from elasticzero.parallel.optimizers.groups import Optimizers, open_optimizers
from elasticzero.parallel.optimizers.moves import Division, PieceState, lack_of_memory
from elasticzero.parallel.optimizers.pieces import ParameterPiece, PartitionedGroup
from elasticzero.parallel.optimizers.state import working_dtype
from elasticzero.parallel.parameter_changes import (
    OPTIONS_DIFFER,
    FixedMemory,
    OldMemory,
    buffer_overlap,
    overlap,
    replaced_sentence,
)
from elasticzero.parallel.partitioned import PartitionedOptimizer
from elasticzero.parallel.pieced import PiecedStrategy
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.rank_groups import same_number
from elasticzero.spans import Span, chunk, fsdp_rows
from elasticzero.state.digests import digests
from elasticzero.state.model import (
    MODEL,
    LoadTarget,
    LocalTensor,
    Partition,
    RankState,
    Spec,
    spec_of,
)
from elasticzero.torch_internals.fsdp import rows_of
from elasticzero.torch_internals.hooks import GradientHooks
from elasticzero.torch_internals.tensors import counts_of_changes

log = logging.getLogger(__name__)

CHANGED_ROWS = (
    "the script has changed parameters after the newest step, which mirrors of zero3 get with the "
    "next gradient: they are not handed over, and training goes back to a snapshot or checkpoint"
)

BLOCKS_DIFFER = (
    "ranks ran different blocks of the model in one step, or in another order; zero3 gathers each "
    "block's parameters on all ranks when it runs: run the same blocks on every rank, or use "
    f"strategy zero2. If they do: {OPTIONS_DIFFER}"
)


class FullyPartitioned(PiecedStrategy):
    """Implements `Strategy`."""

    tells_waits = False

    def __init__(self, setting: Setting) -> None:
        check_hooks(setting.named.parameters, "zero3")
        self._mesh, self._device = setting.place, setting.state_device
        self._computes_on = setting.device.type
        self.shards = self._mesh.shards
        self.residual, self.traffic = Residual(EXACT, self._mesh, None), Traffic()
        self._specs = {name: spec_of(p) for name, p in setting.named.parameters.items()}
        error = overlap(setting.named.parameters) or buffer_overlap(setting.model)
        if error is not None:
            raise error
        made = setting.factory(list(setting.named.parameters.values()))
        self.optimizers = open_optimizers(made, setting.named, "rows", self._device)
        ranks = setting.mirrors if setting.world_size > 1 else ()
        copies = {rank: self.optimizers.copies() for rank in ranks}
        self._pieced = PartitionedOptimizer(
            self.optimizers, self._specs, self._mesh, setting.agreement
        )
        self._old = OldMemory(setting.named.parameters)
        self._options_due = setting.one_release
        """The next comparison of values has the options too: later verifications compare them."""
        self._averages = not setting.one_release
        """FSDP2 divides sums by the number of ranks, by which losses are multiplied, as the release
        before does."""
        undivided = {p for p in setting.named.parameters.values() if not (p.dim() and p.numel())}
        (*blocks, root), before = partition(setting, undivided)
        self._root = cast(FSDPModule, root)
        self.model: nn.Module = setting.model
        self._parameters = _by_name(setting.model, self._specs)
        self._before = {n: p for n, p in before.items() if p() is not self._parameters[n]}
        """The parameters that FSDP2 has replaced, of which the script may have some."""
        watch_rows(self._parameters.values())
        self._frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad}
        """The parameters that were frozen at `prepare`."""
        for module in setting.model.modules():
            module.register_load_state_dict_pre_hook(self._load_rows)
        self._memory = FixedMemory(self._parameters)
        self._uses = Uses(setting.model, self._parameters, root, [*blocks, root], self._memory)
        self._pieced.place(self._own_pieces())
        mirrors = [self._mirror(rank, optimizers) for rank, optimizers in copies.items()]
        self._mirrors = Mirrors(setting, mirrors, self.optimizers)
        self._hooks = GradientHooks(self._parameters)
        self._stepped: Mapping[str, int] | None = None
        """Digests of this rank's rows as the newest step has left them; None: mirrors have what the
        script has changed since."""
        self._counts: list[int] | None = None
        """torch's counts of changes at that time; None: they have grown until a boundary since."""
        self._rows: Mapping[str, Tensor] | None = None
        """This rank's rows in the next world, once they were brought; None: they were not."""

    @property
    def _divisor(self) -> int:
        return self._mesh.world_size if self._averages else 1

    def _own_pieces(self) -> dict[str, ParameterPiece]:
        optimized = set(self._optimized())
        return {
            name: self._piece(name, parameter)
            for name, parameter in self._parameters.items()
            if name in optimized and _local(parameter).numel()
        }

    def _piece(self, name: str, parameter: nn.Parameter) -> ParameterPiece:
        shape = self._specs[name].shape
        rows = _local(parameter).view(-1)
        elements = rows.to(self._device, working_dtype(rows.dtype))
        return ParameterPiece(
            name,
            self._first(name),
            nn.Parameter(elements),
            shape,
            counts=bool(shape) or self._mesh.shard == 0,
            values=None if elements is rows else rows,
        )

    def _spans(self, rank: int) -> dict[str, Span]:
        """Returns the elements that a rank has of each parameter, where it has any."""
        ranks = self._mesh.world_size
        spans = {n: fsdp_rows(spec.shape, ranks, rank) for n, spec in self._specs.items()}
        return {name: span for name, span in spans.items() if span}

    def _mirror(self, rank: int, optimizers: Optimizers) -> Mirror:
        chunks: list[MirroredChunk] = []
        rows: dict[str, Tensor] = {}
        optimized = set(self._optimized())
        for name, span in self._spans(rank).items():
            rows[name] = _local(self._parameters[name]).new_empty(len(span))
            if name in optimized:
                dtype = working_dtype(rows[name].dtype)
                same = dtype == rows[name].dtype
                piece = ParameterPiece(
                    name,
                    span.start,
                    nn.Parameter(rows[name] if same else rows[name].to(dtype)),
                    self._specs[name].shape,
                    values=None if same else rows[name],
                )
                chunks.append(MirroredChunk([piece], [0], torch.zeros_like(piece.parameter.data)))
        return Mirror(rank, chunks, optimizers, self._specs, self._mesh, rows=rows)

    def _messages(self) -> list[Tensor]:
        """Returns what the mirror of this rank gets: all elements, then the gradients."""
        names = self._spans(self._mesh.rank)
        rows = [_local(self._parameters[name]).reshape(-1) for name in names]
        pieces = [
            self._pieced.pieces[name].parameter for name in names if name in self._pieced.pieces
        ]
        return rows + [p.grad if p.grad is not None else torch.zeros_like(p) for p in pieces]

    def expect(self, part: MicroBatch) -> None:
        """Lets each micro-batch be summed within a row, for else a rank would hold whole gradients,
        and only the last one over the rows."""
        if self._mesh.replicas > 1:
            self._root.set_requires_all_reduce(part.last)

    def backward(self, loss: Tensor, fraction: float, only: tuple[str, ...] | None = None) -> None:
        refuse_hooks(self._hooks.names(), "zero3")
        check_hooks(self._uses.named_leaves(), "zero3")
        names = None
        if self.optimizers.begin_turn(only, self._parameters) is not None:
            names = {name for name in self._parameters if self._takes_part(name)}
        self._uses.backward(loss * (fraction * self._divisor), counts=fraction != 0, only=names)
        self._refuse_replaced()
        if fraction != 0:
            self._pieced.losses.add(loss, fraction)

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyPartitioned:
        """Returns itself: a copy of a module has its hooks, and no second strategy."""
        return self

    def _refuse_replaced(self) -> None:
        """Raises `UserError` where a loss has reached parameters from before `prepare`."""
        for name, before in list(self._before.items()):
            if (parameter := before()) is None:
                del self._before[name]
            elif parameter.grad is not None:
                raise UserError(
                    f"the loss reaches parameter {name!r} as it was before session.prepare, of "
                    "which zero3 has given each rank its rows: take parameters from the model "
                    "after session.prepare, or use ddp, zero1 or zero2"
                )

    def finish(
        self, factor: float, max_norm: float | None, hook: GradientHook | None = None
    ) -> None:
        check_frozen(self._frozen)
        self._reduce_scalars()
        for name, piece in self._pieced.pieces.items():
            if not self._takes_part(name):
                continue
            gradient = self._parameters[name].grad
            if gradient is None:
                piece.parameter.grad = torch.zeros_like(piece.parameter)
            else:
                stepped = piece.parameter
                stepped.grad = _local(gradient).reshape(-1).to(stepped.device, stepped.dtype)
        self._pieced.complete(
            self._uses.names,
            factor,
            max_norm,
            hook=hook,
            number=self._number(),
            exchange=self._mirrors.exchange(self._messages),
        )
        self._mirrors.take(self._pieced, max_norm)
        self._pieced.prepare_step([list(self._pieced.pieces)])
        self._stepped = self._counts = None

    def _number(self) -> int:
        """Returns a number for what all ranks must do alike: the blocks that have run and, in the
        first step in which values are compared, the options by which they step."""
        if not (self._uses.compares and self._options_due):
            return self._uses.blocks
        self._options_due = False
        return (self._uses.blocks + self.optimizers.options_number()) % same_number.MODULUS

    def _takes_part(self, name: str) -> bool:
        """Tells whether the global batch gives this parameter a gradient."""
        optimizers = self.optimizers
        return optimizers.only is None or (
            name in optimizers.group_of and optimizers.has_gradients(name)
        )

    def _reduce_scalars(self) -> None:
        """Sums the gradients of the parameters that FSDP2 leaves alone."""
        scalars = [
            p
            for name, p in self._parameters.items()
            if not isinstance(p, DTensor)
            and p.requires_grad
            and p.numel()
            and self._takes_part(name)
        ]
        if not scalars or self._mesh.world_size == 1:
            return
        gradients = torch.stack(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in scalars]
        )
        dist.all_reduce(gradients, group=self._mesh.world_group.process_group)
        for parameter, gradient in zip(scalars, gradients.unbind(), strict=True):
            parameter.grad = gradient / self._divisor

    def _difference(self) -> str:
        return BLOCKS_DIFFER

    def _drop_whole(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._uses.clear()

    def _leaves(self, names: Collection[str]) -> list[Tensor]:
        return self._uses.leaves(names)

    def _renew(self) -> None:
        """Takes elements anew of which the optimizer has copies in the same format, so that what a
        script changes in them counts."""
        for piece in self._pieced.pieces.values():
            if piece.values is not None and piece.values.dtype == piece.parameter.dtype:
                piece.parameter.data.copy_(piece.values)

    def apply(self) -> None:
        self._uses.free()
        self._uses.compares = False
        self._mark_changed()
        self._renew()
        if not self._pieced.is_prepared:
            self._pieced.prepare_step([list(self._pieced.pieces)])
        self._pieced.step()
        self._mirrors.step()
        if self._mirrors.kept:
            self._stepped, self._counts = self._row_digests(), self._counts_now()
        self._drop_whole()

    @property
    def comparison_s(self) -> float:
        return self._uses.compared_s

    def changed_names(self) -> Collection[str]:
        return ()  # such a change is refused

    def take_changes(self) -> UserError | None:
        self._uses.free()  # so that the modules have the parameters of between two steps
        if self._stepped is not None and self._counts != self._counts_now():
            self._counts = None
        compared = self._old.difference() if self._uses.compares else None
        return self._memory.difference() or compared or self._pieced.emptied()

    def settle(self) -> None:
        pass

    def rank_state(self) -> RankState:
        held = {
            name: LocalTensor(_local(parameter), self._first(name))
            for name, parameter in self._parameters.items()
        }
        return self._state(held, self._pieced)

    def mirrored_states(self) -> dict[int, RankState]:
        states: dict[int, RankState] = {}
        # A change of rows that other ranks have is counted here too, where it changes no value.
        is_changed = self._counts is None or self._stepped != self._row_digests()
        if self._stepped is not None and is_changed:
            log.warning(CHANGED_ROWS)
            return states
        for mirror in self._mirrors.up_to_date():
            if mirror.live:
                spans = self._spans(mirror.rank)
                held = {n: LocalTensor(t, spans[n].start) for n, t in mirror.rows.items()}
                held |= {  # nobody sends these
                    name: LocalTensor(_local(parameter))
                    for name, parameter in self._parameters.items()
                    if not self._specs[name].numel
                }
                states[mirror.rank] = self._state(held, mirror.pieced)
        return states

    def _counts_now(self) -> list[int]:
        return counts_of_changes(self._parameters.values())

    def _row_digests(self) -> Mapping[str, int]:
        return digests({name: _local(parameter) for name, parameter in self._parameters.items()})

    def _state(self, held: Mapping[str, LocalTensor], pieced: PartitionedOptimizer) -> RankState:
        """Returns the state of the rank that has these elements of parameters, and pieces."""
        names = tuple(MODEL + name for name in self._parameters)
        share = RankState(
            specs={MODEL + name: spec for name, spec in self._specs.items()},
            partitions=[Partition(rule="fsdp_rows", names=names)],
            held={MODEL + name: local for name, local in held.items()},
            frozen={MODEL + name for name in self._frozen},
        )
        optimized = self._optimized()
        owners = (0,) * len(optimized)
        group = PartitionedGroup(rule="fsdp_rows", names=tuple(optimized), owners=owners)
        pieced.share(share, group)
        return share

    def replicas(self) -> dict[str, Tensor]:
        self._uses.compare()
        whole = {n: p for n, p in self._parameters.items() if not isinstance(p, DTensor)}
        return {MODEL + name: p.detach() for name, p in whole.items()} | self._pieced.norm()

    def _optimized(self) -> list[str]:
        """Returns the parameters that have optimizer state; one that the script freezes for a while
        keeps its own."""
        return [
            name
            for name in self.optimizers.group_of
            if name not in self._frozen and self._specs[name].numel
        ]

    def _load_rows(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Lets a module's `load_state_dict` take whole tensors: each rank takes its own rows."""
        for name, parameter in module.named_parameters(recurse=False):
            value = state.get(prefix + name)
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if value is None or not is_whole or not isinstance(parameter, DTensor):
                continue
            if metadata.get("assign_to_params_buffers"):
                raise UserError(replaced_sentence(prefix + name))
            if value.shape == parameter.shape:
                local = _local(parameter)
                rows = chunk(len(value), self._mesh.shards, self._mesh.shard)
                state[prefix + name] = DTensor.from_local(
                    value[rows.start : rows.stop].to(local.device, local.dtype),
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )

    def _first(self, name: str) -> int:
        """Returns the first of a parameter's elements that this rank holds."""
        shape = self._specs[name].shape
        if not shape:
            return 0
        width = self._specs[name].numel // shape[0] if shape[0] else 0
        return chunk(shape[0], self._mesh.shards, self._mesh.shard).start * width

    def bring_state(self, ranks: Sequence[int | None], plan: BucketPlan | None = None) -> None:
        self._uses.free()
        super().bring_state(ranks, plan)
        group = self._mesh.world_group.process_group
        self._rows = bring_rows(self._divided(), self._held, ranks, group)

    def _held(self, name: str) -> Tensor:
        return _local(self._parameters[name])

    def lay(self, mesh: Mesh, plan: BucketPlan) -> None:
        """Does nothing: rows do not follow from a plan."""

    def enter_world(self, mesh: Mesh, plan: BucketPlan | None = None) -> None:
        brought, rows, self._rows = self._take_brought(), self._rows, None
        assert rows is not None
        undivided = self._undivided_state()
        self._mesh, self.shards = mesh, mesh.shards
        self._connect(rows)
        self._uses.clear()  # a forward since the step counts for the next one, on those that had it
        self._pieced.enter_world(mesh, self._own_pieces(), {**brought, **undivided})
        if plan is not None:  # those that come in know nothing yet
            self._uses.compare()
            self._options_due = not self._averages

    def connect(self) -> None:
        self._connect(None)

    def _connect(self, rows: Mapping[str, Tensor] | None) -> None:
        """Has FSDP2 divide parameters over the ranks of the present world, by their groups.

        Args:
            rows: As for `Uses.divide_anew`.
        """
        self._uses.free()
        with device_mesh(self._mesh, self._computes_on) as mesh:
            self._uses.divide_anew(mesh, rows)
        watch_rows(self._parameters.values())

    @property
    def may_be_tied(self) -> bool:
        return True

    def tied_to_world(self, growth: float = 1.0) -> str:
        pieces = self._pieced.pieces.values()
        tensors = [t for piece in pieces for t in (piece.parameter, piece.values) if t is not None]
        held = self._pieced.nbytes + sum(self._held(name).nbytes for name in self._divided())
        why = tie_to_world(self._uses.groups, tensors)
        return why or lack_of_memory(held, growth, self._device)

    def _divided(self) -> dict[str, Spec]:
        """Returns the parameters that have rows."""
        return {name: spec for name, spec in self._specs.items() if spec.shape and spec.numel}

    def _division(self, shards: int, plan: BucketPlan | None = None) -> Division:
        divided, optimized = self._divided(), self._optimized()
        return division({name: divided[name] for name in optimized if name in divided}, shards)

    def _undivided_state(self) -> dict[str, PieceState]:
        """Returns the state of the pieces that every rank has whole."""
        names = self._pieced.pieces.keys() - self._divided().keys()
        return {name: self._pieced.piece_state(name) for name in names}

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        self._uses.free()
        slots: list[LoadTarget] = []
        for name, parameter in self._parameters.items():
            local = _local(parameter)
            span = Span(self._first(name), self._first(name) + local.numel())
            slots.append(LoadTarget(MODEL + name, span, local))
        with (
            self._pieced.filling(stored, small) as piece_targets,
            self._mirrors.filling(stored, small) as copies,
        ):
            yield [*slots, *piece_targets, *copies]
        self._mirrors.restored()


def _by_name(model: nn.Module, names: Mapping[str, Spec]) -> dict[str, nn.Parameter]:
    """Returns the parameters as FSDP2 has made them; it keeps their names."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in names}


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's elements, which share memory."""
    return rows_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
