"""Lays a script's model and optimizer over the ranks of a generation: `session.prepare`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elasticzero.checkpoint.format.manifest import Manifest
from elasticzero.checkpoint.io.reader import Checkpoint
from elasticzero.checkpoint.io.writer import TensorPiece
from elasticzero.comm.barriers import Call
from elasticzero.comm.process_group import ProcessGroups
from elasticzero.consistency.configuration import Comparison, of_model, of_optimizers
from elasticzero.ipc.agent_client import AgentClient
from elasticzero.ipc.fault_hold import open_fault_hold
from elasticzero.memory_estimate import AUTO
from elasticzero.parallel import OptimizerFactory, Setting, Strategy, create
from elasticzero.parallel.buckets.choice import BucketChoice
from elasticzero.parallel.buckets.measure import exchange_cost
from elasticzero.parallel.buckets.plan import BucketPlan
from elasticzero.parallel.gradients import HiddenGradients
from elasticzero.parallel.materialize import Materializer
from elasticzero.parallel.mesh import Mesh
from elasticzero.parallel.optimizers.script_optimizers import OtherOptimizers, take_over_optimizer
from elasticzero.parallel.parameter_changes import ParameterObjects
from elasticzero.rank_groups.group import ALONE
from elasticzero.rehearsal.plan import VARIABLE, read_plan
from elasticzero.rehearsal.records import Header
from elasticzero.snapshots.kept_residual import KeptResidual
from elasticzero.snapshots.mirrored_shards import MirroredShards
from elasticzero.snapshots.requests import CheckpointRequests
from elasticzero.snapshots.restore import open_source
from elasticzero.snapshots.stager import StateStager
from elasticzero.state.auxiliary import AuxiliaryState
from elasticzero.state.boundary_values import BoundaryValues
from elasticzero.state.buffers import unfold_buffers
from elasticzero.state.model import NamedModel
from elasticzero.state.outer_state import OuterState
from elasticzero.state.script_flags import ScriptFlags
from elasticzero.torch_internals.hooks import order_hooks
from elasticzero.training import argument_checks
from elasticzero.training.full_state_dict import StateNames, gather_state_dict
from elasticzero.training.module_checks import (
    batch_norms,
    check_modules,
    refuse_wrappers,
    watch_batch_norms,
)
from elasticzero.training.precision import Compute
from elasticzero.training.step_guard import StepGuard
from elasticzero.training.step_tracker import StepTracker
from elasticzero.training.training_state import TrainingState
from elasticzero.training.worlds.change import WorldChange
from elasticzero.training.worlds.newcomer import Newcomer
from elasticzero.training.worlds.parts import Captures, LaidModel
from elasticzero.training.worlds.rows import Rows
from elasticzero.training.worlds.starting_state import StartingState

if TYPE_CHECKING:
    from elasticzero.rehearsal.probe import Probe
    from elasticzero.snapshots.pretrained.model import Pretrained
    from elasticzero.snapshots.pretrained.optimizer import PretrainedOptimizer

log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
"""Bytes from which on a part of the model's first values is sent by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Holds what a script's model is laid over."""

    link: AgentClient
    groups: ProcessGroups | None
    comparison: Comparison
    tracker: StepTracker
    device: torch.device
    cpu_offload: bool
    """True if zero3 keeps its part of the state in host memory."""
    load: str | PathLike[str] | None
    """Files with the model's first values; None: the model has them."""
    load_optimizer: bool
    """True if these files also have the optimizer's first state."""
    saving: bool
    """True if checkpoints are written."""
    change: WorldChange | None
    """Enters the next world inside of a loop; None: planned changes begin all loops anew."""
    newcomer: Newcomer | None
    """Brings this rank to the boundary at which others enter the world; None: all begin in it."""
    save: Callable[[Manifest, list[TensorPiece]], None] | None
    """Saves without an agent; None: an agent does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Holds a model that is laid over the ranks."""

    training: TrainingState
    state_dict: Callable[[], dict[str, Any]]
    """Gathers the whole model's state on rank 0; all ranks call it together."""
    outer: OuterState = field(default_factory=OuterState)
    """Adds to what is saved what islands have agreed on."""


def prepare_training(
    place: Place,
    model: nn.Module,
    optimizer: OptimizerFactory,
    strategy: str,
    compute: Compute,
) -> Prepared:
    """Lays the model and its optimizers over the ranks; all ranks call this together.

    Args:
        place: What the model is laid over.
        model: The script's model.
        optimizer: The script's function that makes the optimizer, or several.
        strategy: The strategy's name, or auto.
        compute: How the forward and the backward are computed.

    Returns:
        The training state, and a function that gathers the whole model.

    Raises:
        UserError: A model or an optimizer cannot be trained so, or ranks give different ones.
    """
    argument_checks.check_model(model)
    unfold_buffers(model)
    factory = argument_checks.check_factory(optimizer)
    assignment, groups = place.link.assignment, place.groups
    stored = _open_pretrained(place, model)
    meta = Materializer(model, place.device, stored, ALONE if groups is None else groups.world)
    if strategy == AUTO:
        meta.put_stand_ins(model)
        _fill_and_move(place, model, meta, stored)
        strategy = _choose_strategy(place, model, factory, compute)
    described = {**of_model(NamedModel(model), strategy, assignment), **compute.described()}
    if meta.is_needed:
        described["model"] = "on the meta device"
    described["cpu_offload"] = str(place.cpu_offload)
    if place.load_optimizer:
        described["load_optimizer"] = "True"
    place.comparison.require_equal(Call.PREPARE, described)
    _check_strategy(place, model, strategy, compute)
    same_release = place.comparison.warn_of_versions()
    _give_values(place, model, strategy, meta, stored)
    for module in model.modules():
        order_hooks(module)
    watch_batch_norms(model)
    refuse_wrappers(model)
    named = NamedModel(model, place.device)
    names = StateNames(model, named)
    rows = Rows.arrange(assignment, groups, strategy)
    source = _open_source(place)
    buckets = _choose_buckets(place, source, strategy, named, rows.mesh)

    def plan() -> BucketPlan:
        return buckets.used(assignment.bucket_bytes)

    setting = Setting(
        model=model,
        named=named,
        factory=factory,
        device=place.device,
        rank=assignment.rank,
        world_size=assignment.world_size,
        alone=groups is None,
        materialize=meta.materialize,
        gathered_dtype=compute.dtype,
        mesh=rows.mesh,
        agreement=rows.agreement,
        bucket_plan=plan(),
        options=assignment,
        by_node=assignment.shard == "node",
        cpu_offload=place.cpu_offload,
        mirrors=assignment.mirrors,
        mirrored_by=assignment.mirrored_by,
        one_release=assignment.one_release,
    )
    laid = create(strategy, setting)
    place.comparison.require_equal(Call.PREPARE, of_optimizers(laid.optimizers))
    compute.apply(laid.model, place.device, strategy)
    argument_checks.redirect_deepcopy(model, laid.model, strategy)
    for made in laid.optimizers.by_name.values():
        take_over_optimizer(made, lambda: place.tracker.now.applying, laid.model, strategy=strategy)
    outer = OuterState()
    stager = StateStager(
        place.link,
        strategy,
        lambda: outer.added_to(laid.rank_state()),
        shards=laid.shards,
        saving=place.saving,
        save=place.save,
    )
    guard = StepGuard(
        assignment.on_nonfinite, assignment.on_spike, scales=compute.precision == "fp16"
    )
    parameters = dict(laid.model.named_parameters())
    auxiliary = AuxiliaryState(
        place.device,
        named=named,
        flags=ScriptFlags(parameters, dict(laid.model.named_modules())),
        groups=laid.optimizers.groups,
        guard=guard if guard.keeps_state else None,
        buckets=buckets,
    )
    hidden = HiddenGradients(parameters, partitioned=strategy != "ddp")
    training = TrainingState(
        place.link,
        groups,
        LaidModel(
            strategy=laid,
            auxiliary=auxiliary,
            rows=rows,
            guard=guard,
            gradients=hidden,
            objects=ParameterObjects(model),
            others=OtherOptimizers(
                laid.model,
                lambda: place.tracker.now.applying,
                batch=lambda: None if groups is None else place.tracker.now.batch,
                tracked=auxiliary.tracked.values,
            ),
            probe=_open_probe(place, model, laid, auxiliary, guard, compute),
            values=BoundaryValues(parameters),
            plan=plan,
            change=place.change,
            fault_hold=open_fault_hold(os.environ, place.link),
        ),
        Captures(
            stager=stager,
            requests=CheckpointRequests(place.link, groups, stager, same_release=same_release),
            mirrored=MirroredShards(assignment, strategy, place.device, laid.mirrored_states),
            start=StartingState(
                link=place.link,
                strategy=strategy,
                plan=plan,
                opened=source,
                kept=KeptResidual(place.link, groups, laid.residual),
                first=_open_first_state(place, stored, laid),
                newcomer=place.newcomer,
                outer=outer,
            ),
        ),
        place.tracker,
    )
    return Prepared(
        training=training, outer=outer, state_dict=lambda: gather_state_dict(names, laid, groups)
    )


def _open_probe(
    place: Place,
    model: nn.Module,
    laid: Strategy,
    auxiliary: AuxiliaryState,
    guard: StepGuard,
    compute: Compute,
) -> Probe | None:
    """Returns what records the state at each boundary; None: this is no rehearsal.

    Args:
        place: What the model is laid over.
        model: The script's model.
        laid: The strategy.
        auxiliary: The small state.
        guard: Decides whether steps are applied.
        compute: How the forward and the backward are computed.
    """
    if (plan := read_plan(os.environ)) is None:
        return None
    from elasticzero.rehearsal.owners import Owners
    from elasticzero.rehearsal.probe import NARROW, Probe

    header = Header(
        batch_norm=any(True for _ in batch_norms(model)),
        half_parameters=any(parameter.dtype in NARROW for parameter in model.parameters()),
    )
    owners = Owners(
        model=model, strategy=laid, auxiliary=auxiliary, guard=guard, groups=place.groups
    )
    return Probe(plan, owners, place.link, header, compute.dtype)


def _give_values(
    place: Place, model: nn.Module, strategy: str, meta: Materializer, stored: Pretrained | None
) -> None:
    """Gives the model memory on its device, and the values that rank 0 has or reads.

    Of a model on the meta device zero3 materializes one block after the other later.

    Args:
        place: What the model is laid over.
        model: The model.
        strategy: The strategy's name.
        meta: Gives memory to what is on the meta device.
        stored: First values from files; None: the model has its own.
    """
    if strategy == "zero3":
        meta.put_stand_ins(model)
    else:
        meta.materialize(model)
    _fill_and_move(place, model, meta, stored)
    if place.groups is not None and place.link.assignment.resume.tier == "fresh":
        every = (*model.named_parameters(), *model.named_buffers())
        tensors = {name: t for name, t in every if not meta.gives(t)}
        _broadcast(place.groups, tensors, in_parts=place.link.assignment.one_release)


def _fill_and_move(
    place: Place, model: nn.Module, meta: Materializer, stored: Pretrained | None
) -> None:
    """Fills what the model has outside of the meta device, and moves it to the rank's.

    Args:
        place: What the model is laid over.
        model: The model.
        meta: Gives memory to what is on the meta device, which is left out here.
        stored: First values from files; None: the model has its own.
    """
    if stored is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if stored.has(tensor) and not meta.gives(tensor):
                stored.fill(tensor)
    model.to(place.device)


def _choose_strategy(
    place: Place, model: nn.Module, factory: OptimizerFactory, compute: Compute
) -> str:
    """Returns what `--strategy auto` is in this generation; all ranks call this together.

    Args:
        place: What the model is laid over.
        model: The model, which shows its shapes on its device.
        factory: The script's function that makes the optimizer, or several.
        compute: How the forward and the backward are computed.
    """
    from elasticzero.training.strategy_choice import choose_strategy

    assignment, groups = place.link.assignment, place.groups
    if place.cpu_offload:
        if assignment.rank == 0:
            log.info("--strategy auto takes zero3, which alone has cpu_offload")
        return "zero3"

    def check(strategy: str) -> None:
        _check_strategy(place, model, strategy, compute)

    return choose_strategy(NamedModel(model), factory, place.device, assignment, groups, check)


def _check_strategy(place: Place, model: nn.Module, strategy: str, compute: Compute) -> None:
    """Checks that a strategy can train the model.

    Args:
        place: What the model is laid over.
        model: The model.
        strategy: The strategy's name.
        compute: How the forward and the backward are computed.

    Raises:
        UserError: It cannot.
    """
    compute.check(dict(model.named_parameters()), strategy)
    if place.cpu_offload:
        argument_checks.check_offload(strategy, place.device, place.link.assignment)
    check_modules(model, strategy, place.device, alone=place.groups is None)


def _broadcast(groups: ProcessGroups, tensors: Mapping[str, Tensor], *, in_parts: bool) -> None:
    """Gives all ranks tensors of rank 0.

    Args:
        groups: The process groups.
        tensors: The tensors, which are filled in place.
        in_parts: Whether they are sent in parts, because each part is copied meanwhile; the release
            before sends all at once.
    """
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        part[name] = tensor.data
        size += tensor.nbytes
        if in_parts and size >= PART_BYTES:
            groups.broadcast(part)
            part, size = {}, 0
    groups.broadcast(part)


def _open_pretrained(place: Place, model: nn.Module) -> Pretrained | None:
    """Opens the files that have the model's first values; None: the model has them."""
    if place.load is None:
        return None
    from elasticzero.snapshots.pretrained.model import Pretrained  # few scripts need it

    return Pretrained(model, place.load, place.link, with_optimizer=place.load_optimizer)


def _open_first_state(
    place: Place, stored: Pretrained | None, laid: Strategy
) -> PretrainedOptimizer | None:
    """Finds the optimizers' first state in the files; None: training begins without, or goes on.

    Args:
        place: What the model is laid over.
        stored: The files; None: there are none.
        laid: The strategy.
    """
    begins = place.link.assignment.resume.tier == "fresh"
    if stored is None or not place.load_optimizer or not begins:
        return None
    from elasticzero.snapshots.pretrained.optimizer import PretrainedOptimizer

    return PretrainedOptimizer(stored, laid.optimizers, place.link, place.groups)


def _open_source(place: Place) -> Checkpoint | None:
    """Opens the state that this generation starts from; None: it starts afresh, or without an
    agent, which then chooses the state later, or from a boundary that is not known yet."""
    begins = place.link.assignment.resume.tier == "fresh"
    if place.groups is None or begins or place.newcomer is not None:
        return None
    with place.link.exit_on_abort():
        return open_source(place.link.assignment)


def _choose_buckets(
    place: Place, source: Checkpoint | None, strategy: str, named: NamedModel, mesh: Mesh
) -> BucketChoice:
    """Returns what the job has chosen for its buckets; all ranks call this together.

    Args:
        place: What the model is laid over.
        source: The state that the generation starts from; None: training begins.
        strategy: The strategy's name.
        named: The model's parameters.
        mesh: The rows of ranks.
    """
    assignment, groups = place.link.assignment, place.groups
    buckets = BucketChoice(named.parameters, place.device)
    if source is not None:
        buckets.load_state_dict(source.manifest.state.get("buckets", {}))
    if groups is None or strategy == "zero3" or assignment.deterministic:
        return buckets
    if place.newcomer is not None:
        return buckets  # the state of the boundary has the others' choice
    if VARIABLE in os.environ:  # so that all generations of a rehearsal sum in one order
        return buckets
    buckets.begin_recording(named.parameters, assignment.rank)
    has_size = buckets.plan.size_bytes is not None
    if assignment.bucket_bytes == "auto" and assignment.world_size > 1 and not has_size:
        cost = exchange_cost(strategy, mesh, place.device)
        trained = [p for p in named.parameters.values() if p.requires_grad]
        best = cost.best_bytes(sum(p.numel() * p.element_size() for p in trained))
        size = torch.tensor([best], device=place.device)
        groups.broadcast({"size": size})
        buckets.take_size(int(size.item()))
        if assignment.rank == 0:
            log.info(cost.sentence(best))
    return buckets
