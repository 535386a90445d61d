"""Implements `ddp`: every rank holds everything, and a queue of buckets sums the gradients."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticzero.data.position import MicroBatch
from elasticzero.errors import UserError
from elasticzero.options.wire import EXACT
from elasticzero.parallel.base import GRADIENT_NORM, NONE_STORED, Setting
from elasticzero.parallel.buckets.all_reduce import AllReduce, SummedBucket
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.buckets.queue import BucketQueue
from elasticzero.parallel.finite import (
    LossCheck,
    StepNumbers,
    Suspects,
    clipping,
    fixed_order_sum,
    not_finite,
    squared_norm,
    squares_of,
)
from elasticzero.parallel.fixed_order.gradients import FixedOrderReducer
from elasticzero.parallel.gradients import (
    GradientHook,
    LateGradients,
    check_frozen,
    check_hooks_of_several,
)
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.groups import check_takes_dense, open_optimizers
from elasticzero.parallel.optimizers.whole_state import TREES, WholeRestore, WholeState
from elasticzero.parallel.parameter_changes import ForwardChanges, ParameterMemory
from elasticzero.parallel.wire.residual import Residual
from elasticzero.parallel.wire.sums import Peers
from elasticzero.parallel.wire.traffic import Traffic
from elasticzero.rank_groups import same_number
from elasticzero.spans import Span
from elasticzero.state.model import (
    MODEL,
    OPTIMIZER_TREE,
    LoadTarget,
    LocalTensor,
    RankState,
    Spec,
)
from elasticzero.torch_internals.hooks import (
    GradientHooks,
    call_gradient_hooks,
    without_gradient_hooks,
)


class Replicated:
    """Implements `Strategy`; the model is left as it is."""

    shards = 1
    divides = may_be_tied = False
    tells_waits = True

    def __init__(self, setting: Setting) -> None:
        self._parameters = setting.named.parameters
        made = setting.factory(list(self._parameters.values()))
        self.optimizers = open_optimizers(made, setting.named, "nothing")
        if not setting.alone:
            check_takes_dense(self.optimizers.by_name.values())
        self._ranks = setting.world_size
        mesh, wire = setting.place, setting.options.wire
        self.traffic = Traffic()
        self._peers = Peers(
            index=mesh.rank, group=mesh.world_group, wire=wire, traffic=self.traffic
        )
        self.residual = Residual(EXACT if setting.alone else wire, mesh, mesh.world_group)
        self._device = setting.device
        self._alone = setting.alone
        self._one_release = setting.one_release
        self._part: MicroBatch | None = None
        self._hooks = GradientHooks(self._parameters)
        self._hooked: dict[str, nn.Parameter] = {}
        """The parameters on which the script has registered hooks, at the newest backward. They are
        called with the whole gradient, by `finish`."""
        self._changes = ForwardChanges(
            self._parameters, setting.ranks_of_one_release, self.optimizers.options_number
        )
        self._losses = LossCheck(has_own_message=setting.one_release)
        self._fixed_order = setting.options.deterministic
        self._frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad}
        self._gradients: BucketQueue[SummedBucket] | FixedOrderReducer | None = None
        """Takes the gradients of micro-batches; None: they are added up where they are."""
        self._sums: AllReduce | FixedOrderReducer | None = None
        """Sums them over the ranks."""
        if self._fixed_order:
            reducer = FixedOrderReducer(self._parameters, setting.place, self._losses)
            self._gradients = self._sums = reducer
        elif setting.world_size > 1 or self.residual.is_kept:
            self._fill(setting.bucket_plan)
        self._late = LateGradients(self._parameters)
        self._norm: Tensor | None = None
        """Norm of the last gradient."""
        self._numbers: StepNumbers | None = None
        """Norm, mean loss and the check of losses of the newest complete global batch; None: they
        are known."""
        self._known = (0.0, 0.0)
        """This norm, NaN where a loss is not finite, and the mean loss."""
        self.model: nn.Module = setting.model
        self._memory = ParameterMemory(self._parameters)

    def _fill(self, plan: BucketPlan) -> None:
        """Fills buckets, whose gradients are summed over the ranks."""
        if isinstance(self._gradients, BucketQueue):
            self._gradients.close()
        self._sums = AllReduce(
            self._parameters,
            self.optimizers.name_of,
            plan,
            self._losses,
            self._peers,
            self.residual,
        )
        self._gradients = BucketQueue(self._sums)

    def tied_to_world(self, growth: float = 1.0) -> str:
        return ""

    def bring_state(self, ranks: Sequence[int | None], plan: BucketPlan | None = None) -> None:
        """Brings what ranks that leave have not sent of gradients: all else every rank has."""
        self.residual.hand_over(ranks)

    def enter_world(self, mesh: Mesh, plan: BucketPlan | None = None) -> None:
        """Sums gradients over the ranks of another world from the next step on."""
        self.residual.enter_world(mesh, mesh.world_group)
        self._ranks = mesh.world_size
        self._peers = replace(self._peers, index=mesh.rank, group=mesh.world_group)
        self._changes.enter_world(self._ranks, anew=plan is not None)
        if plan is not None and not self._fixed_order:
            self._fill(plan)
        elif self._sums is not None:
            self._sums.enter_world(mesh)

    def lay(self, mesh: Mesh, plan: BucketPlan) -> None:
        self.residual.begin_as_newcomer()
        self.enter_world(mesh, plan)

    def connect(self) -> None:
        """Does nothing: its groups are asked for where they are used."""

    def take_changes(self) -> UserError | None:
        return self._memory.difference()

    def changed_names(self) -> Collection[str]:
        return self._changes.names

    def expect(self, part: MicroBatch) -> None:
        self._changes.begin()
        self._part = part

    def backward(self, loss: Tensor, fraction: float, only: tuple[str, ...] | None = None) -> None:
        self._hooked = {name: self._parameters[name] for name in self._hooks.names()}
        if not self._alone:
            check_hooks_of_several(self._hooked)
        with without_gradient_hooks(self._hooked.values()):
            self._backward(loss, fraction, only)

    def _backward(self, loss: Tensor, fraction: float, only: tuple[str, ...] | None) -> None:
        inputs, part = self.optimizers.begin_turn(only, self._parameters), self._part
        if fraction != 0:
            self._losses.add(loss, fraction)
        if self._gradients is not None and self._sums is not None:
            assert part is not None
            self._gradients.backward(loss, fraction, part, inputs)
            if part.last:
                check_frozen(self._frozen)
                self._sums.finish()
            return
        self._late.stop()
        if fraction != 0:  # another one uses nothing, and no other rank waits for it
            (loss * fraction).backward(inputs=inputs)
        if part is None or part.last:
            self._late.begin()

    def finish(
        self, factor: float, max_norm: float | None, hook: GradientHook | None = None
    ) -> None:
        self._require_same_changes()
        self._late.end()
        optimized = self.optimizers.parameters()
        if not self._alone:
            _make_dense(optimized.values())
        gradient_of = {n: _values(p) for n, p in optimized.items() if p.grad is not None}
        self.optimizers.check_used(gradient_of)
        gradients = list(gradient_of.values())
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        if self._hooked:
            self._call_hooks(gradient_of)
            gradient_of = {n: _values(p) for n, p in optimized.items() if p.grad is not None}
            gradients = list(gradient_of.values())
        if hook is not None:
            hook.sums = hook.call({name: (0, gradient) for name, gradient in gradient_of.items()})
        if self._fixed_order:
            norm = fixed_order_sum(
                squares_of(gradient_of, self.optimizers.group_of, self._device)
            ).sqrt()
        else:
            in_parts = self._one_release
            norm = squared_norm(gradients, self._device, in_parts=in_parts).sqrt()
        if max_norm is not None and gradients:
            torch._foreach_mul_(gradients, clipping(norm, max_norm).to(gradients[0].dtype))
        self._norm = norm
        numbers = [number.double().to(norm.device) for number in self._losses_of_all(factor)]
        self._numbers = StepNumbers(torch.stack([norm, *numbers]))

    def _losses_of_all(self, factor: float) -> tuple[Tensor, Tensor]:
        """Returns the mean loss of the global batch, and a number that is not finite where a loss
        of any rank is not; both are 0-dim.

        Args:
            factor: What the mean is multiplied by.
        """
        if self._sums is not None:
            loss = self._sums.loss.double()
            return loss * factor, loss
        losses = self._losses
        if losses.mean is None or losses.value is None:
            return torch.tensor(self._known[1]), torch.zeros(())
        return losses.mean * factor, losses.value

    def _learn(self) -> tuple[float, float]:
        """Waits for the numbers of the step, once, and returns them."""
        numbers, self._numbers = self._numbers, None
        if numbers is not None:
            norm, loss, check = numbers.values()
            self._known = (norm if math.isfinite(check) else math.nan), loss
        return self._known

    def _call_hooks(self, names: Iterable[str]) -> None:
        """Calls the script's hooks on these parameters; where there are several ranks, with random
        numbers that are the same on all of them."""
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.no_grad(), torch.random.fork_rng(gpus, enabled=self._sums is not None):
            if self._sums is not None:
                torch.manual_seed(zlib.crc32(struct.pack("d", float(self._sums.loss))))
            for name in names:
                if name in self._hooked:
                    call_gradient_hooks(self._hooked[name])

    def _require_same_changes(self) -> None:
        """Raises `UserError` where ranks have changed parameters in different ways; all ranks call
        this together."""
        if (number := self._changes.end()) is None:
            return
        sums = torch.tensor(same_number.with_square(number), dtype=torch.float64)
        sums = sums.to(self._device)
        dist.all_reduce(sums, group=self._peers.group.process_group)
        total, squares = sums.tolist()
        if not same_number.is_same(number, self._ranks, (total, squares)):
            raise UserError(self._changes.sentence())

    @property
    def norm(self) -> float:
        return self._learn()[0]

    @property
    def loss(self) -> float:
        return self._learn()[1]

    def suspects(self) -> Suspects:
        optimized = self.optimizers.parameters()
        gradients = {n: _values(p) for n, p in optimized.items() if p.grad is not None}
        return Suspects(loss=self._losses.bad, gradients=not_finite(gradients))

    def apply(self) -> None:
        self.optimizers.step()
        self.residual.end_step(applied=True)
        self._drop_gradients()

    def discard(self) -> None:
        self._norm = self._numbers = None
        self.residual.end_step(applied=False)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._losses.clear()
        if self._gradients is not None:
            self._gradients.clear()

    def settle(self) -> None:
        pass

    def rank_state(self) -> RankState:
        frozen = {MODEL + n for n, p in self._parameters.items() if not p.requires_grad}
        share = RankState(frozen=frozen)
        share.residual, share.residual_sum = self.residual.present(), self.residual.summed
        share.factors = self.residual.factors()
        share.add_even({MODEL + name: p.detach() for name, p in self._parameters.items()})
        whole = WholeState.of(self.optimizers)
        share.optimizers = whole.small
        by_key: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, Tensor] = {}
        for full, tensor in whole.tensors.items():
            if tensor.dim() == 0:
                scalars[full] = tensor
            else:
                key = "" if full.startswith(OPTIMIZER_TREE) else full.rpartition("/")[2]
                by_key.setdefault(key, {})[full] = tensor
        for tensors in by_key.values():
            share.add_even(tensors)
        count = len(scalars)
        share.add_whole(scalars, tuple(i * self._ranks // count for i in range(count)))
        return share

    @contextmanager
    def changing(self) -> Iterator[RankState]:
        yield self.rank_state()

    def pieces(self) -> dict[str, LocalTensor]:
        return {n: LocalTensor(p) for n, p in self.optimizers.parameters().items()}

    @property
    def comparison_s(self) -> float:
        return 0.0

    def mirrored_states(self) -> dict[int, RankState]:
        return {}

    def replicas(self) -> dict[str, Tensor]:
        self._changes.request()
        share = self.rank_state()
        tensors = {name: held.tensor for name, held in share.held.items()}
        if trees := {kind: tree for kind, tree in share.optimizers.items() if kind in TREES}:
            text = dumps(trees, sort_keys=True).encode()
            tensors[OPTIMIZER_TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors if self._norm is None else {**tensors, GRADIENT_NORM: self._norm}

    @contextmanager
    def filling(
        self, stored: Mapping[str, Spec], small: Mapping[str, Any] = NONE_STORED
    ) -> Iterator[list[LoadTarget]]:
        slots: list[LoadTarget] = []
        for name, parameter in self._parameters.items():
            slots.append(LoadTarget(MODEL + name, Span(0, parameter.numel()), parameter.data))
        restore = WholeRestore(self.optimizers, stored, small)
        yield [*slots, *restore.targets()]
        restore.put()


def _make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Makes sparse gradients dense, as they are where several ranks sum them."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()


def _values(parameter: nn.Parameter) -> Tensor:
    """Returns the elements of a gradient, sparse or not, which share its memory."""
    assert parameter.grad is not None
    if parameter.grad.layout is torch.strided:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
