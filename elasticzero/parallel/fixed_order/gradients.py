"""Sums the gradients of a global batch's slices by the fixed tree, on the ranks that own them.

Rules:
 W1  Each slice's gradient is computed by itself, and zeros stand for what a slice does not use. A
     rank adds those of its slices to the largest nodes of the tree; a filler adds nothing.
 W2  After the last slice each rank sends the owner of a parameter its nodes' sums, and the owner
     finishes the tree; where several rows hold the whole state, each has an owner, which does
     the same. Which nodes a rank has follows from the slices that each micro-batch names.
 W3  The additions of two elements are the same in all worlds, and each rounds once, wherever and in
     whatever tensor it is done. So the sums are the same to the last bit.
Nothing overlaps with the backward, and a rank holds up to log2(slices) + 1 whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.parallel.finite import LossCheck
from elasticzero.parallel.fixed_order.layout import OwnedParameters, Round, deal_whole
from elasticzero.parallel.fixed_order.tree import PartialSums, largest_nodes
from elasticzero.parallel.mesh import Mesh
from elasticzero.rank_groups.group import RankGroup
from elasticzero.spans import Span
from elasticzero.step_clock import wait_for

TAG = 0x657B
"""Keeps these messages apart from those of `buckets.exchange` and of a script."""

Gradient = dict[str, Tensor]


class GradientTree:
    """Sums the gradients of these parameters over the slices of a global batch."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Any], mesh: Mesh
    ) -> None:
        """Deals the parameters to the ranks that sum their gradients.

        Args:
            parameters: The parameters by name.
            kinds: As for `deal_whole`.
            mesh: The rows of ranks.
        """
        self.rounds: list[Round] = deal_whole(parameters, kinds, mesh.shards)
        self.used: set[str] = set()
        """Parameters that this rank has used in the global batch."""
        self._parameters = parameters
        self._mesh = mesh
        self._sums: PartialSums[Gradient] | None = None
        self._runs: tuple[Span, ...] = ()
        """The slices of each rank."""

    def backward(
        self,
        loss: Tensor,
        fraction: float,
        part: MicroBatch,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds the gradient of `fraction * loss` to the tree (rule W1).

        Args:
            loss: The loss of a slice: one number.
            fraction: Its part of the global batch's mean; a slice of 0 uses no parameter.
            part: The slice's micro-batch.
            inputs: The parameters whose gradients are computed; None: all.
        """
        if self._sums is None:
            self._sums, self._runs = PartialSums(part.slices, _add), part.runs
        if part.slice is None:
            return
        if fraction != 0:
            (loss * fraction).backward(inputs=inputs)
        gradient: Gradient = {}
        for name, parameter in self._parameters.items():
            computed, parameter.grad = parameter.grad, None
            if computed is None:
                gradient[name] = torch.zeros_like(parameter.data)
                continue
            self.used.add(name)
            gradient[name] = computed if computed.layout is torch.strided else computed.to_dense()
        self._sums.put(Span(part.slice, part.slice + 1), gradient)

    def reduce(self) -> dict[OwnedParameters, Tensor]:
        """Returns the sums of the gradients that this rank owns, as messages (rule W2).

        All ranks call this together, after the last slice.
        """
        sums, self._sums = self._sums, None
        assert sums is not None
        sum_of: dict[OwnedParameters, Tensor] = {}
        for messages in self.rounds:
            sum_of |= self._exchange(messages, sums)
        return sum_of

    def clear(self) -> None:
        """Begins a new global batch."""
        self.used.clear()
        self._sums = None

    def _exchange(
        self, messages: Round, sums: PartialSums[Gradient]
    ) -> dict[OwnedParameters, Tensor]:
        mesh, rank = self._mesh, self._mesh.rank
        group = mesh.world_group
        operations: list[dist.P2POp] = []
        owned: OwnedParameters | None = None
        nodes: list[tuple[Span, Tensor]] = []
        for message in messages:
            packed = [
                (node, message.pack([gradient.pop(name) for name in message.names]))
                for node, gradient in sums.nodes
            ]
            for owner in mesh.replicas_of(message.owner):
                if owner != rank:
                    operations += [_operation(dist.isend, sum_, owner, group) for _, sum_ in packed]
            if message.owner != mesh.shard:
                continue
            owned = message
            nodes += packed
            for source in (r for r in range(mesh.world_size) if r != rank):
                its_nodes = largest_nodes(self._runs[source], sums.slices)
                theirs = [(node, message.empty()) for node in its_nodes]
                operations += [_operation(dist.irecv, room, source, group) for _, room in theirs]
                nodes += theirs
        if operations:
            wait_for(dist.batch_isend_irecv(operations))
        if owned is None:
            return {}
        whole: PartialSums[Tensor] = PartialSums(sums.slices, lambda a, b: a.add_(b))
        for node, sum_ in sorted(nodes, key=lambda entry: entry[0]):
            whole.put(node, sum_)
        return {owned: whole.total()}


def _operation(kind: Any, tensor: Tensor, peer: int, group: RankGroup) -> dist.P2POp:
    return dist.P2POp(kind, tensor, peer, group=group.process_group, tag=TAG)


def _add(left: Gradient, right: Gradient) -> Gradient:
    torch._foreach_add_(list(left.values()), list(right.values()))
    return left


def spread(messages: Mapping[OwnedParameters, Tensor], mesh: Mesh) -> None:
    """Sends each owner's messages to all other ranks of its row; all ranks call this together."""
    group = mesh.shard_group.process_group
    wait_for(
        [
            dist.broadcast(flat, mesh.rank_of(message.owner), group=group, async_op=True)
            for message, flat in messages.items()
        ]
    )


class FixedOrderReducer:
    """Sums gradients for `ddp`, in place of a queue of buckets, and leaves them on each rank."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, losses: LossCheck
    ) -> None:
        """Deals the parameters to ranks.

        Args:
            parameters: All parameters of the model, by name.
            mesh: One row, of all ranks.
            losses: The losses of this rank's part of the global batch.
        """
        trained = {n: p for n, p in parameters.items() if p.requires_grad and p.numel()}
        for parameter in trained.values():
            parameter.data = parameter.data.contiguous()
        self._trained = trained
        self._losses = losses
        self._tree = GradientTree(trained, {}, mesh)
        self._mesh = mesh
        self.loss = torch.zeros(())
        """Mean loss of the global batch; NaN where a loss of any rank is not finite."""

    def backward(
        self,
        loss: Tensor,
        fraction: float,
        part: MicroBatch,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds the gradient of `fraction * loss` to the tree, as `GradientTree.backward` does.

        Args:
            loss: The loss of a slice: one number.
            fraction: Its part of the global batch's mean; a slice of 0 uses no parameter.
            part: The slice's micro-batch.
            inputs: The parameters whose gradients are computed; None: all.
        """
        self._tree.backward(loss, fraction, part, inputs)

    def enter_world(self, mesh: Mesh) -> None:
        """Deals the parameters to the ranks of another world, between two steps."""
        self._tree, self._mesh = GradientTree(self._trained, {}, mesh), mesh

    def clear(self) -> None:
        """Drops the gradients, which were applied."""
        self._tree.clear()

    def finish(self) -> None:
        """Sums the gradients over the ranks, which call this together after the last slice."""
        owned = self._tree.reduce()
        names = [n for messages in self._tree.rounds for m in messages for n in m.names]
        totals = torch.tensor([float(n in self._tree.used) for n in names] + [0.0])
        if self._losses.mean is not None:
            totals[-1] = math.nan if self._losses.bad else float(self._losses.mean)
        flats = {m: owned.get(m) for messages in self._tree.rounds for m in messages}
        flat_of = {m: flat if flat is not None else m.empty() for m, flat in flats.items()}
        if self._mesh.world_size > 1:
            totals = totals.to(next(iter(flat_of.values())).device)
            dist.all_reduce(totals, group=self._mesh.world_group.process_group)
            spread(flat_of, self._mesh)
        self.loss = totals[-1]
        uses = totals[:-1].tolist()
        used = {name for name, count in zip(names, uses, strict=True) if count}
        for message, flat in flat_of.items():
            places = zip(message.names, message.parameters, message.unpack(flat), strict=True)
            for name, parameter, place in places:
                parameter.grad = place if name in used else None
