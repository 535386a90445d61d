"""Runs the user's optimizer on pieces of parameters, where a strategy partitions its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticzero.errors import CheckpointMismatch, UserError, is_peer_error
from elasticzero.parallel.base import GRADIENT_NORM, NONE_STORED, Agreement
from elasticzero.parallel.finite import (
    LossCheck,
    SquaredNorm,
    StepNumbers,
    Suspects,
    clipping,
    fixed_order_sum,
    norm_of,
    not_finite,
    squared_norm,
    squares_of,
)
from elasticzero.parallel.gradients import GradientHook
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.divided_step import DividedStep
from elasticzero.parallel.optimizers.groups import Optimizers
from elasticzero.parallel.optimizers.moves import (
    CPU,
    Division,
    PieceState,
    bring,
    plan,
)
from elasticzero.parallel.optimizers.piece_entries import (
    KeptEntry,
    kept_entries,
    master_entry,
    stored_value,
)
from elasticzero.parallel.optimizers.pieces import (
    MasteredValues,
    ParameterPiece,
    PartitionedGroup,
    take_changed_values,
)
from elasticzero.parallel.optimizers.state import (
    MASTER,
    by_parameter,
    check_keys,
    check_nothing_else,
    cut_state,
    name_is_stepped,
)
from elasticzero.rank_groups import same_number
from elasticzero.rank_groups.group import message_device
from elasticzero.spans import Span
from elasticzero.state.model import OPTIMIZER, LoadTarget, LocalTensor, Partition, RankState, Spec


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tells ranks that keep copies of others' pieces what these step."""

    begin: Callable[[], Sequence[Any]] = tuple
    """Is called once the gradients are as they are to be stepped, but for clipping; what it returns
    is waited for before the norm is summed."""
    state_changed: bool | None = None
    """The script of this rank has changed the optimizer's state, which the copies do not have; None
    on all ranks: they do not tell each other."""


NO_EXCHANGE = Exchange()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """Holds what all ranks know of a global batch once it is complete."""

    used: set[str]
    """The parameters that any rank has used."""
    norm: float = 0.0
    """Norm of the gradient before clipping; NaN where a loss is not finite."""
    loss: float = 0.0
    """Mean over the global batch."""
    differ: bool = False
    """Ranks have given `complete` different numbers."""
    state_changed: bool = False
    """The script of a rank has changed the optimizer's state before the global batch."""


class PartitionedOptimizer:
    """Runs the user's optimizers on this rank's pieces instead of all parameters."""

    def __init__(
        self,
        optimizers: Optimizers,
        specs: Mapping[str, Spec],
        mesh: Mesh,
        agreement: Agreement | None = None,
        *,
        fixed_order: bool = False,
    ) -> None:
        """Begins without pieces, which `place` gives it.

        Args:
            optimizers: The script's optimizers, with their groups.
            specs: Shape and dtype of each whole parameter, by its name.
            mesh: The rows of ranks.
            agreement: Lets the ranks of a row agree on each step; None: they need not agree.
            fixed_order: Whether every parameter is whole on one rank, and its norm counts in an
                order that no world changes.
        """
        self.optimizers = optimizers
        self.pieces: dict[str, ParameterPiece] = {}
        self._specs = specs
        self._fixed_order = fixed_order
        self._mesh = mesh
        self._first_row = mesh.replica == 0
        """True if sums over the ranks count this rank's pieces; other rows have the same pieces."""
        self._agreement = agreement
        self._norm: Tensor | None = None
        self.has_state = any(g.nature.makes_state_at_once for g in optimizers.groups)
        self._unstepped = set(optimizers.group_of)
        """Parameters without a gradient in any global batch so far, on all ranks."""
        self._entries: dict[str, int] = {}
        """Number of entries that the optimizer has kept for each piece since its newest step."""
        self._outcome = BatchOutcome(used=set())
        self._learn: Callable[[], BatchOutcome] | None = None
        """Waits for what the ranks have told each other of the newest global batch, and takes it
        in; None: that is done."""
        self._square: SquaredNorm | None = None
        """The gradients that `count` has taken; None: it was not called for the global batch."""
        self._prepared: DividedStep | None = None
        self.chunks: Sequence[MasteredValues] | None = None
        """The elements of all pieces that have masters, where these lie end to end; None: each
        piece has memory of its own."""
        self.losses = LossCheck()
        """Checks the losses of the global batch on this rank."""

    def place(self, pieces: Mapping[str, ParameterPiece]) -> None:
        """Gives the optimizer these pieces, each in its parameter's group."""
        self.pieces = dict(pieces)
        for group in self.optimizers.groups:
            state = group.optimizer.state
            for name, whole in zip(group.names, group.options["params"], strict=True):
                made = state.pop(whole, None)
                if made and name in pieces:
                    held, schema = pieces[name], group.schema(name)
                    state[held.parameter] = cut_state(made, schema, held.start, held.parameter)
            group.options["params"] = [pieces[n].parameter for n in group.names if n in pieces]

    @property
    def outcome(self) -> BatchOutcome:
        """Returns what the ranks know of the newest global batch; the first call after `complete`
        waits for it.

        Raises:
            UserError: A rank has gradients that are not for this global batch.
        """
        learn, self._learn = self._learn, None
        if learn is not None:
            self._outcome = learn()
        return self._outcome

    def begin_count(self) -> None:
        """Begins to count the gradients of a global batch as `count` is given them."""
        self._square = SquaredNorm()

    def count(self, names: Iterable[str]) -> None:
        """Counts the gradients of these parameters' pieces in the norm, once they are summed over
        the ranks; all gradients are counted so, or none."""
        if self._square is not None:
            counted = [self.pieces[name] for name in names if name in self.pieces]
            gradients = [p.parameter.grad for p in counted if self._counts(p.name)]
            self._square.add([gradient for gradient in gradients if gradient is not None])

    def complete(
        self,
        used: Collection[str],
        factor: float,
        max_norm: float | None,
        *,
        hook: GradientHook | None = None,
        number: int = 0,
        exchange: Exchange = NO_EXCHANGE,
    ) -> None:
        """Does what `Strategy.finish` does, once the pieces have their gradients, which are summed
        over the ranks. All ranks call this together.

        Args:
            used: The parameters that this rank has used; they travel with the norm, in one message.
            factor: What the gradients are multiplied by.
            max_norm: The limit of their norm; None: there is none.
            hook: Called with the gradients before their norm is taken; None: none is.
            number: Stands for what must be the same on all ranks, as for `same_number`; where it
                is not the norm is NaN, and `BatchOutcome.differ` says so.
            exchange: What other ranks that keep copies of the pieces get.
        """
        if self._agreement is not None:
            self._agreement.begin()
        gradients = self._gradients()
        if factor != 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), factor)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        uses = [float(name in used) for name in self.optimizers.group_of]
        changed = [] if exchange.state_changed is None else [float(exchange.state_changed)]
        told = torch.tensor(
            [0, *same_number.with_square(number), *uses, *changed], dtype=torch.float64
        ).to(device, non_blocking=True)
        if self.losses.mean is not None:
            told[0] = self.losses.mean
        if hook is None:
            works = exchange.begin()
            square = self._squared(gradients, device, factor)
            totals = self._sum_over_ranks(torch.cat([square, told]), works)
            numbers = StepNumbers(totals)
            self._learn = lambda: self._take_in(numbers.values(), number, factor)
        else:
            self._square = None
            totals = self._complete_with(hook, told, number, factor, exchange)
        self._square = None
        self._norm = totals[0].sqrt()
        left = list(self._gradients().values())
        if max_norm is not None and left:
            torch._foreach_mul_(left, clipping(self._norm, max_norm).to(left[0]))

    def _complete_with(
        self, hook: GradientHook, told: Tensor, number: int, factor: float, exchange: Exchange
    ) -> Tensor:
        """Calls the script's function with gradients of which it is known whether they are used.

        Args:
            hook: Has the function.
            told: What this rank tells the others, but for the norm.
            number: As `complete` has it.
            factor: As `complete` has it.
            exchange: As `complete` has it.

        Returns:
            What is summed over the ranks, the square of the norm first.
        """
        outcome = self._take_in([0.0, *self._sum_over_ranks(told).tolist()], number, factor)
        results = self._call_hook(hook).to(told.device)
        works = exchange.begin()
        square = self._squared(self._gradients(), told.device)
        totals = self._sum_over_ranks(torch.cat([square, results]), works)
        squared, *sums = totals.tolist()
        named = zip(self.optimizers.group_of, sums, strict=True)
        hook.sums = {name: value for name, value in named if name in outcome.used}
        norm = math.nan if outcome.differ else norm_of(squared)
        self._outcome, self._learn = replace(outcome, norm=norm), None
        return totals

    def give(self, gradients: Mapping[str, Tensor], used: Collection[str]) -> None:
        """Gives the pieces gradients that are complete on another rank, in place of `complete`.

        Args:
            gradients: The elements of pieces as they are to be stepped, by parameter; the other
                pieces have no gradient.
            used: The parameters that any rank has used in the global batch.
        """
        self._outcome, self._learn = BatchOutcome(used=set(used)), None
        for name, piece in self.pieces.items():
            gradient = gradients.get(name)
            piece.parameter.grad = None if gradient is None else gradient.view_as(piece.parameter)

    def _counts(self, name: str) -> bool:
        """Returns whether sums over the ranks count this rank's piece of a parameter."""
        return self._first_row and self.pieces[name].counts

    def _gradients(self) -> dict[str, Tensor]:
        grads = ((name, piece.parameter.grad) for name, piece in self.pieces.items())
        return {name: grad for name, grad in grads if grad is not None}

    def _sum_over_ranks(self, numbers: Tensor, works: Sequence[Any] = ()) -> Tensor:
        """Sums over all ranks, after the wait for exchanges under way. Ranks that agree on steps
        learn from each other what a lost peer has kept from one of them."""
        for work in works:
            work.wait()
        if self._mesh.world_size == 1:
            return numbers
        agreement = self._agreement
        try:
            dist.all_reduce(numbers, group=self._mesh.world_group.process_group)
        except RuntimeError as error:
            learnt = agreement.learn() if agreement is not None and is_peer_error(error) else None
            if learnt is None:
                raise
            return learnt
        if agreement is not None:
            agreement.offer(numbers)
        return numbers

    def _squared(
        self, gradients: Mapping[str, Tensor], device: torch.device, factor: float = 1.0
    ) -> Tensor:
        """Returns the square of the norm of this rank's gradients as one element; NaN where a loss
        is not finite.

        Args:
            gradients: All gradients by name.
            device: The device of the result.
            factor: What they were multiplied by since `count` has taken them.
        """
        counted = {n: g for n, g in gradients.items() if self._counts(n)}
        if self._fixed_order:
            squares = self._sum_over_ranks(squares_of(counted, self.optimizers.group_of, device))
            square = fixed_order_sum(squares) * float(self._mesh.rank == 0)
        elif self._square is not None:
            square = self._square.total(factor, device)
        else:
            square = squared_norm(list(counted.values()), device)
        if self.losses.value is not None:
            square = square + self.losses.value
        return square.reshape(1)

    def _take_in(self, totals: Sequence[float], number: int, factor: float) -> BatchOutcome:
        """Drops the gradients of parameters that no rank has used, and returns what is known of the
        global batch.

        Args:
            totals: Sums over ranks of the square of the norm, the loss, `number`, its square, the
                uses of each parameter and, where ranks tell it, `exchange.state_changed`.
            number: As `complete` has it.
            factor: What the loss is multiplied by, as the gradients are.
        """
        square, loss, total, squares, *rest = totals
        uses, changed = rest[: len(self.optimizers.group_of)], rest[len(self.optimizers.group_of) :]
        differ = not same_number.is_same(number, self._mesh.world_size, (total, squares))
        used = {n for n, count in zip(self.optimizers.group_of, uses, strict=True) if count}
        self.optimizers.check_used(used)
        for name, piece in self.pieces.items():
            if name not in used:
                piece.parameter.grad = None
        norm = math.nan if differ else norm_of(square)
        return BatchOutcome(
            used=used, norm=norm, loss=loss * factor, differ=differ, state_changed=any(changed)
        )

    def _call_hook(self, hook: GradientHook) -> Tensor:
        """Returns what the script's function has found in this rank's pieces, by parameter."""
        gradients = {n: (self.pieces[n].start, g) for n, g in self._gradients().items()}
        results = {n: v for n, v in hook.call(gradients).items() if self._counts(n)}
        return torch.tensor(
            [results.get(name, 0.0) for name in self.optimizers.group_of], dtype=torch.float64
        )

    def suspects(self) -> Suspects:
        """Returns what is not finite of this rank's pieces and losses."""
        return Suspects(loss=self.losses.bad, gradients=not_finite(self._gradients()))

    def discard(self) -> None:
        """Drops the gradients of a global batch that is not applied."""
        self._norm = self._learn = self._prepared = None
        self.losses.clear()
        for piece in self.pieces.values():
            piece.parameter.grad = None

    def norm(self) -> dict[str, Tensor]:
        """Returns the norm of the last gradient, by its name."""
        return {} if self._norm is None else {GRADIENT_NORM: self._norm}

    @property
    def is_prepared(self) -> bool:
        """Tells whether `step` may be called."""
        return self._prepared is not None

    def prepare_step(self, parts: Sequence[Collection[str]]) -> None:
        """Prepares a step, as far as it does not depend on the gradients.

        Args:
            parts: The names of the parameters, part by part, in the order in which they are needed.
        """
        self._prepared = DividedStep(self.optimizers, self.pieces, parts)

    def step(self, stepped: Callable[[int], None] = lambda part: None) -> None:
        """Makes the step that is prepared, rounds the masters to the model's own elements, and
        drops the gradients of the pieces.

        Args:
            stepped: Called with the index of each part once it is up to date; by default nothing is
                called.

        Raises:
            UserError: An optimizer keeps or has what it may not.
        """
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        used = self.outcome.used
        self.has_state = self.has_state or bool(used)
        self._unstepped -= used
        self.losses.clear()
        take_changed_values(self._mastered())
        self.optimizers.require_members(self.pieces)
        prepared.run(stepped)
        for piece in self.pieces.values():
            piece.parameter.grad = None
        self._entries = self._count_entries()

    def _count_entries(self) -> dict[str, int]:
        state_of = {name: group.optimizer.state for name, group in self.optimizers.group_of.items()}
        pieces = self.pieces.items()
        return {name: len(state_of[name].get(piece.parameter, ())) for name, piece in pieces}

    def emptied(self) -> UserError | None:
        """Returns the error for entries that the script has taken out of an optimizer's state since
        the newest step: they would be stored as zeros, which is not the same to an optimizer."""
        for name, count in self._count_entries().items():
            if count < self._entries.get(name, 0):
                return UserError(
                    f"the script has taken entries out of the optimizer's state of parameter "
                    f"{name!r}, which zero1, zero2 and zero3 would store as zeros: set its tensors "
                    "to zero in place, or use ddp"
                )
        return None

    def _mastered(self) -> Iterable[MasteredValues]:
        """Returns the chunks that have masters, or else the pieces that have, each by itself."""
        if self.chunks is not None:
            return self.chunks
        return [
            MasteredValues(piece.values, piece.parameter)
            for piece in self.pieces.values()
            if piece.values is not None and piece.values.dtype != piece.parameter.dtype
        ]

    def share(self, share: RankState, group: PartitionedGroup) -> None:
        """Adds the masters and the state of the parameters in `group` to `share`."""
        self._share_masters(share, group)
        if not self.has_state:
            return
        share.optimizers["unstepped"] = sorted(self._unstepped)
        by_key: dict[tuple[str, bool], list[int]] = {}
        for index, name in enumerate(group.names):
            piece = self.pieces.get(name)
            kept = {} if piece is None else self.optimizers.stored_state(name, piece.parameter)
            schema = self.optimizers.schema(name)
            for key, entry in kept_entries(schema, self._specs[name]).items():
                by_key.setdefault((key, entry.scalar), []).append(index)
                full = f"{OPTIMIZER}{name}/{key}"
                share.specs[full] = entry.spec
                if piece is not None:
                    tensor = stored_value(self.optimizers, piece, key, entry, kept)
                    share.held[full] = LocalTensor(tensor, 0 if entry.scalar else piece.start)
        for (key, scalar), indices in by_key.items():
            names = tuple(f"{OPTIMIZER}{group.names[index]}/{key}" for index in indices)
            owners = tuple(group.owners[index] for index in indices)
            if scalar or group.rule == "whole":
                share.partitions.append(Partition(rule="whole", names=names, ranks=owners))
            else:
                share.partitions.append(Partition(rule=group.rule, names=names))

    def _share_masters(self, share: RankState, group: PartitionedGroup) -> None:
        names = []
        for name in group.names:
            for key, entry in master_entry(self._specs[name]).items():
                names.append(full := f"{OPTIMIZER}{name}/{key}")
                share.specs[full] = entry.spec
                if (piece := self.pieces.get(name)) is not None:
                    share.held[full] = LocalTensor(piece.parameter.detach(), piece.start)
        if names:
            share.partitions.append(group.partition(tuple(names)))

    def bring(
        self, present: Division, following: Division, ranks: Sequence[int | None]
    ) -> dict[str, PieceState]:
        """Returns the state of the pieces that this rank has in the next world, by parameter. All
        ranks, which are one row, call this together; nothing of the present state changes.

        Args:
            present: The division of the present world.
            following: That of the next one.
            ranks: As for `moves.plan`.
        """
        rank = self._mesh.rank
        spans = following.spans(ranks.index(rank)) if rank in ranks else {}
        group = self._mesh.world_group.process_group
        held = [piece.parameter for piece in self.pieces.values()]
        room = self.room(spans, held[0].device if held else message_device(group))
        bring(plan(rank, present, following, ranks), rank, self.piece_state, room, group)
        return room

    def room(self, spans: Mapping[str, Span], device: torch.device = CPU) -> dict[str, PieceState]:
        """Returns room for the state of pieces, by parameter.

        Args:
            spans: The elements of each piece.
            device: Where there is room for what is stored of each element.
        """
        return {n: PieceState.empty(s, self._stored_entries(n), device) for n, s in spans.items()}

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes of what is stored of each element of this rank's pieces."""
        return sum(
            len(piece.span) * entry.spec.dtype.itemsize
            for name, piece in self.pieces.items()
            for entry in self._stored_entries(name).values()
            if entry.elementwise
        )

    def _stored_entries(self, name: str) -> dict[str, KeptEntry]:
        """Returns what is stored of a parameter besides its values, by key."""
        spec = self._specs[name]
        kept = kept_entries(self.optimizers.schema(name), spec) if self.has_state else {}
        return master_entry(spec) | kept

    def piece_state(self, name: str) -> PieceState:
        """Returns the state of this rank's piece of a parameter."""
        piece, entries = self.pieces[name], self._stored_entries(name)
        kept = self.optimizers.stored_state(name, piece.parameter)
        tensors = {
            key: stored_value(self.optimizers, piece, key, entry, kept).to(entry.spec.dtype)
            for key, entry in entries.items()
        }
        return PieceState(start=piece.start, tensors=tensors, entries=entries)

    def enter_world(
        self, mesh: Mesh, pieces: Mapping[str, ParameterPiece], brought: Mapping[str, PieceState]
    ) -> None:
        """Takes the pieces of another world in place of those that it has.

        Args:
            mesh: The row of ranks of that world.
            pieces: The pieces of this rank.
            brought: Their state, as `bring` has returned it.
        """
        self._mesh, self._first_row = mesh, mesh.replica == 0
        for name, piece in self.pieces.items():
            self.optimizers.group_of[name].optimizer.state.pop(piece.parameter, None)
        self.pieces = dict(pieces)
        for group in self.optimizers.groups:
            group.options["params"] = [pieces[n].parameter for n in group.names if n in pieces]
        for name, piece in pieces.items():
            tensors = brought[name].in_shape(piece.parameter.shape)
            if (master := tensors.pop(MASTER, None)) is not None:
                piece.parameter.data.copy_(master)
            stepped = name not in self._unstepped
            self.optimizers.put_state(name, piece.parameter, tensors, stepped=stepped)
        self._entries = self._count_entries()

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        """Yields slots for the stored state of this rank's pieces; it is installed when the context
        ends.

        Masters that are not stored are made anew from the model's own elements, which must be in
        place by then.
        """
        slots: list[LoadTarget] = []
        states: list[tuple[ParameterPiece, dict[str, Tensor]]] = []
        index = by_parameter(stored)
        check_nothing_else(small)
        for name, piece in self.pieces.items():
            schema, keys = self.optimizers.schema(name), index.get(name, {})
            check_keys(name, keys, schema)
            tensors: dict[str, Tensor] = {}
            if piece.values is not None and MASTER in keys:
                full = f"{OPTIMIZER}{name}/{MASTER}"
                slots.append(LoadTarget(full, piece.span, piece.parameter.data))
            for key, spec in keys.items():
                if key == MASTER:
                    continue
                kind = schema[key].kind if key in schema else "elementwise"
                if kind == "elementwise" and spec.shape != piece.shape:
                    raise CheckpointMismatch(
                        f"the checkpoint has {key!r} of parameter {name!r} with shape "
                        f"{spec.shape}, which cannot be partitioned like the parameter's own "
                        f"{piece.shape}"
                    )
                divided = kind == "elementwise"
                span = piece.span if divided else Span(0, spec.numel)
                shape = piece.parameter.shape if divided else spec.shape
                tensors[key] = torch.empty(shape, dtype=spec.dtype)
                slots.append(LoadTarget(f"{OPTIMIZER}{name}/{key}", span, tensors[key]))
            states.append((piece, tensors))
        yield slots
        for piece, tensors in states:
            if piece.values is not None and MASTER not in index.get(piece.name, {}):
                piece.parameter.data.copy_(piece.values)
            stepped = name_is_stepped(piece.name, small)
            self.optimizers.put_state(piece.name, piece.parameter, tensors, stepped=stepped)
        self._entries = self._count_entries()
        names = set(self.optimizers.group_of)
        self._unstepped = names.intersection(small.get("unstepped", names))
        at_once = any(g.nature.makes_state_at_once for g in self.optimizers.groups)
        self.has_state = at_once or any(keys.keys() - {MASTER} for keys in index.values())
